"""A plan applied to an exported step: the events of the step if it followed the plan.

Outputs and function state that the plan does not keep are freed after their last use in forward.
Before a block's backward begins, the calls that the plan recomputes run again on new tensors. Kept
tensors are freed after their last use, but not before the backward of their own block, unless the
plan frees early. Offloaded tensors are copied to pinned host memory and back in parallel with the
operations, as by `umem.chainer.Recompute` with offload. Dropout's masks are drawn once and kept as
one bit an element.

Models: `umem.planner.schedule.agenda` with liveness. Does not model: a plan's order of branches in
backward (the step keeps its own order, so tensors that this order reads early are recomputed or
fetched early); masks of other widths than four bytes an element.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from umem.onnx.fitting.step_problem import forward_pass, is_mask, packed_bytes
from umem.planner import Graph, Plan, agenda
from umem.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace, allocations


def apply(trace: Trace, plan: Plan) -> Trace:
    """Return the trace of a step under a plan that was made for it.

    A plan that recomputes nothing leaves masks as they are.

    Cost: some passes over the events.
    """
    return trace.with_events(_PlannedStep(trace, plan).events())


class _PlannedStep:
    """The events of a step with the frees, recomputed calls and copies of a plan."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._events, self._pass = trace.events, forward_pass(trace)
        due = agenda(Graph.from_trace(trace), plan, self._pass.names)
        self._recomputed, self._place = due.recomputed, due.places
        self._blocks = [list(map(call_number, names)) for names in plan.blocks]
        self._block = {call: i for i, block in enumerate(self._blocks) for call in block}
        self._waits = set(self._block.values())  # blocks whose backward has not begun
        self._frees_early = plan.frees_early
        self._made = {alloc.tensor: alloc for made in self._pass.made for alloc in made}
        self._masks: set[int] = set()
        self._freed = set(self._freed_tensors(plan))
        self._packs = self._masks if any(plan.recomputed) else set()
        self._bits: dict[int, int] = {}  # by mask, the tensor that has it packed
        read = {a.tensor for op in trace.ops if op.phase == "backward" for a in op.reads}
        self._needed = read & self._made.keys()
        allocs = allocations(trace.events).values()
        # Tensors of calls without a backward are followed too: recomputed calls may read them.
        self._followed = {a.tensor for a in allocs if a.kind in ("activation", "stash")}
        self._writer = _EventWriter(self._followed, 1 + max(alloc.tensor for alloc in allocs))
        self._sends: dict[int, list[int]] = {}  # tensors to send, by the event after which
        self._leaves: dict[int, list[int]] = {}
        self._fetches: list[tuple[int, int]] = []  # place in backward and tensor, last first
        self._moved: set[int] = set()
        self._find_moves(plan)

    def _freed_tensors(self, plan: Plan) -> Iterator[int]:
        """Yield the tensors that do not stay from forward into backward; note all masks.

        Tensors stay if the plan keeps them or a view of them; masks stay too.
        """
        kept, stashed = set(map(call_number, plan.kept)), set(map(call_number, plan.stashed))
        stays = {access.tensor for call in kept for access in self._pass.calls[call].writes}
        for call, made in enumerate(self._pass.made):
            for alloc in made:
                if is_mask(self._pass.calls[call], alloc):
                    self._masks.add(alloc.tensor)
                elif (call not in stashed) if alloc.kind == "stash" else alloc.tensor not in stays:
                    yield alloc.tensor

    def _find_moves(self, plan: Plan) -> None:
        """Find the events after which offloaded tensors are sent, and freed."""
        last: dict[int, int] = {}
        ends: list[int] = []
        for index, op in enumerate(self._events[: self._pass.turn]):
            if isinstance(op, Op):
                last.update((access.tensor, index) for access in (*op.reads, *op.writes))
                if op.entry is not None:
                    ends.append(index)
        for move in plan.moves:
            for alloc in self._pass.made[call_number(move.node)]:
                if (alloc.kind == "stash") == (move.what == "stash"):
                    tensor = alloc.tensor
                    leaves = max(ends[call_number(move.leaves_after)], last[tensor])
                    self._sends.setdefault(last[tensor], []).append(tensor)
                    self._leaves.setdefault(leaves, []).append(tensor)
                    place = self._place[call_number(move.fetched_before)]
                    self._fetches.append((place, tensor))
                    self._moved.add(tensor)
        self._fetches.sort(key=lambda fetch: -fetch[0])

    def events(self) -> list[Event]:
        """Return the events of the step under the plan."""
        turn = self._pass.turn
        for index, event in enumerate(self._events[:turn]):
            if isinstance(event, Op):
                self._writer.may_free()
                self._writer.op(event)
                self._writer.may_free()  # before the next one's outputs are there
                self._pack(event)
                self._move(index)
            elif isinstance(event, Free) and event.tensor in self._made:
                if event.tensor in self._freed:
                    self._writer.hold(event.tensor)
                    self._writer.drop(event.tensor)
                self._writer.may_free()
            else:
                self._write(event)
        for tensor in self._freed:
            self._writer.drop(tensor)
        self._writer.may_free()
        step: list[Event] = []  # of one call's backward
        for event in self._events[turn:]:
            if isinstance(event, Free) and not step:
                self._write(event)
                continue
            step.append(event)
            if isinstance(event, Mark):
                self._write_step(step, event.entry)
                step = []
        self._write_step(step, None)
        return self._writer.finish()

    def _write(self, event: Event) -> None:
        """Write an event; the writer decides when followed tensors are freed."""
        if isinstance(event, Alloc):
            self._writer.alloc(event)
        elif isinstance(event, Op):
            self._writer.op(event)
        elif isinstance(event, Free):
            if event.tensor not in self._followed:
                self._writer.events.append(event)
            elif event.tensor not in self._needed:
                self._writer.hold(event.tensor)
            self._writer.may_free()
        else:
            self._writer.events.append(event)

    # -- backward --------------------------------------------------------------------------

    def _write_step(self, events: list[Event], call: int | None) -> None:
        """Write the backward of a call, after the plan's actions before it."""
        first = next((event for event in events if isinstance(event, Op)), None)
        if call is not None and first is not None:
            self._writer.may_free()
            self._before_step(first, call)
        for event in events:
            self._write(event)

    def _before_step(self, op: Op, call: int) -> None:
        """Recompute, unpack and fetch the tensors that a call's backward needs.

        Begins the call's block, and the blocks that make the tensors that the operation reads.
        """
        while self._fetches and self._fetches[-1][0] <= self._place[call]:
            self._fetch(self._fetches.pop()[1])
        self._begin_block(self._block[call])
        for tensor, _, _ in op.reads:
            self._unpack(tensor)
            self._fetch(tensor)
            for near in sorted(self._pass.near.get(tensor, ())):
                if self._writer.is_dropped(tensor):
                    self._begin_block(self._block[near])
            self._make(tensor)

    def _begin_block(self, block: int) -> None:
        """Recompute the calls that the plan recomputes for a block, once, before its backward."""
        if block not in self._waits:
            return
        self._waits.discard(block)
        for call in () if self._frees_early else self._blocks[block]:
            for alloc in self._pass.made[call]:
                if alloc.tensor not in self._freed:
                    self._writer.hold(alloc.tensor)
        for call in self._recomputed.get(self._blocks[block][-1], ()):
            for access in self._pass.calls[call].reads:
                self._make(access.tensor)
            self._recompute(call)

    def _make(self, tensor: int) -> None:
        """Recompute a dropped tensor that the step needs earlier than the plan does.

        Does so, with the tensor's inputs, only under a plan that frees early.
        """
        if not self._frees_early or not self._writer.is_dropped(tensor):
            return
        for call, made in enumerate(self._pass.made):
            own = {alloc.tensor for alloc in made}
            if tensor in own:
                for access in self._pass.calls[call].reads:
                    self._make(access.tensor)
                self._recompute(call)

    def _recompute(self, call: int) -> None:
        """Recompute a call, without its in-place writes, such as updates of statistics."""
        op = self._pass.calls[call]
        self._writer.may_free()
        for access in op.reads:
            self._fetch(access.tensor)
        for alloc in self._pass.made[call]:
            self._unpack(alloc.tensor)
            if self._frees_early and alloc.tensor not in self._masks:
                self._writer.drop(alloc.tensor)
            if self._writer.is_dropped(alloc.tensor):
                self._writer.alloc(alloc)
        writes = tuple(access for access in op.writes if access.tensor in self._made)
        self._writer.op(op._replace(phase="backward", writes=writes, entry=None))
        self._writer.may_free()
        self._pack(op)

    # -- masks -----------------------------------------------------------------------------

    def _pack(self, op: Op) -> None:
        """Pack the masks that a call has written, and drop them in full."""
        for tensor, _, _ in op.writes:
            if tensor in self._packs:
                if tensor not in self._bits:
                    mask = self._made[tensor]
                    bits = mask._replace(nbytes=packed_bytes(mask.nbytes))
                    self._bits[tensor] = self._writer.make(bits)
                self._writer.drop(tensor)

    def _unpack(self, tensor: int) -> None:
        """Allocate a packed mask in full, before an operation that uses it."""
        if tensor in self._bits:
            self._writer.hold(self._bits[tensor])
            if self._writer.is_dropped(tensor):
                self._writer.alloc(self._made[tensor])

    # -- offload ---------------------------------------------------------------------------

    def _move(self, index: int) -> None:
        """Send the tensors that an operation of forward used last, and drop those due after it."""
        for tensor in self._sends.get(index, ()):
            self._copy("send", tensor)
        for tensor in self._leaves.get(index, ()):
            self._writer.hold(tensor)
            self._writer.drop(tensor)
            self._writer.may_free()

    def _fetch(self, tensor: int) -> None:
        """Allocate a tensor and begin to fetch it, if it is offloaded and not on the device."""
        if tensor in self._moved and self._writer.is_dropped(tensor):
            self._writer.alloc(self._made[tensor])
            self._copy("fetch", tensor)

    def _copy(self, action: str, tensor: int) -> None:
        whole = Access(tensor, 0, self._made[tensor].nbytes)
        self._writer.events.append(Hint(action, self._writer.mapped((whole,)), overlap=True))


