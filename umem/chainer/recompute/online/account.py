"""What the arrays of a pass take, and which of them go where there is too little room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.online.call_bytes import CallBytes
from umem.chainer.recompute.online.eviction import Candidates
from umem.chainer.recompute.online.gone_below import GoneBelow
from umem.chainer.recompute.online.late_call import LateCall
from umem.chainer.recompute.stash import packing
from umem.chainer.saved.function_state import find_arrays
from umem.trace.recording.storage import root_of

NEAR = 8
"""So many values behind what nobody keeps are remembered for each call."""


class Account:
    """The calls of one pass, what they hold, and which may go.

    Args:
        below: what goes a tier down.

    Attributes:
        held_bytes: what is there of their outputs and stashes, by account.
        kept_bytes: what backward reads of them, gone or not: what a plain pass would hold.
    """

    def __init__(self, below: GoneBelow) -> None:
        self._entries: list[CallBytes] = []
        self._below = below
        self._candidates = Candidates(below.link)
        self._floating: list[CallBytes] = []
        self._users: list[CallBytes] = []
        self._locks: dict[int, int] = {}
        self.held_bytes = self.kept_bytes = 0

    def add(
        self, call: LateCall, arrays: Arrays, seconds: float, roots: dict[int, LateCall] | None
    ) -> None:
        """A call has run.

        Args:
            call: the call.
            arrays: its inputs and outputs, None for what is gone.
            seconds: that it took.
            roots: where calls are looked up late, whose memory is already counted; new is added.
        """
        func, rank = call.func, call.plain_rank
        retained = func._input_indexes_to_retain or ()
        near: dict[int, None] = {}
        cost = seconds
        for place, source in enumerate(call.sources):
            if source.call is None or source.call.reads is not call.reads:
                continue
            entry = self._group(source.call.index)
            if place in retained:
                self._keep(entry, rank)
            if entry.is_kept:
                near[entry.group] = None
            else:
                near.update(dict.fromkeys(entry.near))
                cost += entry.cost
        entry = CallBytes(call, tuple(near)[:NEAR], cost)
        self._entries.append(entry)
        self._candidates.add(-1, cost if call.again else math.inf, entry.near)
        self._count(entry, arrays, roots)
        if entry.stash_bytes:
            self._read(entry, rank)
        if func._output_indexes_to_retain:
            self._keep(self._entries[entry.group], rank)
        if call.again and entry.is_there and not entry.is_kept and entry.group == call.index:
            self._floating.append(entry)
        if entry.is_kept or entry.stash_bytes or not call.again:
            self._offer(entry)

    def _group(self, index: int) -> CallBytes:
        return self._entries[self._entries[index].group]

    def _keep(self, entry: CallBytes, rank: int) -> None:
        self._read(entry, rank)
        if not entry.is_kept:
            entry.keep()
            self.kept_bytes += entry.output_bytes
            self._offer(entry)

    def _read(self, entry: CallBytes, rank: int) -> None:
        entry.read(rank)
        self._candidates.read(entry.call.index, rank)

    def _count(
        self, entry: CallBytes, arrays: Arrays, roots: dict[int, LateCall] | None = None
    ) -> None:
        """Count what a call has just made."""
        call = entry.call
        inputs, outputs = arrays
        made = {}
        for y in outputs:
            if y is not None:
                root = y if y.base is None else root_of(y)
                made[id(root)] = root
                if root is not y or roots is not None:
                    self._find_base(entry, inputs, made, roots)
        stash = 0
        if call.stash.names:
            known = {*made, *(id(root_of(x)) for x in inputs if x is not None)}
            stash = _stash_bytes(call, known)
        self.held_bytes -= entry.nbytes
        before = entry.stash_bytes
        entry.made(sum(int(root.nbytes) for root in made.values()), stash)
        self.held_bytes += entry.nbytes
        self.kept_bytes += max(0, stash - before)

    def _find_base(self, entry: CallBytes, inputs: Any, made: dict[int, Any], roots: Any) -> None:
        """Take away what others have made, and remember whose views its outputs are."""
        for source, x in zip(entry.call.sources, inputs, strict=True):
            root = None if x is None else root_of(x)
            if root is not None and made.pop(id(root), None) is not None and source.call:
                self._is_view(entry, source.call)
        for key in [] if roots is None else list(made):
            if roots.setdefault(key, entry.call) is not entry.call:
                del made[key]
                self._is_view(entry, roots[key])

    def _is_view(self, entry: CallBytes, of: Any) -> None:
        if of.reads is entry.call.reads and entry.group == entry.call.index:
            group = self._group(of.index)
            entry.join(group)
            group.view(entry.call)
            if entry.is_kept:
                group.keep()

    def _offer(self, entry: CallBytes) -> None:
        """Let it go where there is too little room, if that frees anything."""
        call = entry.call
        nbytes = entry.output_bytes if entry.is_there and entry.holds_outputs else 0
        if entry.has_stash:
            nbytes += entry.stash_bytes
        may_go = entry.may_run_again or (entry.may_move and self._below.takes(nbytes))
        if nbytes and call.index not in self._locks and may_go:
            self._candidates.hold(call.index, nbytes)
        else:
            self._candidates.lock(call.index)

    # -- making room -----------------------------------------------------------------------

    def sweep(self) -> None:
        """Count no more what nobody holds: outputs whose variables are gone."""
        floating = []
        for entry in self._floating:
            if entry.is_kept or not entry.is_there:
                continue
            if entry.is_held:
                floating.append(entry)
            else:
                self._died(entry)
        self._floating = floating

    def _died(self, entry: CallBytes) -> None:
        self.held_bytes -= entry.output_bytes if entry.is_there else 0
        entry.outputs_died()

    def free(self, wanted: int, rank: int) -> int:
        """Let go at least so many bytes, if that many may go. Returns how many went."""
        freed = self._free(wanted, rank)
        if freed < wanted and self._users:
            self.offer_again()
            freed += self._free(wanted - freed, rank)
        return freed

    def _free(self, wanted: int, rank: int) -> int:
        freed, goes_on = 0, True
        while goes_on:
            goes_on = False
            for number in self._candidates.choose(rank):
                freed += self._let_go(self._entries[number])
                goes_on = freed < wanted
                if not goes_on:
                    break
        return freed

    def offer_again(self) -> None:
        """Perhaps users no longer hold what they have held."""
        users, self._users = self._users, []
        for entry in users:
            self._offer(entry)

    def _let_go(self, entry: CallBytes) -> int:
        number = entry.call.index
        if entry.is_held:
            self._candidates.lock(number)
            self._users.append(entry)
            return 0
        before = entry.nbytes
        if self._sends(entry):
            self._candidates.lock(number)
        elif entry.may_run_again:
            entry.drop()
            self._candidates.go(number)
        else:
            self._candidates.lock(number)
        self.held_bytes -= before - entry.nbytes
        return before - entry.nbytes

    def _sends(self, entry: CallBytes) -> bool:
        """Move it down, where that is the cheaper way or the only one; whether it went."""
        wanted = not entry.call.again or self._candidates.moves(entry.call.index)
        return wanted and self._below.send(entry)

    # -- backward --------------------------------------------------------------------------

    def lock(self, calls: Iterable[LateCall]) -> list[int]:
        """Have them stay until what this returns is given to `unlock`."""
        numbers = list(self._numbers(calls))
        for number in numbers:
            self._locks[number] = self._locks.get(number, 0) + 1
            self._candidates.lock(number)
        return numbers

    def unlock(self, numbers: Iterable[int]) -> None:
        """They may go again, where nothing else has locked them."""
        for number in numbers:
            count = self._locks.pop(number) - 1
            if count:
                self._locks[number] = count
            else:
                self._offer(self._entries[number])

    def _numbers(self, calls: Iterable[LateCall]) -> Iterator[int]:
        """Those of some calls, and of the memory that their outputs are on."""
        for call in calls:
            yield call.index
            group = self._entries[call.index].group
            if group != call.index:
                yield group

    def came_back(self, call: LateCall, arrays: Arrays) -> None:
        """It has run again."""
        entry = self._entries[call.index]
        self._candidates.come_back(call.index)
        self._count(entry, arrays)

    def came_up(self, call: LateCall) -> None:
        """It is back from the tier below."""
        entry = self._entries[call.index]
        self.held_bytes -= entry.nbytes
        entry.came_up()
        self.held_bytes += entry.nbytes

    def missing_bytes(self, call: LateCall) -> int:
        """What it takes beside what is counted already to have all of it back from below."""
        entry = self._entries[call.index]
        return entry.below_bytes - entry.coming_bytes

    def fetch_ahead(self, rank: int, room_bytes: int) -> None:
        """Begin to bring back what the steps after one of this rank read, where there is room."""
        self.held_bytes += self._below.fetch_ahead(rank, room_bytes)

    def let_values_go(self, call: LateCall) -> None:
        """What was made again of a call is held by nobody but the graph."""
        call.let_go()
        entry = self._group(call.index)
        if entry.call is call and not entry.is_kept and not call.is_held():
            self._died(entry)

    def done(self, call: LateCall) -> None:
        """Backward has gone through it, and through all that reads it."""
        entry = self._entries[call.index]
        self._candidates.lock(call.index)
        self._candidates.come_back(call.index)
        if call.again or call.below:
            before = entry.nbytes
            entry.drop()
            self.held_bytes -= before - entry.nbytes


Arrays = tuple[Sequence[Any], Sequence[Any]]
"""What a call reads, and what it makes."""


def _stash_bytes(call: LateCall, known: set[int]) -> int:
    """What a call keeps on itself and may let go: of a dropout's mask, all but its bits."""
    if not call.stash.names:
        return 0
    owner = owner_of(call.func)
    lists = {name: [a for _, a in _arrays(name, owner)] for name in call.stash.names}
    found = {name: arrays for name, arrays in lists.items() if arrays}
    mask, packed = packing(call.func, found)
    if call.kind.draws:
        return mask - packed
    roots = {id(root): root for arrays in found.values() for root in map(root_of, arrays)}
    return sum(int(root.nbytes) for key, root in roots.items() if key not in known)


def _arrays(name: str, owner: Any) -> Iterator[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    find_arrays(name, getattr(owner, name, None), found)
    return iter(found)
