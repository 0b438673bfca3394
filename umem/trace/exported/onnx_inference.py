"""The shape of every tensor, node by node, by ONNX's own inference.

ONNX infers the types of one node at a time; what shapes are made of is computed here, by NumPy, in
between: ONNX's own propagation leaves out operators (a Reshape before version 14), and a file of a
few hundred bytes could have it double a vector, or a rank, at each node. So each is checked before
the next node sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain, count
from typing import Any

import numpy as np

from umem.errors import OnnxError
from umem.printable import quoted
from umem.trace.exported.onnx_graph import OnnxGraph, OnnxNode
from umem.trace.exported.onnx_reading import CheckedModel, dims_of, node_said
from umem.trace.exported.onnx_weights import KnownTensors
from umem.trace.exported.operators import OPERATORS

Fold = Callable[[Mapping[str, Any], list[Any]], Any]
"""From a node's attributes and the contents of its inputs, the contents of its output."""


def inferred(read: CheckedModel) -> OnnxGraph:
    """The graph of a model, with the type of every tensor.

    Raises:
        OnnxError: shapes that do not go together, contradict what the model says of them, depend
            on data, or are of no machine. Names the node.
    """
    onnx, graph, known = read.onnx, read.model.graph, read.known
    opsets = list(read.model.opset_import)
    nodes = []
    for place, node in enumerate(graph.node):
        if node.op_type == "Constant":
            continue
        _infer(onnx, node, place, opsets, known)
        _fold(onnx, node, known)
        nodes.append(_node(onnx, node, place))
    nodes = _told_apart(nodes)
    _check_said(graph, known)
    weights = known.initializers
    return OnnxGraph(
        tuple(nodes),
        known.types,
        read.inputs,
        frozenset(w for w in weights if known.types[w].is_float and known.types[w].shape),
        frozenset(weights | known.constants),
        tuple(dict.fromkeys(x.name for x in graph.output)),
    )


def _infer(onnx: Any, node: Any, place: int, opsets: list[Any], known: KnownTensors) -> None:
    """Add the types of a node's outputs."""
    version = max((o.version for o in opsets if o.domain in ("", "ai.onnx")), default=1)
    found = _types(onnx, node, place, version, opsets, known)
    for name in filter(None, node.output):
        kind = found.get(name)
        shape = _shape(kind, node, known)
        if shape is None:
            raise OnnxError(
                f"{node_said(node, place)} ({node.op_type}) makes {quoted(name)}, whose shape is "
                f"not known before the data are{_absent(known)}"
            )
        elements = kind.tensor_type.elem_type if kind else known.elements[node.input[0]]
        made = known.add(onnx, name, elements, shape)
        given = known.types.get(node.input[0]) if node.input else None
        if node.op_type == "Reshape" and given is not None and made.size != given.size:
            raise OnnxError(  # which ONNX's inference lets pass
                f"{node_said(node, place)} (Reshape): shapes do not go together: {made.size} "
                f"elements of {given.size}; the graph may be right for the size alone that it was "
                "exported at"
            )


def _absent(known: KnownTensors) -> str:
    if not known.absent:
        return ""
    names = ", ".join(quoted(name) for name in sorted(known.absent)[:3])
    return f"; external data that a shape may need are not there: {names}"


def _types(
    onnx: Any, node: Any, place: int, version: int, opsets: list[Any], known: KnownTensors
) -> dict[str, Any]:
    """What ONNX says of a node's outputs."""
    make = onnx.helper.make_tensor_type_proto
    names = [name for name in node.input if name]
    types = {name: make(known.elements[name], known.types[name].shape) for name in names}
    data = {n: onnx.numpy_helper.from_array(known.values[n]) for n in names if n in known.values}
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
        return dict(
            onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opsets)
        )
    except MemoryError as error:
        raise OnnxError("the shapes of the model need more memory than there is") from error
    except Exception as error:  # InferenceError, SchemaError, RuntimeError or ValueError
        raise OnnxError(
            f"{node_said(node, place)} ({node.op_type}): shapes do not go together, or are not "
            f"known: {quoted(str(error))}{_absent(known)}"
        ) from error


def _shape(kind: Any, node: Any, known: KnownTensors) -> list[int] | None:
    """A shape of which every axis is known; that of the input where ONNX leaves it so."""
    if kind is not None and kind.HasField("tensor_type") and kind.tensor_type.HasField("shape"):
        dims = kind.tensor_type.shape.dim
        return [d.dim_value for d in dims] if all(d.HasField("dim_value") for d in dims) else None
    operator = OPERATORS[node.op_type]  # the first versions of many have no inference
    if operator.elementwise and len(node.input) == 1:
        return list(known.types[node.input[0]].shape)
    return None


def _check_said(graph: Any, known: KnownTensors) -> None:
    """Refuse a graph whose own words on shapes are not what comes out."""
    for x in (*graph.value_info, *graph.output):
        kind = known.types.get(x.name)
        if kind is None or not x.type.tensor_type.HasField("shape"):
            continue
        said = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims_of(x)]
        pairs = list(zip(said, kind.shape, strict=False))
        if len(said) != len(kind.shape) or any(a is not None and a != b for a, b in pairs):
            raise OnnxError(
                f"sizes contradict: {quoted(x.name)} is {list(kind.shape)}, and the model says "
                f"{said}"
            )


def _node(onnx: Any, node: Any, place: int) -> OnnxNode:
    values = {a.name: _value(onnx, a) for a in node.attribute if a.name != "value"}
    name = node.name or next(filter(None, node.output), "") or f"{node.op_type}_{place}"
    return OnnxNode(name, node.op_type, tuple(node.input), tuple(node.output), values)


