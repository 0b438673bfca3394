"""The backward pass of an exported step, in the order of a tape, and the optimizer's update.

The order is Chainer's: of the calls whose outputs have gradients, the one farthest from the inputs
is next; of several, the one found first (`chainer._backprop`). A gradient that is the output's own
array is shared, and freed after its last use; two gradients of one tensor are added at once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from umem.trace import Access, Alloc, Event, Free, Mark, Op

OptimizerName = Literal["adam", "momentum", "sgd", "none"]
OPTIMIZERS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "adam": ("Adam", ("m", "v"), 10),
    "momentum": ("MomentumSGD", ("v",), 4),
    "sgd": ("SGD", (), 2),
}
"""For each optimizer: Chainer's rule of that name, its states, and its operations an element."""


class GradientWay(NamedTuple):
    """The destination of one input's gradient: its tensor and bytes.

    ``shared``: the gradient is the output's gradient, or a view of it.
    """

    name: str
    nbytes: int
    shared: bool


class TapeCall(NamedTuple):
    """A call, with the facts that backward needs.

    Attributes:
        op: its forward operation.
        rank: its distance from the inputs.
        outputs: names of its outputs.
        reads: its saved tensors.
        ways: the gradients that it makes.
        flops: the operations of its backward.
        before: numbers of the calls that made its inputs.
    """

    op: Op
    rank: int
    outputs: tuple[str, ...]
    reads: tuple[Access, ...]
    ways: tuple[GradientWay, ...]
    flops: int
    before: tuple[int, ...]


@dataclass
class Gradients:
    """Gradients by tensor name, each in an array that several tensors may share.

    Args:
        fresh: the first unused tensor number.
    """

    fresh: int
    of: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    _users: Counter[int] = field(default_factory=Counter)

    def begin(self, name: str, nbytes: int, label: str) -> Iterator[Event]:
        """Yield the allocation of an output's gradient, which the loss provides."""
        yield from self._new(nbytes, label)
        self._set(name, self.fresh - 1)

    def backward(self, calls: Sequence[TapeCall], last: Sequence[int]) -> Iterator[Event]:
        """Yield all events of backward, starting with the calls ``last``."""
        seen: set[int] = set()
        waiting: list[tuple[int, int, int]] = []

        def add(numbers: Sequence[int]) -> None:
            for number in numbers:
                if number >= 0 and number not in seen:
                    heapq.heappush(waiting, (-calls[number].rank, len(seen), number))
                    seen.add(number)

        add(last)
        while waiting:
            number = heapq.heappop(waiting)[2]
            yield from self._step(number, calls[number])
            add(calls[number].before)

    def _step(self, number: int, call: TapeCall) -> Iterator[Event]:
        """Yield the events of one call's backward."""
        given = [self.of.pop(name) for name in call.outputs if name in self.of]
        if not given:
            return
        made: list[tuple[str, int]] = []
        for way in call.ways:
            if not way.shared:
                yield from self._new(way.nbytes, f"{call.op.name}Grad")
            made.append((way.name, given[0] if way.shared else self.fresh - 1))
        writes = dict.fromkeys(tensor for _, tensor in made if tensor not in given)
        if writes:
            reads = (*call.reads, *map(self.whole, dict.fromkeys(given)))
            yield _op(
                f"{call.op.name}Grad", reads, [*map(self.whole, writes)], call.flops,
                workspace_bytes=call.op.workspace_bytes, arithmetic=call.op.arithmetic,
            )  # fmt: skip
        for name, tensor in made:
            yield from self._add(name, tensor)
        yield Mark("backward", number)
        for tensor in given:
            yield from self._drop(tensor)

    def _add(self, name: str, tensor: int) -> Iterator[Event]:
        """Accumulate a gradient of a tensor."""
        if name not in self.of:
            self._set(name, tensor)
            return
        first = self.of[name]
        self._users[tensor] += 1
        yield from self._new(max(self.sizes[first], self.sizes[tensor]), "Add")
        total = self.fresh - 1
        reads = [self.whole(one) for one in dict.fromkeys((first, tensor))]
        yield _op("Add", reads, [self.whole(total)], self.sizes[total] // 4, workspace_bytes=0)
        self._set(name, total)
        yield from self._drop(first)
        yield from self._drop(tensor)

    def _new(self, nbytes: int, label: str) -> Iterator[Event]:
        self.sizes[self.fresh] = nbytes
        self.fresh += 1
        yield Alloc(self.fresh - 1, nbytes, "gradient", label)

    def _set(self, name: str, tensor: int) -> None:
        self.of[name] = tensor
        self._users[tensor] += 1

    def _drop(self, tensor: int) -> Iterator[Event]:
        self._users[tensor] -= 1
        if not self._users[tensor]:
            yield Free(tensor)

    def whole(self, tensor: int) -> Access:
        """Return the access to all of a gradient."""
        return Access(tensor, 0, self.sizes[tensor])


def _op(
    name: str, reads: Sequence[Access], writes: Sequence[Access], flops: int, **more: Any
) -> Op:
    traffic = sum(stop - start for _, start, stop in (*reads, *writes))
    return Op(name, "backward", tuple(reads), tuple(writes), flops, traffic, **more)


# -- the update ------------------------------------------------------------------------------------


def update_events(
    optimizer: OptimizerName, parameters: Mapping[str, Alloc], gradients: Gradients
) -> Iterator[Event]:
    """Yield the update of every parameter with a gradient; nothing for ``"none"``.

    Each state has its parameter's shape and type.
    """
    if optimizer == "none":
        return
    rule, states, count = OPTIMIZERS[optimizer]
    fresh = gradients.fresh
    for name, parameter in parameters.items():
        if name in gradients.of:
            gradient, nbytes = gradients.whole(gradients.of[name]), parameter.nbytes
            written = [Access(parameter.tensor, 0, nbytes)]
            for label in states:
                yield Alloc(fresh, nbytes, "state", f"{rule}.{label}")
                written.append(Access(fresh, 0, nbytes))
                fresh += 1
            reads = (*written, gradient)
            traffic = sum(access.stop for access in (*reads, *written))
            flops = count * gradient.stop // 4
            yield Op(rule, "update", reads, tuple(written), flops, traffic, workspace_bytes=0)
    yield Mark("step")
