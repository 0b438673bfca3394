"""Initialisers and constants of an ONNX graph: their types, and the contents of small ones.

Tensors on which a shape may depend are small. All others are weights: their shape is enough, so
neither their contents nor their files are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from umem._common.printable import quoted
from umem.errors import OnnxError
from umem.onnx.exported.onnx_graph import TensorType
from umem.trace import LARGEST_BYTES

SMALL = 4096
"""Arrays of at most this many elements may affect a shape; larger ones are weights. A choice that
no measurement supports: an array that affects a shape has one element an axis."""
SMALL_FLOATS = 64
"""The same limit for floating-point arrays, such as scales of a resize; also a choice."""
MOST_AXES = 64
"""A tensor may have this many axes, as in NumPy."""


@dataclass
class KnownTensors:
    """The types, and small contents, of tensors by name.

    Attributes:
        types: their types.
        elements: their element types, as ONNX's numbers.
        values: the contents of small ones.
        initializers: names of the file's initialisers.
        constants: names of the file's constant nodes.
        absent: small ones whose file is missing.
    """

    types: dict[str, TensorType] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    initializers: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)

    def add(self, onnx: Any, name: str, elements: int, shape: Sequence[int]) -> TensorType:
        """Add a tensor's type.

        Raises:
            OnnxError: the tensor exceeds any machine's memory.
        """
        self.types[name] = found = type_of(onnx, name, elements, tuple(shape))
        self.elements[name] = elements
        return found

    def is_small(self, name: str) -> bool:
        """Tell whether a tensor is small enough to affect a shape."""
        kind = self.types[name]
        return kind.size <= (SMALL_FLOATS if kind.is_float else SMALL)


def add_initializers(onnx: Any, graph: Any, known: KnownTensors, folder: Path) -> None:
    """Add the types of a graph's initialisers and constants, and the contents of small ones.

    Args:
        known: the known tensors, to which they are added.
        folder: the folder of the model's file, which has its external data.

    Raises:
        OnnxError: a tensor exceeds any machine's memory, is sparse, or has contents that do not
            match its type.
    """
    for tensor in graph.initializer:
        known.initializers.add(tensor.name)
        _take(onnx, tensor, tensor.name, known, folder)
    for node in graph.node:
        if node.op_type == "Constant":
            if len(node.output) != 1:
                raise OnnxError(f"a constant of the model has {len(node.output)} outputs")
            known.constants.add(node.output[0])
            _take_constant(onnx, node, known, folder)


def _take_constant(onnx: Any, node: Any, known: KnownTensors, folder: Path) -> None:
    """Add the tensor of a Constant node, whose contents are an attribute, to those known.

    Raises:
        OnnxError: the constant is sparse, not numeric, or does not have one value; or as `_take`.
    """
    name = node.output[0]
    if len(node.attribute) != 1 or node.attribute[0].HasField("sparse_tensor"):
        raise OnnxError(f"the constant {quoted(name)} is sparse, or does not have one value")
    attribute = node.attribute[0]
    if attribute.HasField("t"):
        _take(onnx, attribute.t, name, known, folder)
        return
    if attribute.name not in ("value_int", "value_ints", "value_float", "value_floats"):
        raise OnnxError(f"the constant {quoted(name)} is not a number")
    is_float = "float" in attribute.name
    value = onnx.helper.get_attribute_value(attribute)
    array = np.array(value, np.float32 if is_float else np.int64)
    elements = onnx.TensorProto.FLOAT if is_float else onnx.TensorProto.INT64
    known.add(onnx, name, elements, array.shape)
    if known.is_small(name):
        known.values[name] = array


def _take(onnx: Any, tensor: Any, name: str, known: KnownTensors, folder: Path) -> None:
    """Add a tensor's type to the known ones, and its contents if it is small and they exist.

    A small tensor whose file cannot be read is marked absent.

    Raises:
        OnnxError: the tensor exceeds any machine's memory, or its contents do not match its shape.
    """
    kind = known.add(onnx, name, tensor.data_type, tensor.dims)
    if not known.is_small(name):
        return
    is_external = tensor.data_location == onnx.TensorProto.EXTERNAL
    try:
        if is_external:
            raw = _external_data(tensor, folder, kind.nbytes)
            tensor = onnx.TensorProto(raw_data=raw, dims=kind.shape, data_type=known.elements[name])
        known.values[name] = onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # of several classes, by what is wrong
        if not is_external:
            raise OnnxError(
                f"{quoted(name)} has contents that do not match its shape: {quoted(str(error))}"
            ) from error
        known.absent.add(name)


def _external_data(tensor: Any, folder: Path, nbytes: int) -> bytes:
    """Read a tensor's contents from a file beside the model.

    Raises:
        OSError, ValueError: there is no such file in the model's folder, or it is too short.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    file = (folder / entries["location"]).resolve(strict=True)
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        raise ValueError("external data must be in a file of the model's folder")
    with file.open("rb") as opened:
        opened.seek(int(entries.get("offset", 0)))
        found: bytes = opened.read(nbytes)
    if len(found) < nbytes:
        raise ValueError("the file is too short")
    return found


def type_of(onnx: Any, name: str, data_type: int, shape: tuple[int, ...]) -> TensorType:
    """Return a tensor's type, after checking that a machine could hold the tensor.

    Raises:
        OnnxError: its element type is unknown or text, its shape is invalid, or it is too large.
    """
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(data_type)
    except (KeyError, ValueError, TypeError) as error:
        raise OnnxError(f"{quoted(name)} has a type that umem does not know") from error
    if dtype.kind in "OSU":
        raise OnnxError(f"{quoted(name)} holds text, which no GPU computes with")
    if any(length < 0 for length in shape) or len(shape) > MOST_AXES:
        raise OnnxError(f"{quoted(name)} has the shape {quoted(shape)}")
    if prod(shape) * max(1, dtype.itemsize) > LARGEST_BYTES:
        raise OnnxError(
            f"{quoted(name)} has the shape {quoted(shape)}: {prod(shape) * dtype.itemsize} bytes; "
            f"no machine has more than {LARGEST_BYTES}"
        )
    is_float = dtype.kind == "f" or "float" in dtype.name
    return TensorType(shape, dtype.itemsize, is_float)
