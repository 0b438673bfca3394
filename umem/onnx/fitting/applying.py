"""A plan applied to a trace: the events that the step would leave if it followed the plan.

Outputs and function state that the plan does not keep are freed after their last use in forward.
Before a block's backward begins, the calls that the plan recomputes run once more on fresh
tensors. Kept tensors are freed after their last use, but not before the backward of their own
block, unless the plan frees early. Offloaded tensors are copied to pinned host memory and back
beside the operations, as `umem.chainer.Recompute` with offload does it. Random numbers that a
call draws are drawn once and kept, dropout's masks as one bit an element.

Models: `umem.planner.schedule.agenda` with liveness. Does not model: the order in which a plan
takes the backward of branches (the trace's own order stays, so tensors that this order reads early
are recomputed or fetched early); statistics that recomputing would change; masks that a user gave,
or of other widths than four bytes an element.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from umem.errors import GraphError
from umem.onnx.fitting.step_problem import ForwardPass, is_mask, packed_bytes, passes
from umem.planner import Graph
from umem.planner.from_trace import DRAWS
from umem.planner.plans import Plan
from umem.planner.schedule import Agenda, agenda
from umem.trace.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace, tail
from umem.trace.walk import allocations


def apply(trace: Trace, plan: Plan) -> Trace:
    """Return the trace of the same step under a plan.

    Every forward pass with the planned calls follows the plan, and so does its backward; all
    other events stay. A plan that recomputes nothing leaves masks as they are.

    Cost: some passes over the events.

    Args:
        trace: one step or more.
        plan: made for a graph of the trace, or of another with the same calls.

    Raises:
        GraphError: no forward pass has the planned calls, or an operation uses a tensor that the
            plan has dropped and not recomputed.
    """
    names = sorted(name for block in plan.blocks for name in block)
    planned = [one for one in passes(trace) if sorted(one.names) == names]
    if not planned:
        raise GraphError("no forward pass of the trace has the calls that the plan was made for")
    graph = Graph.from_trace(tail(trace, planned[0].start))
    due = agenda(graph, plan, planned[0].names)
    return trace.with_events(_PlannedTrace(trace, planned, plan, due).events())


class _PlannedTrace:
    """The events of a trace with the frees, recomputed calls and copies of a plan.

    Args:
        trace: the step.
        planned: its forward passes that follow the plan.
        plan: the kept tensors, and until when they are kept.
        due: the calls recomputed and the tensors fetched before each step of backward.
    """

    def __init__(
        self, trace: Trace, planned: Sequence[ForwardPass], plan: Plan, due: Agenda
    ) -> None:
        self._events = trace.events
        self._planned = {one.turn: one for one in planned}
        self._blocks = [list(map(call_number, names)) for names in plan.blocks]
        self._block = {call: i for i, block in enumerate(self._blocks) for call in block}
        self._recomputed = due.recomputed
        self._steps = {k: v for one in planned for k, v in _steps(trace.events, one).items()}
        self._step: int | None = None
        self._is_kept = _kept(planned, plan)
        self._frees_early = plan.frees_early
        # Inputs of calls that are recomputed and that no call of the pass has made: they live as
        # long as they did in the trace, and until they are read again.
        self._inputs = _inputs(planned, self._recomputed) - self._is_kept.keys()
        self._lasting = set(self._inputs)
        self._read_in_backward = {
            a.tensor for op in trace.ops if op.phase == "backward" for a in op.reads
        }
        fresh = 1 + max(allocations(trace.events), default=0)
        self._writer = _EventWriter(self._is_kept.keys() | self._inputs, fresh)
        self._masks = _Masks(self._writer, planned if any(plan.recomputed) else ())
        self._offloaded = _Offloaded(self._writer, trace.events, planned, plan, due)
        self._waiting: list[Alloc] = []  # of an operation to come
        self._pass: ForwardPass | None = None  # whose backward it is
        self._waits: set[int] = set()  # blocks whose backward has not begun
        self._turned: set[int] = set()  # tensors of passes whose forward is over

    def events(self) -> list[Event]:
        """Return the events of the trace under the plan."""
        for index, event in enumerate(self._events):
            if index in self._planned:
                self._begin_backward(self._planned[index])
                self._offloaded.begin_backward(index)
            if isinstance(event, Op):
                self._on_op(event, self._steps.get(index))
                self._offloaded.after(index)
            elif isinstance(event, Alloc) and self._pass is not None:
                self._waiting.append(event)
            elif isinstance(event, Alloc):
                self._writer.alloc(event)
            elif isinstance(event, Free):
                self._on_free(event)
            else:
                self._write_waiting()
                self._writer.other(event)
        self._write_waiting()
        return self._writer.finish(self._lasting)

    def _on_op(self, op: Op, step: int | None) -> None:
        """Write an operation, after the recomputing and fetching that the plan puts before it.

        Args:
            op: the operation.
            step: the call whose backward it is a part of, where the trace says so.
        """
        if op.phase in ("forward", "update"):
            self._pass = None
        now = self._pass
        if now is None:
            self._writer.may_free()
        elif step != self._step or any(tensor in now.near for tensor, _, _ in op.reads):
            # Another call's backward. Operations that read gradients alone sum those of the last.
            self._writer.may_free()
            self._before_step(now, op, now.calls_near(op) if step is None else {step})
        self._step = step
        self._write_waiting()
        self._writer.op(op)
        if now is None:
            self._writer.may_free()  # before the next one's outputs are there
            self._masks.pack(op)

    def _on_free(self, free: Free) -> None:
        """Write a free of the trace, or defer it where the plan decides when to free the tensor."""
        tensor = free.tensor
        if any(alloc.tensor == tensor for alloc in self._waiting):
            self._write_waiting()
        if tensor in self._inputs:
            self._writer.hold(tensor)
            self._lasting.discard(tensor)
        elif tensor not in self._is_kept:
            self._writer.other(free)
        elif tensor not in self._turned:
            if not self._is_kept[tensor]:
                self._writer.hold(tensor)
                self._writer.drop(tensor)
        elif self._pass is not None and tensor not in self._read_in_backward:
            self._writer.hold(tensor)  # used where no recorder sees it
        self._writer.may_free()

    def _write_waiting(self) -> None:
        for alloc in self._waiting:
            self._writer.alloc(alloc)
        self._waiting.clear()

    # -- backward --------------------------------------------------------------------------

    def _begin_backward(self, now: ForwardPass) -> None:
        """Drop the outputs that the plan does not keep, at the end of a forward pass."""
        self._pass, self._waits = now, set(range(len(self._blocks)))
        self._writer.may_free()
        for alloc in now.allocs:
            self._turned.add(alloc.tensor)
            if not self._is_kept[alloc.tensor]:
                self._writer.drop(alloc.tensor)

    def _before_step(self, now: ForwardPass, op: Op, calls: set[int]) -> None:
        """Recompute, unpack and fetch the tensors that an operation of backward needs.

        Begins the last block with one of ``calls``, and the blocks that make the tensors it reads.

        Args:
            now: the pass whose backward the operation is part of.
            op: the operation.
            calls: the call whose backward the operation is part of, or where the trace does not
                say, all that it could be.
        """
        if calls:
            self._offloaded.before_step(calls)
            self._begin_block(now, max(self._block[call] for call in calls))
        for tensor, _, _ in op.reads:
            self._masks.unpack(tensor)
            self._offloaded.fetch(tensor)
            for call in sorted(now.near.get(tensor, ())):
                if self._writer.is_dropped(tensor):
                    self._begin_block(now, self._block[call])
            self._make(now, tensor)

    def _begin_block(self, now: ForwardPass, block: int) -> None:
        """Recompute the calls that the plan recomputes for a block, once, before its backward."""
        if block not in self._waits:
            return
        self._waits.discard(block)
        for call in () if self._frees_early else self._blocks[block]:
            for alloc in now.made[call]:
                if self._is_kept[alloc.tensor]:
                    self._writer.hold(alloc.tensor)
        for call in self._recomputed.get(self._blocks[block][-1], ()):
            for access in now.calls[call].reads:
                self._make(now, access.tensor)
            self._recompute(now.calls[call], now.made[call])

    def _make(self, now: ForwardPass, tensor: int) -> None:
        """Recompute a dropped tensor that the trace's order of backward needs before the plan's.

        Does so, with the tensor's inputs, only under a plan that frees early.
        """
        if not self._frees_early or not self._writer.is_dropped(tensor):
            return
        for call, made in zip(now.calls, now.made, strict=True):
            own = {alloc.tensor for alloc in made}
            if tensor in own:
                for access in call.reads:
                    if access.tensor not in own:  # a call may read what it has written
                        self._make(now, access.tensor)
                self._recompute(call, made)

    def _recompute(self, op: Op, made: Sequence[Alloc]) -> None:
        """Recompute a call, without its in-place writes, such as those of statistics."""
        self._writer.may_free()
        for access in op.reads:
            self._offloaded.fetch(access.tensor)
        for alloc in made:
            self._masks.unpack(alloc.tensor)
            if self._frees_early and not _is_drawn(op, alloc):
                self._writer.drop(alloc.tensor)
            if self._writer.is_dropped(alloc.tensor):
                self._writer.alloc(alloc)
        writes = tuple(access for access in op.writes if access.tensor in self._is_kept)
        self._writer.op(op._replace(phase="backward", writes=writes, entry=None))
        self._writer.may_free()
        self._masks.pack(op)


def call_number(name: str) -> int:
    """Return the index of a call in its pass, the number that its node's name ends with."""
    return int(name.rpartition("#")[2])


