"""Formulas as exporters write them are the one operator that the framework has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced_graphs import check

from tests.on_onnx.test_operators import FLOAT, ints, kept_bytes, node, ops, save, weights
from umem.onnx import onnx_step
from umem.trace import Trace

onnx = pytest.importorskip("onnx")
ROWS, WIDTH = 4, 8
PLANE = ROWS * WIDTH * 4


def number(name: str, value: float) -> Any:
    return onnx.numpy_helper.from_array(np.float32(value), name)


def step(path: Path, *nodes: Any, given: list[Any] | None = None, opset: int = 13) -> Trace:
    """A product h, then the nodes up to g, then a product that reads it."""
    whole = [node("MatMul", "x W", "h"), *nodes, node("MatMul", "g V", "y")]
    all_given = [weights("W", WIDTH, WIDTH), weights("V", WIDTH, WIDTH), *(given or [])]
    return check(onnx_step(save(path, whole, all_given, [ROWS, WIDTH], None, opset)).trace)


def names(trace: Trace) -> list[str]:
    return [op.name for op in ops(trace, "forward")]


NUMBERS = [
    number("half", 0.5), number("one", 1), number("root", 1.41421354),
    number("inverse", 0.70710677),
    number("c", 0.044715), number("s", 0.7978846), number("three", 3), number("two", 2),
    number("six", 6), number("zero", 0), number("sixth", 1 / 6), number("quick", 1.702),
]  # fmt: skip
FORMULAS = {
    "erf, PyTorch": ("Gelu", [
        node("Div", "h root", "a"), node("Erf", "a", "b"), node("Add", "b one", "d"),
        node("Mul", "h d", "e"), node("Mul", "e half", "g")]),
    "erf, half first": ("Gelu", [
        node("Mul", "half h", "e"), node("Mul", "h inverse", "a"), node("Erf", "a", "b"),
        node("Add", "one b", "d"), node("Mul", "d e", "g")]),
    "tanh, a power": ("Gelu", [
        node("Pow", "h three", "a"), node("Mul", "a c", "b"), node("Add", "h b", "d"),
        node("Mul", "d s", "e"), node("Tanh", "e", "f"), node("Add", "f one", "i"),
        node("Mul", "h half", "j"), node("Mul", "j i", "g")]),
    "tanh, products": ("Gelu", [
        node("Mul", "h h", "a"), node("Mul", "a h", "k"), node("Mul", "c k", "b"),
        node("Add", "b h", "d"), node("Mul", "s d", "e"), node("Tanh", "e", "f"),
        node("Add", "one f", "i"), node("Mul", "i h", "j"), node("Mul", "j half", "g")]),
    "silu": ("Swish", [node("Sigmoid", "h", "a"), node("Mul", "a h", "g")]),
    "silu, by an exponential": ("Swish", [
        node("Neg", "h", "a"), node("Exp", "a", "b"), node("Add", "b one", "d"),
        node("Div", "h d", "g")]),
    "hardswish": ("HardSwish", [
        node("Add", "h three", "a"), node("Clip", "a zero six", "b"), node("Mul", "h b", "d"),
        node("Div", "d six", "g")]),
    "hardswish, by a hard sigmoid": ("HardSwish", [
        onnx.helper.make_node("HardSigmoid", ["h"], ["a"], alpha=1 / 6), node("Mul", "h a", "g")]),
    "mish": ("Mish", [
        node("Softplus", "h", "a"), node("Tanh", "a", "b"), node("Mul", "h b", "g")]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_a_written_out_activation_keeps_its_input(tmp_path: Path, name: str) -> None:
    op, nodes = FORMULAS[name]
    trace = step(tmp_path / "m.onnx", *nodes, given=NUMBERS)
    assert names(trace) == ["MatMul", op, "MatMul"]
    assert kept_bytes(trace) == 3 * PLANE  # h, g, which the second product reads, and y


NOT_ONE = {
    "another constant": [
        node("Mul", "h quick", "q"), node("Sigmoid", "q", "a"), node("Mul", "h a", "g")],
    "a gate of another tensor": [
        node("MatMul", "h V", "i"), node("Sigmoid", "i", "a"), node("Mul", "h a", "g")],
    "a sigmoid that something else reads": [
        node("Sigmoid", "h", "a"), node("Mul", "h a", "b"), node("Add", "b a", "g")],
    "a trained factor": [
        node("Sigmoid", "h", "a"), node("Mul", "h a", "b"), node("Mul", "b gain", "g")],
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ONE)
def test_what_is_no_known_function_is_not_fused(tmp_path: Path, name: str) -> None:
    gain = onnx.numpy_helper.from_array(np.ones((1,), np.float32), "gain")
    trace = step(tmp_path / "m.onnx", *NOT_ONE[name], given=[*NUMBERS, gain])
    if name == "a trained factor":
        assert "Swish" in names(trace) and names(trace).count("Mul") == 1
    else:
        assert "Sigmoid" in names(trace) and "Swish" not in names(trace)


def test_an_output_inside_a_formula_is_not_fused_away(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    step(path, *FORMULAS["silu"][1])
    model = onnx.load(path)
    model.graph.output.append(onnx.helper.make_tensor_value_info("a", FLOAT, None))
    onnx.save(model, path)
    assert names(onnx_step(path).trace) == ["MatMul", "Sigmoid", "Mul", "MatMul"]


# -- normalisations --------------------------------------------------------------------------------


def layer_norm(square: str, root: str, affine: bool) -> list[Any]:
    nodes = [node("ReduceMean", "h", "m", axes=[-1]), node("Sub", "h m", "d")]
    nodes += [node("Pow", "d two", "p") if square == "Pow" else node("Mul", "d d", "p")]
    nodes += [node("ReduceMean", "p", "v", axes=[-1]), node("Add", "v eps", "w")]
    nodes += [node("Sqrt", "w", "r")]
    out = "n" if affine else "g"
    if root == "Div":
        nodes += [node("Div", "d r", out)]
    else:
        nodes += [node("Reciprocal", "r", "q"), node("Mul", "d q", out)]
    return nodes + [node("Mul", "n gamma", "o"), node("Add", "o beta", "g")] * affine


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("root", ["Div", "Reciprocal"])
@pytest.mark.parametrize("affine", [True, False])
def test_a_written_out_layer_normalisation_keeps_its_input_and_two_numbers_a_row(
    tmp_path: Path, square: str, root: str, affine: bool
) -> None:
    given = [*NUMBERS, number("eps", 1e-5), weights("gamma", WIDTH), weights("beta", WIDTH)]
    trace = step(tmp_path / "m.onnx", *layer_norm(square, root, affine), given=given)
    assert names(trace) == ["MatMul", "LayerNormalization", "MatMul"]
    assert kept_bytes(trace) == 3 * PLANE + 2 * ROWS * 4
    gradients = [op for op in ops(trace, "backward") if op.name == "LayerNormalizationGrad"]
    (one,) = gradients
    assert len(one.writes) == (3 if affine else 1)  # of h, gamma and beta


def test_axes_that_are_an_input_are_known_too(tmp_path: Path) -> None:
    nodes = layer_norm("Pow", "Div", True)
    for n in (0, 3):
        nodes[n] = node("ReduceMean", f"{nodes[n].input[0]} axes", nodes[n].output[0])
    given = [*NUMBERS, number("eps", 1e-5), weights("gamma", WIDTH), weights("beta", WIDTH)]
    given.append(ints("axes", 1))
    trace = step(tmp_path / "m.onnx", *nodes, given=given, opset=18)
    assert names(trace) == ["MatMul", "LayerNormalization", "MatMul"]


def test_a_mean_over_other_axes_is_no_layer_normalisation(tmp_path: Path) -> None:
    nodes = layer_norm("Pow", "Div", True)
    for n in (0, 3):
        nodes[n].attribute[0].ints[:] = [0]
    given = [*NUMBERS, number("eps", 1e-5), weights("gamma", WIDTH), weights("beta", WIDTH)]
    assert "LayerNormalization" not in names(step(tmp_path / "m.onnx", *nodes, given=given))


@pytest.mark.parametrize("affine", [True, False])
def test_a_group_normalisation_keeps_its_input_and_two_numbers_a_group(
    tmp_path: Path, affine: bool
) -> None:
    nodes = [
        node("Conv", "x W", "h"), node("Shape", "h", "shape"), node("Reshape", "h to", "a"),
        node("InstanceNormalization", "a ones zeros", "b", epsilon=1e-5),
        node("Reshape", "b shape", "n" if affine else "g"),
    ]  # fmt: skip
    if affine:
        nodes += [
            node("Unsqueeze", "gamma axes", "gamma3"), node("Mul", "n gamma3", "o"),
            node("Unsqueeze", "beta axes", "beta3"), node("Add", "o beta3", "g"),
        ]  # fmt: skip
    nodes.append(node("Conv", "g V", "y"))
    ones = onnx.numpy_helper.from_array(np.ones(2, np.float32), "ones")
    given = [
        weights("W", 6, 3, 1, 1), weights("V", 6, 6, 1, 1), ints("to", 0, 2, -1), ones,
        weights("zeros", 2), weights("gamma", 6), weights("beta", 6), ints("axes", 1, 2),
    ]  # fmt: skip
    trace = onnx_step(save(tmp_path / "m.onnx", nodes, given, [2, 3, 4, 4], None, 13)).trace
    check(trace)
    plane = 2 * 6 * 4 * 4 * 4
    assert "GroupNormalization" in names(trace) and "Mul" not in names(trace)
    assert "InstanceNormalization" not in names(trace)
    assert kept_bytes(trace) == 3 * plane + 2 * 2 * 2 * 4
    parameters = [a.label for a in trace.events if getattr(a, "kind", "") == "parameter"]
    assert sorted(parameters) == ["V", "W", *(["beta", "gamma"] if affine else [])]
