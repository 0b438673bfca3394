"""Contents of small tensors that follow from the model alone, from which shapes are made.

ONNX's own propagation skips some operators (a Reshape before version 14), and a file of a few
hundred bytes could make it double a vector at each node. So only small outputs are computed, with
ONNX's reference implementation of operators that need no more memory than their output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.onnx.exported.onnx_weights import SMALL, KnownTensors

FOLDED = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "ConstantOfShape", "Div", "Equal",
    "Expand", "Flatten", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less",
    "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "Or", "Pad", "Pow",
    "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "Reshape", "Round", "ScatterND", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""Operators that compute shapes."""


def fold(onnx: Any, node: Any, known: KnownTensors, opsets: list[Any]) -> None:
    """Compute the contents of small outputs from known inputs."""
    if node.op_type == "Shape" or node.op_type == "Size":
        kind = known.types[node.input[0]]
        attributes = {a.name: a.i for a in node.attribute}
        part = kind.shape[attributes.get("start", 0) : attributes.get("end")]
        known.values[node.output[0]] = np.array(
            part if node.op_type == "Shape" else kind.size, np.int64
        )
        return
    is_known = all(not name or name in known.values for name in node.input)
    names = [name for name in node.output if name]
    if node.op_type not in FOLDED or not is_known or not all(map(known.is_small, names)):
        return
    inputs = {name: known.values[name] for name in node.input if name}
    if _is_large(node, inputs):
        return
    try:
        with np.errstate(all="ignore"):
            found = evaluated(onnx, [node], inputs, names, opsets)
    except Exception:  # of any class, by the operator: whoever needs it says that it is not known
        return
    for name, value in zip(names, found, strict=True):
        array = np.asarray(value)
        if array.shape == known.types[name].shape:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(known.elements[name])
            known.values[name] = array.astype(dtype)


def evaluated(
    onnx: Any, nodes: list[Any], inputs: dict[str, Any], outputs: list[str], opsets: list[Any]
) -> Any:
    """Run nodes with ONNX's reference implementation."""
    from onnx.reference import ReferenceEvaluator

    make = onnx.helper.make_empty_tensor_value_info
    graph = onnx.helper.make_graph(nodes, "part", list(map(make, inputs)), list(map(make, outputs)))
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    return ReferenceEvaluator(model).run(None, inputs)


def _is_large(node: Any, inputs: dict[str, Any]) -> bool:
    """Tell whether a Pad or Tile may need more memory than its small output, by its numbers."""
    if node.op_type not in ("Pad", "Tile") or len(node.input) < 2:
        return False
    numbers = [int(n) for n in np.ravel(inputs[node.input[1]])]
    return min(numbers, default=0) < 0 or sum(numbers) > SMALL


def count_of_nonzero(node: Any, known: KnownTensors) -> list[int] | None:
    """Return the shape of a NonZero of known contents."""
    value = known.values.get(node.input[0]) if node.op_type == "NonZero" else None
    return None if value is None else list(np.shape(np.nonzero(value)))
