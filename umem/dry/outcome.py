"""The result of a dry run, behind its report and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from umem._common.as_json import named

End = Literal[
    "steady",
    "script",
    "steps",
    "out of memory",
    "error",
    "interrupted",
    "asked too often",
    "nothing on the GPU",
]
DOES_NOT_FIT, FAILED, INTERRUPTED = 3, 1, 130
"""Exit statuses; 0: the program fits."""
_KEYS = (
    "simulated", "gpu", "title", "vram_bytes", "mode", "fits", "ended", "exit_status", "peak_bytes",
    "reserved_peak_bytes", "step_seconds", "step_seconds_all", "moved_bytes", "steps_run",
    "steps_in_script", "epoch_seconds", "run_seconds", "wall_seconds", "asked",
    "caught_out_of_memory", "failure", "first_connection", "written", "evaluated", "reported",
    "has_steps",
)  # fmt: skip


class UnknownValue(NamedTuple):
    """Unknown values that a line read, with the kernel that would have computed them."""

    line: str
    what: str
    read_count: int
    answered: bool

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        line, what, count, answered = self
        return {"line": line, "what": what, "count": count, "answered": answered}


class CaughtOutOfMemory(NamedTuple):
    """Out-of-memory errors on a line that the program caught."""

    line: str
    error_count: int

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"line": self.line, "count": self.error_count}


class Holder(NamedTuple):
    """Memory that a variable holds."""

    nbytes: int
    place: str


@dataclass(frozen=True)
class Failure:
    """The error that ended the program.

    Attributes:
        line: the innermost line of the program itself.
        step: the number of the step, from 1.
        missing_bytes: the least number of bytes that were missing; None if that is unknown.
        explanation: a text on the owners of the memory and on ways to fit; None if that is unknown,
            or for other errors.
        extension: the Trainer's extension that ran then, before its time.
        missing: the missing file.
    """

    line: str
    step: int
    message: str
    holders: tuple[Holder, ...] = ()
    missing_bytes: int | None = None
    explanation: str | None = None
    extension: str | None = None
    missing: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return named(self, ("line", "step", "message", "holders", "missing_bytes"))


@dataclass(frozen=True)
class DryOutcome:
    """The result of a dry run; all but ``wall_seconds`` is simulated.

    Attributes:
        gpu, vram_bytes, mode: where it ran.
        ended: what ended it.
        peak_bytes, reserved_peak_bytes: of the whole run: used by arrays, and by CuPy's pool.
        step_seconds, moved_bytes: of the last step; of the whole program where it has none.
        steps_in_script, epoch_steps: by a Trainer; None without one.
        wall_seconds: what the script took here.
        evaluated: whether evaluation was reached; None where a Trainer has none.
        has_steps: whether the program has steps: optimizers, or marks of its own.
        reported: values that Chainer read to print or save them.
        own_exit_code: the script's.
        unused_answers: answers for lines that asked nothing.
        notes: sentences on what else to know.
    """

    gpu: str
    title: str
    vram_bytes: int
    mode: str
    ended: End
    exit_status: int
    peak_bytes: int
    reserved_peak_bytes: int
    step_seconds: float | None
    step_seconds_all: tuple[float, ...]
    moved_bytes: int
    steps_run: int
    steps_in_script: int | None
    epoch_steps: int | None
    wall_seconds: float
    asked: tuple[UnknownValue, ...]
    caught_out_of_memory: tuple[CaughtOutOfMemory, ...]
    failure: Failure | None
    first_connection: str | None
    written: tuple[str, ...]
    evaluated: bool | None
    reported: int = 0
    has_steps: bool = True
    own_exit_code: object = 0
    unused_answers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    simulated = True

    @property
    def fits(self) -> bool:
        """Tell whether the program ran within the GPU's memory, as far as it was to run."""
        return self.ended in ("steady", "script", "steps") and not self.exit_status

    @property
    def epoch_seconds(self) -> float | None:
        """Return the time of an epoch's steps; None if it is unknown."""
        return self._times(self.epoch_steps)

    @property
    def run_seconds(self) -> float | None:
        """Return the time of all steps of the run; None if it is unknown."""
        return self._times(self.steps_in_script)

    def _times(self, count: int | None) -> float | None:
        return None if count is None or self.step_seconds is None else count * self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON; see `docs/reference/dry-runs.md` for the keys."""
        return named(self, _KEYS)
