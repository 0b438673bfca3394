"""Times of messages between two ranks, by round trips.

This file is also the program of both ranks, so it imports nothing of umem.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from typing import Any

SIZES = (1, 8, 64, 512, 4096, 32768, 262144, 2 << 20, 16 << 20)
"""Message sizes in bytes."""
REPEATS = 21
WARM_UP = 3


def measured(comm: Any) -> list[tuple[int, float]]:
    """Measure the time of a message by size: half of the quickest round trip.

    A machine that does other things besides makes single messages slower, and none quicker.
    """
    import numpy as np

    found = []
    for size in SIZES:
        buffer = np.zeros(size, np.uint8)
        times = [_there_and_back(comm, buffer) for _ in range(WARM_UP + REPEATS)]
        found.append((size, min(times[WARM_UP:]) / 2))
    return found


def _there_and_back(comm: Any, buffer: Any) -> float:
    """Return the seconds of one round trip."""
    comm.Barrier()
    start = time.perf_counter()
    if comm.Get_rank() == 0:
        comm.Send(buffer, 1)
        comm.Recv(buffer, 1)
    else:
        comm.Recv(buffer, 0)
        comm.Send(buffer, 0)
    return time.perf_counter() - start


def main() -> None:
    """Measure as one of two ranks; rank 0 prints the result as a line of JSON."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.Get_size() != 2:
        sys.exit(f"mpi4py sees {comm.Get_size()} ranks, and 2 were started")
    hosts = comm.gather(platform.node())
    found = measured(comm)
    if comm.Get_rank() == 0:
        print(json.dumps({"hosts": hosts, "seconds": found}), flush=True)


if __name__ == "__main__":
    main()
