"""A trace as it would be under a plan of recomputation.

Outputs and stashes that the plan does not keep go after their last use in forward. Before a
block's backward begins, what the plan runs again runs again, on fresh tensors, each gone after
its last use. What a plan keeps stays until its own block's turn at least, unless it frees early,
and goes after its last use. Everything else is as it was.

What a plan moves goes down and comes back as copies.

Models: `umem.planner.schedule` with liveness, as `umem.chainer.Recompute` carries it out, which
also keeps dropout's masks as bits. Does not model: the order that a plan gives to the backward of
branches (the trace's own order stays); a second run's own statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from umem.errors import GraphError
from umem.planner.from_trace import DRAWS
from umem.planner.plans import Plan
from umem.predict.techniques.budget_graph import ForwardPass, passes
from umem.predict.techniques.drawn import Masks, is_mask
from umem.predict.techniques.stream import Moved, Stream, call_number
from umem.trace.trace import Alloc, Event, Free, Hint, Mark, Op, Trace
from umem.trace.walk import allocations


def rewrite(trace: Trace, plan: Plan) -> Trace:
    """The trace under a plan; every pass of the calls that were planned is rewritten.

    A plan that runs nothing again leaves masks as they are.

    Args:
        trace: one step or more.
        plan: made for a graph of the trace, or of another with the same calls.

    Raises:
        GraphError: no pass has the calls that were planned, or something uses a value that the
            plan has dropped and not made again.
    """
    names = sorted(name for block in plan.blocks for name in block)
    planned = [one for one in passes(trace) if sorted(one.names) == names]
    if not planned:
        raise GraphError("no forward pass of the trace has the calls that the plan was made for")
    return trace.with_events(_Rewriter(trace, planned, plan).events())


class _Rewriter:
    """Sends the events of a trace to a stream, and what runs again in between."""

    def __init__(self, trace: Trace, planned: Sequence[ForwardPass], plan: Plan) -> None:
        self._events = trace.events
        self._planned = {one.turn: one for one in planned}
        self._blocks = [list(map(call_number, names)) for names in plan.blocks]
        self._steps = {k: v for one in planned for k, v in _steps(trace.events, one).items()}
        self._step: int | None = None
        self._block = {index: i for i, block in enumerate(self._blocks) for index in block}
        self._again = [list(map(call_number, names)) for names in plan.recomputed]
        self._is_kept = _kept(planned, plan)
        self._frees_early = plan.frees_early
        # What else runs again reads: it lives as long as it did, and until it was read.
        self._read_again = _reads(planned, self._again) - self._is_kept.keys()
        self._lasting = set(self._read_again)
        self._read_in_backward = _read_in_backward(trace)
        self._left = _left_over(trace)
        fresh = 1 + max(allocations(trace.events), default=0)
        self._stream = Stream(self._is_kept.keys() | self._read_again, fresh)
        self._masks = Masks(self._stream, _masks(planned) if any(plan.recomputed) else ())
        self._moved = Moved(self._stream, trace.events, planned, plan)
        self._waiting: list[Alloc] = []  # of an operation to come
        self._pass: ForwardPass | None = None  # whose backward it is
        self._waits: set[int] = set()  # blocks whose turn has not come
        self._turned: set[int] = set()  # tensors of passes whose forward is over

    def events(self) -> list[Event]:
        """All events."""
        for index, event in enumerate(self._events):
            if index in self._planned:
                self._turn(self._planned[index])
                self._moved.turn(index)
            if isinstance(event, (Alloc, Free)) and event.tensor in self._left:
                continue
            if isinstance(event, Op):
                self._on_op(event, self._steps.get(index))
                self._moved.after(index)
            elif isinstance(event, Alloc) and self._pass is not None:
                self._waiting.append(event)
            elif isinstance(event, Alloc):
                self._stream.alloc(event)
            elif isinstance(event, Free):
                self._on_free(event)
            else:
                self._release()
                self._stream.other(event)
        self._release()
        return self._stream.finish(self._lasting)

    def _on_op(self, op: Op, step: int | None) -> None:
        if op.phase in ("forward", "update"):
            self._pass = None
        now = self._pass
        if now is None:
            self._stream.rest()
        elif step != self._step or any(tensor in now.near for tensor, _, _ in op.reads):
            # Another call's backward. What reads gradients alone adds them up for the one before.
            self._stream.rest()
            self._begin_what_is_due(now, op, now.calls_near(op) if step is None else {step})
        self._step = step
        self._release()
        self._stream.op(op)
        if now is None:
            self._stream.rest()  # before the next one's outputs are there
            self._masks.pack(op)

    def _on_free(self, free: Free) -> None:
        tensor = free.tensor
        if any(alloc.tensor == tensor for alloc in self._waiting):
            self._release()
        if tensor in self._read_again:
            self._stream.hold(tensor)
            self._lasting.discard(tensor)
        elif tensor not in self._is_kept:
            self._stream.other(free)
        elif tensor not in self._turned:
            if not self._is_kept[tensor]:
                self._stream.hold(tensor)
                self._stream.drop(tensor)
        elif self._pass is not None and tensor not in self._read_in_backward:
            self._stream.hold(tensor)  # used where no recorder sees it
        self._stream.rest()

    def _release(self) -> None:
        for alloc in self._waiting:
            self._stream.alloc(alloc)
        self._waiting.clear()

    # -- backward --------------------------------------------------------------------------

    def _turn(self, now: ForwardPass) -> None:
        """Forward is over: what is not kept is gone."""
        self._pass, self._waits = now, set(range(len(self._again)))
        self._stream.rest()
        for alloc in now.allocs:
            self._turned.add(alloc.tensor)
            if not self._is_kept[alloc.tensor]:
                self._stream.drop(alloc.tensor)

    def _begin_what_is_due(self, now: ForwardPass, op: Op, calls: set[int]) -> None:
        """Begin the block that an operation belongs to, and those that it needs something of.

        Where the trace does not say whose backward it is part of, it is one of some ``calls``.
        """
        if calls:
            self._moved.before(calls)
            self._begin(now, max(self._block[index] for index in calls))
        for tensor, _, _ in op.reads:
            self._masks.unpack(tensor)
            self._moved.bring(tensor)
            for index in sorted(now.near.get(tensor, ())):
                if self._stream.is_gone(tensor):
                    self._begin(now, self._block[index])
            self._make(now, tensor)

    def _begin(self, now: ForwardPass, block: int) -> None:
        """A block's backward begins: run again what must, once."""
        if block not in self._waits:
            return
        self._waits.discard(block)
        for index in () if self._frees_early else self._blocks[block]:
            for alloc in now.made[index]:
                if self._is_kept[alloc.tensor]:
                    self._stream.hold(alloc.tensor)
        for index in self._again[block]:
            for access in now.calls[index].reads:
                self._make(now, access.tensor)
            self._run_again(now.calls[index], now.made[index])

    def _make(self, now: ForwardPass, tensor: int) -> None:
        """Run again what made a tensor, if it is gone: the trace's order is not the plan's."""
        if not self._frees_early or not self._stream.is_gone(tensor):
            return
        for call, made in zip(now.calls, now.made, strict=True):
            if any(alloc.tensor == tensor for alloc in made):
                for access in call.reads:
                    self._make(now, access.tensor)
                self._run_again(call, made)

    def _run_again(self, op: Op, made: Sequence[Alloc]) -> None:
        """Run a call once more; what it changed in place, such as statistics, it leaves alone."""
        self._stream.rest()
        for access in op.reads:
            self._moved.bring(access.tensor)
        for alloc in made:
            self._masks.unpack(alloc.tensor)
            if self._frees_early and not _is_drawn(op, alloc):
                self._stream.drop(alloc.tensor)
            if self._stream.is_gone(alloc.tensor):
                self._stream.alloc(alloc)
        writes = tuple(access for access in op.writes if access.tensor in self._is_kept)
        self._stream.op(op._replace(phase="backward", writes=writes, entry=None))
        self._stream.rest()
        self._masks.pack(op)


