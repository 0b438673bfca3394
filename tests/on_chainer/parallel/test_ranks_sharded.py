"""Optimizers in shards: the bits of the whole, an N-th of its state, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mpi_programs import needs_ranks, run_ranks
from project import ROOT
from software_programs import needs_compiler, needs_cupy

PROGRAM = ROOT / "tests" / "support" / "sharded_program.py"
pytestmark = needs_ranks


def run(count: int, tmp_path: Path, *cases: str) -> list[list[str]]:
    """What each rank says of each case: nothing, where it is as it should be."""
    done = run_ranks(count, PROGRAM, tmp_path, *cases)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.slow
def test_every_optimizer_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    assert not any(run(3, tmp_path, "optimizers"))


@pytest.mark.thorough
def test_adam_in_32_and_8_bits_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    assert not any(run(2, tmp_path, "adams"))


CASES = (
    *("hooks", "halves", "scaled", "edges", "accumulated", "tied", "recomputed", "memory"),
    *("spoiled", "refused", "refused_at_once", "converted"),
)


@pytest.mark.thorough
def test_shards_are_as_the_whole(tmp_path: Path) -> None:
    assert not any(run(2, tmp_path, *CASES))


@needs_cupy
@needs_compiler
@pytest.mark.thorough
def test_shards_of_cupy_arrays_on_two_software_gpus(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setattr("mpi_programs.SECONDS", 400)  # its kernels are compiled
    assert not any(run(2, tmp_path, "gpus"))


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks have saved a run."""
    folder = tmp_path_factory.mktemp("begun")
    run(2, folder, "begun")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((1, 3), marks=pytest.mark.thorough),
        pytest.param((2, 4, 5), marks=pytest.mark.slow),
    ],
)
def test_a_snapshot_of_two_ranks_is_read_by_any_number(
    counts: tuple[int, ...], of_two_ranks: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(of_two_ranks, tmp_path / "run")
    for count in counts:
        assert not any(run(count, folder, "resumed"))
    if 1 in counts:
        assert not any(run(1, folder, "whole"))


@pytest.mark.parametrize(
    "counts",
    [pytest.param((2, 3), marks=pytest.mark.thorough), pytest.param((5,), marks=pytest.mark.slow)],
)
def test_another_number_of_ranks_goes_on_to_rounding(
    counts: tuple[int, ...], of_two_ranks: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(of_two_ranks, tmp_path / "run")
    for count in counts:
        shutil.rmtree(folder / "adam" / "step-5", ignore_errors=True)
        shutil.rmtree(folder / "adam" / "step-4", ignore_errors=True)
        assert not any(run(count, folder, "trained_on"))


@pytest.mark.thorough
def test_a_trainer_goes_on_where_ranks_have_other_samples(tmp_path: Path) -> None:
    assert not any(run(2, tmp_path, "trainers"))
    assert not any(run(3, tmp_path, "trainers"))
