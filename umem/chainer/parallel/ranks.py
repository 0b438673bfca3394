"""The ranks of a program that MPI started, which exchange the parts of a graph."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from umem.chainer.parallel.shard_exchange import mpi_of
from umem.errors import DataError

_TAG = 1516
"""Tag of umem's own messages, distinct from the program's."""
MESSAGE_BYTES = 1 << 30
"""The most bytes of one message: MPI counts in 32 bits, so longer ones are sent in pieces."""


class Ranks:
    """The ranks of a communicator, or one process alone.

    All ranks must call every method except `send`, `receive` and `wait`, in the same order.
    Thread-safety: one thread at a time, as MPI is started by default.

    Args:
        comm: a ChainerMN communicator, an mpi4py one, or None for one process without MPI.

    Attributes:
        rank: this process's rank, from 0.
        size: the number of ranks.
        sent_bytes: bytes given to `send`, by kind: ``halo`` or ``sums``.

    Raises:
        TypeError: ``comm`` is not one of these.
    """

    def __init__(self, comm: Any = None) -> None:
        self.rank, self.size = 0, 1
        self.sent_bytes: Counter[str] = Counter()
        if comm is None:
            return
        self._comm = mpi_of(comm)
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a communicator cannot be copied, and a copied model is of the same ranks

    def send(self, array: Any, rank: int, what: str) -> list[Any]:
        """Start sending a NumPy array, which must not change until `wait`."""
        self.sent_bytes[what] += array.nbytes
        return [self._comm.Isend(piece, rank, _TAG) for piece in _pieces(array)]

    def wait(self, requests: list[Any]) -> None:
        """Wait until all sends are complete."""
        for request in requests:
            request.Wait()

    def receive(self, array: Any, rank: int) -> None:
        """Receive a message of a rank into a NumPy array."""
        for piece in _pieces(array):
            self._comm.Recv(piece, rank, _TAG)

    def broadcast(self, array: Any, root: int) -> None:
        """Broadcast a rank's array in place."""
        for piece in _pieces(array) if self.size > 1 else ():
            self._comm.Bcast(piece, root)

    def draw(self) -> tuple[int, int]:
        """Return two numbers that rank 0 drew from NumPy's global generator, on every rank."""
        drawn = np.random.randint(0, 2**31 - 1, 2).astype(np.int64)
        self.broadcast(drawn, 0)
        return int(drawn[0]), int(drawn[1])

    def count(self, *values: int) -> list[int]:
        """Sum integers over all ranks, exactly."""
        total = np.array(values, np.int64)
        if self.size > 1:
            self._comm.Allreduce(total.copy(), total)
        return [int(value) for value in total]

    def check_alike(self, facts: Mapping[str, str], error: Exception | None) -> None:
        """Raise on all ranks if values differ between ranks, or one has an error.

        Raises:
            DataError: one of these, on every rank; the message names the rank and its host.
        """
        if error is not None and self.size == 1:
            raise error
        if self.size == 1:
            return
        mine = (platform.node(), dict(facts), None if error is None else str(error))
        every = self._comm.allgather(mine)
        for rank, (host, theirs, what) in enumerate(every):
            if what is not None:
                raise DataError(f"rank {rank} on {host}: {what}") from error
            for name, value in theirs.items():
                if value != every[0][1][name]:
                    raise DataError(
                        f"rank {rank} on {host} has another {name} than rank 0 on {every[0][0]}: "
                        f"{value}, and not {every[0][1][name]}; every rank needs the same"
                    )


def _pieces(array: Any) -> list[Any]:
    """Return the bytes of a C-ordered array in pieces of at most `MESSAGE_BYTES`."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[at : at + MESSAGE_BYTES] for at in range(0, len(flat), MESSAGE_BYTES)]
