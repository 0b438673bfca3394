"""A trainer extension that saves the run, and resumes it."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from chainer import training

from umem._common.printable import quoted
from umem.chainer.resume.run_state import RunState
from umem.chainer.resume.saver import Resumed, RunSaver, as_path, check_options
from umem.chainer.resume.saver_of_ranks import SaverOfRanks
from umem.errors import SizeError

_LAST = -1_000_000
"""Lowest priority, so that the snapshot includes the other extensions' work after the update."""


class Snapshot(training.Extension):
    """A trainer extension that saves the run regularly, and resumes it from the newest snapshot.

    Use it as ``trainer.extend(umem.chainer.Snapshot(every=500, keep=3))``. To continue a run that
    was stopped, killed or lost with its machine, start the same command again. The run is the same,
    bit for bit: parameters, optimizers, iterators, extensions, triggers and random generators are
    restored. The snapshot that it resumed from is printed on standard error, and is in `resumed`.

    Args:
        every: updates between snapshots; or a trigger, such as ``(1, "epoch")``.
        keep: how many of the newest snapshots to keep.
        folder: the folder of this run's snapshots; by default ``snapshots`` in the trainer's
            ``out``.
        on_error: if a snapshot cannot be written, "raise" ends the training at the next one (at
            once, if the disk is full), "warn" warns and continues.
        comm: the communicator of ChainerMN or of mpi4py whose ranks all train, each with this
            extension; they write one snapshot together. See docs/reference/resume.md.

    Attributes:
        resumed: the snapshot that the run resumed from, once it has begun.

    Raises:
        SizeError: an option is not valid.

    When training begins: see `umem.chainer.resume_run`.

    Cost: an update that is saved waits for a copy of the run's arrays to the host, and until the
    snapshot before is written; a thread writes the rest.
    """

    priority = _LAST
    name = "umem-snapshot"

    def __init__(
        self,
        every: Any = 500,
        keep: int = 3,
        folder: str | os.PathLike[str] | None = None,
        *,
        on_error: str = "raise",
        comm: Any = None,
    ) -> None:
        check_options(keep, on_error)
        self.trigger = _trigger(every)
        self.resumed = Resumed()
        self._keep, self._on_error = keep, on_error
        self._folder = None if folder is None else as_path(folder)
        self._saver: RunSaver | None = None
        self._comm = comm

    def initialize(self, trainer: Any) -> None:
        """Claim the folder, and resume from the newest snapshot; called by the trainer."""
        folder = as_path(Path(trainer.out) / "snapshots") if self._folder is None else self._folder
        self._state = RunState({"trainer": trainer})
        options = folder, self._keep, self._on_error
        alone = self._comm is None
        self._saver = RunSaver(*options) if alone else SaverOfRanks(self._comm, *options)
        try:
            self.resumed = self._saver.resume(self._state)
        except BaseException:
            self.finalize()
            raise

    def __call__(self, trainer: Any) -> None:
        """Save."""
        assert self._saver is not None
        self._saver.save(int(trainer.updater.iteration), self._state)

    def finalize(self) -> None:
        """Wait for the last snapshot, also after an error; called by the trainer."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()


def _trigger(every: Any) -> Any:
    """Return the trigger that ``every`` means.

    Raises:
        SizeError: it is not a trigger.
    """
    if callable(every):
        return every
    match every:
        case bool():
            pass
        case int() | np.integer() if every >= 1:
            return int(every), "iteration"
        case (int() | float() as period, "iteration" | "epoch") if 0 < period < inf:
            return every
    raise SizeError(
        'every must be a whole number from 1 on, or a trigger such as (1, "epoch"), got '
        f"{quoted(every)}"
    )
