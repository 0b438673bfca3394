"""Graphs made by hand, against bytes that are worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import printed
from project import ROOT
from traced_graphs import check

from umem.onnx import OPERATORS, onnx_step, packed, reshaped
from umem.trace import Alloc, Free, Op, Trace

onnx = pytest.importorskip("onnx")
FLOAT, INT64 = 1, 7


def weights(name: str, *shape: int) -> Any:
    return onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)


def ints(name: str, *values: int) -> Any:
    return onnx.numpy_helper.from_array(np.array(values, np.int64), name)


def save(path: Path, nodes: list[Any], given: list[Any], shape: Any, out: Any, opset: int) -> Path:
    """A model of one input x, float32, and one output y."""
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", FLOAT, shape)], [value("y", FLOAT, out)], given
    )
    opsets = [onnx.helper.make_opsetid("", opset)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), path)
    return path


def node(op: str, ins: str, outs: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(op, ins.split(), outs.split(), name=f"{op}-{outs}", **attributes)


def kept_bytes(trace: Trace) -> int:
    """Activations and stashes that are alive when the first operation of backward runs."""
    alive: dict[int, Alloc] = {}
    for event in trace.events:
        if isinstance(event, Alloc):
            alive[event.tensor] = event
        elif isinstance(event, Free):
            del alive[event.tensor]
        elif isinstance(event, Op) and event.phase == "backward":
            break
    return sum(a.nbytes for a in alive.values() if a.kind in ("activation", "stash"))


def ops(trace: Trace, phase: str) -> list[Op]:
    return [op for op in trace.ops if op.phase == phase]


def two_layers(path: Path, batch: Any = "batch") -> Path:
    nodes = [
        node("Gemm", "x W1 b1", "h", transB=1),
        node("Relu", "h", "r"),
        node("Gemm", "r W2 b2", "y", transB=1),
    ]
    given = [weights("W1", 30, 20), weights("b1", 30), weights("W2", 10, 30), weights("b2", 10)]
    return save(path, nodes, given, [batch, 20], [batch, 10], 13)


def test_a_perceptron_keeps_its_relu_and_its_output(tmp_path: Path) -> None:
    step = onnx_step(two_layers(tmp_path / "m.onnx"), {"batch": 8})
    check(step.trace)
    relu, out, x = 8 * 30 * 4, 8 * 10 * 4, 8 * 20 * 4
    assert kept_bytes(step.trace) == relu + out
    parameters = 4 * (30 * 20 + 30 + 10 * 30 + 10)
    # Adam's last update: parameters, gradients and two states; the graph is gone.
    assert step.trace.peak_bytes == 4 * parameters + x
    assert [op.flops for op in ops(step.trace, "forward")] == [
        2 * 8 * 30 * 20, 8 * 30, 2 * 8 * 10 * 30,
    ]  # fmt: skip
    # y's own Gemm has gradients for r and W2, the first Gemm for W1 alone.
    assert [op.flops for op in ops(step.trace, "backward")] == [
        2 * 2 * 8 * 10 * 30, 8 * 30, 2 * 8 * 30 * 20,
    ]  # fmt: skip
    assert step.names == ("Gemm-h", "Relu-r", "Gemm-y")


def test_a_residual_block_with_pooling_and_dropout(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x W", "c", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c gamma beta mean var", "n"),
        node("Relu", "n", "r"),
        node("Add", "r c", "s"),
        node("MaxPool", "s", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("Dropout", "p", "d"),
        node("GlobalAveragePool", "d", "g"),
        node("Flatten", "g", "f"),
        node("MatMul", "f V", "y"),
    ]
    given = [weights("W", 6, 3, 3, 3), weights("V", 6, 5)]
    given += [weights(name, 6) for name in ("gamma", "beta", "mean", "var")]
    path = save(tmp_path / "m.onnx", nodes, given, [2, 3, 8, 8], [2, 5], 11)
    trace = onnx_step(path, optimizer="sgd").trace
    check(trace)
    plane, pooled = 2 * 6 * 8 * 8 * 4, 2 * 6 * 4 * 4 * 4
    # c for the norm, r for the relu, three numbers a channel; the pooling's int32 indexes; the
    # mask; what MatMul reads, which lies in the mean; y. The sum itself is read by nobody.
    assert kept_bytes(trace) == 2 * plane + 3 * 6 * 4 + pooled + pooled + 2 * 6 * 4 + 2 * 5 * 4
    conv = ops(trace, "forward")[0]
    assert conv.flops == 2 * (2 * 6 * 8 * 8) * (3 * 3 * 3)
    assert conv.workspace_bytes == 2 * 3 * 3 * 3 * 8 * 8 * 4
    assert {e.label for e in trace.events if isinstance(e, Alloc) and e.kind == "state"} == {
        "mean", "var",
    }  # fmt: skip


def test_attention_with_a_weight_that_two_operators_share(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x W", "q"),
        node("MatMul", "x W", "k"),
        node("Transpose", "k", "t", perm=[0, 2, 1]),
        node("MatMul", "q t", "a"),
        node("Mul", "a scale", "m"),
        node("Softmax", "m", "s", axis=2),
        node("MatMul", "s q", "y"),
    ]
    given = [weights("W", 16, 16), onnx.numpy_helper.from_array(np.float32(0.25), "scale")]
    path = save(tmp_path / "m.onnx", nodes, given, [4, 12, 16], [4, 12, 16], 13)
    trace = onnx_step(path, optimizer="adam").trace
    check(trace)
    rows, scores = 4 * 12 * 16 * 4, 4 * 12 * 12 * 4
    # q, and k by its view; the softmax; y. Neither a nor m: a constant has no gradient.
    assert kept_bytes(trace) == 3 * rows + scores
    kinds = [(e.kind, e.nbytes) for e in trace.events if isinstance(e, Alloc)]
    assert kinds.count(("parameter", 16 * 16 * 4)) == 1  # shared, counted once
    assert [kind for kind, _ in kinds].count("state") == 2
    adds = [op for op in ops(trace, "backward") if op.name == "Add"]
    assert len(adds) == 2  # of q's two gradients, and of W's


def test_what_has_no_gradient_is_on_no_tape(tmp_path: Path) -> None:
    nodes = [node("Exp", "x", "e"), node("MatMul", "e W", "y")]
    path = save(tmp_path / "m.onnx", nodes, [weights("W", 3, 2)], [4, 3], [4, 2], 13)
    step = onnx_step(path)
    assert step.names == ("MatMul-y",)
    assert kept_bytes(step.trace) == 4 * 3 * 4 + 4 * 2 * 4  # e, which MatMul reads, and y


def test_shapes_that_the_graph_computes_are_no_memory(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Concat", "n rest", "to", axis=0),
        node("MatMul", "x W", "h"),
        node("Reshape", "h to", "y"),
    ]
    given = [weights("W", 6, 6), ints("zero", 0), ints("rest", 2, 3)]
    path = save(tmp_path / "m.onnx", nodes, given, ["n", 6], None, 13)
    step = onnx_step(path, {"n": 7})
    assert [op.name for op in ops(step.trace, "forward")] == ["MatMul", "Reshape"]
    assert kept_bytes(step.trace) == 7 * 6 * 4  # y lies in h


def test_a_reshape_of_a_transposed_array_copies(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x W", "h"),
        node("Transpose", "h", "t", perm=[0, 2, 1]),
        node("Reshape", "t to", "y"),
    ]
    given = [weights("W", 4, 4), ints("to", 2, 12)]
    trace = onnx_step(save(tmp_path / "m.onnx", nodes, given, [2, 3, 4], [2, 12], 13)).trace
    made = [e for e in trace.events if isinstance(e, Alloc) and e.kind == "activation"]
    assert [e.label for e in made] == ["MatMul", "Reshape"]
    assert kept_bytes(trace) == 2 * 12 * 4


@pytest.mark.parametrize("seed", range(60))
def test_a_reshape_is_a_view_where_numpy_makes_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4], rng.integers(1, 5)))
    array = np.zeros(shape, np.int8).transpose(rng.permutation(len(shape)))
    factors = [int(f) for n in array.shape for f in ([2, 2] if n == 4 else [n])]
    cuts = sorted(rng.choice(len(factors) + 1, 2))
    new = [int(np.prod(part)) for part in np.split(np.array(factors), cuts)]
    view = reshaped(array.shape, array.strides, new)
    expected = array.reshape(new)
    assert (view is not None) == np.shares_memory(array, expected)
    if view is not None:
        pairs = zip(new, view, expected.strides, strict=True)
        assert all(ours == theirs for n, ours, theirs in pairs if n > 1)
    fresh = np.zeros(new, np.int8)
    assert packed(new) == fresh.strides


def test_every_operator_is_one_of_onnx_and_says_its_source() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert not OPERATORS.keys() - known - {"Upsample"}  # deprecated since version 10
    assert all(operator.source for operator in OPERATORS.values())


def test_the_page_lists_the_operators_that_are_known() -> None:
    printed(ROOT / "scripts" / "onnx_operators.py", "--check")