def _steps(events: Sequence[Event], one: ForwardPass) -> dict[int, int]:
    """Map operations of a pass's backward to the call whose backward they are, where marks say."""
    number = {op.entry.number: call for call, op in enumerate(one.calls) if op.entry is not None}
    found: dict[int, int] = {}
    waiting: list[int] = []
    for place in range(one.turn, len(events)):
        event = events[place]
        if isinstance(event, Op):
            if event.phase != "backward":
                break
            waiting.append(place)
        elif isinstance(event, Mark) and event.label == "backward":
            if event.entry in number:
                found |= dict.fromkeys(waiting, number[event.entry])
            waiting.clear()
    return found


def _kept(planned: Iterable[ForwardPass], plan: Plan) -> dict[int, bool]:
    """Map each tensor that a planned call makes to True if the tensor or a view of it is kept.

    Random numbers that a call draws are always kept.
    """
    kept, stashed = set(map(call_number, plan.kept)), set(map(call_number, plan.stashed))
    tensors = {
        access.tensor for one in planned for call in kept for access in one.calls[call].writes
    }
    return {
        alloc.tensor: (_is_drawn(op, alloc) or call in stashed)
        if alloc.kind == "stash"
        else alloc.tensor in tensors
        for one in planned
        for call, (op, made) in enumerate(zip(one.calls, one.made, strict=True))
        for alloc in made
    }


