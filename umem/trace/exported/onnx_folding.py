"""Contents of small tensors that follow from the model alone: what shapes are made of, by NumPy.

ONNX's own propagation leaves out operators (a Reshape before version 14), and a file of a few
hundred bytes could have it double a vector at each node: only outputs that are small are computed,
and by operators that need no more memory than these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from umem.trace.exported.onnx_weights import SMALL, KnownTensors

Fold = Callable[[Mapping[str, Any], list[Any]], Any]
"""A function of a node's attributes and its inputs' contents that returns the contents of its
output, or a list of all outputs'."""


def fold(onnx: Any, node: Any, known: KnownTensors) -> None:
    """Compute the contents of small outputs from known inputs."""
    if node.op_type == "Shape" or node.op_type == "Size":
        kind = known.types[node.input[0]]
        attributes = {a.name: a.i for a in node.attribute}
        part = kind.shape[attributes.get("start", 0) : attributes.get("end")]
        known.values[node.output[0]] = np.array(
            part if node.op_type == "Shape" else kind.size, np.int64
        )
        return
    function = FOLDS.get(node.op_type)
    is_known = all(not name or name in known.values for name in node.input)
    names = [name for name in node.output if name]
    if function is None or not is_known or not all(map(known.is_small, names)):
        return
    attributes = {a.name: _attribute(onnx, a) for a in node.attribute}
    attributes["outputs"] = len(node.output)
    attributes["shape"] = known.types[names[0]].shape
    inputs = [known.values[name] if name else None for name in node.input]
    try:
        with np.errstate(all="ignore"):
            found = function(attributes, inputs)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, AttributeError):
        return  # whoever needs it says that it is not known
    for name, value in zip(
        node.output, found if isinstance(found, list) else [found], strict=False
    ):
        array = np.asarray(value)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(known.elements[name]) if name else None
        if name and array.shape == known.types[name].shape:
            known.values[name] = array.astype(dtype)


def count_of_nonzero(node: Any, known: KnownTensors) -> list[int] | None:
    """Return the shape of a NonZero of known contents."""
    value = known.values.get(node.input[0]) if node.op_type == "NonZero" else None
    return None if value is None else list(np.shape(np.nonzero(value)))


def _attribute(onnx: Any, attribute: Any) -> Any:
    if attribute.HasField("t"):  # of a ConstantOfShape: one number
        return onnx.numpy_helper.to_array(attribute.t) if len(attribute.t.dims) < 2 else None
    return onnx.helper.get_attribute_value(attribute)


def _by_numpy(function: Callable[..., Any]) -> Fold:
    return lambda attributes, ins: function(*ins)


def _axes(attributes: Mapping[str, Any], ins: list[Any]) -> tuple[int, ...] | None:
    """Return the axes, an attribute in old versions and an input in new ones."""
    found = attributes.get("axes", ins[1] if len(ins) > 1 else None)
    return None if found is None else tuple(int(axis) for axis in np.ravel(found))


