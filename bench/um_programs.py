"""Small programs whose time on real GPUs is published, as the events of a trace.

Nothing here computes a time: a program is a list of allocations, operations and hints, each with
the bytes that it touches. What they cost is the model's business (`umem.replay`). The last step
of a program is the one that the publication timed. um_gcn.py has the graph network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import umem
from umem.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace
from umem.units import BLOCK_BYTES

FLOAT = 4
PAGE_BYTES = 4096
SECTOR_BYTES = 32
"""The least that a GPU reads from its memory at once."""


class Program:
    """Builds a trace. A tensor is a number; an operation names the tensors it touches."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._events: list[Event] = []
        self._sizes: dict[int, int] = {}
        self._count = 0

    @property
    def trace(self) -> Trace:
        """What was written down so far."""
        return Trace(self._events, backend="model")

    def new(self, nbytes: int, label: str, kind: str = "array", *, uploaded: bool = False) -> int:
        """Allocate a tensor."""
        self._count += 1
        self._sizes[self._count] = nbytes
        self.allocated_bytes += nbytes
        self._events.append(Alloc(self._count, nbytes, kind, label, uploaded))
        return self._count

    def made(self, name: str, nbytes: int, reads: Iterable[int | Access] = (), **costs: int) -> int:
        """Allocate a tensor and run the operation that fills it; ``costs`` as for `op`."""
        tensor = self.new(nbytes, name)
        self.op(name, reads, (tensor,), **costs)
        return tensor

    def free(self, *tensors: int) -> None:
        """Free tensors."""
        for tensor in tensors:
            del self._sizes[tensor]
            self._events.append(Free(tensor))

    def op(
        self,
        name: str,
        reads: Iterable[int | Access],
        writes: Iterable[int | Access],
        *,
        flops: int = 0,
        traffic: int | None = None,
        pattern: str = "stream",
    ) -> None:
        """Run an operation; if nothing else is said it moves every byte it touches once.

        What it changes in place is listed under ``writes`` alone: the model walks the lists one
        after the other, and the program walks such an array once.
        """
        read = tuple(map(self._access, reads))
        written = tuple(map(self._access, writes))
        if traffic is None:
            traffic = sum(stop - start for _, start, stop in (*read, *written))
        self._events.append(Op(name, "array", read, written, flops, traffic, pattern))

    def prefetch(self, tensor: int, place: int | str) -> None:
        """Prefetch all of a tensor; ``"cpu"`` is how an array that the host wrote begins."""
        self._events.append(Hint("prefetch", (self._access(tensor),), place))

    def step(self) -> None:
        """The end of a step, and the beginning of the next."""
        self._events.append(Mark("step"))

    def _access(self, item: int | Access) -> Access:
        return item if isinstance(item, Access) else Access(item, 0, self._sizes[item])


def last_step(program: Program, gpu: str, **how: Any) -> float:
    """Simulated seconds of a program's last step."""
    return umem.replay(program.trace, gpu, **how).figures.step_seconds[-1]


def on_host(program: Program, nbytes: int, label: str) -> int:
    """A managed array that the host has written."""
    tensor = program.new(nbytes, label)
    program.prefetch(tensor, "cpu")
    return tensor


def read_from_host(nbytes: int) -> Program:
    """One kernel reads an array that the host has written."""
    program = Program()
    array = on_host(program, nbytes, "array")
    program.step()
    program.op("read", (array,), (), flops=nbytes // FLOAT)
    program.step()
    return program


def prefetch_from_host(nbytes: int) -> Program:
    """An array that the host has written is prefetched."""
    program = Program()
    array = on_host(program, nbytes, "array")
    program.step()
    program.prefetch(array, 0)
    program.step()
    return program


def copy_from_host(nbytes: int) -> Program:
    """An array is copied from pinned host memory (replay it as ``unmanaged``)."""
    program = Program()
    program.step()
    program.new(nbytes, "array", uploaded=True)
    program.step()
    return program


def fill(nbytes: int, before_bytes: int) -> Program:
    """A kernel writes a fresh array, after another has written ``before_bytes``."""
    program = Program()
    if before_bytes:
        program.made("fill", before_bytes)
    program.step()
    program.made("fill", nbytes)
    program.step()
    return program


def page_stride(nbytes: int, passes: int = 3) -> Program:
    """A kernel changes one word in each page of an array, over and over.

    A page costs one sector read and one written. The array begins on the host; the first passes
    are not timed, and the publication gives the median of many.
    """
    program = Program()
    array = on_host(program, nbytes, "array")
    for _ in range(passes):
        program.step()
        program.op(
            "add_one",
            (),
            (array,),
            flops=nbytes // PAGE_BYTES,
            traffic=2 * SECTOR_BYTES * (nbytes // PAGE_BYTES),
            pattern="strided",
        )
    program.step()
    return program


def weight_stream(layers: int, rows: int, columns: int, tokens: int, rounds: int = 2) -> Program:
    """A matrix-vector product with each layer's weights in turn, for one token after the other.

    The weights begin on the host. The first round of tokens is not timed.
    """
    program = Program()
    size = rows * columns * FLOAT
    weights = [on_host(program, size, f"weight{number}") for number in range(layers)]
    state = program.made("token", columns * FLOAT)
    for _ in range(rounds):
        program.step()
        for _ in range(tokens):
            for weight in weights:
                program.op("gemv", (weight,), (state,), flops=2 * rows * columns)
    program.step()
    return program


def blocks(count: int) -> int:
    """Bytes of so many blocks."""
    return count * BLOCK_BYTES
