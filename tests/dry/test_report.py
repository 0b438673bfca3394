"""The report of a dry run, in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from umem.dry.outcome import CaughtOutOfMemory, DryOutcome, Failure, Holder, UnknownValue
from umem.dry.verdict import report
from umem.units import GIB, MIB

FITS = DryOutcome(
    gpu="t4",
    title="T4",
    vram_bytes=15 * GIB,
    mode="unmanaged",
    ended="steady",
    exit_status=0,
    peak_bytes=3 * GIB,
    reserved_peak_bytes=4 * GIB,
    step_seconds=0.25,
    step_seconds_all=(0.5, 0.25, 0.25),
    moved_bytes=0,
    steps_run=3,
    steps_in_script=4000,
    epoch_steps=400,
    wall_seconds=2.0,
    asked=(),
    caught_out_of_memory=(),
    failure=None,
    first_connection=None,
    written=(),
    evaluated=True,
)


def said(**changes: Any) -> list[str]:
    return report(dataclasses.replace(FITS, **changes), "train.py").splitlines()


def test_a_program_that_fits() -> None:
    assert said() == [
        "umem: dry run of train.py on T4 with 15.0 GiB of VRAM (simulated)",
        "fits",
        "  peak       3.0 GiB in use, 4.0 GiB with CuPy's pool",
        "  time       250.0 ms a step (simulated)",
        "  epoch      100.0 s for 400 steps (simulated)",
        "  whole run  16 min 40 s for 4,000 steps (simulated)",
        "  moved      0 B a step",
        "  ran        3 of 4,000 steps, until two were alike, and evaluation",
        "  here       the script took 2.0 s, loading data included",
    ]


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ("a:1", "fits, if the values read at a:1 are as assumed"),
        ("a:1 a:2", "fits, if the values read at a:1 and a:2 are as assumed"),
        ("a:1 a:2 b:3 b:4", "fits, if the values read at a:1, a:2 and 2 more lines are as "
         "assumed"),
    ],
)  # fmt: skip
def test_the_verdict_rests_on_what_was_asked(lines: str, verdict: str) -> None:
    asked = tuple(UnknownValue(line, "cupy_sum", 2, answered=False) for line in lines.split())
    found = said(asked=asked)
    assert found[1] == verdict
    row = "  asked      a:1, 2 times, for a result of cupy_sum; --answer a:1=VALUE supplies a "
    assert row + "value" in found


def test_an_answered_line_is_no_condition() -> None:
    found = said(asked=(UnknownValue("a:1", "cupy_sum", 1, answered=True),))
    assert found[1] == "fits"
    assert "  asked      a:1, once, for a result of cupy_sum; as answered" in found


OUT = Failure("net.py:4", 2, "Out of memory", (Holder(7 * MIB, "model"),), MIB, "7.0 MiB  model")


def test_memory_that_runs_out() -> None:
    changes = {"ended": "out of memory", "exit_status": 3, "step_seconds": None, "steps_run": 1}
    found = said(failure=OUT, **changes)
    assert found[1:3] == ["does not fit: out of memory at net.py:4, in step 2", "7.0 MiB  model"]
    later = dataclasses.replace(OUT, extension="validation")
    found = said(failure=later, **changes)
    assert found[1] == "does not fit: out of memory at net.py:4, in the extension validation, " + (
        "after step 1"
    )
    outcome = dataclasses.replace(FITS, failure=OUT, **changes)  # type: ignore[arg-type]
    assert not outcome.fits
    assert outcome.to_json()["failure"]["holders"] == [{"nbytes": 7 * MIB, "place": "model"}]


def test_other_things_to_know() -> None:
    found = said(
        mode="managed",
        moved_bytes=MIB,
        steps_in_script=None,
        epoch_steps=None,
        evaluated=None,
        caught_out_of_memory=(CaughtOutOfMemory("a.py:3", 2),),
        first_connection="a.py:9 connects to 93.184.216.34:443",
        written=("/tmp/x", "/tmp/y"),
        reported=12,
        unused_answers=("b.py:1",),
        notes=("each step holds more",),
    )
    assert found[0].endswith("of VRAM, managed (simulated)")
    assert found[4:] == [
        "  moved      1.0 MiB a step",
        "  ran        3 steps, until two were alike; the rest did not run (--dry-steps all runs "
        "it)",
        "  here       the script took 2.0 s, loading data included",
        "  caught     out of memory at a.py:3, 2 times; the script continued",
        "  reported   12 values, which Chainer printed or saved as zeros",
        "  answer     b.py:1 read no value, so its --answer was not used",
        "  network    a.py:9 connects to 93.184.216.34:443",
        "  disk       wrote 2 files to a scratch folder, now deleted",
        "  note       each step holds more",
    ]


def test_a_name_cannot_break_the_report() -> None:
    text = report(FITS, "a\x1b[2Jb.py")
    assert "\x1b" not in text
