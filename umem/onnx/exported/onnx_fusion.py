"""Fuses formulas that exporters write out into one operator.

A GELU, SiLU or layer normalisation is one function of a framework, which keeps its input. For older
versions of ONNX's operators, exporters write it as a formula, whose operators would keep an array
each. A formula is recognised by its values, however it is written: a part of the graph with one
input, and with only elementwise operators, means over one set of axes and single numbers, is
computed on a few numbers with ONNX's reference implementation, and compared with each function.

A group normalisation is recognised by its form: a Reshape that makes groups channels, an instance
normalisation, and a Reshape back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import erf
from typing import Any

import numpy as np

from umem.onnx.exported.onnx_folding import evaluated
from umem.onnx.exported.onnx_graph import OnnxGraph, OnnxNode
from umem.onnx.exported.onnx_reading import CheckedModel

MOST_NODES = 16
"""At most this many operators form a formula, which limits the search. A choice that no measurement
supports."""
TOLERANCE = 1e-4
"""A formula may differ this much from its function, because exporters round constants. A choice
that no measurement supports."""
SAMPLES = 24
"""A formula is compared on this many numbers. A choice that no measurement supports."""
Function = Callable[..., Any]


def _normal(x: Any) -> Any:
    return 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


FUNCTIONS: dict[str, tuple[Function, ...]] = {
    "Gelu": (
        lambda x: x * _normal(x),
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    "Swish": (lambda x: x * _sigmoid(x),),
    "HardSwish": (lambda x: x * np.clip(x + 3, 0, 6) / 6,),
    "Mish": (lambda x: x * np.tanh(_softplus(x)),),
}
"""Functions of one number that frameworks have as one operator, by ONNX's name."""


PARTS = frozenset((
    "Add", "Clip", "Div", "Erf", "Exp", "HardSigmoid", "Mul", "Neg", "Pow", "Reciprocal",
    "ReduceMean", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh",
))  # fmt: skip
"""Operators that formulas consist of."""
ENDS = ("Mul", "Div")
"""Operators that a formula can end with."""
BENT = frozenset({"Erf", "Tanh", "Sigmoid", "HardSigmoid", "Clip", "Exp", "Relu", "ReduceMean"})
"""A formula has at least one of these operators."""


@dataclass(frozen=True)
class _Formula:
    """A subgraph with one input.

    Attributes:
        input: the input's name.
        places: the places of its nodes.
        axes: the axes of its means; None if it has no mean.
    """

    input: str
    places: frozenset[int]
    axes: tuple[int, ...] | None


class _NoMatch(Exception):
    """The subgraph is not a formula."""


def fused(graph: OnnxGraph, read: CheckedModel) -> OnnxGraph:
    """Replace each subgraph that computes a known function by that function's operator.

    Args:
        graph: the model's graph.
        read: the model, for its versions of operators.
    """
    parts = _Parts(graph, read)
    nodes: dict[int, OnnxNode | None] = {}
    for place in range(len(graph.nodes)):
        for found in (parts.formula_ending(place), parts.groups_ending(place)):
            if found is not None:
                node, places = found
                if not places & nodes.keys():
                    node, places, at = parts.with_affine(node, places, place)
                    nodes.update(dict.fromkeys(places))
                    nodes[at] = node
    if not nodes:
        return graph
    kept = (nodes.get(place, node) for place, node in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(node for node in kept if node is not None))


