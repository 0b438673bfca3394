"""Copies of pinned memory on streams that only copy run concurrently in simulated time.

Models: an event after such a copy completes when the copy does; operations that wait for it, or run
on the same stream, continue then. Does not model: library calls on a stream that so far has only
copied, which do not wait for its copies; concurrent operations.
"""

from __future__ import annotations

from umem.devices.virtual.driver import covered
from umem.devices.virtual.model import Model
from umem.host_cuda import DEFAULT_STREAMS
from umem.trace import Access


class CopyStreams:
    """Tracks streams that only copy pinned memory, and the ends of their copies.

    Guarded by the runtime's lock.

    Args:
        model: the GPU's model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._computing: set[int] = set(DEFAULT_STREAMS)
        self._over: dict[int, float] = {}

    def may_take(self, stream: int) -> bool:
        """Tell whether a stream has only copied so far."""
        return stream not in self._computing

    def copy(self, stream: int, access: Access, to_host: bool) -> None:
        """Copy a part of a tensor to pinned memory, or from it."""
        model, (number, low, high) = self._model, access
        model.clocks.launch(None)
        tensor = model.tensors[number]
        if tensor.managed:
            blocks = covered(tensor.part(low, high))
            moves = model.driver.residency.touch(*blocks, write=not to_host)
            model.counters.moves.add(moves)
            model.clocks.move(moves, overlap=True)
        self._over[stream] = model.copies.run("send" if to_host else "fetch", high - low)[0]

    def compute(self, stream: int) -> None:
        """Run an operation on a stream, after its copies."""
        if stream not in self._computing:
            self._computing.add(stream)
            self._model.clock.wait(self._over.pop(stream, 0.0))

    def restart(self) -> None:
        """Restart simulated time, with all copies finished."""
        self._over.clear()

    def over(self, stream: int, seconds: float) -> float:
        """Return the end of a stream's work; ``seconds`` if no copy ends later."""
        return max(seconds, self._over.get(stream, 0.0))

    def wait(self, stream: int, seconds: float) -> None:
        """Make a stream wait for a time."""
        if self.may_take(stream):
            self._over[stream] = max(seconds, self._over.get(stream, 0.0))
        else:
            self._model.clock.wait(seconds)