def _is_drawn(op: Op, alloc: Alloc) -> bool:
    return alloc.kind == "stash" and op.name in DRAWS


def _inputs(planned: Iterable[ForwardPass], recomputed: dict[int, list[int]]) -> set[int]:
    """Return the tensors that the recomputed calls read."""
    calls = {call for due in recomputed.values() for call in due}
    return {a.tensor for one in planned for call in calls for a in one.calls[call].reads}


class _Masks:
    """Dropout's masks, packed to one bit an element while no operation uses them.

    Args:
        writer: writes the masks' events, and follows the masks.
        planned: the forward passes that draw the masks.
    """

    def __init__(self, writer: _EventWriter, planned: Iterable[ForwardPass]) -> None:
        self._writer = writer
        self._allocs = {
            alloc.tensor: alloc
            for one in planned
            for op, made in zip(one.calls, one.made, strict=True)
            for alloc in made
            if is_mask(op, alloc)
        }
        self._bits: dict[int, int] = {}

    def pack(self, op: Op) -> None:
        """Pack the masks that a call has written, and drop them in full."""
        for tensor, _, _ in op.writes:
            mask = self._allocs.get(tensor)
            if mask is not None:
                if tensor not in self._bits:
                    nbytes = packed_bytes(mask.nbytes)
                    bits = mask._replace(nbytes=nbytes, label=f"{mask.label} (bits)")
                    self._bits[tensor] = self._writer.make(bits)
                self._writer.drop(tensor)

    def unpack(self, tensor: int) -> None:
        """Allocate a packed mask in full, before an operation that uses it."""
        if tensor in self._bits:
            self._writer.hold(self._bits[tensor])
            if self._writer.is_dropped(tensor):
                self._writer.alloc(self._allocs[tensor])


