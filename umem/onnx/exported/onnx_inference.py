"""The shape of every tensor, node by node, from ONNX's own inference.

ONNX infers the types of one node at a time; between nodes, `onnx_folding` computes the contents of
tensors from which shapes are made. A file of a few hundred bytes could double a rank at each node,
so each shape is checked before the next node uses it.

Shapes of intermediate tensors in the file are ignored: exporters write them wrongly, and ONNX
Runtime ignores them too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import chain, count
from typing import Any

from umem._common.printable import quoted
from umem.errors import OnnxError
from umem.onnx.exported.computed_weights import with_made_weights
from umem.onnx.exported.onnx_folding import count_of_nonzero, fold
from umem.onnx.exported.onnx_graph import OnnxGraph, OnnxNode
from umem.onnx.exported.onnx_lowering import Lowering
from umem.onnx.exported.onnx_reading import CheckedModel, node_name
from umem.onnx.exported.onnx_weights import KnownTensors
from umem.onnx.exported.operators import OPERATORS

SAME_SHAPES = {"GreaterOrEqual": "Greater", "LessOrEqual": "Less"}
"""Operators without shape inference in some versions, each with one that has equal shapes."""


def inferred(read: CheckedModel) -> OnnxGraph:
    """Return the graph of a model with the type of every tensor.

    Raises:
        OnnxError: shapes contradict each other, depend on data, or exceed any machine's memory; or
            a branch or sequence depends on data. Names the node.
    """
    onnx, graph, known = read.onnx, read.model.graph, read.known
    opsets = list(read.model.opset_import)
    version = max((o.version for o in opsets if o.domain in ("", "ai.onnx")), default=1)
    lowering = Lowering(onnx, known, version, read.folder)
    nodes = []
    todo = deque(enumerate(graph.node))
    while todo:
        place, node = todo.popleft()
        if node.op_type == "Constant":
            continue
        instead = lowering.lowered(node, place)
        if instead is not None:
            todo.extendleft((place, each) for each in reversed(instead))
            continue
        _infer(onnx, node, place, version, opsets, known)
        fold(onnx, node, known, opsets)
        nodes.append(_node(onnx, node, place))
    weights = known.initializers
    outputs = tuple(dict.fromkeys(x.name for x in graph.output))
    for name in outputs:
        if name not in known.types:
            raise OnnxError(f"the output {quoted(name)} is a sequence, which has no gradient")
    return with_made_weights(
        OnnxGraph(
            tuple(_with_unique_names(nodes)),
            known.types,
            read.inputs,
            frozenset(w for w in weights if known.types[w].is_float and known.types[w].shape),
            frozenset(weights | known.constants),
            outputs,
            known.values,
        )
    )


def _infer(
    onnx: Any, node: Any, place: int, version: int, opsets: list[Any], known: KnownTensors
) -> None:
    """Add the types of a node's outputs."""
    found = _types(onnx, node, place, version, opsets, known)
    for name in filter(None, node.output):
        if name in known.types:
            raise OnnxError(f"{node_name(node, place)} makes {quoted(name)}, which already exists")
        kind = found.get(name)
        shape = _shape(kind, node, name, known)
        shape = count_of_nonzero(node, known) if shape is None else shape
        if shape is None:
            raise OnnxError(
                f"{node_name(node, place)} ({node.op_type}) makes {quoted(name)}, whose shape is "
                f"not known before the data are{_absent(known)}"
            )
        element_type = 0 if kind is None else kind.tensor_type.elem_type
        elements = element_type or known.elements[node.input[0]]
        made = known.add(onnx, name, elements, shape)
        given = known.types.get(node.input[0]) if node.input else None
        if node.op_type == "Reshape" and given is not None and made.size != given.size:
            raise OnnxError(  # which ONNX's inference lets pass
                f"{node_name(node, place)} (Reshape): shapes contradict each other: {made.size} "
                f"elements from {given.size}; the graph may be valid only for the size that it was "
                "exported at"
            )


def _absent(known: KnownTensors) -> str:
    if not known.absent:
        return ""
    names = ", ".join(quoted(name) for name in sorted(known.absent)[:3])
    return f"; external data that a shape may need are missing: {names}"


def _types(
    onnx: Any, node: Any, place: int, version: int, opsets: list[Any], known: KnownTensors
) -> dict[str, Any]:
    """Infer the types of a node's outputs by ONNX.

    Raises:
        OnnxError: shapes contradict each other, or cannot be inferred.
    """
    make = onnx.helper.make_tensor_type_proto
    names = [name for name in node.input if name]
    types = {name: make(known.elements[name], known.types[name].shape) for name in names}
    data = {n: onnx.numpy_helper.from_array(known.values[n]) for n in names if n in known.values}
    try:
        schema = onnx.defs.get_schema(SAME_SHAPES.get(node.op_type, node.op_type), version, "")
        infer = onnx.shape_inference.infer_node_outputs
        return dict(infer(schema, node, types, data, opset_imports=opsets))
    except MemoryError as error:
        raise OnnxError("the shapes of the model need more memory than there is") from error
    except Exception as error:  # InferenceError, SchemaError, RuntimeError or ValueError
        raise OnnxError(
            f"{node_name(node, place)} ({node.op_type}): shapes contradict each other, or are not "
            f"known: {quoted(str(error))}{_absent(known)}"
        ) from error


def _shape(kind: Any, node: Any, name: str, known: KnownTensors) -> list[int] | None:
    """Return a shape with every axis known; the input's if ONNX has no inference for it."""
    if kind is not None and kind.HasField("tensor_type") and kind.tensor_type.HasField("shape"):
        dims = kind.tensor_type.shape.dim
        return [d.dim_value for d in dims] if all(d.HasField("dim_value") for d in dims) else None
    operator = OPERATORS[node.op_type]  # the first versions of many have no inference
    if operator.statistics and name != node.output[0]:
        return list(known.types[node.input[operator.statistics[0]]].shape)
    is_group_norm = node.op_type == "GroupNormalization"  # no version has inference
    if is_group_norm or (operator.elementwise and len(node.input) == 1):
        return list(known.types[node.input[0]].shape)
    return None


def _node(onnx: Any, node: Any, place: int) -> OnnxNode:
    values = {a.name: _value(onnx, a) for a in node.attribute if a.name != "value"}
    name = node.name or next(filter(None, node.output), "") or f"{node.op_type}_{place}"
    return OnnxNode(name, node.op_type, tuple(node.input), tuple(node.output), values)


def _with_unique_names(nodes: list[OnnxNode]) -> list[OnnxNode]:
    """Make node names unique: replace a repeated one by the output's name, or by the place.

    Schedules identify nodes by name.
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
