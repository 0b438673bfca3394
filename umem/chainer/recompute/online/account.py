"""Accounts for the bytes of a pass's arrays, and evicts them where there is too little room."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.offloaded import OffloadTarget, What
from umem.chainer.recompute.online.eviction import Candidates
from umem.chainer.recompute.online.late_call import LateCall
from umem.chainer.saved.slots import find_arrays, packing
from umem.chainer.saved.tiers.tier import Tier
from umem.trace.recording.storage import root_of

NEAR = 8
"""At most this many evicted ancestors of a call form its DTR neighbourhood."""
PREFETCHED = 2
"""Values that are on their way back at a time: one is read while the next comes."""


class CallBytes:
    """One call's bytes.

    Attributes:
        call: the call.
        group: the call whose memory its outputs are on: its own number, or that of the one that
            made what they are views of.
        near: the values that it is made of.
        cost: seconds to make it again, of those.
        read_rank: of the function that backward reads it for first; -1: for none.
        views: the calls whose outputs are on its memory.
        output_bytes, stash_bytes: what they take while they are there; of a stash, what can go.
        is_kept: whether backward reads its outputs, or a view of them.
        is_there: whether its outputs are.
        has_stash: whether its stash is.
        coming_bytes: what is on its way back of it.
    """

    __slots__ = (
        "call", "coming_bytes", "cost", "group", "has_stash", "is_kept", "is_there", "near",
        "output_bytes", "read_rank", "stash_bytes", "views",
    )  # fmt: skip

    def __init__(self, call: LateCall, near: tuple[int, ...], cost: float) -> None:
        self.call, self.near, self.cost = call, near, cost
        self.group = call.index
        self.views: list[LateCall] = []
        self.output_bytes = self.stash_bytes = self.coming_bytes = 0
        self.read_rank = -1
        self.is_kept = self.is_there = self.has_stash = False

    def made(self, output_bytes: int, stash_bytes: int) -> None:
        """It has run."""
        self.output_bytes, self.stash_bytes = output_bytes, stash_bytes
        self.is_there, self.has_stash = True, stash_bytes > 0
        self.coming_bytes = 0

    @property
    def nbytes(self) -> int:
        """What is there of it, or about to be."""
        outputs = self.output_bytes if self.is_there else 0
        return outputs + (self.stash_bytes if self.has_stash else 0) + self.coming_bytes

    @property
    def holds_outputs(self) -> bool:
        """True where its outputs are not gone once no variable holds them."""
        return self.is_kept or not self.call.again

    @property
    def may_run_again(self) -> bool:
        """True where it may run a second time, and what is on its memory."""
        return self.call.again and self.may_move

    @property
    def may_move(self) -> bool:
        """True where what is on its memory may run a second time."""
        return not self.views or all(view.again for view in self.views)

    @property
    def is_held(self) -> bool:
        """True where the user holds its outputs as variables."""
        return self.call.is_held() or any(view.is_held() for view in self.views)

    def keep(self) -> None:
        """Backward reads it."""
        self.is_kept = True

    def read(self, rank: int) -> None:
        """A function of this rank reads it in backward."""
        self.read_rank = max(self.read_rank, rank)

    def outputs_died(self) -> None:
        """Nobody holds its outputs."""
        self.is_there = False

    def join(self, group: CallBytes) -> None:
        """Its outputs are on the memory of another."""
        self.group = group.group

    def view(self, call: LateCall) -> None:
        """A call has made a view of its outputs."""
        self.views.append(call)

    def drop(self) -> None:
        """Let all go."""
        for call in (self.call, *self.views):
            call.drop()
        self.call.drop_stash()
        self.call.pack()
        self.is_there = self.has_stash = False

    def send(self, tier: Tier) -> bool:
        """Send what is there of it, and drop that; whether the target has taken all."""
        call = self.call
        if not call.has_func:
            return False
        whats: list[What] = ["value"] if self.is_there and self.holds_outputs else []
        if self.has_stash and not call.kind.draws:
            whats.append("stash")
        for what in whats:
            call.send(tier, what)
        if not all(what in call.offloaded for what in whats):
            return False
        for what in whats:
            call.leave(what)
        self.drop()
        return True

    def fetch(self) -> None:
        """Begin to bring back what was sent."""
        for what in self.call.offloaded:
            self.call.fetch(what)
        self.coming_bytes = self.offloaded_bytes

    def came_up(self) -> None:
        """What was sent is back."""
        self.is_there = self.is_there or "value" in self.call.offloaded
        self.has_stash = self.has_stash or "stash" in self.call.offloaded
        self.coming_bytes = 0

    @property
    def offloaded_bytes(self) -> int:
        """What has to come back of it."""
        offloaded = self.call.offloaded
        outputs = self.output_bytes if "value" in offloaded and not self.is_there else 0
        return outputs + (self.stash_bytes if "stash" in offloaded and not self.has_stash else 0)


class OffloadedCalls:
    """The values of one pass that are offloaded.

    Args:
        offload: the offload target, and the link to it.

    Attributes:
        link: that link; None where nothing moves.
        sent_bytes: what has gone down.
    """

    def __init__(self, offload: OffloadTarget) -> None:
        self._tier, self.link = offload.tier, offload.link
        self._gone: list[tuple[int, int, CallBytes]] = []
        self._coming: list[CallBytes] = []
        self.sent_bytes = 0

    def takes(self, nbytes: int) -> bool:
        """Tell whether something of so many bytes may be moved."""
        return self._tier is not None and self.link is not None and self.link.takes(nbytes)

    def send(self, entry: CallBytes) -> bool:
        """Move what is there of a call; False where that stays: the target has no room."""
        nbytes = entry.nbytes
        if self._tier is None or not self.takes(nbytes) or not entry.send(self._tier):
            return False
        self.sent_bytes += nbytes
        heapq.heappush(self._gone, (-entry.read_rank, entry.call.index, entry))
        return True

    def fetch_ahead(self, rank: int, room_bytes: int) -> int:
        """Begin to bring back what is read next; returns how many bytes come.

        What was read before, and has to go once more, comes when it is asked for.

        Args:
            rank: of the step of backward that is about to be taken.
            room_bytes: that what comes may take.
        """
        self._coming = [entry for entry in self._coming if entry.coming_bytes]
        coming = 0
        while self._gone and len(self._coming) < PREFETCHED:
            entry = self._gone[0][2]
            if entry.read_rank > rank or entry.nbytes or not entry.call.may_come_back:
                heapq.heappop(self._gone)
                continue
            nbytes = entry.offloaded_bytes
            if coming + nbytes > room_bytes:
                break
            heapq.heappop(self._gone)
            entry.fetch()
            coming += nbytes
            self._coming.append(entry)
        return coming


class Account:
    """The calls of one pass, what they hold, and which may go.

    Args:
        offloaded: what goes to the offload target.

    Attributes:
        held_bytes: what is there of their outputs and stashes, by account.
        kept_bytes: what backward reads of them, gone or not: what a plain pass would hold.
    """

    def __init__(self, offloaded: OffloadedCalls) -> None:
        self._entries: list[CallBytes] = []
        self._offloaded = offloaded
        self._candidates = Candidates(offloaded.link)
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
        may_go = entry.may_run_again or (entry.may_move and self._offloaded.takes(nbytes))
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
        return wanted and self._offloaded.send(entry)

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
        """It is back from the offload target."""
        entry = self._entries[call.index]
        self.held_bytes -= entry.nbytes
        entry.came_up()
        self.held_bytes += entry.nbytes

    def missing_bytes(self, call: LateCall) -> int:
        """What it takes beside what is counted already to have all of it back from the target."""
        entry = self._entries[call.index]
        return entry.offloaded_bytes - entry.coming_bytes

    def fetch_ahead(self, rank: int, room_bytes: int) -> None:
        """Begin to bring back what the steps after one of this rank read, where there is room."""
        self.held_bytes += self._offloaded.fetch_ahead(rank, room_bytes)

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
        if call.again or call.offloaded:
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
