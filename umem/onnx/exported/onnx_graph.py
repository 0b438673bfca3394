"""An ONNX graph in plain numbers: its operators in order, and the shape of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from umem.onnx.exported.strides import Ints


@dataclass(frozen=True)
class TensorType:
    """A tensor's shape, bytes of an element, and whether it is floating-point."""

    shape: Ints
    itemsize: int
    is_float: bool

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes."""
        return self.size * self.itemsize


@dataclass(frozen=True)
class OnnxNode:
    """One operator of a graph.

    Attributes:
        name: the model's own name for it, or its first output's name.
        op: its kind, such as ``Conv``.
        inputs, outputs: names of tensors; empty for an omitted optional one.
        attributes: numbers, text and lists of them.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OnnxGraph:
    """A graph with known shapes.

    Attributes:
        nodes: the operators, in the order in which they run.
        tensors: the type of every tensor, by its name.
        inputs: names of the step's inputs.
        parameters: names of trained tensors: floating-point initialisers with a shape.
        constants: names of all given tensors that are not inputs, parameters included.
        outputs: names of the graph's outputs.
        values: contents of small tensors that follow from the model and its sizes.
    """

    nodes: tuple[OnnxNode, ...]
    tensors: Mapping[str, TensorType]
    inputs: tuple[str, ...]
    parameters: frozenset[str]
    constants: frozenset[str]
    outputs: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)

    def is_on_host(self, name: str) -> bool:
        """Tell whether a tensor is a scalar or a shape: an argument without device memory."""
        kind = self.tensors[name]
        if name in self.inputs:
            return False
        is_known = name in self.constants or name in self.values
        if not kind.shape:
            return is_known or not kind.is_float
        return not kind.is_float and kind.size <= 64 and (len(kind.shape) == 1 or is_known)

    def runs_on_host(self, node: OnnxNode) -> bool:
        """Tell whether a node makes arguments only."""
        return all(self.is_on_host(name) for name in node.outputs if name)
