"""Rows of a comparison of memory modes, for tables, pictures and JSON files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from umem.as_json import named
from umem.devices.base import Mode
from umem.devices.cost import Sample, StepCost
from umem.predict.replaying import Replay


@dataclass(frozen=True)
class ModeRow(StepCost):
    """The figures of one memory mode; None for a figure that the device does not measure.

    ``seconds`` is the median of ``step_seconds``. ``how`` is "run" for a step that was computed,
    "replay" for a trace on the model of a GPU.
    """

    mode: Mode
    how: Literal["run", "replay"]
    fits: bool
    prefetch: bool = False
    advice: str | None = None
    reason: str | None = None
    loss: tuple[float, ...] | None = None
    timeline: tuple[Sample, ...] = ()

    @property
    def title(self) -> str:
        """Return the mode, with its prefetch or advice, as a title."""
        extra = " + prefetch" if self.prefetch else f" + {self.advice}" if self.advice else ""
        return f"{self.mode}{extra}"

    def to_json(self) -> dict[str, Any]:
        """Return the row without its timeline and single steps, for a JSON file."""
        return named(self, _JSON_FIELDS)


_JSON_FIELDS = (
    "mode", "prefetch", "advice", "how", "fits", "reason", "peak_bytes", "resident_peak_bytes",
    "migrated_in_bytes", "migrated_out_bytes", "remote_bytes", "fault_count", "seconds", "loss",
)  # fmt: skip


def simulated_row(
    mode: Mode,
    how: Literal["run", "replay"],
    figures: StepCost,
    timeline: Sequence[Sample],
    reason: str | None,
    loss: Sequence[float] | None = None,
    *,
    prefetch: bool = False,
    advice: str | None = None,
) -> ModeRow:
    """Return the row of a virtual GPU's figures; ``seconds`` is None where the run did not end."""
    timed = reason is None and figures.step_seconds
    cost = replace(figures, seconds=median(figures.step_seconds) if timed else None)
    return ModeRow(
        mode,
        how,
        reason is None,
        prefetch,
        advice,
        reason,
        None if loss is None else tuple(loss),
        tuple(timeline),
        **vars(cost),
    )


def replayed_row(replay: Replay, advice: str | None = None) -> ModeRow:
    """Return the row of a replay."""
    return simulated_row(
        replay.mode,
        "replay",
        replay.figures,
        replay.timeline,
        replay.reason,
        prefetch=replay.prefetch,
        advice=advice,
    )
