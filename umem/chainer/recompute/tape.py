"""Chainer's tape, with arrays that can be dropped and recomputed.

A `Call` is one application of a function. Dropping frees its outputs (on the variable nodes that
later functions retain them on, and on the function itself) and its function state; recomputing runs
the function's forward on the same inputs and restores both. Backward, in Chainer 7.8, pops
functions by rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import chainer

from umem.chainer import tap
from umem.chainer.forward_state import ReadArrays, as_in_forward, checksum
from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.offloaded import Offloaded, What
from umem.chainer.saved.slots import (
    NO_STASH,
    Stash,
    empty_outputs,
    held_array,
    holds_outputs,
    lacks_outputs,
    node_slot,
    output_nodes,
    refill_outputs,
)
from umem.chainer.saved.tiers.tier import Tier
from umem.devices import work_seconds
from umem.errors import RecomputeError, StateError

STATISTICS = ("running_mean", "running_var")
"""Attributes that a normalisation updates in place in forward; a recompute preserves them."""

Signature = tuple[Any, ...]
"""Class, input origins, shapes and dtypes, which a call shares with its repetitions."""


LEAF, UNTRACKED = -1, -2
"""First entry of the origin of an input from outside: a leaf, or an untracked call's output."""


class InputSource(NamedTuple):
    """The origin of an input: another call's output, or an array from outside."""

    call: Call | None
    output: int
    array: Any


Leaves = dict[int, tuple[int, Any, InputSource]]
"""The nodes that come from outside, by identity: each with its place among them, and its array."""
NOT_OFFLOADED: Mapping[What, Offloaded] = MappingProxyType({})
NOT_CUT: Mapping[int, Any] = MappingProxyType({})


