"""A training run on a cached dataset with a disk tier, which saves itself and goes on.

    python tests/support/data_kill_program.py OUT serial|threads|processes|plain

It prints a line an update, so that whoever started it can kill it in the middle of any; ``plain``
is the same run without a cache.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import resume_cases

import umem.chainer
import umem.data

# isort: split
import chainer
from chainer import training
from chainer.training import extensions

UPDATES = 60
COUNT, BATCH = 60, 7


def main(out: Path, kind: str) -> None:
    """Train a network on a cached dataset, with snapshots, and print each iteration."""
    np.random.seed(0)
    data, order = resume_cases.dataset(COUNT), umem.data.known_order(11)
    if kind != "plain":
        (out / "disk").mkdir(parents=True, exist_ok=True)
        data = umem.data.cached(data, "6KiB", "1MiB", order=order, folder=out / "disk")
    processes = {"n_processes": 2, "shared_mem": 4096} if kind == "processes" else {}
    iterator = resume_cases.ITERATORS.get(kind, chainer.iterators.SerialIterator)
    batches = iterator(data, BATCH, order_sampler=order, **processes)
    optimizer = chainer.optimizers.Adam().setup(resume_cases.network())
    updater = training.StandardUpdater(batches, optimizer)
    made = training.Trainer(updater, (UPDATES, "iteration"), out=str(out))
    made.extend(extensions.LogReport(trigger=(1, "iteration")))
    made.extend(umem.chainer.Snapshot(every=4, keep=2))

    def say(trainer: Any) -> None:
        print(trainer.updater.iteration, flush=True)

    made.extend(say, trigger=(1, "iteration"))
    made.run()
    batches.finalize()
    if kind != "plain":
        found = data.counters
        print(f"done {found.hit_count} {found.disk_count}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
