"""Exchange of gradients and parameters between ranks: shards, summed in the order of ranks.

All data is sent through the host, in pieces, so that messages and buffers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

BUFFER_BYTES = 16 << 20
"""The most bytes that a rank sends at once, and the most that it receives: a guess, large compared
with the latency of a message, not measured."""

Array = np.ndarray[Any, Any]
Read = Callable[[int, int, Array], None]
"""A function that copies a range of a flat vector, from and to, into an array."""


_METHODS = ("Alltoallv", "Allgatherv", "Isend", "allgather", "Get_rank")
"""Methods by which a communicator of mpi4py is recognised."""


def mpi_of(comm: Any) -> Any:
    """Return the mpi4py communicator that a communicator is or wraps.

    Raises:
        TypeError: it is neither mpi4py's nor ChainerMN's.
    """
    mpi = getattr(comm, "mpi_comm", comm)
    if not all(hasattr(mpi, name) for name in _METHODS):
        raise TypeError(
            "comm must be a communicator of ChainerMN (chainermn.create_communicator) or of mpi4py "
            f"(MPI.COMM_WORLD); got {type(comm).__name__}"
        )
    return mpi


def reduce_scatter_mean(mpi: Any, bounds: Sequence[int], read: Read, dtype: Any) -> Array:
    """Average a flat vector over ranks; each rank gets its shard of the mean (reduce-scatter).

    The sum starts with rank 0's values, adds rank 1's and so on, and is then multiplied by 1/N: the
    same bits with any MPI. Halves are added and divided as float32, and rounded once.

    Cost: a rank sends and receives its shard N - 1 times; two buffers of `BUFFER_BYTES`.

    Args:
        bounds: where the shards begin, and the end.
        read: this rank's vector.
    """
    rank, count = mpi.Get_rank(), mpi.Get_size()
    mean = np.empty(bounds[rank + 1] - bounds[rank], dtype)
    for begin, spans in _rounds(bounds, dtype):
        sent = _Pieces([stop - start for start, stop in spans], dtype)
        for (start, stop), piece in zip(spans, sent.pieces, strict=True):
            read(start, stop, piece)
        length = spans[rank][1] - spans[rank][0]
        received = _Pieces([length] * count, dtype)
        mpi.Alltoallv(sent.message, received.message)
        mean[begin : begin + length] = _mean(received.pieces)
    return mean


def _mean(pieces: list[Array]) -> Array:
    first, *others = pieces
    total = first.astype(np.float32 if first.dtype == np.float16 else first.dtype)
    for other in others:
        total += other
    total *= 1.0 / len(pieces)
    return total


def all_gather(
    mpi: Any,
    bounds: Sequence[int],
    read: Read,
    write: Callable[[int, int, Array], None],
    dtype: Any,
) -> None:
    """Send each rank's shard to all ranks (all-gather).

    Args:
        bounds: where the shards begin, and the end.
        read: reads ranges of this rank's shard.
        write: takes a range: from, to, and its values.
    """
    rank = mpi.Get_rank()
    for _, spans in _rounds(bounds, dtype):
        received = _Pieces([stop - start for start, stop in spans], dtype)
        start, stop = spans[rank]
        mine = np.empty(stop - start, dtype)
        read(start, stop, mine)
        mpi.Allgatherv(mine.view(np.uint8), received.message)
        for (start, stop), piece in zip(spans, received.pieces, strict=True):
            write(start, stop, piece)


def broadcast_first(
    mpi: Any, size: int, read: Read, write: Callable[[int, int, Array], None], dtype: Any
) -> bool:
    """Broadcast the first rank's vector; tells whether all ranks had the same bytes."""
    step = max(1, BUFFER_BYTES // np.dtype(dtype).itemsize)
    is_same = True
    for start in range(0, size, step):
        stop = min(start + step, size)
        mine, theirs = np.empty(stop - start, dtype), np.empty(stop - start, dtype)
        read(start, stop, mine)
        theirs[:] = mine
        mpi.Bcast(theirs.view(np.uint8), 0)
        if mine.tobytes() != theirs.tobytes():
            is_same = False
            write(start, stop, theirs)
    return all(mpi.allgather(is_same))


class _Pieces:
    """Consecutive arrays in one buffer, as MPI sends them."""

    def __init__(self, lengths: list[int], dtype: Any) -> None:
        ends = np.cumsum(lengths)
        starts = ends - lengths
        buffer = np.empty(int(ends[-1]), dtype)
        self.pieces = [buffer[a:b] for a, b in zip(starts, ends, strict=True)]
        width = buffer.itemsize
        counts = [n * width for n in lengths]
        self.message = [buffer.view(np.uint8), (counts, [int(a) * width for a in starts])]


def _rounds(bounds: Sequence[int], dtype: Any) -> list[tuple[int, list[tuple[int, int]]]]:
    """Split an exchange into rounds: the offset of each into the shards, and its range in each
    shard.
    """
    shards = list(pairwise(bounds))
    longest = max(stop - start for start, stop in shards)
    step = max(1, BUFFER_BYTES // (len(shards) * np.dtype(dtype).itemsize))
    return [
        (begin, [(min(a + begin, b), min(a + begin + step, b)) for a, b in shards])
        for begin in range(0, longest, step)
    ]