class _Offloaded:
    """The tensors that a plan offloads, copied to the host and back.

    A tensor is sent after its last use in forward, freed on the device after the call that the
    plan names, and fetched before the step of backward that the plan names, or before an
    operation that needs it earlier.

    Args:
        writer: writes the copies.
        events: the trace.
        planned: its forward passes that follow the plan.
        plan: its ``moves`` are the offloaded tensors.
        due: the order of the steps of backward.
    """

    def __init__(
        self,
        writer: _EventWriter,
        events: Sequence[Event],
        planned: Iterable[ForwardPass],
        plan: Plan,
        due: Agenda,
    ) -> None:
        self._writer = writer
        self._sends: dict[int, list[Alloc]] = {}  # by event
        self._leaves: dict[int, list[Alloc]] = {}
        self._fetches: dict[int, list[tuple[int, Alloc]]] = {}  # by pass: place, tensor
        self._allocs: dict[int, Alloc] = {}
        self._pending: list[tuple[int, Alloc]] = []
        self._place = due.places
        for one in planned if plan.moves else ():
            self._find(events, one, plan)

    def _find(self, events: Sequence[Event], one: ForwardPass, plan: Plan) -> None:
        """Find the events after which the offloaded tensors of a pass are sent, and freed."""
        last: dict[int, int] = {}
        ends: list[int] = []
        for index in range(one.start, one.turn):
            event = events[index]
            if isinstance(event, Op):
                last.update((access.tensor, index) for access in (*event.reads, *event.writes))
                if len(ends) < len(one.calls) and event is one.calls[len(ends)]:
                    ends.append(index)
        for move in plan.moves:
            for alloc in one.made[call_number(move.node)]:
                if (alloc.kind == "stash") == (move.what == "stash"):
                    leaves = max(ends[call_number(move.leaves_after)], last[alloc.tensor])
                    self._sends.setdefault(last[alloc.tensor], []).append(alloc)
                    self._leaves.setdefault(leaves, []).append(alloc)
                    fetch = self._place[call_number(move.fetched_before)], alloc
                    self._fetches.setdefault(one.turn, []).append(fetch)
                    self._allocs[alloc.tensor] = alloc

    def after(self, index: int) -> None:
        """Send the tensors that an operation of forward used last, and drop those due after it."""
        for alloc in self._sends.get(index, ()):
            self._copy("send", alloc)
        for alloc in self._leaves.get(index, ()):
            self._writer.hold(alloc.tensor)
            self._writer.drop(alloc.tensor)
            self._writer.may_free()

    def begin_backward(self, index: int) -> None:
        """Queue the fetches of the backward that begins at an event."""
        self._pending = sorted(self._fetches.get(index, ()), key=lambda pair: -pair[0])

    def before_step(self, calls: Iterable[int]) -> None:
        """Fetch the tensors that the plan fetches up to the backward of the first of some calls."""
        place = min(self._place[call] for call in calls)
        while self._pending and self._pending[-1][0] <= place:
            self.fetch(self._pending.pop()[1].tensor)

    def fetch(self, tensor: int) -> None:
        """Allocate a tensor and begin to fetch it, if it is offloaded and not on the device."""
        alloc = self._allocs.get(tensor)
        if alloc is not None and self._writer.is_dropped(tensor):
            self._writer.alloc(alloc._replace(uploaded=False))
            self._copy("fetch", alloc)

    def _copy(self, action: str, alloc: Alloc) -> None:
        whole = Access(alloc.tensor, 0, alloc.nbytes)
        self._writer.other(Hint(action, (whole,), overlap=True))


