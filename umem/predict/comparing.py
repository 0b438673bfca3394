"""Rows of a comparison of memory modes, for tables, pictures and JSON files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from umem._common.as_json import named
from umem.devices import Mode, Sample, StepCost
from umem.predict.replaying import Replay


@dataclass(frozen=True)
class ModeRow(StepCost):
    """The figures of one memory mode; None for a figure that the device does not measure.

    Moved bytes, faults and ``seconds`` are means over all steps. ``how`` is "run" for a step that
    was computed, "replay" for a trace on the model of a GPU.
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
    """Return the row of a virtual GPU's figures, with moved bytes and time as means of its steps.

    For a run that did not finish, ``seconds`` is None, and the bytes are those moved so far.
    """
    cost = replace(figures, seconds=None)
    if reason is None and (count := len(figures.step_seconds)):
        means: dict[str, Any] = {
            name: None if (total := getattr(figures, name)) is None else round(total / count)
            for name in ("migrated_in_bytes", "migrated_out_bytes", "remote_bytes", "fault_count")
        }
        cost = replace(figures, seconds=sum(figures.step_seconds) / count, **means)
    losses = None if loss is None else tuple(loss)
    return ModeRow(
        mode, how, reason is None, prefetch, advice, reason, losses, tuple(timeline), **vars(cost)
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
