"""Chainer's tape, with arrays that can be dropped and made again.

A `Call` is one application of a function. Dropping lets its outputs go (from the variable nodes
that later functions retain them on, and from the function itself) and what it keeps on itself;
making again runs the function's forward on the same inputs and puts everything back.

Models of Chainer that this rests on, of version 7.8: ``VariableNode._data`` is where retained
inputs are, ``FunctionNode._retained_output_data`` where retained outputs are; backward pops
functions by rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer import configuration

from umem.chainer.recording import arrays_on, rerun
from umem.errors import StateError

DRAWS = frozenset((
    "Dropout", "GaussianDropout", "Gaussian", "GaussianNoise", "RReLU", "SimplifiedDropconnect",
    "GumbelSoftmax",
))  # fmt: skip
"""Functions that draw random numbers once and find them on themselves when they run again."""
NOT_AGAIN = frozenset(("Zoneout", "ZoneoutLSTM", "NegativeSampling", "DropoutRNN", "Checkpoint"))
"""Functions that must not run twice."""
_STATISTICS = ("running_mean", "running_var")


class Signature(NamedTuple):
    """What makes two calls the same from one iteration to the next."""

    label: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


class Source(NamedTuple):
    """Where an input comes from: another call's output, or an array from outside."""

    call: Call | None
    output: int
    array: Any


class Call:
    """One application of a function, in the order of forward.

    ``values`` are its outputs while they are held, None once they were dropped. The function is
    held weakly: the user's graph decides how long it lives.
    """

    def __init__(self, index: int, func: Any, inputs: Any, outputs: Any, before: set[int]) -> None:
        self.index = index
        self._func = weakref.ref(func)
        arrays = tuple(y.array for y in outputs)
        ins = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
        known = (*ins, *arrays)
        self.signature = Signature(
            func.label, tuple(a.shape for a in known), tuple(a.dtype.str for a in known)
        )
        self.sources = [_source(node, array) for node, array in zip(func.inputs, ins, strict=True)]
        self.values: tuple[Any, ...] | None = arrays
        self.recorded = [root_bytes(array) for array in arrays]
        self.retained = [False] * len(arrays)
        self.stash = [key for key, array in arrays_on(func) if id(array) not in before]
        self.stash_arrays = [array for _, array in arrays_on(func) if id(array) not in before]
        self.draws = type(func).__name__ in DRAWS
        self.stash_dropped = False

    @property
    def func(self) -> Any:
        """The function's node.

        Raises:
            StateError: the graph was cut, and what should run again is gone.
        """
        func = self._func()
        if func is None:
            raise StateError(
                f"{self.signature.label!r} has to run again, and its graph is gone: was the graph "
                "cut between forward and backward?"
            )
        return func

    @property
    def has_graph(self) -> bool:
        """Whether the function's node is alive."""
        return self._func() is not None

    def nodes(self) -> Iterator[tuple[int, Any]]:
        """The variable nodes of its outputs that are alive."""
        func = self._func()
        if func is not None:
            for index, reference in enumerate(func.outputs):
                node = reference()
                if node is not None:
                    yield index, node

    # -- dropping and making again ---------------------------------------------------------

    def drop(self) -> None:
        """Let the outputs go."""
        for index, node in self.nodes():
            self.retained[index] |= node._data is not None
            node._data = None
        func = self._func()
        if func is not None and func._retained_output_data is not None:
            func._retained_output_data = None
        self.values = None

    def drop_stash(self) -> None:
        """Let go what the function keeps on itself, unless it is what was drawn."""
        func = self._func()
        if func is None or self.draws or not self.stash:
            return
        for key in self.stash:
            setattr(func, key, None)
        self.stash_arrays = []
        self.stash_dropped = True

    def make_again(self) -> None:
        """Run the function again if its outputs or what it keeps were dropped."""
        if self.values is None or self.stash_dropped:
            self.materialise()

    def materialise(self) -> None:
        """Run the function again, and before it what it needs, if anything of it was dropped."""
        pending = [self]
        while pending:
            call = pending[-1]
            missing = [s.call for s in call.sources if s.call is not None and s.call.values is None]
            if missing:
                pending += missing
                continue
            pending.pop()
            if call.values is None or call.stash_dropped:
                call._run()

    def _run(self) -> None:
        func = self.func
        inputs = tuple(
            source.array if source.call is None else _value(source) for source in self.sources
        )
        statistics = {name: getattr(func, name) for name in _STATISTICS if hasattr(func, name)}
        for name in statistics:
            setattr(func, name, None)
        with (
            chainer.using_device(chainer.backend.get_device_from_array(*inputs)),
            configuration.using_config("in_recomputing", True),
        ):
            outputs = rerun(func, inputs)
        for name, value in statistics.items():
            setattr(func, name, value)
        self._put_back(func, outputs)

    def _put_back(self, func: Any, outputs: tuple[Any, ...]) -> None:
        self.values = outputs
        self.stash_dropped = False
        for index, node in self.nodes():
            if self.retained[index]:
                node._data = outputs[index]
        if func._output_indexes_to_retain is not None:
            func._retained_output_data = tuple(outputs[i] for i in func._output_indexes_to_retain)

    def ensure(self) -> None:
        """Before its backward: what the function retains is there."""
        func = self.func
        for index in func._input_indexes_to_retain or ():
            source = self.sources[index]
            if source.call is not None and func.inputs[index]._data is None:
                source.call.retained[source.output] = True
                if source.call.values is None:
                    source.call.materialise()
                func.inputs[index]._data = _value(source)
        gone = func._output_indexes_to_retain is not None and func._retained_output_data is None
        if gone or self.stash_dropped:
            self.values = None
            self.materialise()

    # -- what a planner wants to know ------------------------------------------------------

    def needs(self) -> list[Call]:
        """The calls whose outputs its backward reads, itself included."""
        func = self.func
        found = [self.sources[i].call for i in func._input_indexes_to_retain or ()]
        if func._output_indexes_to_retain:
            found.append(self)
        return [call for call in found if call is not None]

    def drawn_bytes(self) -> int:
        """Bytes that it keeps on itself and that stay."""
        return sum(array.nbytes for array in self.stash_arrays) if self.draws else 0

    def stash_bytes(self) -> int:
        """Bytes that it keeps on itself and that can be dropped."""
        return 0 if self.draws else sum(array.nbytes for array in self.stash_arrays)


def _value(source: Source) -> Any:
    assert source.call is not None and source.call.values is not None
    return source.call.values[source.output]


def _source(node: Any, array: Any) -> Source:
    creator = node.creator_node
    call = None if creator is None else getattr(creator, "_umem_call", None)
    if call is None:
        return Source(None, 0, array)
    for index, reference in enumerate(creator.outputs):
        if reference() is node:
            return Source(call, index, None)
    return Source(None, 0, array)


def root_bytes(array: Any) -> tuple[int, int]:
    """An identity of the memory behind an array, and its bytes."""
    while isinstance(getattr(array, "base", None), (np.ndarray, type(array))):
        array = array.base
    return id(array), array.nbytes
