"""What snapshots cost: how long a step waits, and what is left behind after many."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from resume_parts.runs import KINDS, dataset, network

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
import chainer.links as L

from umem.chainer.resume.run_state import RunState
from umem.chainer.resume.saver import RunSaver


def blocked(units: int, repeats: int) -> dict[str, Any]:
    """How long a step waits for a snapshot, beside a plain copy of the same arrays, in turn.

    Times are the training thread's, by the clock and of the processor. The writer is idle when a
    snapshot begins.
    """
    model = chainer.ChainList(*[L.Linear(units, units) for _ in range(6)])
    optimizer = chainer.optimizers.Adam().setup(model)
    for parameter in model.params():
        parameter.grad = np.ones_like(parameter.array)
    optimizer.update()
    state = RunState({"model": model, "optimizer": optimizer})
    clock: dict[str, list[float]] = {"save": [], "copy": []}
    processor: dict[str, list[float]] = {"save": [], "copy": []}
    with tempfile.TemporaryDirectory() as name:
        saver = RunSaver(Path(name), 1)
        arrays = list(state.collect().arrays.values())
        for number in range(repeats):
            for what in ("save", "copy"):
                begin = time.perf_counter(), time.thread_time()
                if what == "save":
                    saver.save(number, state)
                else:
                    copies = [array.copy() for array in arrays]
                clock[what].append(time.perf_counter() - begin[0])
                processor[what].append(time.thread_time() - begin[1])
                saver.wait()  # and what follows begins on an idle disk
                copies = []
        del copies
        saver.close()
    return {
        "what": "blocked",
        "state_bytes": sum(array.nbytes for array in arrays),
        "clock_ratio": _ratio(clock),
        "processor_ratio": _ratio(processor),
        "clock_seconds": clock,
        "processor_seconds": processor,
    }


def _ratio(seconds: dict[str, list[float]]) -> float:
    return statistics.median(seconds["save"]) / statistics.median(seconds["copy"])


def growth(updates: int, every: int) -> dict[str, Any]:
    """What a process holds after a tenth of many updates with snapshots, and after all."""
    np.random.seed(0)
    model = network(KINDS[0].normalized)
    optimizer = chainer.optimizers.Adam().setup(model)
    batches = chainer.iterators.SerialIterator(dataset(), 16)
    parts = {"model": model, "optimizer": optimizer, "batches": batches}
    found = []
    with tempfile.TemporaryDirectory() as name:
        umem.chainer.resume_run(name, **parts)
        for update in range(1, updates + 1):
            optimizer.update(model, *chainer.dataset.concat_examples(batches.next()))
            if update % every == 0:
                umem.chainer.save_run(name, keep=2, wait=update % (updates // 10) == 0, **parts)
            if update in (updates // 10, updates):
                found.append({**held(), "entries": len(os.listdir(name))})
    row: dict[str, Any] = {"what": "growth", "updates": updates, "snapshots": updates // every}
    for key in found[0]:
        row |= {f"{key}_before": found[0][key], f"{key}_after": found[1][key]}
    return row


def held() -> dict[str, int]:
    """Memory, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }
