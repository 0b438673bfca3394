"""A call that is made late, after its function has run in a pass that was left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from chainer import Variable

from umem.chainer.forward_state import ReadArrays, checksum
from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.online.kinds import FunctionKind
from umem.chainer.recompute.tape import NOT_CUT, NOT_OFFLOADED, STATISTICS, Call, source_of
from umem.chainer.saved.slots import NO_STASH, Stash, held_array


class Ran(NamedTuple):
    """Record of a function that was applied: the facts that cannot be found out later.

    Attributes:
        func: a weak reference to it.
        leaves: its input arrays that no function has made; None for the others.
        config: Chainer's configuration.
        stash: attributes that forward may have set to arrays, and that were None before.
        seconds: that it took.
        outputs: its outputs, if it may not be recomputed; None otherwise.
    """

    func: Any
    leaves: tuple[Any, ...]
    config: dict[str, Any]
    stash: tuple[str, ...]
    seconds: float
    outputs: tuple[Any, ...] | None = None


class LateCall(Call):
    """One application of a function; outputs that can be recomputed are held by the graph alone.

    It may not be recomputed if one of its inputs is not known, or was made by a call whose outputs
    are lost.

    Args:
        number, index: of its pass, and its place there.
        ran: the record of its application.
        kind: the facts of its class.
        reads: the parameters as they were in forward.
        arrays: its inputs and its outputs, to keep checksums of; None otherwise.

    Attributes:
        is_lost: whether it may not be recomputed, and an output is gone.
        kind: the facts of its class.
        shape: of its parameter; see `shape_of`.
    """

    __slots__ = ("is_lost", "kind", "shape")

    def __init__(
        self,
        number: int,
        index: int,
        ran: Ran,
        kind: FunctionKind,
        reads: ReadArrays,
        arrays: tuple[Sequence[Any], Sequence[Any]] | None = None,
    ) -> None:
        func = ran.func()
        self.number, self.index = number, index
        self.offloaded = NOT_OFFLOADED
        self.reads, self.kind, self.shape = reads, kind, shape_of(ran.leaves)
        self._func = ran.func
        self.cut = NOT_CUT
        self.plain_rank = func.rank
        sources, leaves = [], []
        knows_all, self.from_elsewhere = True, False
        for node, leaf in zip(func.inputs, ran.leaves, strict=True):
            source = source_of(node, leaf)
            sources.append(source)
            if source.call is None:
                leaves.append(leaf)
                knows_all = knows_all and leaf is not None
                self.from_elsewhere = self.from_elsewhere or leaf is None
            else:
                knows_all = knows_all and not getattr(source.call, "is_lost", False)
                self.from_elsewhere = self.from_elsewhere or source.call.reads is not reads
        self.sources = tuple(sources)
        reads.add(leaves)
        owner = type(owner_of(func))
        self.signature = (owner, (), ())
        self.output_count, self.retained = len(func.outputs), 0
        self.stash = Stash(owner, ran.stash) if ran.stash else NO_STASH
        self.config = ran.config
        self.checksums = None
        if arrays is not None:
            self.checksums = [checksum(a) for a in arrays[0]], [checksum(a) for a in arrays[1]]
        self.rerun_seconds = 0.0
        self.again = kind.again and knows_all
        self.values = None if self.again else ran.outputs or _all_outputs(func)
        self.is_lost = not self.again and self.values is None

    @property
    def nbytes(self) -> int:
        """Return the bytes of its inputs and outputs."""
        func = self.func
        return working_bytes(func, [reference() for reference in func.outputs])

    def ensure_own(self) -> None:
        """Unpack its function state; the other arrays that its backward reads are alive."""
        if self.kind.draws:
            self.stash.unpack(self.func)
        if self.checksums is not None:
            self.ensure()


def _all_outputs(func: Any) -> tuple[Any, ...] | None:
    """Return the outputs of a function; None if one of them is gone."""
    found = outputs_of(func)
    return None if any(array is None for array in found) else tuple(found)


def shape_of(leaves: tuple[Any, ...]) -> Any:
    """Return the shape of a call's second input if that is from outside, as weights are."""
    return None if len(leaves) < 2 or leaves[1] is None else leaves[1].shape


def new_stash(kind: FunctionKind, func: Any) -> tuple[str, ...]:
    """Return the names of the function state that the next forward may set, None so far."""
    if not kind.stash:
        return ()
    owner = owner_of(func)
    return tuple(
        name for name in kind.stash if name not in STATISTICS and getattr(owner, name, None) is None
    )


# -- arrays of the graph that are alive ------------------------------------------------------------


def leaves_of(inputs: Any) -> tuple[Any, ...]:
    """Return the arrays among inputs that no function has made; None for the others."""
    found = []
    for x in inputs:
        if not isinstance(x, Variable):
            found.append(x)
        elif x._node._creator_node is None:
            found.append(x._data[0])
        else:
            found.append(None)
    return tuple(found)


def _array_of(node: Any) -> Any:
    """Return the array behind a variable node; None if nothing holds it."""
    return None if node is None else held_array(node)


def inputs_of(func: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return the inputs of a function that has run; None for those that are gone."""
    return [
        _array_of(node) if leaf is None else leaf
        for node, leaf in zip(func.inputs, leaves, strict=True)
    ]


def outputs_of(func: Any) -> list[Any]:
    """Return the outputs of a function that has run; None for those that are gone."""
    found = [_array_of(reference()) for reference in func.outputs]
    retained = func._retained_output_data
    if retained:
        for place, array in zip(func._output_indexes_to_retain, retained, strict=True):
            found[place] = array
    return found


def held_by(func: Any, stash: Iterable[str]) -> Iterator[Any]:
    """Yield the outputs and the function state of a function that are alive."""
    for array in outputs_of(func):
        if array is not None:
            yield array
    if stash:
        owner = owner_of(func)
        for name in stash:
            array = getattr(owner, name, None)
            if hasattr(array, "base"):
                yield array


def working_bytes(func: Any, outputs: Iterable[Any]) -> int:
    """Return the bytes of a function's inputs and of some outputs, by shapes and dtypes."""
    found = 0
    for node in func.inputs:
        if node.dtype is not None:
            found += prod(node.shape) * np.dtype(node.dtype).itemsize
    for node in outputs:
        if node is not None and node.dtype is not None:
            found += prod(node.shape) * np.dtype(node.dtype).itemsize
    return found


def leaf_nodes(funcs: Iterable[Any]) -> Iterator[Any]:
    """Yield the leaves that get a gradient, each once."""
    seen = set()
    for func in funcs:
        for node in func.inputs or ():
            if node._creator_node is None and node._requires_grad and node not in seen:
                seen.add(node)
                yield node
