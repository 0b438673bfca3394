"""Techniques, planners and reports that another package adds to umem."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner
from processes import python
from software_programs import needs_cupy

import umem
from umem.choosing import TECHNIQUES, Technique, nothing, register_technique
from umem.errors import GraphError, StateError
from umem.planner import Family, Graph, Node, dispatch, min_budget, plan, register_method, simulate
from umem.reports import OUTPUTS, Output, ReportRequest, register_output
from umem.trace import Alloc, Trace


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    outputs, methods = list(OUTPUTS), dict(dispatch.METHODS)
    rows = list(TECHNIQUES)
    yield
    TECHNIQUES[:] = rows
    OUTPUTS[:] = outputs
    dispatch.METHODS.clear()
    dispatch.METHODS.update(methods)


# -- a technique -------------------------------------------------------------------------------

TECHNIQUE = """
import umem
from umem.choosing import TECHNIQUES, Technique, register_technique

def mine(stack):
    stack.enter_context(umem.enable("managed"))

del TECHNIQUES[1:]
register_technique(Technique("mine", "mine.turn_on()", mine, needs_chainer=False))
"""
LARGE = """
import cupy
x = cupy.ones(64 << 20, "f")
y = x + 1
"""


@pytest.mark.thorough
@needs_cupy
def test_a_technique_from_outside_is_tried(tmp_path: Path) -> None:
    path = add_package(tmp_path, "more_techniques", TECHNIQUE)
    (tmp_path / "large.py").write_text(LARGE)
    command = ("choose", "--gpu", "t4", "--vram", "384MiB", "--json", "large.py")
    done = python("-m", "umem", *command, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    first, last = json.loads(done.stdout)["rows"]
    assert first["name"] == "mine" and first["fits"] and first["line"] == "mine.turn_on()"
    assert last["name"] == "nothing" and "large.py:4" in last["why_not"]


def test_a_name_is_registered_once() -> None:
    register_technique(Technique("mine", "mine.turn_on()", nothing))
    assert TECHNIQUES[-1].name == "mine"
    with pytest.raises(StateError, match="technique 'mine' is already registered"):
        register_technique(Technique("mine", "other()", nothing))


# -- a planner ---------------------------------------------------------------------------------


def every_third(graph: Graph, model: str) -> tuple[int, ...]:
    """Cuts after every third node."""
    places = [*range(0, len(graph), 3), len(graph)]
    return tuple((1 << place) - 1 for place in places)


def test_a_planner_from_outside_plans() -> None:
    names = [f"n{index}" for index in range(12)]
    graph = Graph([Node(name, 4, 1) for name in names], pairwise(names))
    with pytest.raises(GraphError, match="method must be one of"):
        plan(graph, method="thirds")
    register_method("thirds", Family(every_third))
    found = plan(graph, method="thirds", model="saved")
    assert found.method == "thirds" and {len(block) % 3 for block in found.blocks} == {0}
    assert simulate(graph, found).peak_bytes <= found.peak_bytes
    assert min_budget(graph, "thirds", "saved") >= min_budget(graph, "lower_sets_exact", "saved")
    with pytest.raises(GraphError, match="method 'thirds' is already registered"):
        register_method("thirds", Family(every_third))


# -- a report ----------------------------------------------------------------------------------


def write_sizes(request: ReportRequest, file: IO[bytes]) -> None:
    """A line for each tensor of the peak."""
    lines = [f"{tensor.label},{tensor.nbytes}" for tensor in request.analysis.peak.tensors]
    file.write("\n".join(lines).encode())


CSV = Output("csv", "For a spreadsheet.", write_sizes, then="Open it in a spreadsheet.")


def test_a_report_from_outside_is_written(tmp_path: Path) -> None:
    from umem.cli import main

    def run(*words: object) -> Any:
        return CliRunner().invoke(main, ["report", *map(str, words)])

    trace = Trace([Alloc(0, 5, "array", "a"), Alloc(1, 7, "array", "b")]).save(tmp_path / "t.gz")
    target = tmp_path / "sizes.csv"
    assert run(trace, "--export", "csv", target).exit_code == 2
    register_output(CSV)
    done = run(trace, "--export", "csv", target)
    assert target.read_text() == "b,7\na,5"
    assert done.output.splitlines()[0] == f"Wrote {target}. Open it in a spreadsheet."
    assert run(trace, "--export", "csv", target).exit_code == 1, "nothing is overwritten"
    with pytest.raises(StateError, match="output 'csv' is already registered"):
        register_output(CSV)


PACKAGE = """
from tests.test_adding import CSV
from umem.reports import register_output
register_output(CSV)
"""


def add_package(folder: Path, name: str, source: str) -> str:
    """Install a package in a folder; returns the path for Python to have it and umem."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    shown = name.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {shown}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[umem]\nmore = {name}\n")
    root = Path(umem.__file__).parent.parent
    return os.pathsep.join(map(str, (folder, root, root / "tests" / "support")))


@pytest.mark.parametrize("source", [PACKAGE, "raise RuntimeError('too old')"])
def test_the_command_finds_what_an_installed_package_adds(tmp_path: Path, source: str) -> None:
    path = add_package(tmp_path, "more_reports", source)
    trace = Trace([Alloc(0, 5, "array", "a")]).save(tmp_path / "t.gz")
    command = ("report", trace, "--export", "csv", "sizes.csv")
    done = python("-m", "umem", *command, cwd=tmp_path, PYTHONPATH=path)
    if source == PACKAGE:
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "sizes.csv").read_text() == "a,5"
    else:
        assert done.returncode == 1 and "'more' of the package 'more-reports'" in done.stderr
        assert "too old" in done.stderr and "Traceback" not in done.stderr


def test_contributing_names_where_things_are() -> None:
    root = Path(umem.__file__).parent.parent
    text = (root / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"`([A-Z]{4,})`[^`\n]*\(`(umem/[a-z_/]+\.py)`\)", text)
    assert len(listed) == 2
    for name, path in listed:
        assert re.search(rf"^{name}(:.*)? = ", (root / path).read_text(), re.MULTILINE), name
    count = len(list((root / "examples").glob("[0-9]*.py")))
    words = {9: "nine", 10: "ten", 11: "eleven", 12: "twelve"}
    said = f"{words[count]} short [examples](examples)"
    assert said in (root / "README.md").read_text()
