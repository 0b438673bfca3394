"""The clock of a step that was cut out of a run starts with it."""

from __future__ import annotations

import pytest

import umem
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Event, Mark, Op
from umem.units import BLOCK_BYTES as BLOCK

W = Alloc(0, 6 * BLOCK, "parameter", "W", True)
USE = Op("use", "array", (Access(0, 0, W.nbytes),), (), 6_000_000)


@pytest.mark.parametrize("mode", ["managed", "unmanaged"])
def test_uploads_before_the_start_take_no_time_of_the_step(mode: str) -> None:
    events: list[Event] = [USE, Mark("step")]
    whole = umem.replay(Trace([W, *events]), "v100-16gb", mode)
    step = umem.replay(Trace([W, Mark("start"), *events]), "v100-16gb", mode)
    upload = W.nbytes / 12e9
    compute = 10e-6 + 6_000_000 / (0.6 * 15.7e12)
    assert whole.seconds > upload
    assert step.seconds == pytest.approx(compute)
    assert step.step_seconds == (step.seconds,)
    assert step.seconds_low < step.seconds <= step.seconds_high < upload
    assert step.peak_bytes == step.resident_peak_bytes == W.nbytes
    assert step.figures.uploaded_bytes == step.figures.populated_bytes == 0
    assert step.timeline[0] == (0.0, W.nbytes, W.nbytes)


def test_what_was_pushed_out_before_the_start_is_missed_after_it() -> None:
    other = Alloc(1, 6 * BLOCK, "state", "m", True)
    trace = Trace([W, other, Mark("start"), USE])
    found = umem.replay(trace, "v100-16gb", vram=8 * BLOCK)
    assert found.figures.migrated_in_bytes == 6 * BLOCK  # the later upload pushed it out


def test_a_start_after_an_operation_is_a_mark_like_any_other() -> None:
    plain = umem.replay(Trace([W, USE, USE]), "v100-16gb")
    marked = umem.replay(Trace([W, USE, Mark("start"), USE]), "v100-16gb")
    assert marked.figures == plain.figures