def _divide(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    a, b = ins
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        return (np.abs(a) // np.abs(b)) * np.sign(a) * np.sign(b)  # towards zero, as in C
    return a / b


def _slice(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    """Evaluate Slice, in its old form by attributes and its new one by inputs."""
    array = ins[0]
    if "starts" in attributes:
        starts, ends = attributes["starts"], attributes["ends"]
        axes, steps = attributes.get("axes"), None
    else:
        starts, ends, axes, steps = (*ins[1:], *[None] * 3)[:4]
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    taken = [slice(None)] * array.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        before = int(step) < 0 and int(end) < -array.shape[int(axis)]
        taken[int(axis)] = slice(int(start), None if before else int(end), int(step))
    return array[tuple(taken)]


def _split(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    axis = attributes.get("axis", 0)
    sizes = attributes.get("split", ins[1] if len(ins) > 1 else None)
    if sizes is None:
        each = -(-ins[0].shape[axis] // attributes["outputs"])
        sizes = [each] * attributes["outputs"]
    return np.split(ins[0], np.cumsum(sizes)[:-1], axis=axis)


def _constant_of_shape(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    value = attributes.get("value", np.zeros(1, np.float32))
    return np.full(attributes["shape"], value.item())


def _range(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    start, _, step = (each.item() for each in ins)
    return start + step * np.arange(attributes["shape"][0])


def _tiled(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    if tuple(n * int(m) for n, m in zip(ins[0].shape, ins[1], strict=True)) != attributes["shape"]:
        raise ValueError("a product that ONNX's inference did not see overflow")
    return np.tile(ins[0], ins[1])


def _scattered(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    """Evaluate a ScatterND that assigns, to which a change of part of a shape is exported."""
    if attributes.get("reduction", b"none") != b"none":
        raise ValueError("a sum")
    found = ins[0].copy()
    found[tuple(np.moveaxis(ins[1], -1, 0))] = ins[2]
    return found


def _clipped(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    low, high = (*ins[1:], None, None)[:2]
    low, high = attributes.get("min", low), attributes.get("max", high)
    return ins[0] if low is None and high is None else np.clip(ins[0], low, high)


def _padded(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    pads = [int(n) for n in ins[1]]
    if attributes.get("mode", b"constant") != b"constant" or len(ins) > 3 or min(pads) < 0:
        raise ValueError("other than with one number")
    value = 0 if len(ins) < 3 or ins[2] is None else ins[2].item()
    half = len(pads) // 2
    if sum(pads) > SMALL:
        raise ValueError("large")
    return np.pad(ins[0], list(zip(pads[:half], pads[half:], strict=True)), constant_values=value)


def _reduced(function: Callable[..., Any]) -> Fold:
    def fold_it(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
        keeps = bool(attributes.get("keepdims", 1))
        return function(ins[0], axis=_axes(attributes, ins), keepdims=keeps)

    return fold_it


def _given(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    return ins[0]


def _transposed(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    return np.transpose(ins[0], attributes.get("perm"))


FOLDS: dict[str, Fold] = {
    "Abs": _by_numpy(np.abs),
    "Add": _by_numpy(np.add),
    "And": _by_numpy(np.logical_and),
    "Cast": _given,
    "Ceil": _by_numpy(np.ceil),
    "Clip": _clipped,
    "Concat": lambda attributes, ins: np.concatenate(ins, axis=attributes["axis"]),
    "ConstantOfShape": _constant_of_shape,
    "Div": _divide,
    "Equal": _by_numpy(np.equal),
    "Expand": lambda attributes, ins: np.broadcast_to(ins[0], attributes["shape"]),
    "Flatten": lambda attributes, ins: np.reshape(ins[0], attributes["shape"]),
    "Floor": _by_numpy(np.floor),
    "Gather": lambda attributes, ins: np.take(ins[0], ins[1], axis=attributes.get("axis", 0)),
    "Greater": _by_numpy(np.greater),
    "GreaterOrEqual": _by_numpy(np.greater_equal),
    "Identity": _given,
    "Less": _by_numpy(np.less),
    "LessOrEqual": _by_numpy(np.less_equal),
    "Max": lambda attributes, ins: np.maximum.reduce(np.broadcast_arrays(*ins)),
    "Min": lambda attributes, ins: np.minimum.reduce(np.broadcast_arrays(*ins)),
    "Mod": lambda attributes, ins: (np.fmod if attributes.get("fmod") else np.mod)(*ins),
    "Mul": _by_numpy(np.multiply),
    "Neg": _by_numpy(np.negative),
    "NonZero": lambda attributes, ins: np.stack(np.nonzero(ins[0])),
    "Not": _by_numpy(np.logical_not),
    "Or": _by_numpy(np.logical_or),
    "Pad": _padded,
    "Pow": _by_numpy(np.power),
    "Range": _range,
    "Reciprocal": _by_numpy(np.reciprocal),
    "ReduceMax": _reduced(np.max),
    "ReduceMean": _reduced(np.mean),
    "ReduceMin": _reduced(np.min),
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "Reshape": lambda attributes, ins: np.reshape(ins[0], attributes["shape"]),
    "Round": _by_numpy(np.round),
    "ScatterND": _scattered,
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _by_numpy(np.sqrt),
    "Squeeze": lambda attributes, ins: np.squeeze(ins[0], axis=_axes(attributes, ins)),
    "Sub": _by_numpy(np.subtract),
    "Tile": _tiled,
    "Transpose": _transposed,
    "Unsqueeze": lambda attributes, ins: np.expand_dims(ins[0], _axes(attributes, ins) or ()),
    "Where": _by_numpy(np.where),
}
"""Operators that compute shapes, each with its NumPy function."""
