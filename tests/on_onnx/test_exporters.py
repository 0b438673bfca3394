"""Float graphs as the exporters of real models write them: each is a shape of files in wheels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced_graphs import check

from tests.on_onnx.test_operators import FLOAT, INT64, ints, kept_bytes, node, save, weights
from umem.errors import OnnxError
from umem.onnx import onnx_step
from umem.trace import Alloc, Trace

onnx = pytest.importorskip("onnx")


def kinds(trace: Trace, kind: str) -> list[int]:
    return [e.nbytes for e in trace.events if isinstance(e, Alloc) and e.kind == kind]


def step(path: Path, sizes: dict[str, int] | None = None) -> Trace:
    return check(onnx_step(path, sizes).trace)


def refused(path: Path, sizes: dict[str, int] | None = None) -> str:
    with pytest.raises(OnnxError) as caught:
        onnx_step(path, sizes)
    return str(caught.value)


def constant(name: str, value: Any) -> Any:
    return onnx.helper.make_node(
        "Constant", [], [name], value=onnx.numpy_helper.from_array(np.asarray(value))
    )


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


# -- weights that nodes make -----------------------------------------------------------------------


def test_weights_in_constant_nodes_are_trained(tmp_path: Path) -> None:
    nodes = [
        constant("W", floats(6, 5)), constant("b", floats(5)), constant("half", np.float32(0.5)),
        node("MatMul", "x W", "h"), node("Add", "h b", "a"), node("Mul", "a half", "y"),
    ]  # fmt: skip
    trace = step(save(tmp_path / "m.onnx", nodes, [], [4, 6], [4, 5], 13))
    assert sorted(kinds(trace, "parameter")) == [5 * 4, 6 * 5 * 4]


def test_constants_beside_weights_that_have_names_are_not_trained(tmp_path: Path) -> None:
    nodes = [
        constant("mean", floats(6)), node("Sub", "x mean", "c"), node("MatMul", "c W", "h"),
        node("MatMul", "h V", "i"), constant("rotation", floats(5, 5)),
        node("MatMul", "i rotation", "y"),
    ]  # fmt: skip
    given = [weights("W", 6, 5), weights("V", 5, 5)]
    trace = step(save(tmp_path / "m.onnx", nodes, given, [4, 6], [4, 5], 13))
    assert sorted(kinds(trace, "parameter")) == [5 * 5 * 4, 6 * 5 * 4]


def test_weights_that_a_node_fills_are_trained_and_made_before_the_step(tmp_path: Path) -> None:
    nodes = [
        node("ConstantOfShape", "s", "W"), node("MatMul", "x W", "h"),
        node("ConstantOfShape", "s", "V"), node("MatMul", "h V", "y"),
    ]  # fmt: skip
    trace = step(save(tmp_path / "m.onnx", nodes, [ints("s", 6, 6)], [4, 6], [4, 6], 13))
    assert kinds(trace, "parameter") == [6 * 6 * 4] * 2
    assert kinds(trace, "activation") == [4 * 6 * 4] * 2
    assert [op.name for op in trace.ops if op.phase == "forward"] == ["MatMul", "MatMul"]


@pytest.mark.parametrize("make", ["Cast", "ConstantOfShape", "Identity", "chain"])
def test_statistics_that_nodes_make_are_state(tmp_path: Path, make: str) -> None:
    given = [weights("W", 3, 3, 1, 1), weights("g", 3), weights("b", 3)]
    makers = {
        "Cast": [node("Cast", "m16", "m", to=FLOAT)],
        "ConstantOfShape": [node("ConstantOfShape", "three", "m")],
        "Identity": [node("Identity", "m32", "m")],
        "chain": [node("Identity", "m32", "i"), node("Sqrt", "i", "m")],
    }[make]
    given += [
        onnx.numpy_helper.from_array(np.zeros(3, np.float16), "m16"), ints("three", 3),
        weights("m32", 3), weights("v", 3),
    ]  # fmt: skip
    nodes = [
        node("Conv", "x W", "c"), *makers, node("BatchNormalization", "c g b m v", "n"),
        node("Relu", "n", "y"),
    ]  # fmt: skip
    trace = step(save(tmp_path / "m.onnx", nodes, given, [2, 3, 4, 4], None, 13))
    assert [a.label for a in trace.events if isinstance(a, Alloc) and a.label in ("m", "v")] == [
        "m", "v",
    ]  # fmt: skip
    assert sorted(kinds(trace, "parameter")) == [3 * 4, 3 * 4, 9 * 4]
    plane = 2 * 3 * 4 * 4 * 4
    assert kept_bytes(trace) == 2 * plane + 3 * 3 * 4


def test_the_statistics_that_a_training_export_makes_have_the_shape_of_the_old(
    tmp_path: Path,
) -> None:
    given = [weights("W", 3, 3, 1, 1), *(weights(name, 3) for name in "gbmv")]
    for opset in (13, 15):
        outs = "y m1 v1 m2 v2" if opset == 13 else "y m1 v1"
        norm = node("BatchNormalization", "c g b m v", outs)
        if opset == 15:
            norm.attribute.append(onnx.helper.make_attribute("training_mode", 1))
        nodes = [node("Conv", "x W", "c"), norm]
        trace = step(save(tmp_path / "m.onnx", nodes, given, [2, 3, 4, 4], None, opset))
        assert kinds(trace, "activation") == [2 * 3 * 4 * 4 * 4] * 2


def test_statistics_that_the_data_make_are_no_state(tmp_path: Path) -> None:
    given = [weights("W", 3, 3, 1, 1), weights("g", 3), weights("b", 3), ints("axes", 0, 2, 3)]
    nodes = [
        node("Conv", "x W", "c"), node("ReduceSum", "c axes", "m", keepdims=0),
        node("Exp", "m", "v"), node("BatchNormalization", "c g b m v", "y"),
    ]  # fmt: skip
    trace = step(save(tmp_path / "m.onnx", nodes, given, [2, 3, 4, 4], None, 13))
    labels = {a.label for a in trace.events if isinstance(a, Alloc)}
    assert not labels & {"m", "v"} and sorted(kinds(trace, "parameter")) == [3 * 4, 3 * 4, 9 * 4]


# -- shapes that follow from the model -------------------------------------------------------------


def test_the_padding_that_pytorch_writes_follows_from_the_model(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "given", "n"), node("Gather", "n zero", "n0"), node("Sub", "four n0", "more"),
        node("Unsqueeze", "more", "more1", axes=[0]),
        onnx.helper.make_node("ConstantOfShape", ["more1"], ["zeros"],
                              value=onnx.numpy_helper.from_array(np.zeros(1, np.int64))),
        node("Concat", "given zeros", "p", axis=0), node("Reshape", "p pairs", "a"),
        node("Slice", "a last first axis last", "b"), node("Transpose", "b", "c", perm=[1, 0]),
        node("Reshape", "c all", "d"), node("Cast", "d", "e", to=INT64),
        node("Pad", "x e", "z"), node("MatMul", "z W", "y"),
    ]  # fmt: skip
    given = [
        weights("W", 9, 5), ints("given", 2, 1), ints("pairs", -1, 2), ints("last", -1),
        ints("first", -(2**63) + 1), ints("axis", 0), ints("all", -1),
        onnx.numpy_helper.from_array(np.int64(0), "zero"),
        onnx.numpy_helper.from_array(np.int64(4), "four"),
    ]  # fmt: skip
    trace = step(save(tmp_path / "m.onnx", nodes, given, ["n", 6], None, 11), {"n": 3})
    assert kinds(trace, "activation") == [3 * 9 * 4, 3 * 5 * 4]  # padded by 2 and 1 columns


def test_sizes_of_parts_and_of_what_is_not_zero_follow_from_the_model(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "s"), node("Split", "s", "n width", axis=0),
        node("Greater", "s one", "large"), node("NonZero", "large", "where"),
        node("Shape", "where", "count"), node("ReduceMax", "count", "two"),
        node("Tile", "two two", "four"), node("Concat", "n two two", "to", axis=0),
        node("Reshape", "x to", "r"), node("MatMul", "r W", "y"),
    ]  # fmt: skip
    given = [weights("W", 2, 5), ints("one", 1)]
    trace = step(save(tmp_path / "m.onnx", nodes, given, ["n", 4], None, 13), {"n": 3})
    assert kinds(trace, "activation")[-1] == 3 * 2 * 5 * 4


def test_a_comparison_of_the_first_version_has_a_shape(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x W", "h"), node("GreaterOrEqual", "h b", "c"), node("Where", "c h b", "y"),
    ]  # fmt: skip
    given = [weights("W", 6, 5), weights("b", 5)]
    trace = step(save(tmp_path / "m.onnx", nodes, given, [4, 6], None, 13))
    assert kinds(trace, "activation") == [4 * 5 * 4, 4 * 5, 4 * 5 * 4]


def test_a_group_normalisation_has_the_shape_of_its_input(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x W", "c"), node("GroupNormalization", "c g b", "n", num_groups=2),
        node("Relu", "n", "y"),
    ]  # fmt: skip
    given = [weights("W", 6, 3, 1, 1), weights("g", 6), weights("b", 6)]
    trace = step(save(tmp_path / "m.onnx", nodes, given, [2, 3, 4, 4], None, 21))
    plane = 2 * 6 * 4 * 4 * 4
    assert kinds(trace, "activation") == [plane] * 3
    assert kept_bytes(trace) == 2 * plane + 2 * 2 * 2 * 4


# -- branches, sequences, functions ----------------------------------------------------------------


def branching(path: Path, condition: list[Any]) -> Path:
    """A Squeeze where the condition holds, else a Tanh; the branches share names."""
    value, helper = onnx.helper.make_tensor_value_info, onnx.helper
    squeezed = helper.make_graph(
        [node("Squeeze", "h axes", "t"), node("Relu", "t", "out")], "then", [],
        [value("out", FLOAT, None)], [ints("axes", 1)],
    )  # fmt: skip
    whole = helper.make_graph([node("Tanh", "h", "out")], "else", [], [value("out", FLOAT, None)])
    nodes = [
        node("MatMul", "x W", "h"), *condition,
        helper.make_node("If", ["c"], ["t"], "branch", then_branch=squeezed, else_branch=whole),
        node("Sigmoid", "t", "y"),
    ]  # fmt: skip
    given = [weights("W", 6, 5), ints("one", 1), ints("at", 1)]
    return save(path, nodes, given, [4, "n", 6], None, 13)


def test_a_branch_on_a_shape_is_taken(tmp_path: Path) -> None:
    chain = [node("Shape", "x", "s"), node("Gather", "s at", "n"), node("Equal", "n one", "c")]
    path = branching(tmp_path / "m.onnx", chain)
    assert [op.name for op in step(path, {"n": 1}).ops if op.phase == "forward"] == [
        "MatMul", "Squeeze", "Relu", "Identity", "Sigmoid",
    ]  # fmt: skip
    assert "Tanh" in [op.name for op in step(path, {"n": 2}).ops]


def test_a_branch_on_data_is_refused_by_name(tmp_path: Path) -> None:
    data = [node("ReduceMax", "x", "m", keepdims=0), node("Cast", "m", "c", to=9)]
    said = refused(branching(tmp_path / "m.onnx", data), {"n": 2})
    assert "'branch' is 'If'" in said and "holds a graph whose runs depend on data" in said


def number(name: str, value: int) -> Any:
    return onnx.numpy_helper.from_array(np.int64(value), name)


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_parts_of_a_sequence_are_those_of_a_split(tmp_path: Path, opset: int) -> None:
    nodes = [
        node("MatMul", "x W", "h"), node("SplitToSequence", "h two", "parts", axis=1),
        node("SequenceAt", "parts zero", "a"), node("SequenceAt", "parts back", "b"),
        node("Mul", "a b", "m"), node("SequenceConstruct", "m a", "both"),
        node("ConcatFromSequence", "both", "y", axis=1),
    ]  # fmt: skip
    given = [weights("W", 6, 5), number("two", 2), number("zero", 0), number("back", -2)]
    trace = step(save(tmp_path / "m.onnx", nodes, given, [4, 6], None, opset))
    # The product, of which a and b are parts; their product; both beside each other.
    assert kinds(trace, "activation") == [4 * 5 * 4, 4 * 2 * 4, 4 * 4 * 4]
    assert kept_bytes(trace) == 4 * 5 * 4 + 4 * 4 * 4


@pytest.mark.parametrize("opset", [11, 18])
def test_a_tensor_that_is_unbound_and_stacked(tmp_path: Path, opset: int) -> None:
    nodes = [
        node("MatMul", "x W", "h"), node("SplitToSequence", "h", "rows", axis=0, keepdims=0),
        node("SequenceLength", "rows", "n"), node("SequenceAt", "rows one", "r"),
        node("SequenceConstruct", "r r r", "again"),
        node("ConcatFromSequence", "again", "s", axis=0, new_axis=1),
        node("Expand", "s n5", "y") if opset == 11 else node("Relu", "s", "y"),
    ]  # fmt: skip
    given = [weights("W", 6, 5), number("one", 1), ints("n5", 3, 5)]
    trace = step(save(tmp_path / "m.onnx", nodes, given, [4, 6], None, opset))
    assert kinds(trace, "activation")[:2] == [4 * 5 * 4, 3 * 5 * 4]


def test_a_sequence_that_depends_on_data_is_refused(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x W", "h"), node("SplitToSequence", "h", "rows", axis=0),
        node("ArgMax", "h", "most", axis=0, keepdims=0), node("ReduceMax", "most", "i", keepdims=0),
        node("SequenceAt", "rows i", "y"),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, [weights("W", 6, 5)], [4, 6], None, 13)
    assert "'SequenceAt-y' (SequenceAt) depends on 'i', which is not known" in refused(path)
    nodes = [*nodes[:2], node("Relu", "rows", "y")]
    path = save(tmp_path / "m.onnx", nodes, [weights("W", 6, 5)], [4, 6], None, 13)
    assert "reads 'rows', a sequence" in refused(path)


def with_functions(path: Path, *functions: Any, calls: str = "Twice") -> Path:
    nodes = [node("MatMul", "x W", "h"), onnx.helper.make_node(calls, ["h"], ["y"], domain="own")]
    save(path, nodes, [weights("W", 6, 5)], [4, 6], None, 18)
    model = onnx.load(path)
    model.functions.extend(functions)
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    onnx.save(model, path)
    return path


def function(name: str, *nodes: Any, opset: int = 18) -> Any:
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("own", 1)]
    return onnx.helper.make_function("own", name, ["a"], ["b"], list(nodes), opsets)


def test_functions_are_put_in_the_place_of_their_calls(tmp_path: Path) -> None:
    like = [
        onnx.helper.make_node("Constant", [], ["two"], value_float=2.0),
        node("CastLike", "two a", "t"), node("Sigmoid", "a", "s"), node("Mul", "s t", "b"),
    ]  # fmt: skip
    path = with_functions(tmp_path / "m.onnx", function("Twice", *like))
    trace = step(path)
    assert [op.name for op in trace.ops if op.phase == "forward"] == ["MatMul", "Sigmoid", "Mul"]
    assert kept_bytes(trace) == 2 * 4 * 5 * 4  # the sigmoid and y


def test_functions_that_call_themselves_or_grow_without_end_are_refused(tmp_path: Path) -> None:
    def call(name: str, a: str, b: str) -> Any:
        return onnx.helper.make_node(name, [a], [b], domain="own")

    ring = function("Twice", call("Twice", "a", "b"))
    assert "in a ring" in refused(with_functions(tmp_path / "m.onnx", ring))
    grow = [
        function(f"F{n}", call(f"F{n + 1}", "a", "c"), call(f"F{n + 1}", "c", "b"))
        for n in range(40)
    ]
    grow.append(function("F40", node("Relu", "a", "b")))
    path = with_functions(tmp_path / "m.onnx", *grow, calls="F0")
    assert "with its functions inlined" in refused(path)


def test_a_function_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    old = function("Twice", node("Relu", "a", "b"), opset=12)
    path = with_functions(tmp_path / "m.onnx", old)
    assert "'Twice' of the domain 'own', which umem does not know" in refused(path)


# -- what is no float graph ------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["DynamicQuantizeLinear", "QLinearConv", "MatMulInteger"])
def test_a_quantised_graph_is_refused_as_what_it_is(tmp_path: Path, op: str) -> None:
    nodes = [node("MatMul", "x W", "h"), node("Strange", "h", "i"), node(op, "i", "y")]
    said = refused(save(tmp_path / "m.onnx", nodes, [weights("W", 6, 5)], [4, 6], None, 13))
    assert "quantised graph" in said and repr(op) in said and "Strange" not in said
