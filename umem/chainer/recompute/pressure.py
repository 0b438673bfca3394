"""A pass under pressure: followed call by call, because a plain one would not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import chainer
import numpy as np

from umem.chainer.forward_state import as_in_forward
from umem.chainer.recompute.account import Account, Arrays
from umem.chainer.recompute.facts import CallMemory, Experience, FunctionKind, meter_of
from umem.chainer.recompute.observing import gradient_bytes
from umem.chainer.recompute.tape import Call, needed_again
from umem.devices import work_seconds
from umem.errors import BudgetError
from umem.trace.recording import root_of
from umem.units import format_bytes

Retry = Callable[[Callable[[], Any]], Any]
"""Runs a function, and again if memory has run out and some was freed."""
AHEAD = 64
"""Evictions free the needed bytes and one part in this many of the room, so that not each call
evicts. A guess, not measured."""
THRASH = 1.0
"""Recomputing takes too long above this ratio to the rest of the pass: a plan runs at most one more
forward. A guess, not measured."""


class Room:
    """A budget, and the arrays from outside that count in it.

    Args:
        budget: bytes in total; None if it is not known yet.
        parameters: arrays of parameters that optimizers have updated.
        other_bytes: optimizer state, and the gradients of the step before.
        is_wish: whether exceeding the budget is a warning instead of an error.
        gaps: the bytes that a GPU's pool reserves, relative to those in use; 1 on the host.

    Attributes:
        budget: the bytes that may be in use, without the gaps.
        whole: the budget, with the gaps.
        fixed_bytes: those arrays and bytes, alive before anything is computed.
        parameter_bytes: the part of the parameters; their gradients will take the same.
    """

    def __init__(
        self,
        budget: int | None,
        parameters: Iterable[Any],
        other_bytes: int,
        *,
        is_wish: bool = False,
        gaps: float = 1.0,
    ) -> None:
        self.whole, self.is_wish = budget, is_wish
        self.budget = None if budget is None else int(budget / gaps)
        self._arrays: dict[int, Any] = {}
        self.fixed_bytes = 0
        self.read(parameters)
        self.parameter_bytes = self.fixed_bytes
        self.fixed_bytes += other_bytes

    def read(self, arrays: Iterable[Any]) -> None:
        """Record arrays from outside that a call has read, and count their memory; skips None."""
        known = self._arrays
        for array in arrays:
            if array is not None and id(array) not in known:
                known[id(array)] = array
                root = root_of(array)
                if root is array or id(root) not in known:
                    known[id(root)] = root
                    self.fixed_bytes += int(root.nbytes)

    def has(self, array: Any) -> bool:
        """Tell whether a call has read an array from outside."""
        return id(array) in self._arrays

    @property
    def rest_bytes(self) -> int:
        """Return the part of the budget that is left for the pass's own arrays."""
        return 0 if self.budget is None else max(0, self.budget - self.fixed_bytes)


class GradientsHeld:
    """Counts the bytes of gradients, each piece of memory once.

    Attributes:
        nbytes: the bytes of all gradients that were added and not removed.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._counts: dict[int, int] = {}

    def add(self, array: Any) -> None:
        """Count a gradient; its memory counts until every gradient on it is removed."""
        root = array if array.base is None else root_of(array)
        count = self._counts.get(id(root), 0)
        if not count:
            self.nbytes += int(root.nbytes)
        self._counts[id(root)] = count + 1

    def remove(self, array: Any) -> None:
        """Stop counting a gradient."""
        root = array if array.base is None else root_of(array)
        count = self._counts.pop(id(root), 0)
        if count > 1:
            self._counts[id(root)] = count - 1
        elif count:
            self.nbytes -= int(root.nbytes)

    def begin_step(self, sums: Mapping[Any, list[Any]]) -> None:
        """Handle the beginning of a step, which replaces these gradients of its inputs."""
        for found in sums.values():
            for g in found:
                if g.raw_array is not None:
                    self.remove(g.raw_array)

    def end_step(self, sums: Mapping[Any, list[Any]], taken: Iterable[Any]) -> None:
        """Handle the end of a step, which made gradients of its inputs and freed its outputs'."""
        for found in sums.values():
            for g in found:
                if g.raw_array is not None:
                    self.add(g.raw_array)
        for g in taken:
            if g is not None and g.raw_array is not None:
                self.remove(g.raw_array)