class Call:
    """One application of a function.

    ``values`` are its outputs while they are held, None once they were dropped. The function is
    held weakly: the user's graph decides how long it lives.

    Args:
        number: the number of its pass.
        index: its place in that pass.
        func: the function's node.
        inputs, outputs: the input and output arrays; None for freed ones.
        leaves: the nodes that come from outside; new ones are added.
        reads: the parameters as they were in forward.
        config: Chainer's configuration in forward.
        checksums: whether to keep checksums, for `verify`.

    Attributes:
        again: whether it may be recomputed. If not, neither its outputs, retained or not, nor its
            function state are dropped while its graph is alive, unless they are offloaded.
        offloaded: the arrays that were sent to the offload target, by kind.
        retained: a bit for each output whose array a variable node held before it was dropped, or
            must hold for a later backward.
        from_elsewhere: whether an input was made in an earlier pass.
        cut: the outputs behind which the graph was cut, by index. They are inputs of the remaining
            graph, so their arrays are held like those from outside; None: it must be computed.
    """

    __slots__ = (
        "__weakref__", "_func", "again", "checksums", "config", "cut", "from_elsewhere", "index",
        "number", "offloaded", "output_count", "plain_rank", "reads", "rerun_seconds", "retained",
        "signature", "sources", "stash", "values",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        index: int,
        func: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        leaves: Leaves,
        reads: ReadArrays,
        config: dict[str, Any],
        checksums: bool = False,
    ) -> None:
        self.number, self.index = number, index
        self.offloaded = NOT_OFFLOADED
        self.again = True
        self.reads = reads
        self._func: Callable[[], Any] = weakref.ref(func)
        self.cut = NOT_CUT
        self.plain_rank = func.rank
        self.values: tuple[Any, ...] | None = tuple(outputs)
        self.sources, origins, self.from_elsewhere = origins_of(number, func, inputs, leaves)
        reads.add(source.array for source in self.sources if source.call is None)
        shapes = [None if array is None else (array.shape, array.dtype) for array in outputs]
        self.signature: Signature = (type(owner_of(func)), origins, tuple(shapes))
        self.output_count = len(self.values)
        self.retained = 0  # bits: there are many calls, and a list takes 64 bytes
        self.stash = NO_STASH
        self.config = config
        self.checksums: tuple[list[int], list[int]] | None = None
        if checksums:
            self.checksums = [checksum(a) for a in inputs], [checksum(a) for a in outputs]
        self.rerun_seconds = 0.0

    @property
    def func(self) -> Any:
        """Return the function's node; raise StateError if it was freed, as after a cut."""
        func = self._func()
        if func is None:
            raise StateError(
                f"{self.label!r} must run again, but its graph was freed: was it cut before that?"
            )
        return func

    @property
    def label(self) -> str:
        """Return the function's name, for messages."""
        func = self._func()
        return str(self.signature[0].__name__ if func is None else func.label)

    @property
    def is_cut(self) -> bool:
        """True once the graph was cut behind all its outputs."""
        return len(self.cut) == self.output_count

    @property
    def has_graph(self) -> bool:
        """True while the function's node is alive, and in a graph."""
        return not self.is_cut and self._func() is not None

    @property
    def has_func(self) -> bool:
        """True while the function is alive, and could run."""
        return self._func() is not None

    def nodes(self) -> Iterator[tuple[int, Any]]:
        """Yield its outputs' live variable nodes, each with the output's index."""
        func = self._func()
        if func is not None and not self.is_cut:
            yield from output_nodes(func)

    def leaves(self) -> Iterator[tuple[Any, Any]]:
        """Yield the live nodes of its inputs from outside, each with its array."""
        func = self._func()
        if func is not None:
            for node, source in zip(func.inputs, self.sources, strict=True):
                if source.call is None and source.array is not None:
                    yield node, source.array

    def learn(self, again: bool, stash: tuple[str, ...]) -> None:
        """Record whether it may be recomputed, and the names of its function state."""
        self.again = again
        if self.stash is not NO_STASH:
            self.stash.names = stash
        elif stash:
            self.stash = Stash(self.signature[0], stash)

    def hold_by_graph(self) -> None:
        """Leave the outputs to the graph; hold them if the call may not be recomputed.

        Outputs that were freed before are lost, and calls that read them may not be recomputed.
        """
        if self.again or any(array is None for array in self.values or (None,)):
            self.values = None

    @property
    def is_lost(self) -> bool:
        """True if it may not be recomputed, and its outputs are not held."""
        return not self.again and self.values is None

    def set_rank(self, rank: int) -> None:
        """Set the rank by which backward pops it: the highest first.

        Its outputs keep the rank that they have in a plain run, because Chainer computes later
        functions' ranks from it.
        """
        func = self._func()
        if func is not None:
            func.rank = rank

    def is_held(self) -> bool:
        """Tell whether the user still holds an output as a variable."""
        return any(node.get_variable_or_none() is not None for _, node in self.nodes())

    @property
    def may_drop(self) -> bool:
        """True if its outputs can be recomputed, and no variable of the user holds them."""
        return self.again and self.has_graph and not self.is_held()

    @property
    def holds_droppable(self) -> bool:
        """True if it or its graph holds outputs that can be dropped, and no variable does."""
        return self.may_drop and (self.values is not None or holds_outputs(self.func))

    # -- dropping and recomputing ----------------------------------------------------------

    def release_values(self) -> None:
        """Release the outputs if they can be recomputed; the graph holds those it retains."""
        if self.again:
            self.values = None

    def drop(self) -> None:
        """Drop the outputs, here and in the graph, if they can be recomputed or are offloaded."""
        if not self.again and "value" not in self.offloaded:
            return
        self.values = None
        if self.has_graph:
            for index in empty_outputs(self.func):
                self.retain(index)

    def retain(self, output: int) -> None:
        """Record that a recompute must put this output back into its variable node."""
        self.retained |= 1 << output

    def drop_stash(self) -> None:
        """Drop the function state, if it was not drawn and can be recomputed or is offloaded."""
        if self.again or "stash" in self.offloaded:
            self.stash.drop(self._func())

    def pack(self) -> None:
        """Keep a dropout's mask as bits."""
        self.stash.pack(self._func())

    def make_again(self) -> None:
        """Restore dropped outputs and function state, if any."""
        if self.values is None or self.stash.is_dropped:
            self.materialise()

    def materialise(self) -> list[Call]:
        """Recompute or fetch dropped arrays, with the dropped inputs that this needs.

        Returns the calls that were recomputed or fetched.
        """
        made = needed_again([self])
        for call in made:
            if not call.bring_back():
                call._run()
        return made

    def find(self, output: int) -> bool:
        """Tell whether an output is alive: held here, by the graph, or by the user's variable."""
        return self.values is not None or self.value(output) is not None

    def value(self, output: int) -> Any:
        """Return an output held here, by the graph or by a variable; None if it was freed."""
        if self.values is not None:
            return self.values[output]
        if output in self.cut:
            return self.cut[output]
        func = self._func()
        node = None if func is None or self.is_cut else func.outputs[output]()
        return None if node is None else held_array(node)

    def _run(self) -> None:
        start, inputs = work_seconds(), self.inputs()
        device = chainer.backend.get_device_from_array(*inputs)
        with chainer.using_device(device), as_in_forward(self.config):
            self.run_here(inputs)
        self.rerun_seconds += work_seconds() - start

    def inputs(self) -> tuple[Any, ...]:
        """Return the input arrays for a recompute; all of them must be alive.

        Raises:
            RecomputeError: it must not be recomputed, or an array that it reads was changed.
        """
        if not self.again:
            raise RecomputeError(f"{self.label!r} must not run twice, and its outputs were freed")
        return tuple([self._input(source) for source in self.sources])

    def run_here(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Recompute under the current configuration, put the arrays back, and return the outputs.

        The configuration must be forward's. Running statistics are left as they are.

        Raises:
            RecomputeError: in debug mode, an input or an output differs from forward's.
        """
        func = self.func
        self.verify(inputs)
        statistics = {name: getattr(func, name) for name in STATISTICS if hasattr(func, name)}
        for name in statistics:
            setattr(func, name, None)
        packed = self.stash.unpack(func)
        try:
            outputs: tuple[Any, ...] = tap.rerun(func, inputs)
        finally:
            for name, value in statistics.items():
                setattr(func, name, value)
            if packed:
                self.pack()
        self.restore_outputs(func, outputs)
        self.stash.is_dropped = False
        return outputs

    def _input(self, source: InputSource) -> Any:
        if source.call is None:
            return self.reads.find(source.array, self.label)
        return source.call.value(source.output)

    def restore_outputs(self, func: Any, outputs: tuple[Any, ...]) -> None:
        """Restore outputs here and in the graph.

        Raises:
            RecomputeError: in debug mode, an output differs from forward's. Nothing is restored.
        """
        if self.checksums is not None and self.checksums[1] != [checksum(a) for a in outputs]:
            raise RecomputeError(
                f"{self.label!r} has another result than in forward: an array was edited in place "
                "between forward and backward, or it draws random numbers or keeps state"
            )
        self.values = outputs
        held = 0 if self.is_cut else self.retained
        refill_outputs(func, outputs, [i for i in range(self.output_count) if held >> i & 1])

    def verify(self, inputs: tuple[Any, ...]) -> None:
        """In debug mode, raise RecomputeError if an input differs from forward's."""
        if self.checksums is None:
            return
        for place, (array, known) in enumerate(zip(inputs, self.checksums[0], strict=True)):
            if array is not None and checksum(array) != known:
                raise RecomputeError(
                    f"input {place} of {self.label!r} was edited in place between forward and "
                    "backward: gradients would be wrong"
                )

    def cut_behind(self, func: Any, node: Any = None) -> None:
        """Hold the arrays that the readers of its outputs need once the graph is cut behind it.

        These are the arrays of the outputs. If one of them was dropped and no variable of the
        program holds it, the function is held with all that it needs to run again.

        Args:
            func: the function, whose graph is still whole.
            node: the output that loses its function; None: the function loses all its outputs.

        Raises:
            RecomputeError: the output was dropped, other outputs of the function stay in the graph,
                and it cannot be recomputed. Nothing has changed.
        """
        if node is None or self.output_count == 1:
            self.cut = {i: self.value(i) for i in range(self.output_count)}
            del func._umem_call  # the graph no longer leads here; and with `func` held, a cycle
        else:
            index = [reference() for reference in func.outputs].index(node)
            if not self.find(index):
                self.materialise()
            self.cut = {**self.cut, index: self.value(index)}
        if self.is_cut:
            is_missing = any(array is None for array in self.cut.values())
            self._func = (lambda: func) if is_missing else (lambda: None)
            self.sources = self.sources if is_missing else ()

    def ensure(self) -> list[Call]:
        """Restore the arrays that its backward reads. Returns the calls recomputed."""
        func = self.func
        made = bring_inputs(func, self.sources)
        if self.lacks_own():
            self.values = self.values if self.offloaded else None
            made += self.materialise()
        self.stash.unpack(func)
        if self.checksums is not None:
            self.verify(tuple([node.data for node in func.inputs]))
        return made

    def lacks_own(self) -> bool:
        """Tell whether outputs that the function retains, or its function state, were dropped."""
        return lacks_outputs(self.func) or self.stash.is_dropped

    def replace_input(self, array: Any, copy: Any) -> None:
        """Use a copy in recomputes, because an array from outside is about to change."""
        self.sources = tuple(
            source._replace(array=copy) if source.call is None and source.array is array else source
            for source in self.sources
        )

    def near(self) -> list[Call]:
        """List the call itself, and the producers of its inputs."""
        return [self, *(source.call for source in self.sources if source.call is not None)]

    def needs(self) -> list[Call]:
        """List the calls whose outputs its backward reads; itself if it retains outputs."""
        func = self.func
        found = [self.sources[i].call for i in func._input_indexes_to_retain or ()]
        if func._output_indexes_to_retain:
            found.append(self)
        return [call for call in found if call is not None]

    # -- offloading ------------------------------------------------------------------------

    def send(self, tier: Tier, what: What) -> None:
        """Begin to send outputs or function state; nothing if part is missing or lacks room."""
        arrays = self._outputs() if what == "value" else self.stash.arrays(self.func)
        if arrays and what not in self.offloaded:
            offloaded = Offloaded.send(tier, arrays)
            if offloaded is not None:
                self.offloaded = {**self.offloaded, what: offloaded}

    def leave(self, what: What) -> None:
        """Drop outputs or function state that were sent, once the copy is complete; others stay."""
        if what in self.offloaded:
            self.offloaded[what].release()
            self.drop() if what == "value" else self.drop_stash()

    def fetch(self, what: What) -> None:
        """Begin to fetch outputs or function state that were sent."""
        if what in self.offloaded:
            self.offloaded[what].fetch()

    def bring_back(self) -> bool:
        """Restore missing arrays if no function must run for it; tell whether that was so.

        Outputs are taken from variables of the program that hold them, or else from the offload
        target.
        """
        missing = self._missing()
        if not self.is_offloaded:
            return False
        if not missing:  # variables of the program hold them
            self.restore_outputs(self.func, tuple(self._outputs()))
        for what in missing:
            arrays = self.offloaded[what].arrays()
            if what == "value":
                self.restore_outputs(self.func, tuple(arrays))
            else:
                self.stash.restore(self.func, arrays)
        return True

    def forget_offloaded(self) -> None:
        """Discard the offloaded copies."""
        self.offloaded = NOT_OFFLOADED

    @property
    def is_offloaded(self) -> bool:
        """True if all missing arrays are offloaded, or none is missing."""
        return all(what in self.offloaded for what in self._missing())

    def _missing(self) -> list[What]:
        own: list[What] = ["stash"] if self.stash.is_dropped else []
        return own if self._outputs() else ["value", *own]

    def _outputs(self) -> list[Any]:
        """Return the outputs; an empty list if one of them is missing."""
        found = [self.value(output) for output in range(self.output_count)]
        return [] if any(array is None for array in found) else found


def source_of(node: Any, array: Any) -> InputSource:
    """Return the origin of the array behind a variable node."""
    creator = node.creator_node
    call = None if creator is None else getattr(creator, "_umem_call", None)
    if call is None:
        return InputSource(None, 0, array)
    if len(creator.outputs) == 1:
        return InputSource(call, 0, None)
    for index, reference in enumerate(creator.outputs):
        if reference() is node:
            return InputSource(call, index, None)
    return InputSource(None, 0, array)


def needed_again(wanted: Iterable[Call]) -> list[Call]:
    """List the calls that must run again, or be fetched, to restore the arrays of some calls.

    These are the calls themselves, and the producers of their missing inputs. The list has
    producers before readers.
    """
    needed: set[Call] = set()
    pending = list(wanted)
    while pending:
        call = pending.pop()
        if call in needed:
            continue
        needed.add(call)
        if not (call.is_offloaded and call.has_func):
            made = ((s.call, s.output) for s in call.sources if s.call is not None)
            pending += [source for source, output in made if not source.find(output)]
    return sorted(needed, key=lambda call: (call.number, call.index))


def bring_inputs(func: Any, sources: Sequence[InputSource]) -> list[Call]:
    """Put inputs that a function retains back on their nodes. Returns the calls recomputed."""
    made: list[Call] = []
    for index in func._input_indexes_to_retain or ():
        source, node = sources[index], func.inputs[index]
        if source.call is not None and node.data is None:
            source.call.retain(source.output)
            if not source.call.find(source.output):
                made += source.call.materialise()
            node_slot(node).put(source.call.value(source.output))
    return made


def origins_of(
    number: int, func: Any, arrays: Sequence[Any], leaves: Leaves
) -> tuple[tuple[InputSource, ...], tuple[Any, ...], bool]:
    """Return the origin of each input of a function, and the same in a form that can be compared.

    For another call's output that is its place, the output's index, and the number of passes in
    between. The third result tells whether an input was made in an earlier pass.

    Args:
        number: the pass's number.
        func: the function's node.
        arrays: its inputs; None for freed ones.
        leaves: the nodes that come from outside; new ones are added.
    """
    sources: list[InputSource] = []
    origins: list[tuple[Any, ...]] = []
    elsewhere = False
    for node, array in zip(func.inputs, arrays, strict=True):
        source = source_of(node, array)
        call = source.call
        if call is None:
            leaf, _, before = leaves.setdefault(id(node), (len(leaves), node, source))
            if before.array is array:
                source = before  # one object for all readers
            is_untracked = node.creator_node is not None
            elsewhere = elsewhere or is_untracked
            origins.append((UNTRACKED if is_untracked else LEAF, leaf, node.shape, node.dtype))
        else:
            ago = number - call.number
            elsewhere = elsewhere or ago != 0
            origins.append((call.index, source.output, ago))
        sources.append(source)
    return tuple(sources), tuple(origins), elsewhere