def call_number(name: str) -> int:
    """Return the index of a call in its pass, which is the number at the end of its node's name."""
    return int(name.rpartition("#")[2])


class _EventWriter:
    """Writes the events of a trace, and frees each followed tensor after its last use.

    A followed tensor is freed at the first place after its last use where `may_free` was called.
    A dropped tensor that is allocated again has a new number.

    Args:
        followed: the numbers of the followed tensors.
        fresh: the first unused tensor number.
    """

    def __init__(self, followed: Iterable[int], fresh: int) -> None:
        self.events: list[Event] = []
        self._now: dict[int, int | None] = {tensor: tensor for tensor in followed}
        self._fresh = fresh
        self._last: dict[int, int] = {}
        self._places: list[int] = []

    def may_free(self) -> None:
        """Allow followed tensors whose last use is before this place to be freed here."""
        self._places.append(len(self.events) - 1)

    def is_dropped(self, tensor: int) -> bool:
        """Return True if a tensor was dropped and not allocated again."""
        return self._now.get(tensor, tensor) is None

    def drop(self, tensor: int) -> None:
        """Drop a tensor; until it is allocated again, using it is an error."""
        self._now[tensor] = None

    def hold(self, tensor: int) -> None:
        """Keep a followed tensor allocated up to this place, used or not."""
        now = self._now[tensor]
        if now is not None:
            self._last[now] = max(self._last.get(now, 0), len(self.events) - 1)

    def alloc(self, alloc: Alloc) -> None:
        """Allocate a tensor, for the first time or again."""
        if alloc.tensor in self._now:
            number = alloc.tensor
            if self.is_dropped(number):
                number, self._fresh = self._fresh, self._fresh + 1
            self._now[alloc.tensor] = number
            self._last[number] = len(self.events)
            alloc = alloc._replace(tensor=number)
        self.events.append(alloc)

    def make(self, alloc: Alloc) -> int:
        """Allocate and follow a tensor that is not in the trace; return its number."""
        number, self._fresh = self._fresh, self._fresh + 1
        self._now[number] = number
        self.alloc(alloc._replace(tensor=number))
        return number

    def op(self, op: Op) -> None:
        """Write an operation."""
        op = op._replace(reads=self.mapped(op.reads), writes=self.mapped(op.writes))
        for tensor, _, _ in (*op.reads, *op.writes):
            if tensor in self._last:
                self._last[tensor] = len(self.events)
        self.events.append(op)

    def mapped(self, accesses: Iterable[Access]) -> tuple[Access, ...]:
        """Return accesses with the numbers that the tensors have at this place."""
        found = []
        for access in accesses:
            number = self._now.get(access.tensor, access.tensor)
            assert number is not None, "the plan was made for another step"
            found.append(access._replace(tensor=number))
        return tuple(found)

    def finish(self) -> list[Event]:
        """Return all events, with the frees of all followed tensors."""
        ends: dict[int, list[Free]] = {}
        for number, last in self._last.items():
            place = bisect_left(self._places, last)
            whole = len(self.events) - 1
            end = self._places[place] if place < len(self._places) else whole
            ends.setdefault(end, []).append(Free(number))
        found: list[Event] = []
        for index, event in enumerate(self.events):
            found += [event, *ends.get(index, ())]
        return found