class Pressure:
    """Keeps one pass within the budget by evicting, and restores the arrays that backward reads.

    Args:
        room: the budget.
        experience: facts on functions from earlier passes.
        warn: warns the user that the budget is exceeded (False), or that recomputing takes too long
            (True).

    Attributes:
        seconds, rerun_seconds: of its functions, and of recomputing.
        peak_bytes: its peak so far, by account.
    """

    def __init__(
        self, room: Room, experience: Experience, warn: Callable[[str, bool], None]
    ) -> None:
        self._room, self._experience, self._warn = room, experience, warn
        self._account = Account()
        self._gradients = GradientsHeld()
        self._top_rank = self._rank = self._most_beside = self._base = 0
        self._is_backward = self._is_rebuilding = False
        self.peak_bytes = 0
        self.seconds = self.rerun_seconds = 0.0

    # -- forward ---------------------------------------------------------------------------

    def add(
        self,
        call: Call,
        kind: FunctionKind,
        arrays: Arrays,
        seconds: float,
        roots: dict[int, Any] | None,
    ) -> None:
        """Account for a call that has run; see `Account.add`."""
        self._top_rank = max(self._top_rank, call.plain_rank)
        self.seconds += seconds
        self._account.add(call, kind, arrays, seconds, roots)
        self.peak_bytes = max(self.peak_bytes, self.level)

    def make_room_for(self, nbytes: int, func: Any) -> None:
        """Evict until a call of forward fits, in which memory is expected to rise by ``nbytes``.

        Raises:
            BudgetError: arrays that cannot be evicted exceed the budget. The call has not run.
        """
        self._rank = self._top_rank + 1
        self._make_room(nbytes, self._rank, func)

    def keep_to(self, nbytes: int) -> None:
        """Evict until calls hold no more than this many bytes, or nothing can be evicted."""
        if self._account.held_bytes > nbytes:
            self._account.sweep()
            if self._account.held_bytes > nbytes:
                self._account.free(self._account.held_bytes - nbytes, self._top_rank + 1)

    def evict_half(self, busy: Iterable[Any]) -> bool:
        """Evict about half of the bytes held, but of no busy call; tell whether any were evicted.

        Use it after an error, which has ended the work that needed the locked calls. Inside
        `_rebuild` it has not: that runs the failed function again.
        """
        self._account.sweep()
        if not self._is_rebuilding:
            self._account.unlock_all()
        locked = self._account.lock(busy)
        freed = self._account.free(self._account.held_bytes // 2 + 1, self._rank)
        self._account.unlock(locked)
        return freed > 0

    @property
    def level(self) -> int:
        """Return the live bytes, by account."""
        return self._room.fixed_bytes + self._gradients.nbytes + self._account.held_bytes

    def _make_room(self, nbytes: int, rank: int, func: Any) -> None:
        """Evict until this many bytes fit beside the live ones, or nothing can be evicted."""
        budget = self._room.budget
        if budget is None:
            return
        over = self.level + nbytes - budget
        if over > 0:
            self._account.sweep()
            over = self.level + nbytes - budget
        if over > 0:
            self._account.free(over + self._room.rest_bytes // AHEAD, rank)
            self._check(nbytes, func.label)
        self.peak_bytes = max(self.peak_bytes, self.level + nbytes)

    def _check(self, nbytes: int, label: str) -> None:
        """Check that this many bytes fit beside those that cannot be evicted; warn if not.

        Raises:
            BudgetError: those alone exceed the budget, in forward, and the budget is not a wish.
        """
        budget = self._room.whole
        assert budget is not None
        if self.level + nbytes <= 1.02 * budget:
            return
        text = (
            f"{label!r} needs {format_bytes(nbytes)} beside {format_bytes(self.level)} that cannot "
            f"be freed: parameters, gradients, arrays that the program holds, and functions that "
            f"must not run twice; the budget is {format_bytes(budget)}. Give it "
            f"{format_bytes(self.level + nbytes)}"
        )
        is_over = self.level > 1.02 * budget
        if is_over and not self._is_backward and not self._room.is_wish:
            raise BudgetError(text)
        self._warn(text, False)

    # -- backward --------------------------------------------------------------------------

    def begin_backward(self, funcs: Iterable[Any]) -> None:
        """Handle the end of forward: account for gradients of parameters that exist already."""
        self._is_backward = True
        self._account.offer_again()
        for node in _leaf_nodes(funcs):
            variable = node.get_variable_or_none()
            if variable is not None and gradient_bytes(variable):
                self._gradients.add(variable.grad)

    def before(self, call: Any, retry: Retry) -> None:
        """Restore the arrays that this step reads, and make room for those that it computes.

        ``retry`` runs each recomputed function, and again if memory runs out.
        """
        func, self._rank = call.func, call.plain_rank
        retained = func._input_indexes_to_retain or ()
        missing = [
            source.call
            for i in retained
            if func.inputs[i]._data is None and (source := call.sources[i]).call is not None
        ]
        if call.lacks_own():
            missing.append(call)
        self._base = _working_bytes(func)
        rise = self._memory(call).expected_bytes(self._base)
        budget = self._room.budget
        if missing or (budget is not None and self.level + rise > budget):
            near = (call, *(c for i in retained if (c := call.sources[i].call) is not None))
            locked = self._account.lock(near)
            if missing:
                self._is_rebuilding = True
                try:
                    locked += self._rebuild(missing, call.plain_rank, retry)
                finally:
                    self._is_rebuilding = False
            call.ensure()
            for made in missing:
                self._account.release_values(made)
            self._make_room(rise, call.plain_rank, func)
            self._account.unlock(locked)
        else:
            if call.checksums is None:
                call.stash.unpack(func)  # all else is alive
            else:
                call.ensure()
            self.peak_bytes = max(self.peak_bytes, self.level + rise)

    def _rebuild(self, wanted: Sequence[Any], rank: int, retry: Retry) -> list[int]:
        """Recompute the missing arrays of some calls, with room made for each.

        The calls whose outputs this needs are restored as well; the oldest come first.

        Args:
            wanted: the calls.
            rank: the rank of the step of backward that reads them; eviction chooses by it.
            retry: see `before`.

        Returns:
            The account's numbers of the restored values, which are locked against eviction until
            the caller unlocks them.
        """
        needed = needed_again(wanted)
        uses = dict.fromkeys(needed, 0)
        for call in needed:
            for source in call.sources:
                if source.call in uses:
                    uses[source.call] += 1
        for call in dict.fromkeys(wanted):
            uses[call] += 1
        read = [(s.call, s.output) for call in needed for s in call.sources if s.call is not None]
        locked = self._account.lock({call for call, output in read if call.find(output)})
        made: dict[Any, list[int]] = {}
        start = work_seconds()
        with ExitStack() as stack:
            config = None
            for call in needed:
                if config is not call.config:
                    config = call.config
                    stack.pop_all().close()
                    stack.enter_context(as_in_forward(config))
                made[call] = self._restore(call, rank, retry)
                for source in call.sources:
                    if source.call in uses:
                        uses[source.call] -= 1
                        if not uses[source.call]:
                            self._account.release_values(source.call)
                            self._account.unlock(made[source.call])
        self._account.unlock(locked)
        self.rerun_seconds += work_seconds() - start
        if self.rerun_seconds > THRASH * self.seconds:
            self._warn(self._overhead(), True)
        return [number for call in dict.fromkeys(wanted) for number in made[call]]

    def _restore(self, call: Call, rank: int, retry: Retry) -> list[int]:
        """Recompute a call, or take its outputs from variables; returns as `Account.lock`."""
        inputs: tuple[Any, ...] = (None,) * len(call.sources)
        if not call.bring_back():
            inputs = call.inputs()
            entry = self._account[call]
            base = sum([x.nbytes for x in inputs])
            self._make_room(entry.kind.forward(entry.shape).expected_bytes(base), rank, call)
            with chainer.using_device(chainer.backend.get_device_from_array(*inputs)):
                retry(partial(call.run_here, inputs))
        self._account.restored(call, (inputs, call.values or ()))
        return self._account.lock((call,))

    def _overhead(self) -> str:
        return (
            f"a pass without a plan has spent {self.rerun_seconds:.3g} s on recomputing so far, "
            f"and {self.seconds:.3g} s on the rest: the budget leaves too little room"
        )

    def step(
        self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...], *, measures: bool
    ) -> None:
        """Run a step of backward, and measure its time and, if needed, the rise of memory.

        ``measures``: nobody else measures it.
        """
        _, grads, sums, *_ = args
        memory, base = self._memory(call), self._base
        beside = self._gradients.nbytes
        self._gradients.begin_step(sums)
        start = work_seconds()
        if measures and memory.wants(base):
            arrays = [g.raw_array for g in grads if g is not None]
            memory.run(lambda: proceed(func, *args), meter_of(arrays), base)
        else:
            proceed(func, *args)
        self.seconds += work_seconds() - start
        self._gradients.end_step(sums, grads)
        self._most_beside = max(self._most_beside, beside + memory.expected_bytes(base))

    def _memory(self, call: Call) -> CallMemory:
        """Return the memory of the steps of backward that are similar to a call's."""
        entry = self._account[call]
        return entry.kind.backward(entry.shape)

    def after(self, call: Call) -> None:
        """Drop the arrays of a call whose step is over."""
        self._account.done(call)

    def learn(self) -> None:
        """Add the share that this backward has held to the experience."""
        beside = max(0, self._most_beside - self._gradients.nbytes)
        self._experience.went_backward(beside / max(self._account.kept_bytes, 1))

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that backward reads, evicted or not."""
        return self._account.kept_bytes


def _working_bytes(func: Any) -> int:
    """Return the bytes of a function's inputs and outputs, by shapes and dtypes."""
    nodes = [*func.inputs, *(reference() for reference in func.outputs)]
    sizes = [
        prod(node.shape) * np.dtype(node.dtype).itemsize
        for node in nodes
        if node is not None and node.dtype is not None
    ]
    return sum(sizes)


def _leaf_nodes(funcs: Iterable[Any]) -> dict[Any, None]:
    """Return the leaves that get a gradient, each once."""
    nodes = [node for func in funcs for node in func.inputs or ()]
    return dict.fromkeys(x for x in nodes if x._creator_node is None and x._requires_grad)
