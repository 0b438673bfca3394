"""`umem batch TRACE`: the batch that fits, on the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.predict.test_batches import recorded, step
from umem.cli import main
from umem.trace import Trace
from umem.units import MIB


def run(*words: Any, command: str = "batch") -> Result:
    return CliRunner().invoke(main, [command, *map(str, words)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recorded().save(tmp_path / "step.umem.gz")


def test_the_largest_and_the_quickest_are_printed(path: Path) -> None:
    done = run(path, "--gpu", "t4", "--vram", "64MiB")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(
        "T4, 64.0 MiB of VRAM; all figures are simulated.\nlargest batch "
    )
    assert "does not fit: " in done.output
    assert "least time a sample" in done.output
    assert "batch doubled: peak" in done.output


def test_json_has_what_was_found(path: Path) -> None:
    done = run(path, "--vram", "64MiB", "--json")
    found = json.loads(done.output)
    assert found["simulated"] is True
    assert found["next_batch"] == found["largest"]["batch"] + 1
    limited = json.loads(run(path, "--json", "--maximum", 10).output)
    assert (limited["largest"]["batch"], limited["next_batch"]) == (10, None)
    less = json.loads(run(path, "--vram", "64MiB", "--json", "--margin", 0.5).output)
    assert less["vram_bytes"] == 32 * MIB


def test_two_traces_and_their_sizes_are_one_step(tmp_path: Path) -> None:
    small, large = (step(n).save(tmp_path / f"{n}.umem.gz") for n in (4, 8))
    done = run(small, large, "--sizes", "4,8", "--vram", "64MiB")
    assert done.exit_code == 0
    assert "largest batch" in done.output


def test_of_a_step_along_axes_the_others_are_given(tmp_path: Path) -> None:
    points = [(batch, length) for batch in (4, 8) for length in (2, 4)]
    traces = [step(batch, per_sample=(20_000 * length,)) for batch, length in points]
    sizes = [{"batch": b, "length": n} for b, n in points]
    path = Trace.join(traces, sizes).save(tmp_path / "axes.umem.gz")
    done = run(path, "--size", "length=8", "--vram", "64MiB")
    assert done.exit_code == 0, done.output
    assert "batch doubled: peak" in done.output
    assert "length doubled: peak" in done.output
    plain = run(path, "--size", "batch=16,length=8", "--vram", "64MiB", command="choose")
    assert "length doubled: peak" in plain.output
    assert "Twice as much (simulated" in plain.output
    files = [str(t.save(tmp_path / f"{n}.gz")) for n, t in enumerate(traces)]
    text = ";".join(f"batch={b},length={n}" for b, n in points)
    joined = run(*files, "--sizes", text, "--size", "length=8", "--vram", "64MiB")
    assert joined.output == done.output


def test_vram_too_small_for_a_batch_of_one_ends_with_status_three(tmp_path: Path) -> None:
    path = recorded(lasting=30 * MIB, per_sample=(40 * MIB,)).save(tmp_path / "x")
    done = run(path, "--vram", "64MiB")
    assert done.exit_code == 3
    assert "a batch of one does not fit: it needs" in done.output


def test_ctrl_c_ends_with_the_status_of_shells(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("umem.cli.batch.batches_of", interrupted)
    done = run(path)
    assert done.exit_code == 130 and "Interrupted." in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--effective", 64], "has no --effective any more; run umem choose TRACE... --size N"),
        (["--size", "batch"], "a size is a whole number, or one for each axis"),
        (["--size", "batch=1,batch=2"], "a size is a whole number, or one"),
    ],
)
def test_bad_options_are_refused(path: Path, words: list[Any], said: str) -> None:
    done = run(path, *words)
    assert done.exit_code in (1, 2)
    assert said in done.output


def test_a_trace_of_one_size_says_how_to_record_two(tmp_path: Path) -> None:
    done = run(step(4).save(tmp_path / "x"))
    assert done.exit_code == 1
    assert "umem.record_at(step, sizes=(4, 8))" in done.output
