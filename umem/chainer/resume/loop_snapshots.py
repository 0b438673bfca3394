"""Saving and resuming in a hand-written loop."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from umem._common.printable import quoted
from umem.chainer.resume.optimizer_extras import is_optimizer
from umem.chainer.resume.run_state import RunState
from umem.chainer.resume.saver import Resumed, RunSaver, as_path, check_options
from umem.chainer.resume.saver_of_ranks import SaverOfRanks
from umem.errors import SizeError

_savers: dict[tuple[int, Path], RunSaver] = {}
"""The saver of each folder that this process writes to."""


def resume_run(folder: str | os.PathLike[str], *, comm: Any = None, **parts: Any) -> Resumed:
    """Restore a run from its newest complete snapshot; call it before the training loop.

    ::

        done = umem.chainer.resume_run("out/run", model=model, optimizer=optimizer, data=iterator)
        for step in range(done.step, 10_000):
            optimizer.update(loss, *concat_examples(iterator.next()))
            if (step + 1) % 500 == 0:
                umem.chainer.save_run("out/run", model=model, optimizer=optimizer, data=iterator)

    The resumed run is the same, bit for bit: see docs/reference/resume.md for the saved state. A
    snapshot that is torn, or not umem's, is skipped with an `umem.errors.SnapshotWarning`, and the
    one before is used.

    Args:
        folder: the folder of `save_run`. From now on it belongs to this process.
        comm: the communicator of ChainerMN or of mpi4py whose ranks all call this, each with its
            own parts; the number of ranks may differ from the saved run's. None: one process.
        parts: the parts that are given to `save_run`, by the same names.

    Returns:
        The step, 0 if there is no snapshot; and the plain values that were saved with it.

    Raises:
        SnapshotError: the snapshot is of another model, named by the first name and shape that
            differ, or of a newer version of umem's format. StateError: another run writes to the
            folder.
        FileError: the folder cannot be read or created.
    """
    return _saver(folder, comm).resume(RunState(parts))


def save_run(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int = 3,
    on_error: str = "raise",
    wait: bool = False,
    comm: Any = None,
    **parts: Any,
) -> None:
    """Save a run: copy it, and write the copy in the background.

    On NumPy and on a GPU alike the loop waits for a copy of the run's arrays to the host, and until
    the snapshot before is written.

    Args:
        folder: the folder of this run's snapshots.
        step: the number of updates so far; by default the first optimizer's among the parts.
        keep: how many of the newest snapshots to keep.
        on_error: if a snapshot cannot be written, "raise" makes the next call raise (this one, if
            the disk is full), "warn" warns and continues.
        wait: return only once the snapshot is on the disk.
        comm: the communicator whose ranks all call this, see `resume_run`; they write one snapshot
            together, and return once it is on the disk.
        parts: the parts of the run, each with a name: links, optimizers (saved with their models),
            iterators, a Trainer, any object with a method ``serialize``, random generators; and
            JSON values, which `resume_run` returns.

    Raises:
        FileError: the snapshot cannot be written; the message has the bytes needed and free.
        UnsupportedError: a part is of another kind.
        StateError: another run writes to the folder; or it has a snapshot of a later step, from
            which this run was not resumed. Nothing was saved.
    """
    check_options(keep, on_error)
    saver = _saver(folder, comm)
    saver.keep, saver.on_error = keep, on_error
    saver.save(_step(step, parts), RunState(parts))
    if wait:
        saver.wait()


def _step(step: int | None, parts: dict[str, Any]) -> int:
    if step is None:
        optimizers = [p for p in parts.values() if is_optimizer(p)]
        if not optimizers:
            raise SizeError("no optimizer among the parts gives the step: give step=")
        step = int(optimizers[0].t)
    if type(step) is not int or step < 0:
        raise SizeError(f"step must be a whole number from 0 on, got {quoted(step)}")
    return step


def _saver(folder: Any, comm: Any) -> RunSaver:
    key = os.getpid(), as_path(folder)
    if key not in _savers:
        _savers[key] = RunSaver(key[1]) if comm is None else SaverOfRanks(comm, key[1])
    return _savers[key]


def close_all() -> None:
    """Wait at exit for the last snapshots, and report those that could not be written."""
    for key, saver in [*_savers.items()]:
        if key[0] == os.getpid():
            saver.on_error = "warn"
            saver.close()
            del _savers[key]


atexit.register(close_all)
