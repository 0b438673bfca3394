"""Managed memory with `umem.chainer.LookaheadPrefetch`: what it would do, as hints in a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.planner.prefetch.moves import NOTHING, ROOM, MovePlan, plan_moves
from umem.planner.prefetch.order import Iteration, Order
from umem.predict.techniques.subject import Subject
from umem.predict.techniques.technique import Prepared
from umem.trace.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace
from umem.trace.walk import Alive, numbered_by_birth
from umem.units import format_bytes

DEPTH = 2
LINE = f"with umem.managed(), umem.chainer.LookaheadPrefetch({DEPTH}):"


def prepare(subject: Subject, gpu: GpuSpec) -> Prepared:
    """Every step but the first is helped, as by a `LookaheadPrefetch` that has learned it."""
    return lookahead(subject, subject.trace, gpu, LINE)


def lookahead(subject: Subject, trace: Trace, gpu: GpuSpec, line: str) -> Prepared:
    """Lookahead on what was made of a step.

    Raises:
        StateError: it has nothing to do, or the step does not fit managed memory either.
    """
    step = subject.replays.step(trace, gpu, "managed")
    if step.reason is not None:
        raise StateError(step.reason)
    reserved = step.cost.reserved_peak_bytes or 0
    if reserved <= gpu.usable_bytes:
        raise StateError(
            f"it moves nothing: {format_bytes(reserved)} are reserved, and all of that has room "
            f"in {format_bytes(gpu.usable_bytes)} of VRAM"
        )
    hinted = subject.made_once(
        ("lookahead", id(trace), gpu.usable_bytes),
        lambda: with_moves(trace, DEPTH, round(ROOM * gpu.usable_bytes)),
    )
    if len(hinted) == len(trace):
        raise StateError(
            "it moves nothing: the arrays have room, and only the gaps between them have none"
        )
    return Prepared(hinted, line, "managed", hintless=trace)


def with_moves(trace: Trace, depth: int, capacity_bytes: int) -> Trace:
    """A trace with the hints that `LookaheadPrefetch` gives: learns a step, helps the next.

    Its tensors are numbered by birth.
    """
    helper = _Helper(depth, capacity_bytes)
    found: list[Event] = []
    ends = (i for i in range(len(trace.events) - 1, -1, -1) if trace.events[i] == Mark("step"))
    last = next(ends, len(trace.events))  # what it learns there helps no step
    for index, event in enumerate(numbered_by_birth(trace.events)):
        found.append(event)
        if index < last:
            found += helper.after(event)
    return trace.with_events(found)


class _Helper:
    """Follows a trace as `umem.chainer.lookahead.session` follows a run.

    Tensors are numbered by birth, which an `Iteration` knows old ones by.
    """

    def __init__(self, depth: int, capacity_bytes: int) -> None:
        self._depth, self._capacity = depth, capacity_bytes
        self._alive = Alive()
        self._bytes: dict[int, int] = {}
        self._iteration = Iteration(0)
        self._order: Order | None = None
        self._moves: MovePlan = NOTHING
        self._follows = False

    def after(self, event: Event) -> Sequence[Hint]:
        """The hints that come after an event."""
        if isinstance(event, Op):
            return self._after_op(event)
        self._alive.follow(event)
        if isinstance(event, Alloc):
            self._bytes[event.tensor] = event.nbytes
        elif isinstance(event, Free):
            self._iteration.free(event.tensor)
        elif event == Mark("step"):
            self._learn()
        return ()

    def _after_op(self, op: Op) -> Sequence[Hint]:
        number = len(self._iteration.steps)
        step = self._iteration.add(op, self._bytes)
        if self._order is None or not self._follows:
            return ()
        self._follows = self._order.steps[number : number + 1] == (step,)
        if not self._follows or not self._moves.any:
            return ()
        fetches, sends = self._moves.fetches[number], self._moves.sends[number]
        return [*self._hints(self._order, fetches, 0), *self._hints(self._order, sends, "cpu")]

    def _hints(self, order: Order, slots: Sequence[int], place: int | str) -> Iterator[Hint]:
        births = self._iteration.tensors
        for slot in slots:
            birth = births[slot] if slot < len(births) else order.kept.get(slot)
            alloc = None if birth is None else self._alive.tensors.get(birth)
            if alloc is not None:
                whole = Access(alloc.tensor, 0, alloc.nbytes)
                yield Hint("prefetch", (whole,), place, overlap=True)

    def _learn(self) -> None:
        kinds = {birth: alloc.kind for birth, alloc in self._alive.tensors.items()}
        known = self._order
        order = self._iteration.order(self._iteration.kept(kinds if known is None else None))
        if known is None or (known.steps, known.kept.keys()) != (order.steps, order.kept.keys()):
            self._moves = plan_moves(order, self._depth, self._capacity)
        self._order, self._follows = order, True
        self._iteration = Iteration(len(self._bytes))