def _told_apart(nodes: list[OnnxNode]) -> list[OnnxNode]:
    """Nodes of which no two have one name: the second is called by its output, then by its place.

    A schedule names them.
    """
    taken: set[str] = set()
    found = []
    for place, node in enumerate(nodes):
        outputs = tuple(filter(None, node.outputs))
        names = chain((node.name, *outputs), (f"{node.name}_{n}" for n in count(place)))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        found.append(node if name == node.name else replace(node, name=name))
    return found


def _value(onnx: Any, attribute: Any) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, (int, float, str)) else tuple(value) if value else ()


# -- what shapes are made of -----------------------------------------------------------------------


def _fold(onnx: Any, node: Any, known: KnownTensors) -> None:
    """Compute the contents of a small output whose inputs are known."""
    if node.op_type == "Shape" or node.op_type == "Size":
        kind = known.types[node.input[0]]
        attributes = {a.name: a.i for a in node.attribute}
        part = kind.shape[attributes.get("start", 0) : attributes.get("end")]
        known.values[node.output[0]] = np.array(
            part if node.op_type == "Shape" else kind.size, np.int64
        )
        return
    fold = FOLDS.get(node.op_type)
    is_known = all(not name or name in known.values for name in node.input)
    if fold is None or not is_known or not known.is_small(node.output[0]):
        return
    attributes = {a.name: _attribute(onnx, a) for a in node.attribute}
    inputs = [known.values[name] if name else None for name in node.input]
    kind = known.types[node.output[0]]
    try:
        with np.errstate(all="ignore"):
            value = np.asarray(fold(attributes, inputs))
    except (ValueError, TypeError, IndexError, KeyError, OverflowError):
        return  # whoever needs it says that it is not known
    dtype = onnx.helper.tensor_dtype_to_np_dtype(known.elements[node.output[0]])
    if value.shape == kind.shape:
        known.values[node.output[0]] = value.astype(dtype)


def _attribute(onnx: Any, attribute: Any) -> Any:
    if attribute.HasField("t"):  # of a ConstantOfShape: one number
        return onnx.numpy_helper.to_array(attribute.t) if len(attribute.t.dims) < 2 else None
    return onnx.helper.get_attribute_value(attribute)


def _by_numpy(function: Callable[..., Any]) -> Fold:
    return lambda attributes, ins: function(*ins)


def _axes(attributes: Mapping[str, Any], ins: list[Any]) -> tuple[int, ...] | None:
    """The axes, an attribute at first and an input later."""
    found = attributes.get("axes", ins[1] if len(ins) > 1 else None)
    return None if found is None else tuple(int(axis) for axis in np.ravel(found))


def _divide(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    a, b = ins
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        return (np.abs(a) // np.abs(b)) * np.sign(a) * np.sign(b)  # towards zero, as in C
    return a / b


def _slice(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    """Of a vector, which is what shapes are."""
    if "starts" in attributes:
        starts, ends = attributes["starts"], attributes["ends"]
        axes, steps = attributes.get("axes"), None
    else:
        starts, ends, axes, steps = (*ins[1:], *[None] * 3)[:4]
    if ins[0].ndim != 1 or (axes is not None and int(np.ravel(axes)[0]) not in (0, -1)):
        raise ValueError("more than a vector")
    step = 1 if steps is None else int(steps[0])
    start, end = int(starts[0]), int(ends[0])
    if step < 0 and end < -len(ins[0]):
        return ins[0][start::step]
    return ins[0][start:end:step]


def _constant_of_shape(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    value = attributes.get("value", np.zeros(1, np.float32))
    return np.full(ins[0], value.item())


def _product(attributes: Mapping[str, Any], ins: list[Any]) -> Any:
    keeps = bool(attributes.get("keepdims", 1))
    return np.prod(ins[0], axis=_axes(attributes, ins), keepdims=keeps)


FOLDS: dict[str, Fold] = {
    "Add": _by_numpy(np.add),
    "Cast": lambda attributes, ins: ins[0],
    "Ceil": _by_numpy(np.ceil),
    "Concat": lambda attributes, ins: np.concatenate(ins, axis=attributes["axis"]),
    "ConstantOfShape": _constant_of_shape,
    "Div": _divide,
    "Equal": _by_numpy(np.equal),
    "Expand": lambda attributes, ins: ins[0] * np.ones(ins[1], ins[0].dtype),
    "Floor": _by_numpy(np.floor),
    "Gather": lambda attributes, ins: np.take(ins[0], ins[1], axis=attributes.get("axis", 0)),
    "Identity": lambda attributes, ins: ins[0],
    "Max": lambda attributes, ins: np.maximum.reduce(np.broadcast_arrays(*ins)),
    "Min": lambda attributes, ins: np.minimum.reduce(np.broadcast_arrays(*ins)),
    "Mod": _by_numpy(np.mod),
    "Mul": _by_numpy(np.multiply),
    "Neg": _by_numpy(np.negative),
    "Range": _by_numpy(np.arange),
    "ReduceProd": _product,
    "Reshape": lambda attributes, ins: np.reshape(ins[0], ins[1]),
    "Slice": _slice,
    "Squeeze": lambda attributes, ins: np.squeeze(ins[0], axis=_axes(attributes, ins)),
    "Sub": _by_numpy(np.subtract),
    "Unsqueeze": lambda attributes, ins: np.expand_dims(ins[0], _axes(attributes, ins) or ()),
    "Where": _by_numpy(np.where),
}
"""Operators of which shapes are made."""