class _Parts:
    """Finds formulas in a graph."""

    def __init__(self, graph: OnnxGraph, read: CheckedModel) -> None:
        self.graph, self._onnx = graph, read.onnx
        self._opsets = list(read.model.opset_import)
        self.makers = {
            name: place for place, node in enumerate(graph.nodes) for name in node.outputs if name
        }
        self.users: dict[str, list[int]] = {}
        for place, node in enumerate(graph.nodes):
            for name in set(node.inputs):
                self.users.setdefault(name, []).append(place)

    # -- formulas --------------------------------------------------------------------------

    def formula_ending(self, place: int) -> tuple[OnnxNode, set[int]] | None:
        """Return the operator of the formula that ends at ``place``, and its nodes."""
        node = self.graph.nodes[place]
        if node.op not in ENDS or not self.graph.tensors[node.outputs[0]].is_float:
            return None
        for name in self._candidates(place):
            try:
                formula = self._formula(place, name)
                found = self._known(formula, node)
            except _NoMatch:
                continue
            if found is not None:
                return found, set(formula.places)
        return None

    def _candidates(self, place: int) -> Iterator[str]:
        """Yield tensors before a node at which a formula may begin, nearest first."""
        seen: dict[str, None] = {}
        reached = [place]
        for at in reached:  # which grows
            if len(reached) > MOST_NODES:
                break
            for name in self.graph.nodes[at].inputs:
                if name and self._number(name) is None:
                    seen.setdefault(name)
                    maker = self.makers.get(name, place)
                    if maker not in reached and self.graph.nodes[maker].op in PARTS:
                        reached.append(maker)
        bent = any(self.graph.nodes[at].op in BENT for at in reached)
        shape = self.graph.tensors[self.graph.nodes[place].outputs[0]].shape
        return (name for name in seen if bent and self.graph.tensors[name].shape == shape)

    def _number(self, name: str) -> float | None:
        """Return the value of a constant scalar."""
        value = self.graph.values.get(name)
        if value is None or np.size(value) != 1 or np.iscomplexobj(value):
            return None
        if name in self.graph.parameters:
            return None
        return float(np.asarray(value).item())

    def _formula(self, place: int, start: str) -> _Formula:
        """Return the nodes between a tensor and a node's output, unless others read their
        outputs.
        """
        places: set[int] = set()
        axes: set[tuple[int, ...]] = set()
        todo = [place]
        while todo:
            at = todo.pop()
            if at in places:
                continue
            places.add(at)
            node = self.graph.nodes[at]
            if node.op not in PARTS or len(places) > MOST_NODES:
                raise _NoMatch
            if node.op == "ReduceMean":
                axes.add(self._axes(node))
            for name in node.inputs[:1] if node.op == "ReduceMean" else node.inputs:
                if name and name != start and self._number(name) is None:
                    maker = self.makers.get(name)
                    if maker is None:
                        raise _NoMatch
                    todo.append(maker)
        for at in places - {place}:
            for name in self.graph.nodes[at].outputs:
                is_read = not places.issuperset(self.users.get(name, ()))
                if is_read or name in self.graph.outputs:
                    raise _NoMatch
        if len(axes) > 1:
            raise _NoMatch
        return _Formula(start, frozenset(places), next(iter(axes), None))

    def _axes(self, node: OnnxNode) -> tuple[int, ...]:
        found = node.attributes.get("axes")
        if found is None and len(node.inputs) > 1 and node.inputs[1]:
            found = self.graph.values.get(node.inputs[1])
        if found is None or not node.attributes.get("keepdims", 1):
            raise _NoMatch
        rank = len(self.graph.tensors[node.inputs[0]].shape)
        return tuple(sorted(int(axis) % rank for axis in np.ravel(found)))

    def _known(self, formula: _Formula, last: OnnxNode) -> OnnxNode | None:
        """Return the operator that a formula computes, found by comparing values; None if
        unknown.
        """
        x = np.linspace(-6, 6, SAMPLES)
        if formula.axes is None:
            y = self._computed(formula, last.outputs[0], x)
            for op, functions in FUNCTIONS.items():
                for function in functions:
                    if np.allclose(y, function(x), rtol=TOLERANCE, atol=TOLERANCE):
                        return OnnxNode(last.name, op, (formula.input,), last.outputs)
            return None
        shape = self.graph.tensors[formula.input].shape
        if formula.axes != tuple(range(formula.axes[0], len(shape))):
            return None
        wide = np.stack([x, x * x])
        y = self._computed(formula, last.outputs[0], wide)
        mean, variance = wide.mean(1, keepdims=True), wide.var(1, keepdims=True)
        for epsilon in self._epsilons(formula):
            expected = (wide - mean) / np.sqrt(variance + epsilon)
            if np.allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE):
                values = {"axis": formula.axes[0] - len(shape), "epsilon": epsilon}
                return OnnxNode(
                    last.name, "LayerNormalization", (formula.input,), last.outputs, values
                )
        return None

    def _epsilons(self, formula: _Formula) -> Iterator[float]:
        for place in formula.places:
            node = self.graph.nodes[place]
            for name in node.inputs if node.op == "Add" else ():
                number = self._number(name) if name else None
                if number is not None and 0 <= number < 0.1:
                    yield number

    def _computed(self, formula: _Formula, name: str, x: Any) -> Any:
        """Evaluate a formula on numbers; means are over the last axis."""
        given, nodes = {formula.input: x}, []
        for place in sorted(formula.places):
            node = self.graph.nodes[place]
            for each in filter(None, node.inputs):
                if (number := self._number(each)) is not None:
                    given[each] = np.float64(number)
            attributes = dict(node.attributes)
            if node.op == "ReduceMean" and "axes" in attributes:
                attributes["axes"] = [-1]
            elif node.op == "ReduceMean":
                given[node.inputs[1]] = np.array([-1])
            make = self._onnx.helper.make_node
            nodes.append(make(node.op, node.inputs, node.outputs, **attributes))
        try:
            with np.errstate(all="ignore"):
                return evaluated(self._onnx, nodes, given, [name], self._opsets)[0]
        except Exception as error:  # of any class, by the operator
            raise _NoMatch from error

    # -- groups ----------------------------------------------------------------------------

    def groups_ending(self, place: int) -> tuple[OnnxNode, set[int]] | None:
        """Return the group normalisation that ends with the Reshape at ``place``, and its nodes."""
        last = self.graph.nodes[place]
        norm = self._only(last.inputs[0], "InstanceNormalization") if last.op == "Reshape" else None
        first = None if norm is None else self._only(norm[1].inputs[0], "Reshape")
        if norm is None or first is None:
            return None
        tensors = self.graph.tensors
        x, groups = tensors[first[1].inputs[0]].shape, tensors[first[1].outputs[0]].shape
        scale, bias = (self.graph.values.get(name) for name in norm[1].inputs[1:3])
        is_whole = len(x) > 1 and groups[0] == x[0] and tensors[last.outputs[0]].shape == x
        if not is_whole or scale is None or bias is None or x[1] % groups[1]:
            return None
        if not np.all(np.asarray(scale) == 1) or np.any(bias):
            return None
        attributes = {"num_groups": groups[1]}
        ins = first[1].inputs[:1]
        node = OnnxNode(last.name, "GroupNormalization", ins, last.outputs, attributes)
        return node, {place, norm[0], first[0]}

    def _only(self, name: str, op: str) -> tuple[int, OnnxNode] | None:
        """Return the node of a kind that makes a tensor with a single reader."""
        place = self.makers.get(name)
        if place is None or len(self.users[name]) > 1 or name in self.graph.outputs:
            return None
        node = self.graph.nodes[place]
        return (place, node) if node.op == op else None

    # -- scale and bias --------------------------------------------------------------------

    def with_affine(
        self, node: OnnxNode, places: set[int], place: int
    ) -> tuple[OnnxNode, set[int], int]:
        """Merge the product and the sum after a normalisation into it, as its scale and bias.

        Only for layer and group normalisations whose intermediate outputs have no other reader;
        others are returned unchanged. Returns the node, the places of all nodes that it replaces,
        and the place of the last one.
        """
        if node.op not in ("LayerNormalization", "GroupNormalization"):
            return node, places, place
        for op in ("Mul", "Add"):
            users = self.users.get(node.outputs[0], [])
            if len(users) != 1 or node.outputs[0] in self.graph.outputs:
                break
            after = self.graph.nodes[users[0]]
            others = [name for name in after.inputs if name != node.outputs[0]]
            if after.op != op or len(others) != 1 or not self._fits(node, others[0]):
                break
            node = replace(
                node, name=after.name, inputs=(*node.inputs, others[0]), outputs=after.outputs
            )
            places, place = places | {users[0]}, users[0]
        return node, places, place

    def _fits(self, node: OnnxNode, name: str) -> bool:
        """Tell whether a tensor has the shape of a normalisation's scale or bias."""
        x, shape = self.graph.tensors[node.inputs[0]].shape, self.graph.tensors[name].shape
        if node.op == "LayerNormalization":
            return shape == x[node.attributes["axis"] :]
        channels = (x[1], *[1] * (len(x) - 2))
        return shape in (channels, (1, *channels))
