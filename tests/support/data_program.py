"""A program whose worker processes ask a cache: MultiprocessIterator, by a start method.

    python tests/support/data_program.py fork|forkserver|spawn CODEC

It asks the cache in this process first, so that threads and locks are in use, then lets workers
do three epochs, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from typing import Any

import numpy as np

import umem.chainer
import umem.data

# isort: split
import chainer  # after the compatibility layer


class Rows:
    """A dataset that goes to processes by pickle."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        rng = np.random.Generator(np.random.PCG64(index))
        return rng.integers(0, 9, 500).astype(np.float32), np.int32(index)


def main(method: str, codec: str) -> None:
    """Read a cached dataset by worker processes, and print what was wrong and what was counted."""
    multiprocessing.set_start_method(method)
    warnings.simplefilter("ignore", DeprecationWarning)  # of Chainer's threads
    source, order = Rows(), umem.data.known_order(0)
    one = source[0][0].nbytes + 150
    made = umem.data.BloscCodec() if codec == "blosc2" else None
    data = umem.data.cached(source, 24 * one, "1MiB", order=order, codec=made)
    serial = chainer.iterators.SerialIterator(data, 7, order_sampler=order)
    for _ in range(12):  # more than an epoch, in this process
        serial.next()
    iterator = chainer.iterators.MultiprocessIterator(
        data, 6, n_processes=3, order_sampler=order, shared_mem=1 << 14
    )
    before, wrong, seen = data.counters, 0, list[int]()
    for _ in range(30):
        for row, number in iterator.next():
            expected, _ = source[int(number)]
            wrong += row.tobytes() != expected.tobytes()
            seen.append(int(number))
    iterator.finalize()
    after = data.counters
    print(
        json.dumps(
            {
                "wrong": wrong,
                "epochs_whole": [sorted(seen[k : k + 60]) == list(range(60)) for k in (0, 60, 120)],
                "asked": after.request_count - before.request_count,
                "hits": after.hit_count - before.hit_count,
                "loads": after.load_count - before.load_count,
                "peak_bytes": after.peak_memory_bytes,
                "limit_bytes": 24 * one,
                "lost": after.lost_count,
            }
        )
    )
    data.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
