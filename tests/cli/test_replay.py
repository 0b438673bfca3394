"""``umem replay TRACE``: a recorded step on the models of GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import umem
from umem._common.specs import GPUS
from umem.cli import main
from umem.trace import Access, Alloc, Free, Mark, Op, Trace
from umem.units import MIB


def run(*args: Any) -> Result:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(
        main, ["replay", *map(str, args)]
    )


def steps(backend: str) -> Trace:
    """Two steps, each with two arrays of 32 MiB at once."""
    events: list[Any] = [Alloc(0, 32 * MIB, "parameter", "W", True)]
    for number in (1, 2):
        both = (Access(0, 0, 32 * MIB),), (Access(number, 0, 32 * MIB),)
        events += [Alloc(number, 32 * MIB, "activation", "f"), Op("f", "forward", *both, 1, 64)]
        events += [Free(number), Mark("step")]
    return Trace(events, backend)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return steps("cupy").save(tmp_path / "t.umem.gz")


def test_a_line_for_each_mode_has_what_umem_replay_says(path: Path) -> None:
    done = run(path, "--vram", "48MiB", "--json")
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert found["simulated"] is True
    rows = {row["mode"]: row for row in found["replays"]}
    assert list(rows) == ["unmanaged", "managed", "hybrid"]
    for mode, row in rows.items():
        replay = umem.replay(Trace.load(path), "t4", mode, "48MiB")
        assert row["simulated_fits"] is replay.fits is (mode != "unmanaged")
        assert row["simulated_needed_bytes"] == 64 * MIB
        assert row["simulated_migrated_bytes"] == replay.migrated_bytes
        mean = sum(replay.step_seconds) / 2 if replay.fits else None
        assert row["simulated_step_seconds"] == (pytest.approx(mean) if mean else None)
    assert "32.0 MiB" in rows["unmanaged"]["reason"] and rows["managed"]["reason"] is None


def test_the_text_says_what_is_needed_where_it_fits_and_why_not(path: Path) -> None:
    done = run(path, "--vram", "48MiB", "--mode", "unmanaged", "--mode", "managed")
    text = " ".join(done.output.split())
    assert done.exit_code == 0
    assert "needs 64.0 MiB at its peak" in text and "All figures are simulated" in text
    assert "t4 48.0 MiB unmanaged NO - -" in text and "t4 48.0 MiB managed yes" in text
    assert "hybrid yes" not in text and "The step time is the mean of 2" in text
    assert "needs 32.0 MiB for 'f' activation" in text


def test_every_gpu_of_the_table(path: Path) -> None:
    done = run(path, "--all-gpus", "--mode", "unmanaged", "--json")
    assert [row["gpu"] for row in json.loads(done.output)["replays"]] == list(GPUS)
    for option in (["--gpu", "t4"], ["--vram", "1GiB"]):
        done = run(path, "--all-gpus", *option)
        assert done.exit_code == 2 and "Leave out --gpu and --vram" in done.output


def test_a_trace_of_numpy_says_so(tmp_path: Path, path: Path) -> None:
    said = "The trace was recorded on NumPy"
    assert said in run(steps("numpy").save(tmp_path / "n.umem.gz")).output
    assert said not in run(path).output


def test_where_it_fits_nowhere_the_status_is_3(path: Path) -> None:
    assert run(path, "--vram", "48MiB", "--mode", "unmanaged").exit_code == 3


def test_without_steps_the_time_is_of_all_of_it(tmp_path: Path) -> None:
    events = [event for event in steps("cupy").events if event != Mark("step")]
    done = run(Trace(events, "cupy").save(tmp_path / "x"), "--mode", "unmanaged")
    text = " ".join(done.output.split())
    assert "no step ends in it" in text and "time" in text


def test_what_is_no_trace_is_refused(tmp_path: Path, path: Path) -> None:
    (tmp_path / "x").write_text("no trace")
    for wrong in (tmp_path / "x", tmp_path / "none"):
        done = run(wrong)
        assert done.exit_code == 1 and done.output.startswith("Error: ")
    done = run(path, "--gpu", "t5")
    assert done.exit_code == 1 and "t5" in done.output
    assert "more than 3 events" in run(path, "--max-events", "3").output
