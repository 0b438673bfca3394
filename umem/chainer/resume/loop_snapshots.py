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

    The resumed run is the same, bit for bit: docs/reference/resume.md has what is saved. A snapshot
    that is torn, or not umem's, is passed over with an `umem.errors.SnapshotWarning`, and the one
    before is taken.

    Args:
        folder: where `save_run` saves. The folder is this process's from now on.
        comm: the communicator of ChainerMN or of mpi4py whose ranks all call this, each with its
            own parts; their number may be another than that which has saved. None: one process.
        parts: whatever is given to `save_run`, by the same names.

    Returns:
        the step, 0 where there is no snapshot; and the plain values that were saved with it.

    Raises:
        SnapshotError: the snapshot is of another model, by the first name and shape that differ,
            or of a newer version of umem's format. StateError: another run writes to the folder.
        FileError: the folder cannot be read or made.
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
    """Save a run: copies it, and writes the copy in the background.

    On NumPy and on a GPU alike the loop is held up by a copy of the run's arrays to the host, and
    by what is left of writing the snapshot before.

    Args:
        folder: where snapshots lie, one run's only.
        step: updates that were made; that of the first optimizer among the parts by default.
        keep: how many snapshots stay, the newest.
        on_error: where a snapshot cannot be written, "raise" has the next call say so (this one
            already, where the disk is full), "warn" warns and goes on.
        wait: return only once it is on the disk.
        comm: the communicator whose ranks all call this, see `resume_run`; they write one snapshot
            together, and return once it is on the disk.
        parts: the parts of the run, each with a name: links, optimizers (what they train is
            saved with them), iterators, a Trainer, whatever has a method ``serialize``, random
            generators; and values that JSON can say, which `resume_run` returns.

    Raises:
        FileError: it cannot be written; the message has the bytes needed and free.
        UnsupportedError: a part is not one of these.
        StateError: another run writes to the folder; or a snapshot of a later step is there, which
            this run was not resumed from. Nothing was saved.
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
            raise SizeError("no optimizer among the parts says which step this is: give step=")
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
