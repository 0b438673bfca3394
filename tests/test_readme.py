"""README's code runs as it stands, prints what README says, and its figures are measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import printed, python
from project import ROOT
from software_programs import needs_software_gpu

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


PROGRAM = "".join(line for line in BLOCKS[0].splitlines(True) if "umem.enable" not in line)
KERNEL = """
import cupy
def test_one_too_far():
    kernel = cupy.RawKernel(
        'extern "C" __global__ void copy(const float* x, float* y) '
        "{ int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i + 1]; }", "copy")
    x, y = cupy.ones(64, "float32"), cupy.empty(64, "float32")
    kernel((1,), (64,), (x, y))
"""


def output_of(command: str) -> list[str]:
    """Return the lines that README says a command prints."""
    block = README.split(f"$ {command}\n")[1].split("```")[0]
    return [line for line in block.splitlines() if line.strip()]


@pytest.mark.thorough
@needs_software_gpu
def test_a_program_out_of_memory_says_who_holds_it(tmp_path: Path) -> None:
    """It does not fit in 640 MiB as it is, and does with README's line."""
    words = ("-m", "umem", "run", "--software", "t4", "--vram", "640MiB", "sums.py")
    (tmp_path / "sums.py").write_text(PROGRAM)
    done = python(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert [
        line
        for line in output_of("umem run --software t4 --vram 640MiB sums.py")
        if line not in done.stderr
    ] == []
    (tmp_path / "sums.py").write_text(BLOCKS[0])
    assert printed(*words, cwd=tmp_path) == f"{3.0 * 16384 * 4096}\n"


@pytest.mark.thorough
@needs_software_gpu
def test_pytest_names_the_argument_that_a_kernel_leaves(tmp_path: Path) -> None:
    (tmp_path / "test_copy.py").write_text(KERNEL)
    done = python("-m", "pytest", "--software-gpu", "t4,checked,force,seed=0",
                  "-p", "no:cacheprovider", cwd=tmp_path, COLUMNS=200)  # fmt: skip
    said = " ".join(map(str.strip, output_of("pytest --software-gpu t4,checked")))
    assert said in " ".join(map(str.strip, done.stdout.splitlines()))


def test_the_code_for_a_chainer_model_runs() -> None:
    entered: list[int] = []
    names: dict[str, Any] = {"train": lambda: entered.append(1)}
    exec(compile(BLOCKS[1], "README block 1", "exec"), names)
    assert entered == [1]


def test_the_readme_is_short_and_its_code_too() -> None:
    assert len(README.splitlines()) <= 120
    assert "make demo" in README[:900] and "make test" in README[:900]
    assert len(BLOCKS) == 2
    assert all(len(list(filter(str.strip, block.splitlines()))) <= 6 for block in BLOCKS)


# What the table says, and the sentence of bench/README.md that has its numbers.
FIGURES = [
    (
        "{:.0%} to {:.0%} of unified memory's time | three lines",
        r"in (\S+) to (\S+) of managed memory's",
    ),
    ("{:.0%} to {:.0%} of the VRAM", r"9 networks train in (\S+) to (\S+) of the VRAM"),
    ("{:.2f} times the time at the median", r"of its time \((\S+) at the median\), and 84 of"),
    ("{:.2f} to {:.2f} times the time", r"at (\S+) to (\S+) of its time by the clock \("),
    ("{:.2f} bytes an element", r"Adam8bit keeps (\S+) bytes an element"),
    ("{:.2f} to {:.2f} of Adam's time", r"an element and takes (\S+) to (\S+) with Numba"),
    (
        "{:.0%} to {:.0%} of unified memory's time | a step",
        r"takes (\S+) to (\S+) of its time in plain",
    ),
    ("{:.0%} of the bytes", r"takes (\S+) to \S+ of a file's bytes"),
    ("{:.0f} of {:.0f} programs", r"Of (?P<all>\S+) programs (?P<equal>\S+) are equal within 1%"),
]


@pytest.mark.parametrize(("said", "measured"), FIGURES)
def test_a_figure_of_the_table_is_a_benchs(said: str, measured: str) -> None:
    found = re.search(measured, (ROOT / "bench" / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    numbers = [found["equal"], found["all"]] if "all" in found.groupdict() else found.groups()
    assert said.format(*map(float, numbers)) in README


def test_the_figures_of_accumulation_are_those_of_the_founding_table() -> None:
    text = (ROOT / "bench" / "results" / "founding_table.json").read_text(encoding="utf-8")
    rows = {row["technique"]: row for row in json.loads(text)["rows"]}
    accumulation = rows["accumulation, 16 x 4"]
    saved = f"{-accumulation['simulated_reserved_change']:.0%} of a RoBERTa's memory"
    assert f"{saved} | {accumulation['time_ratio']:.2f} times the time" in README


def test_every_file_the_readme_links_to_exists() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
