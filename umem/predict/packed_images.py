"""Images that NumPy leaves in larger arrays, and how large they are by themselves.

Chainer sums columns into an image with a border and hands out a view of its inside
(chainer/utils/conv.py, ``col2im_cpu``), which keeps the border with it; on CuPy there is none
(``col2im_gpu``). A forward call says how large its output is; the gradient of an input is as large
as the input.
"""

from __future__ import annotations

from collections.abc import Iterator

from umem.trace.events import Access, Alloc, Event, Hint, Mark, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations

FROM_COLUMNS = frozenset((
    "AveragePooling2DGrad", "AveragePoolingNDGrad", "Deconvolution2DFunction", "DeconvolutionND",
    "MaxPoolingNDGrad", "Unpooling2D", "UnpoolingND",
))  # fmt: skip
"""Functions that sum columns into images."""


def packed_images(trace: Trace) -> Trace:
    """The trace with images of their own size; itself where none is larger."""
    sizes = own_sizes(trace)
    return trace.with_events(_packed(trace, sizes)) if sizes else trace


def own_sizes(trace: Trace) -> dict[int, int]:
    """By tensor, the bytes of an image that lies in a larger array.

    Cost: one pass over the events.
    """
    if not any(op.name in FROM_COLUMNS for op in trace.ops):
        return {}
    allocs = allocations(trace.events)
    found: dict[int, int] = {}
    inputs: dict[int, int] = {}  # by the number of a call, the bytes of what it reads first
    waiting: list[int] = []  # images of a call's backward

    def note(tensor: int, nbytes: int) -> None:
        if 0 < nbytes < allocs[tensor].nbytes:
            found[tensor] = nbytes

    for event in trace.events:
        if isinstance(event, Op):
            made = [a.tensor for a in event.writes] if event.name in FROM_COLUMNS else []
            entry = event.entry
            if event.phase == "backward":
                waiting += made
            elif entry is not None:
                if len(made) == 1:
                    note(made[0], entry.gradient_bytes)
                if event.reads:
                    first = event.reads[0]
                    own = found.get(first.tensor, first.stop - first.start)
                    inputs[entry.number] = min(own, first.stop - first.start)
        elif isinstance(event, Mark) and event.entry is not None:
            for tensor in waiting:
                note(tensor, inputs.get(event.entry, 0))
            waiting.clear()
    return found


def _packed(trace: Trace, sizes: dict[int, int]) -> Iterator[Event]:
    whole = {n: a.nbytes for n, a in allocations(trace.events).items() if n in sizes}

    def shrunk(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            Access(n, start * sizes[n] // whole[n], stop * sizes[n] // whole[n])
            if n in sizes
            else Access(n, start, stop)
            for n, start, stop in accesses
        )

    for event in trace.events:
        if isinstance(event, Alloc) and event.tensor in sizes:
            yield event._replace(nbytes=sizes[event.tensor])
        elif isinstance(event, Op):
            yield event._replace(reads=shrunk(event.reads), writes=shrunk(event.writes))
        elif isinstance(event, Hint):
            yield event._replace(accesses=shrunk(event.accesses))
        else:
            yield event
