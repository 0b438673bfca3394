"""The backward pass of an exported step, in the order of a tape.

The order is Chainer's: of the calls whose outputs have gradients, the one farthest from the
inputs; of several, the one that was found first (`chainer._backprop`). A gradient that is the
output's own is shared, and goes when nobody needs it; two for one tensor are added at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from umem.onnx.exported.tape_calls import TapeCall
from umem.trace.arithmetic import FLOAT32
from umem.trace.events import Access, Alloc, Event, Free, Mark, Op


@dataclass
class Gradients:
    """Gradients by tensor name, each in an array that several tensors may share.

    Args:
        fresh: the first tensor's number that is free.
    """

    fresh: int
    of: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    _users: dict[int, int] = field(default_factory=dict)

    def begin(self, name: str, nbytes: int, label: str) -> Iterator[Event]:
        """Yield the allocation of an output's gradient, which the loss provides."""
        yield from self._new(nbytes, label)
        self._set(name, self.fresh - 1)

    def backward(self, calls: Sequence[TapeCall], last: Sequence[int]) -> Iterator[Event]:
        """Yield all events of backward, starting with the calls ``last``."""
        by_number = {call.number: call for call in calls}
        seen: set[int] = set()
        waiting: list[tuple[int, int, int]] = []

        def add(number: int) -> None:
            if number in by_number and number not in seen:
                heapq.heappush(waiting, (-by_number[number].rank, len(seen), number))
                seen.add(number)

        for number in last:
            add(number)
        while waiting:
            call = by_number[heapq.heappop(waiting)[2]]
            yield from self._step(call)
            for number in call.before:
                add(number)

    def _step(self, call: TapeCall) -> Iterator[Event]:
        """Yield the events of one call's backward."""
        given = [self.of.pop(name) for name in call.outputs if name in self.of]
        if not given:
            return
        made: list[tuple[str, int]] = []
        for way in call.ways:
            if not way.shared:
                yield from self._new(way.nbytes, f"{call.label}Grad")
            made.append((way.name, given[0] if way.shared else self.fresh - 1))
        writes = dict.fromkeys(tensor for _, tensor in made if tensor not in given)
        if writes:
            reads = (*call.reads, *map(self.whole, dict.fromkeys(given)))
            yield _op(f"{call.label}Grad", reads, [*map(self.whole, writes)], call)
        for name, tensor in made:
            yield from self._add(name, tensor)
        yield Mark("backward", call.number)
        for tensor in given:
            yield from self._drop(tensor)

    def _add(self, name: str, tensor: int) -> Iterator[Event]:
        """Accumulate a gradient of a tensor."""
        if name not in self.of:
            self._set(name, tensor)
            return
        first = self.of[name]
        self._users[tensor] = self._users.get(tensor, 0) + 1
        yield from self._new(max(self.sizes[first], self.sizes[tensor]), "Add")
        total = self.fresh - 1
        reads = [self.whole(one) for one in dict.fromkeys((first, tensor))]
        yield _op("Add", reads, [self.whole(total)])
        self._set(name, total)
        yield from self._drop(first)
        yield from self._drop(tensor)

    def _new(self, nbytes: int, label: str) -> Iterator[Event]:
        self.sizes[self.fresh] = nbytes
        self.fresh += 1
        yield Alloc(self.fresh - 1, nbytes, "gradient", label)

    def _set(self, name: str, tensor: int) -> None:
        self.of[name] = tensor
        self._users[tensor] = self._users.get(tensor, 0) + 1

    def _drop(self, tensor: int) -> Iterator[Event]:
        self._users[tensor] -= 1
        if not self._users[tensor]:
            yield Free(tensor)

    def whole(self, tensor: int) -> Access:
        """Return the access to all of a gradient."""
        return Access(tensor, 0, self.sizes[tensor])


def _op(
    name: str, reads: Sequence[Access], writes: Sequence[Access], call: TapeCall | None = None
) -> Op:
    """Return an operation of backward: of a call, or a sum of gradients."""
    traffic = sum(stop - start for _, start, stop in (*reads, *writes))
    flops = sum(stop - start for _, start, stop in writes) // 4 if call is None else call.flops
    workspace = 0 if call is None else call.workspace_bytes
    return Op(
        name, "backward", tuple(reads), tuple(writes), flops, traffic, workspace_bytes=workspace,
        arithmetic=FLOAT32 if call is None else call.arithmetic,
    )  # fmt: skip
