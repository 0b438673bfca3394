"""Lowering of branches and sequences to simpler operators.

An exporter writes a branch on a shape as an If, and parts of a tensor as a sequence. If the
condition, or the place in the sequence, follows from the model and its sizes, both are replaced;
otherwise the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from umem._common.printable import quoted
from umem.errors import OnnxError
from umem.onnx.exported.onnx_reading import check_branch, holds_a_graph, node_name
from umem.onnx.exported.onnx_weights import KnownTensors, add_initializers

MOST_PARTS = 10_000
"""A tensor may be split into a sequence of at most this many parts."""
INT64 = 7
"""ONNX's number for the type."""


class Lowering:
    """Replaces nodes by simpler ones, one after the other, as their inputs become known.

    Args:
        version: the version of ONNX's own operators.
    """

    def __init__(self, onnx: Any, known: KnownTensors, version: int, folder: Any) -> None:
        self._onnx = onnx
        self._known = known
        self._version = version
        self._folder = folder
        self._sequences: dict[str, list[str]] = {}

    def lowered(self, node: Any, place: int) -> list[Any] | None:
        """Return the nodes that replace one; None if it stays.

        Raises:
            OnnxError: a branch depends on data, or a sequence is used in another way.
        """
        make = _MADE.get(node.op_type)
        if make is not None:
            if not node.output or (node.op_type != "If" and not node.output[0]):
                raise OnnxError(f"{node_name(node, place)} ({node.op_type}) has no output")
            return list(make(self, node, place))
        for name in node.input:
            if name in self._sequences:
                raise OnnxError(f"{node_name(node, place)} reads {quoted(name)}, a sequence")
        return None

    # -- branches --------------------------------------------------------------------------

    def _if(self, node: Any, place: int) -> Iterator[Any]:
        """Return the branch that is taken, with unique names."""
        condition = self._known.values.get(node.input[0]) if node.input else None
        branches = {a.name: a.g for a in node.attribute if a.HasField("g")}
        if condition is None or np.size(condition) != 1 or len(branches) != 2:
            raise OnnxError(holds_a_graph(node, place))
        branch = branches.get("then_branch" if np.asarray(condition).item() else "else_branch")
        if branch is None or len(branch.output) != len(node.output):
            raise OnnxError(holds_a_graph(node, place))
        own = [x.name for x in branch.initializer]
        own += [name for inner in branch.node for name in inner.output if name]
        taken = {*self._known.types, *node.output}
        renamed = {name: self._fresh(name, place) for name in own if name in taken}
        _rename(branch, renamed)
        known = self._known
        check_branch(branch, {*known.types, *self._sequences}, node_name(node, place))
        add_initializers(self._onnx, branch, known, self._folder)
        yield from branch.node
        for inner, outer in zip(branch.output, node.output, strict=True):
            if outer:
                yield self._node("Identity", [renamed.get(inner.name, inner.name)], [outer])

    def _fresh(self, name: str, place: int) -> str:
        return f"{name}/{place}/{len(self._known.types)}"

    # -- sequences -------------------------------------------------------------------------

    def _split(self, node: Any, place: int) -> Iterator[Any]:
        """Replace SplitToSequence by Split, and a Squeeze of each part of one element."""
        attributes = {a.name: a.i for a in node.attribute}
        kind = self._type(node, 0, place)
        axis = attributes.get("axis", 0)
        if not -len(kind.shape) <= axis < len(kind.shape):
            raise OnnxError(
                f"{node_name(node, place)} splits along the axis {axis} of {kind.shape}"
            )
        length = kind.shape[axis]
        sizes = [1] * min(length, MOST_PARTS + 1)
        keeps = bool(attributes.get("keepdims", 1))
        if len(node.input) > 1 and node.input[1]:
            keeps = True
            given = self._value(node, 1, place)
            if given.ndim:
                sizes = [int(n) for n in given.ravel()]
            else:
                each = max(1, int(given))
                whole, rest = divmod(length, each)
                sizes = [each] * min(whole, MOST_PARTS + 1) + [rest] * bool(rest)
        if len(sizes) > MOST_PARTS or not sizes:
            raise OnnxError(f"{node_name(node, place)} makes {len(sizes)} parts of {length}")
        parts = [f"{node.output[0]}/{n}" for n in range(len(sizes))]
        before = parts if keeps else [f"{part}/whole" for part in parts]
        self._sequences[node.output[0]] = parts
        yield self._with_ints("Split", node.input[0], before, "split", sizes, axis=axis)
        if not keeps:
            for wide, part in zip(before, parts, strict=True):
                yield self._with_ints("Squeeze", wide, [part], "axes", [axis])

    def _at(self, node: Any, place: int) -> Iterator[Any]:
        parts = self._sequence(node, place)
        index = int(self._value(node, 1, place).ravel()[0])
        if not -len(parts) <= index < len(parts):
            raise OnnxError(f"{node_name(node, place)} takes part {index} of {len(parts)}")
        yield self._node("Identity", [parts[index]], node.output)

    def _construct(self, node: Any, place: int) -> Iterator[Any]:
        for n in range(len(node.input)):
            self._type(node, n, place)
        self._sequences[node.output[0]] = list(node.input)
        return iter(())

    def _length(self, node: Any, place: int) -> Iterator[Any]:
        self._ints(node.output[0], len(self._sequence(node, place)))
        return iter(())

    def _concat(self, node: Any, place: int) -> Iterator[Any]:
        attributes = {a.name: a.i for a in node.attribute}
        axis, parts = attributes.get("axis", 0), self._sequence(node, place)
        if attributes.get("new_axis", 0):
            wide = [f"{node.output[0]}/{n}" for n in range(len(parts))]
            for part, name in zip(parts, wide, strict=True):
                yield self._with_ints("Unsqueeze", part, [name], "axes", [axis])
            parts = wide
        yield self._node("Concat", parts, node.output, axis=axis)

    def _sequence(self, node: Any, place: int) -> list[str]:
        found = self._sequences.get(node.input[0]) if node.input else None
        if found is None:
            raise OnnxError(
                f"{node_name(node, place)} ({node.op_type}) reads a sequence whose parts are not "
                "known"
            )
        return found

    # -- others ----------------------------------------------------------------------------

    def _cast_like(self, node: Any, place: int) -> Iterator[Any]:
        self._type(node, 0, place)
        self._type(node, 1, place)
        to = self._known.elements[node.input[1]]
        yield self._node("Cast", node.input[:1], node.output, to=to)

    def _type(self, node: Any, n: int, place: int) -> Any:
        found = self._known.types.get(node.input[n]) if n < len(node.input) else None
        if found is None:
            raise OnnxError(f"{node_name(node, place)} ({node.op_type}) has no input {n}")
        return found

    def _value(self, node: Any, n: int, place: int) -> Any:
        """Return the integers that an input holds, at least one."""
        self._type(node, n, place)
        found = self._known.values.get(node.input[n])
        if found is not None and (not np.size(found) or np.asarray(found).dtype.kind not in "iu"):
            raise OnnxError(f"{node_name(node, place)} ({node.op_type}) has no number as input {n}")
        if found is None:
            raise OnnxError(
                f"{node_name(node, place)} ({node.op_type}) depends on {quoted(node.input[n])}, "
                "which is not known before the data are"
            )
        return found

    def _node(self, op: str, ins: Sequence[str], outs: Sequence[str], **attributes: Any) -> Any:
        name = f"{outs[0]}/{op}"
        return self._onnx.helper.make_node(op, list(ins), list(outs), name=name, **attributes)

    def _with_ints(
        self, op: str, of: str, outs: list[str], label: str, ints: list[int], **attributes: Any
    ) -> Any:
        """Make a node whose integers are an attribute, or an input since version 13."""
        if self._version < 13:
            return self._node(op, [of], outs, **{label: ints}, **attributes)
        name = f"{outs[0]}/{label}"
        self._ints(name, ints)
        return self._node(op, [of, name], outs, **attributes)

    def _ints(self, name: str, value: int | list[int]) -> None:
        array = np.array(value, np.int64)
        self._known.add(self._onnx, name, INT64, array.shape)
        self._known.values[name] = array
        self._known.constants.add(name)


def _rename(graph: Any, names: dict[str, str]) -> None:
    """Rename tensors of a graph and of the graphs in it."""
    for x in graph.initializer:
        x.name = names.get(x.name, x.name)
    for node in graph.node:
        for given in (node.input, node.output):
            given[:] = [names.get(name, name) for name in given]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)


_MADE: dict[str, Callable[[Lowering, Any, int], Iterator[Any]]] = {
    "If": Lowering._if,
    "CastLike": Lowering._cast_like,
    "SplitToSequence": Lowering._split,
    "SequenceAt": Lowering._at,
    "SequenceConstruct": Lowering._construct,
    "SequenceLength": Lowering._length,
    "ConcatFromSequence": Lowering._concat,
}
