"""Every example runs as a program, on a virtual GPU where there is no other, and stays short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_VIRTUAL = {"03_gcn": ["--device", "virtual:v100-16gb"]}
ON_NUMPY = ("04_before_renting", "05_budget")


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_before_renting_a_gpu_a_batch_that_does_not_fit_is_said_to_need_help() -> None:
    result = run(ROOT / "examples" / "04_before_renting.py", "--batches", "32,4096")
    assert result.returncode == 0, result.stderr
    first, small, large, line = result.stdout.splitlines()
    assert "simulated t4" in first and "ms a step" in small
    assert "fits with" in large and line.lstrip().startswith("with umem.")


def test_a_budget_changes_no_bit() -> None:
    result = run(ROOT / "examples" / "05_budget.py")
    assert result.returncode == 0, result.stderr
    assert "losses are the same to the bit: True" in result.stdout
    assert "planned by" in result.stdout


@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p.stem not in ON_NUMPY], ids=lambda path: path.stem
)
def test_an_example_runs_and_says_that_the_gpu_is_simulated(path: Path) -> None:
    result = run(path, *ON_VIRTUAL.get(path.stem, ["virtual:v100-16gb"]))
    assert result.returncode == 0, result.stderr
    assert "The GPU is simulated (virtual:v100-16gb" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_begins_with_what_it_shows(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""')
    assert f"python examples/{path.name}" in "\n".join(lines[:5])


def test_enabling_once_holds_three_times_the_memory_of_the_gpu() -> None:
    output = run(ROOT / "examples/01_enable.py", "virtual:v100-16gb").stdout
    assert "mean: 7.0" in output  # 2 + 10 * 0.5 * 1
    assert "384.0 MiB were reserved on a GPU with 128.0 MiB." in output


def test_a_hint_changes_what_moves_and_not_the_result() -> None:
    output = run(ROOT / "examples/02_managed_block.py", "virtual:t4").stdout.splitlines()
    total = 3 * 24 * 2**20 * (1 + 2 + 3)
    assert output[1] == f"without a hint: the sum is {total}"
    assert output[3] == f"with a hint: the sum is {total}"
    assert "GiB moved, 0 B used in place" in output[2]
    assert "used in place" in output[4]
    assert "GiB moved" not in output[4]


@pytest.mark.parametrize("name", ["01_enable", "02_managed_block"])
@pytest.mark.parametrize("device", ["tpu", "virtual:v101"])
def test_an_unknown_device_is_refused(name: str, device: str) -> None:
    result = run(ROOT / f"examples/{name}.py", device)
    assert result.returncode == 1
    assert "did you mean" in result.stderr or "a device is virtual:NAME or cuda" in result.stderr


ON_SOFTWARE = {
    "01_enable": (["cuda"], "384.0 MiB were reserved on a GPU with 256.0 MiB"),
    "02_managed_block": (["cuda"], "with a hint: the sum is 452984832"),
    "03_gcn": (["--device", "cuda"], "96.9% of the test nodes' labels found"),
}
"""How each is told to use CuPy, and what it says on NumPy too."""


@needs_compiler
@needs_cupy
@pytest.mark.parametrize("name", ON_SOFTWARE)
def test_an_example_runs_on_the_real_cupy_with_the_same_result(
    name: str, kernel_cache: Path
) -> None:
    arguments, says = ON_SOFTWARE[name]
    path = str(ROOT / "examples" / f"{name}.py")
    asked = [sys.executable, "-m", "umem", "run", "--software", "t4", "--vram", "256MiB", path]
    result = subprocess.run(
        [*asked, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(kernel_cache)},
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert says in result.stdout