class _EventWriter:
    """Writes the events of a trace, and frees each followed tensor after its last use.

    A followed tensor is freed at the first place after its last use where `may_free` was called.
    A dropped tensor that is allocated again has a new number.

    Args:
        followed: the numbers of the tensors.
        fresh: the first number that no tensor of the trace has.
    """

    def __init__(self, followed: Iterable[int], fresh: int) -> None:
        self._events: list[Event] = []
        self._now: dict[int, int | None] = {tensor: tensor for tensor in followed}
        self._fresh = fresh
        self._last: dict[int, int] = {}
        self._places: list[int] = []

    def may_free(self) -> None:
        """Allow followed tensors whose last use is before this place to be freed here."""
        self._places.append(len(self._events) - 1)

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
            self._last[now] = max(self._last.get(now, 0), len(self._events) - 1)

    def alloc(self, alloc: Alloc) -> None:
        """Allocate a tensor, for the first time or again."""
        if alloc.tensor in self._now:
            number = alloc.tensor
            if self.is_dropped(number):
                number, self._fresh = self._fresh, self._fresh + 1
            self._now[alloc.tensor] = number
            self._last[number] = len(self._events)
            alloc = alloc._replace(tensor=number)
        self._events.append(alloc)

    def make(self, alloc: Alloc) -> int:
        """Allocate and follow a tensor that is not in the trace; return its number."""
        number, self._fresh = self._fresh, self._fresh + 1
        self._now[number] = number
        self.alloc(alloc._replace(tensor=number))
        return number

    def op(self, op: Op) -> None:
        """Write an operation.

        Raises:
            GraphError: it uses a tensor that was dropped.
        """
        used = {tensor for tensor, _, _ in (*op.reads, *op.writes) if tensor in self._now}
        if used:
            op = op._replace(reads=self._mapped(op.reads, op), writes=self._mapped(op.writes, op))
            for tensor in used:
                number = self._now[tensor]
                assert number is not None
                self._last[number] = len(self._events)
        self._events.append(op)

    def other(self, event: Event) -> None:
        """Write an event that is no operation; a hint loses the accesses of dropped tensors."""
        if isinstance(event, Hint):
            here = [access for access in event.accesses if not self.is_dropped(access.tensor)]
            event = event._replace(accesses=self._mapped(here))
        self._events.append(event)

    def finish(self, lasting: Iterable[int] = ()) -> list[Event]:
        """Return all events, with the frees of all followed tensors except ``lasting``."""
        ends: dict[int, list[Free]] = {}
        kept = set(lasting)
        for number, last in self._last.items():
            if number not in kept:
                place = bisect_left(self._places, last)
                whole = len(self._events) - 1
                end = self._places[place] if place < len(self._places) else whole
                ends.setdefault(end, []).append(Free(number))
        found: list[Event] = []
        freed: set[int] = set()
        for place, event in enumerate(self._events):
            if freed and isinstance(event, Hint):  # it is no use: nothing is kept for it
                here = (access for access in event.accesses if access.tensor not in freed)
                event = event._replace(accesses=tuple(here))
            found.append(event)
            if place in ends:
                found += ends[place]
                freed.update(free.tensor for free in ends[place])
        return found

    def _mapped(self, accesses: Iterable[Access], op: Op | None = None) -> tuple[Access, ...]:
        """Return accesses with the numbers that the tensors have at this place.

        Raises:
            GraphError: a tensor was dropped.
        """
        found = []
        for access in accesses:
            number = self._now.get(access.tensor, access.tensor)
            if number is None:
                name = "an operation" if op is None else repr(op.name)
                raise GraphError(
                    f"{name} uses tensor {access.tensor}, which the plan has dropped and not "
                    "recomputed: it was made for another graph"
                )
            found.append(access if number == access.tensor else access._replace(tensor=number))
        return tuple(found)
