"""A trainer extension that reports memory, by kind, and how long the run will take."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from chainer import reporter, training

from umem._common.files import claimed
from umem.data import reported
from umem.devices import current_device
from umem.errors import TraceError
from umem.trace.recording import NAMES, Keeper, Kept, Recorder, Steps, Tally
from umem.units import MIB


class MemoryReport(training.Extension):
    """Reports memory and time, for LogReport and PrintReport: ``trainer.extend(MemoryReport())``.

    - ``memory/current_MiB``: live arrays;
    - ``memory/peak_MiB``: the most that were live at once since the run began, and
      ``memory/parameters_MiB``, ``gradients``, ``state`` (the optimizer's and normalisation's),
      ``activations``, ``inputs``: the parts of that peak, which add up to it;
    - ``memory/pools_peak_MiB``, on a GPU only: the most that arrays used of CuPy's pools since the
      run began, workspace included, measured; ``memory/reserved_MiB``: the memory that the pools
      have reserved (neither has run on a real GPU yet);
    - ``time/step_s``: seconds per update since the last report, evaluation and data loading
      included;
    - ``time/whole_run_min``: the estimated minutes of the whole run, in three figures, including
      the part already done, from the rate so far without the first update. It is reported if the
      trainer stops after a number of epochs or updates; for an EarlyStoppingTrigger it is the
      longest time;
    - ``data/hit_rate``, ``data/memory_MiB``, ``data/waited_s`` and ``data/raw_MiB`` (of loaded
      arrays that no codec made smaller), if there is a `umem.data.cached`: since it was made.

    Other bytes count the arrays that Chainer's functions of this thread see, without the workspace
    of operations; on NumPy only a trace has it.

    LogReport prints means: give both the same trigger, and its figures are the current ones.

    Args:
        trigger: when to report, as for `Trainer.extend`.
        record: a file for a trace of the third update, for ``umem report``; the fourth is slowed
            down to measure workspace.
        force: overwrite that file.

    Raises:
        TraceError: the file exists or cannot be written; raised by the constructor, and again when
            training begins.

    Cost: a recorder with a listener (bench/overhead.py). Snapshots hold the peak.
    """

    priority = training.PRIORITY_WRITER

    def __init__(
        self,
        trigger: Any = (1, "iteration"),
        record: str | Path | None = None,
        *,
        force: bool = False,
    ) -> None:
        self.trigger = trigger
        self._path = None if record is None else Path(record).absolute()
        self._force = force
        if self._path is not None:
            with claimed(self._path, force=force):
                pass
        self._tally = Tally()
        self._recorder = Recorder(self._tally.on_event, keep=False, renamed=self._tally.rename)
        self._before = np.zeros(1 + len(NAMES), np.int64)  # the peak of runs resumed from
        self._stack = ExitStack()

    # -- called by the trainer ---------------------------------------------------------------

    def initialize(self, trainer: Any) -> None:
        """Start following the run; called by the trainer."""
        self._now = self._first = _Moment(trainer)
        self._is_warm = False
        with ExitStack() as stack:
            if self._path is not None:
                stack.enter_context(claimed(self._path, force=self._force))
                keeper = Keeper(Steps(3, 3), complete=self._save)
                keeper.start()
                stack.callback(lambda: self._finish(keeper))
            stack.enter_context(self._recorder)
            self._stack = stack.pop_all()

    def __call__(self, trainer: Any) -> None:
        """Report."""
        self._recorder.flush()
        reporter.report({**self._memory(), **self._time(trainer), **reported()})

    def finalize(self) -> None:
        """Stop following the run, also after an error; called by the trainer."""
        self._stack.close()

    def serialize(self, serializer: Any) -> None:
        """Save or load the peak; a snapshot made without this extension has none."""
        try:
            self._before = serializer("peak", self._peak())
        except KeyError:
            return

    # -- memory ----------------------------------------------------------------------------

    def _peak(self) -> Any:
        """Return the peak and its parts, or an earlier run's if that was higher."""
        found = np.array([self._tally.peak_bytes, *self._tally.at_peak.values()], np.int64)
        return found if found[0] >= self._before[0] else self._before

    def _memory(self) -> dict[str, float]:
        names = ("peak", *NAMES)
        peaks = {f"memory/{n}_MiB": v / MIB for n, v in zip(names, self._peak(), strict=True)}
        found = {"memory/current_MiB": self._tally.current_bytes / MIB, **peaks}
        if self._recorder.backend != "numpy":
            found["memory/reserved_MiB"] = current_device().usage().reserved_bytes / MIB
        if self._tally.pools_peak_bytes is not None:
            found["memory/pools_peak_MiB"] = self._tally.pools_peak_bytes / MIB
        return {name: float(value) for name, value in found.items()}

    # -- time ------------------------------------------------------------------------------

    def _time(self, trainer: Any) -> dict[str, float]:
        """Return the time a step took since the last report, and an estimate for the whole run."""
        before, self._now = self._now, _Moment(trainer)
        count = self._now.iteration - before.iteration
        if count <= 0:
            return {}
        found = {"time/step_s": (self._now.seconds - before.seconds) / count}
        whole = self._whole_seconds(trainer)
        if whole is not None:
            found["time/whole_run_min"] = float(f"{whole / 60:.3g}")
        if not self._is_warm:
            self._first, self._is_warm = self._now, True
        return found

    def _whole_seconds(self, trainer: Any) -> float | None:
        """Estimate the seconds of the whole run from its pace; None if its end is not known."""
        trigger = getattr(trainer.stop_trigger, "_max_trigger", trainer.stop_trigger)
        unit, period = getattr(trigger, "unit", None), getattr(trigger, "period", None)
        if unit not in ("epoch", "iteration") or period is None:
            return None
        now, then = (getattr(moment, unit) for moment in (self._now, self._first))
        if now <= then:
            return None
        pace = (self._now.seconds - self._first.seconds) / (now - then)
        return float(self._now.elapsed + max(0, period - now) * pace)

    # -- the trace -------------------------------------------------------------------------

    def _finish(self, keeper: Keeper) -> None:
        saved = keeper.kept is not None
        kept = keeper.finish()
        if kept is not None and not saved and any(kept.trace.ops):
            self._save(kept)

    def _save(self, kept: Kept) -> None:
        assert self._path is not None
        try:
            kept.trace.save(self._path, force=self._force)
        except TraceError as error:  # training must not stop for it
            print(f"MemoryReport: {error}", file=sys.stderr)


class _Moment:
    """The progress of a trainer at one moment: iteration, epoch, seconds."""

    def __init__(self, trainer: Any) -> None:
        updater = trainer.updater
        self.seconds = time.perf_counter()
        self.elapsed = float(trainer.elapsed_time)
        self.iteration = int(updater.iteration)
        self.epoch = float(getattr(updater, "epoch_detail", 0.0))
