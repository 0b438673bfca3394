"""Accounts for the bytes of a pass's arrays, and evicts them when there is too little room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.candidates import Candidates
from umem.chainer.recompute.facts import FunctionKind, shape_of
from umem.chainer.recompute.tape import Call
from umem.chainer.saved.slots import arrays_in, packing
from umem.trace.recording import root_of

NEAR = 8
"""At most this many evicted ancestors of a call form its DTR neighbourhood, so that the cost of a
call stays constant. A guess, not measured."""


class CallBytes:
    """The bytes of one call's outputs and function state.

    Attributes:
        call: the call.
        kind, shape: the facts of its class, and the shape of its parameter, if any.
        group: the call that owns its outputs' memory: its own number, or that of the call whose
            array they are views of.
        near: numbers of the nearest ancestors that backward reads, from which it is recomputed; at
            most `NEAR`.
        cost: seconds to recompute it from those.
        views: the calls whose outputs are on its memory.
        output_bytes, stash_bytes: of its live outputs and function state; of function state, only
            the part that can be evicted.
        is_kept: whether backward reads its outputs, or a view of them.
        is_there: whether its outputs are alive.
        has_stash: whether its function state is alive.
    """

    __slots__ = (
        "call", "cost", "group", "has_stash", "is_kept", "is_there", "kind", "near",
        "output_bytes", "shape", "stash_bytes", "views",
    )  # fmt: skip

    def __init__(self, call: Call, kind: FunctionKind, near: tuple[int, ...], cost: float) -> None:
        self.call, self.kind, self.near, self.cost = call, kind, near, cost
        self.shape = shape_of([source.array for source in call.sources])
        self.group = call.index
        self.views: list[Call] = []
        self.output_bytes = self.stash_bytes = 0
        self.is_kept = self.is_there = self.has_stash = False

    def made(self, output_bytes: int, stash_bytes: int) -> None:
        """Record the bytes of its outputs and its function state, as it has just run."""
        self.output_bytes, self.stash_bytes = output_bytes, stash_bytes
        self.is_there, self.has_stash = True, stash_bytes > 0

    @property
    def nbytes(self) -> int:
        """Return its live bytes."""
        outputs = self.output_bytes if self.is_there else 0
        return outputs + (self.stash_bytes if self.has_stash else 0)

    @property
    def may_run_again(self) -> bool:
        """True if it may be recomputed, and so may the calls whose outputs are on its memory."""
        return self.call.again and all(view.again for view in self.views)

    @property
    def is_held(self) -> bool:
        """True if the user holds its outputs, or views of them, as variables."""
        return self.call.is_held() or any(view.is_held() for view in self.views)

    def drop(self) -> None:
        """Drop its outputs, the views of them and its function state; a mask is kept as bits."""
        for call in (self.call, *self.views):
            call.drop()
        self.call.drop_stash()
        self.call.pack()
        self.is_there = self.has_stash = False


class Account:
    """The calls of one pass, the bytes that they hold, and which of them may be evicted.

    Attributes:
        held_bytes: their live outputs and function state, by account.
        kept_bytes: those that backward reads, evicted or not: a plain pass would hold them.
    """

    def __init__(self) -> None:
        self._entries: list[CallBytes] = []
        self._candidates = Candidates()
        self._floating: list[CallBytes] = []
        self._users: list[CallBytes] = []
        self._locks: dict[int, int] = {}
        self.held_bytes = self.kept_bytes = 0

    def __getitem__(self, call: Call) -> CallBytes:
        """Return the bytes of a call that was added."""
        return self._entries[call.index]

    def add(
        self,
        call: Call,
        kind: FunctionKind,
        arrays: Arrays,
        seconds: float,
        roots: dict[int, Call] | None,
    ) -> None:
        """Account for a call that has run.

        Args:
            call, kind: the call, and the facts of its class.
            arrays: its inputs and outputs; None for freed ones.
            seconds: its time.
            roots: if calls are made late, by id of a piece of memory, the call that it is counted
                for; new ones are added. None otherwise.
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
        entry = CallBytes(call, kind, tuple(near)[:NEAR], cost)
        self._entries.append(entry)
        self._candidates.add(-1, cost if call.again else math.inf, entry.near)
        self._count(entry, arrays, roots)
        if entry.stash_bytes:
            self._candidates.read(entry.call.index, rank)
        if func._output_indexes_to_retain:
            self._keep(self._entries[entry.group], rank)
        if call.again and entry.is_there and not entry.is_kept and entry.group == call.index:
            self._floating.append(entry)
        if entry.is_kept or entry.stash_bytes:
            self._offer(entry)

    def _group(self, index: int) -> CallBytes:
        return self._entries[self._entries[index].group]

    def _keep(self, entry: CallBytes, rank: int) -> None:
        self._candidates.read(entry.call.index, rank)
        if not entry.is_kept:
            entry.is_kept = True
            self.kept_bytes += entry.output_bytes
            self._offer(entry)

    def _count(
        self, entry: CallBytes, arrays: Arrays, roots: dict[int, Call] | None = None
    ) -> None:
        """Record the bytes of a call's outputs and function state, and replace its earlier count.

        Arrays on the same memory count once; function state on the memory of an input or an output
        does not count.

        Args:
            arrays: the call's inputs and outputs.
            roots: the calls that own memory, by its id, to find the owner of a view's memory.
        """
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
            stash = _stash_bytes(entry, known)
        self.held_bytes -= entry.nbytes
        before = entry.stash_bytes
        entry.made(sum(int(root.nbytes) for root in made.values()), stash)
        self.held_bytes += entry.nbytes
        self.kept_bytes += max(0, stash - before)

    def _find_base(self, entry: CallBytes, inputs: Any, made: dict[int, Any], roots: Any) -> None:
        """Remove the memory of other calls from ``made``, and record the outputs as views."""
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
            entry.group = group.group
            group.views.append(entry.call)
            group.is_kept = group.is_kept or entry.is_kept

    def _offer(self, entry: CallBytes) -> None:
        """Make a call a candidate for eviction if that is allowed and frees memory."""
        call = entry.call
        nbytes = entry.output_bytes if entry.is_there and entry.is_kept else 0
        if entry.has_stash:
            nbytes += entry.stash_bytes
        if nbytes and call.index not in self._locks and entry.may_run_again:
            self._candidates.hold(call.index, nbytes)
        else:
            self._candidates.lock(call.index)

    # -- making room -----------------------------------------------------------------------

    def sweep(self) -> None:
        """Stop counting outputs that backward does not read and no variable holds any more."""
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
        entry.is_there = False

    def free(self, wanted: int, rank: int) -> int:
        """Evict at least this many bytes, if there are enough candidates. Returns the bytes freed.

        Args:
            wanted: bytes to free.
            rank: the rank of the function that runs next.
        """
        freed = self._free(wanted, rank)
        if freed < wanted and self._users:
            self.offer_again()
            freed += self._free(wanted - freed, rank)
        return freed

    def _free(self, wanted: int, rank: int) -> int:
        """Evict candidates, cheapest first, until enough is freed or none is left."""
        freed, has_more = 0, True
        while has_more:
            has_more = False
            for number in self._candidates.choose(rank):
                freed += self._evict(self._entries[number])
                has_more = freed < wanted
                if not has_more:
                    break
        return freed

    def offer_again(self) -> None:
        """Make calls candidates again that variables held, because those may be freed by now."""
        users, self._users = self._users, []
        for entry in users:
            self._offer(entry)

    def _evict(self, entry: CallBytes) -> int:
        """Drop a call's arrays; return the bytes freed.

        A call that the user's variables hold is set aside for `offer_again`.
        """
        number = entry.call.index
        if entry.is_held:
            self._candidates.lock(number)
            self._users.append(entry)
            return 0
        before = entry.nbytes
        if entry.may_run_again:
            entry.drop()
            self._candidates.go(number)
        else:
            self._candidates.lock(number)
        self.held_bytes -= before - entry.nbytes
        return before - entry.nbytes

    # -- backward --------------------------------------------------------------------------

    def lock(self, calls: Iterable[Call]) -> list[int]:
        """Protect calls from eviction until the returned numbers are given to `unlock`."""
        numbers = list(self._numbers(calls))
        for number in numbers:
            self._locks[number] = self._locks.get(number, 0) + 1
            self._candidates.lock(number)
        return numbers

    def unlock(self, numbers: Iterable[int]) -> None:
        """Allow calls to be evicted again, unless another `lock` protects them."""
        for number in numbers:
            count = self._locks.pop(number) - 1
            if count:
                self._locks[number] = count
            else:
                self._offer(self._entries[number])

    def unlock_all(self) -> None:
        """Allow all calls to be evicted again, after an error ended the work that needed them."""
        self.unlock([number for number, count in self._locks.items() for _ in range(count)])

    def _numbers(self, calls: Iterable[Call]) -> Iterator[int]:
        """Yield the numbers of some calls, and of the calls whose memory their outputs are on."""
        for call in calls:
            yield call.index
            group = self._entries[call.index].group
            if group != call.index:
                yield group

    def restored(self, call: Call, arrays: Arrays) -> None:
        """Account for a call that was recomputed."""
        entry = self._entries[call.index]
        self._candidates.restored(call.index)
        self._count(entry, arrays)

    def release_values(self, call: Call) -> None:
        """Release recomputed outputs of a call, and stop counting them if nothing holds them."""
        call.release_values()
        entry = self._group(call.index)
        if entry.call is call and not entry.is_kept and not call.is_held():
            self._died(entry)

    def done(self, call: Call) -> None:
        """Drop a call after its step of backward, because all its readers are done."""
        entry = self._entries[call.index]
        self._candidates.lock(call.index)
        self._candidates.restored(call.index)
        if call.again:
            before = entry.nbytes
            entry.drop()
            self.held_bytes -= before - entry.nbytes


Arrays = tuple[Sequence[Any], Sequence[Any]]
"""The inputs and the outputs of a call."""


def _stash_bytes(entry: CallBytes, known: set[int]) -> int:
    """Return the bytes that evicting a call's function state frees.

    A drawn mask, such as dropout's, is kept as bits, and counts without these. For any other state,
    memory in ``known``, by id, does not count.
    """
    call = entry.call
    owner = owner_of(call.func)
    named = {name: getattr(owner, name, None) for name in call.stash.names}
    lists = {name: [a for _, a in arrays_in([(name, held)])] for name, held in named.items()}
    found = {name: arrays for name, arrays in lists.items() if arrays}
    mask, packed = packing(call.func, found)
    if entry.kind.draws:
        return mask - packed
    roots = {id(root): root for arrays in found.values() for root in map(root_of, arrays)}
    return sum(int(root.nbytes) for key, root in roots.items() if key not in known)