def _steps(events: Sequence[Event], one: ForwardPass) -> dict[int, int]:
    """By operation of a pass's backward, the call whose backward it is part of, where marks say."""
    index = {op.entry.number: call for call, op in enumerate(one.calls) if op.entry is not None}
    found: dict[int, int] = {}
    waiting: list[int] = []
    for place in range(one.turn, len(events)):
        event = events[place]
        if isinstance(event, Op):
            if event.phase != "backward":
                break
            waiting.append(place)
        elif isinstance(event, Mark) and event.label == "backward":
            if event.entry in index:
                found |= dict.fromkeys(waiting, index[event.entry])
            waiting.clear()
    return found


def _kept(planned: Iterable[ForwardPass], plan: Plan) -> dict[int, bool]:
    """Tell which tensors of a pass are kept, or a view of them; what was drawn always is."""
    kept, stashed = set(map(call_number, plan.kept)), set(map(call_number, plan.stashed))
    tensors = {
        access.tensor for one in planned for index in kept for access in one.calls[index].writes
    }
    return {
        alloc.tensor: (_is_drawn(op, alloc) or index in stashed)
        if alloc.kind == "stash"
        else alloc.tensor in tensors
        for one in planned
        for index, (op, made) in enumerate(zip(one.calls, one.made, strict=True))
        for alloc in made
    }


def _is_drawn(op: Op, alloc: Alloc) -> bool:
    return alloc.kind == "stash" and op.name in DRAWS


def _masks(planned: Iterable[ForwardPass]) -> list[Alloc]:
    calls = [pair for one in planned for pair in zip(one.calls, one.made, strict=True)]
    return [alloc for op, made in calls for alloc in made if is_mask(op, alloc)]


def _reads(planned: Iterable[ForwardPass], again: Iterable[Sequence[int]]) -> set[int]:
    """All that calls read that run again."""
    numbers = [index for block in again for index in block]
    return {a.tensor for one in planned for index in numbers for a in one.calls[index].reads}


def _read_in_backward(trace: Trace) -> set[int]:
    return {a.tensor for op in trace.ops if op.phase == "backward" for a in op.reads}


def _left_over(trace: Trace) -> set[int]:
    """Return what is there from the graph of the step before, which somebody holds and nobody uses.

    Under a plan, that graph's arrays went in its own backward.
    """
    left = {
        event.tensor
        for event in trace.events
        if isinstance(event, Alloc) and event.uploaded and event.kind in ("activation", "stash")
    }
    for event in trace.events if left else ():
        if isinstance(event, Op):
            left.difference_update(a.tensor for a in (*event.reads, *event.writes))
        elif isinstance(event, Hint):
            left.difference_update(a.tensor for a in event.accesses)
    return left
