"""One line for each mode: what a table, a picture and a JSON file of a comparison show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from umem.devices.base import Mode
from umem.devices.virtual.figures import Figures, Sample
from umem.predict.replaying import Replay


@dataclass(frozen=True)
class ModeRow:
    """How one mode did. None is what the device cannot know, or what did not happen.

    ``seconds`` is the median of ``step_seconds``, each from one update to the next. ``how`` is
    "run" for arithmetic that was done, "replay" for a trace on the model.
    """

    mode: Mode
    how: Literal["run", "replay"]
    fits: bool
    prefetch: bool = False
    advice: str | None = None
    reason: str | None = None
    peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    migrated_in_bytes: int | None = None
    migrated_out_bytes: int | None = None
    remote_bytes: int | None = None
    fault_count: int | None = None
    seconds: float | None = None
    loss: tuple[float, ...] | None = None
    timeline: tuple[Sample, ...] = ()
    step_seconds: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """The mode with what was added to it."""
        extra = " + prefetch" if self.prefetch else f" + {self.advice}" if self.advice else ""
        return f"{self.mode}{extra}"

    def to_json(self) -> dict[str, Any]:
        """The row without its timeline and single steps, for a JSON file."""
        fields = {name: getattr(self, name) for name in _JSON_FIELDS}
        return {**fields, "loss": None if self.loss is None else list(self.loss)}


_JSON_FIELDS = (
    "mode", "prefetch", "advice", "how", "fits", "reason", "peak_bytes", "resident_peak_bytes",
    "migrated_in_bytes", "migrated_out_bytes", "remote_bytes", "fault_count", "seconds",
)  # fmt: skip


def simulated_row(
    mode: Mode,
    how: Literal["run", "replay"],
    figures: Figures,
    timeline: Sequence[Sample],
    reason: str | None,
    loss: Sequence[float] | None = None,
    *,
    prefetch: bool = False,
    advice: str | None = None,
) -> ModeRow:
    """A row of what a virtual GPU counted; a time only where the run came to its end."""
    fits = reason is None
    return ModeRow(
        mode=mode,
        how=how,
        fits=fits,
        prefetch=prefetch,
        advice=advice,
        reason=reason,
        peak_bytes=figures.peak_bytes,
        resident_peak_bytes=figures.resident_peak_bytes,
        migrated_in_bytes=figures.migrated_in_bytes,
        migrated_out_bytes=figures.migrated_out_bytes,
        remote_bytes=figures.remote_bytes,
        fault_count=figures.fault_count,
        seconds=median(figures.step_seconds) if fits and figures.step_seconds else None,
        loss=None if loss is None else tuple(loss),
        timeline=tuple(timeline),
        step_seconds=figures.step_seconds,
    )


def replayed_row(replay: Replay, advice: str | None = None) -> ModeRow:
    """A row of a replay."""
    return simulated_row(
        replay.mode,
        "replay",
        replay.figures,
        replay.timeline,
        replay.reason,
        prefetch=replay.prefetch,
        advice=advice,
    )
