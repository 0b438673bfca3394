"""Accumulation: a step's batch in micro-batches, one update, as `umem.chainer.accumulate` does it.

Each micro-batch is a forward and a backward of the step at its size. From the second on, backward
adds each gradient of a parameter to the sum so far, as Chainer does it: into a third array, after
the backward of the call that made the gradient. Inputs are slices of the whole batch, which stays
in memory.

Models: memory and times. Micro-batches after the third are like it, so that replays leave them out.
Does not model: the last micro-batch, where it is smaller than the others; the check of the first
step, which also takes a larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from umem.errors import StateError
from umem.predict.techniques.steady_state import START, STEP, distinct, period_of
from umem.trace.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace, tail
from umem.trace.walk import allocations, renumbered

MIXES = frozenset(("BatchNormalization",))
"""Functions that take statistics over the batch, which micro-batches would change."""
SUM = "_ + _"
"""The name of a sum of two gradients."""
SHOWN = 3
"""At most this many micro-batches of a step are replayed; later ones are like the third."""


def line(micro_batch: int) -> str:
    """Return the code of the context that turns accumulation on."""
    return f"umem.chainer.accumulate(optimizer, micro_batch={micro_batch})"


def check_splits(trace: Trace) -> None:
    """Check that the batch of a step can be split.

    Raises:
        StateError: the step has no backward, no update or several optimizers in turn, or a
            function that mixes samples.
    """
    mixing = next((op.name for op in trace.ops if op.name in MIXES), None)
    if mixing is not None:
        raise StateError(
            f"the batch cannot be split: {mixing} takes statistics over all of it. Recomputation "
            "gives the step of the whole batch exactly"
        )
    steps = _operations(trace)
    if len(steps) < 2:
        raise StateError("the batch cannot be split: no optimizer's update is in the trace")
    if not any(op.phase == "backward" for op in trace.ops):
        raise StateError("the batch cannot be split: no backward pass is in the trace")
    if period_of(steps[:-1]) > 1:
        raise StateError("the batch cannot be split: optimizers take turns in a step")


def _operations(trace: Trace) -> list[list[str]]:
    steps: list[list[str]] = [[]]
    for event in trace.events:
        if isinstance(event, Op):
            steps[-1].append(event.name)
        elif event == STEP:
            steps.append([])
    return steps


def accumulated(step: Trace, whole: Trace, passes: int) -> Trace:
    """Return the trace of a step in micro-batches.

    Args:
        step: the step at the size of a micro-batch; of several steps the last is taken.
        whole: the same step at the size of the batch.
        passes: the number of micro-batches.

    Raises:
        StateError: the step cannot be split.
    """
    check_splits(step)
    pairs = zip(_allocs(step), _allocs(whole), strict=False)  # as scaling matches them
    wholes = {
        small.tensor: large.nbytes
        for small, large in pairs
        if small.kind == "input" and small.label == large.label
    }
    return step.with_events(_Passes(_last_step(step), wholes).events(passes))


def _allocs(trace: Trace) -> Iterator[Alloc]:
    return (event for event in _last_step(trace) if isinstance(event, Alloc))


def _last_step(trace: Trace) -> list[Event]:
    """Return the events of the last whole step, after uploads of the tensors that it found."""
    trace = distinct(trace)
    ends = [index + 1 for index, event in enumerate(trace.events) if event == STEP]
    return (tail(trace, ends[-2]) if len(ends) > 1 else trace).events


class _Passes:
    """Repeats forward and backward of a step before its update.

    Args:
        step: the events of one step.
        wholes: by tensor of an input, its bytes in the whole batch.
    """

    def __init__(self, step: list[Event], wholes: dict[int, int]) -> None:
        begin = step.index(START) + 1 if START in step else 0
        turn = _end_of_backward(step)
        self._found, self._body, self._rest = step[:begin], step[begin:turn], step[turn:]
        self._fresh = count(1 + max(allocations(step)))
        freed = {event.tensor for event in self._body if isinstance(event, Free)}
        self._made = {
            event.tensor: event
            for event in self._body
            if isinstance(event, Alloc) and (not event.uploaded or event.tensor in freed)
        }
        self._wholes = {n: nbytes for n, nbytes in wholes.items() if n not in self._made}
        updates = [op for op in self._rest if isinstance(op, Op) and op.phase == "update"]
        seconds = sum(op.host_seconds or 0.0 for op in updates)
        self._seconds_a_byte = seconds / max(1, sum(op.traffic_bytes for op in updates))
        self._used_after = _used(self._rest)
        self._finals = self._gradients_of_parameters()
        self._roots = {_root(final, self._body, self._made): final for final in self._finals}
        self._last_write = {  # views, such as a reshape's, write them again
            access.tensor: op for op in self._ops() for access in op.writes
        }
        self._held: dict[int, int] = {}  # sums of gradients so far, by the step's own gradients
        self._numbers = {n: n for n in allocations(step)}  # those of the current pass
        self._alive: dict[int, None] = {}
        self._waiting: list[int] = []  # gradients to be added, until their call's backward ends

    def _gradients_of_parameters(self) -> set[int]:
        read = {
            access.tensor
            for op in self._rest
            if isinstance(op, Op) and op.phase == "update"
            for access in op.reads
        }
        return {tensor for tensor in read & self._made.keys() if self._is_gradient(tensor)}

    def _is_gradient(self, tensor: int) -> bool:
        return self._made[tensor].kind == "gradient"

    def events(self, passes: int) -> Iterator[Event]:
        """Yield the events of the step with this many passes."""
        has_marks = any(isinstance(event, Mark) for event in self._body)
        numbers = [op.entry.number for op in self._ops() if op.entry]
        entries = 1 + max(numbers, default=-1) - min(numbers, default=0)
        yield from (self._whole(event) for event in self._found)
        for number in range(passes):
            for event in self._body:
                if has_marks and isinstance(event, Mark):
                    yield from self._add_waiting()
                yield from self._repeated(event, number, entries * number)
                if not has_marks:
                    yield from self._add_waiting()
            yield from self._add_waiting()
            yield from self._end_pass(number == passes - 1)
        for event in self._rest:
            if not (isinstance(event, Free) and self._is_over(event.tensor)):
                yield renumbered(event, self._numbers)

    def _ops(self) -> Iterator[Op]:
        return (event for event in self._body if isinstance(event, Op))

    def _is_over(self, tensor: int) -> bool:
        return tensor in self._made and tensor not in self._alive

    def _repeated(self, event: Event, number: int, entries: int) -> Iterator[Event]:
        """Yield an event of a pass, with its own tensors, slices of inputs and entries."""
        if isinstance(event, (Alloc, Free)) and event.tensor not in self._made:
            if number == 0:
                yield self._whole(event)
            return
        if isinstance(event, Alloc):
            self._numbers[event.tensor] = next(self._fresh) if number else event.tensor
            self._alive[event.tensor] = None
        elif isinstance(event, Free):
            self._alive.pop(event.tensor, None)
        elif isinstance(event, Mark) and event.entry is not None:
            event = event._replace(entry=event.entry + entries)
        elif isinstance(event, Op):
            if number:
                self._waiting += [
                    tensor
                    for tensor, _, _ in event.writes
                    if tensor in self._roots and self._last_write[tensor] is event
                ]
            event = self._sliced(event, number, entries)
        yield renumbered(event, self._numbers)

    def _sliced(self, op: Op, number: int, entries: int) -> Op:
        entry = op.entry
        if entry is not None and entries:
            sources = tuple(s if s < 0 else s + entries for s in entry.sources)
            entry = entry._replace(number=entry.number + entries, sources=sources)
        reads = tuple(self._slice(access, number) for access in op.reads)
        return op._replace(reads=reads, entry=entry)

    def _slice(self, access: Access, number: int) -> Access:
        whole = self._wholes.get(access.tensor)
        if whole is None:
            return access
        start = min(number * access.stop, whole - min(whole, access.stop))
        return access._replace(start=start + access.start, stop=start + access.stop)

    def _whole(self, event: Event) -> Event:
        if isinstance(event, Alloc) and event.tensor in self._wholes:
            return event._replace(nbytes=max(event.nbytes, self._wholes[event.tensor]))
        return event

    def _add_waiting(self) -> Iterator[Event]:
        """Yield the sums of this pass's waiting gradients and those of the passes before."""
        for root in dict.fromkeys(self._waiting):
            mine, before = self._numbers[root], self._held[self._roots[root]]
            nbytes = self._made[root].nbytes
            total = next(self._fresh)
            reads = Access(before, 0, nbytes), Access(mine, 0, nbytes)
            yield Alloc(total, nbytes, "gradient", SUM)
            yield self._sum(reads, Access(total, 0, nbytes), nbytes)
            yield Free(mine)
            yield Free(before)
            self._numbers[root] = total
        self._waiting.clear()

    def _sum(self, reads: tuple[Access, ...], write: Access, nbytes: int) -> Op:
        seconds, traffic = 3 * nbytes * self._seconds_a_byte, 3 * nbytes
        return Op(SUM, "backward", reads, (write,), nbytes // 4, traffic, "stream", seconds, 0)

    def _end_pass(self, is_last: bool) -> Iterator[Event]:
        """Free the pass's tensors except gradients of parameters and those that the update uses."""
        self._held = {final: self._numbers[final] for final in self._finals}
        kept = self._finals | (self._used_after if is_last else set())
        for tensor in [tensor for tensor in self._alive if tensor not in kept]:
            del self._alive[tensor]
            yield Free(self._numbers[tensor])


def _end_of_backward(step: list[Event]) -> int:
    """Return the index of the first event after backward and the frees and marks that follow."""
    last = max(i for i, e in enumerate(step) if isinstance(e, Op) and e.phase == "backward")
    for index in range(last + 1, len(step)):
        event = step[index]
        if not isinstance(event, Free) and not (isinstance(event, Mark) and event != STEP):
            return index
    return len(step)


def _used(events: Iterable[Event]) -> set[int]:
    ops = (event for event in events if isinstance(event, (Op, Hint)))
    return {
        access.tensor
        for op in ops
        for access in ((*op.reads, *op.writes) if isinstance(op, Op) else op.accesses)
    }


def _root(final: int, body: Iterable[Event], made: dict[int, Alloc]) -> int:
    """Return the first summand of a parameter's gradient, to which a pass adds the earlier sum."""
    sums = {
        op.writes[0].tensor: op.reads[0].tensor
        for op in body
        if isinstance(op, Op) and op.name == SUM and op.phase == "backward" and op.writes
    }
    while sums.get(final) in made:
        final = sums[final]
    return final
