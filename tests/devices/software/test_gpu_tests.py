"""Every test for a GPU, on the software GPU: those of some files in a process of their own.

What only hardware can answer is marked ``hardware`` with the reason, and skipped there. Nothing
else may be skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
from project import ROOT
from software_programs import needs_compiler, needs_cupy

pytestmark = [pytest.mark.thorough(every_case=True), needs_cupy, needs_compiler]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
FILES = sorted(
    str(path.relative_to(TESTS))
    for path in TESTS.rglob("test_*.py")
    if "mark.gpu" in path.read_text("utf-8")
    and path.name not in (Path(__file__).name, "test_gpu_run.py")  # they name the mark
)
FUNCTIONS = "compat/functions/test_gpu_functions.py"
DEVICE = "devices/cuda/test_gpu_device.py"
"""These have tests of their own below."""
GROUPS: dict[str, list[str]] = {}
"""Files by folder, those below on_chainer/ by half of the alphabet too: a process has a group."""
for name in FILES:
    if name not in (FUNCTIONS, DEVICE):
        first, second = Path(name).parts[:2]
        half = (", to l" if second < "m" else ", from m") * (first == "on_chainer")
        GROUPS.setdefault(first + half, []).append(name)
CUDA_13 = Path(sys.prefix) / "cuda13"
"""Where scripts/setup puts CUDA 13's bindings, beside CUDA 12's, which are installed."""
bindings = pytest.mark.parametrize(
    "ahead",
    [
        pytest.param([], id="cuda-bindings 12"),
        pytest.param(
            [str(CUDA_13)],
            id="cuda-bindings 13",
            marks=pytest.mark.skipif(not CUDA_13.is_dir(), reason=f"there is no {CUDA_13}"),
        ),
    ],
)


@pytest.fixture
def environment(kernel_cache: Path) -> dict[str, str]:
    """Programs in it have a software GPU; its kernels are kept from run to run of the tests."""
    kernels = str(kernel_cache)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(SUPPORT / "on_software_gpu"), str(ROOT), str(SUPPORT))),
        "XDG_CACHE_HOME": kernels,
        "CUPY_CACHE_DIR": kernels,
    }


Cases = dict[tuple[str, str], str | None]
"""Tests by module and name, with the reason where one was skipped."""


def run_tests(
    paths: Sequence[Path], environment: dict[str, str], folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], Cases]:
    """Run the tests for a GPU of some files."""
    report = folder / "report.xml"
    quiet = ("-n", "0", "-q", "-p", "no:cacheprovider")
    given = ["-m", "gpu and not slow", *quiet, f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, *options, *map(str, paths)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    found: Cases = {}
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        place = case.attrib["classname"], case.attrib["name"]
        found[place] = None if skipped is None else skipped.attrib["message"]
    return done, found


def assert_passed(
    paths: Sequence[Path], environment: dict[str, str], folder: Path, *options: str
) -> None:
    done, found = run_tests(paths, environment, folder, *options)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skipped = {name: why for name, why in found.items() if why is not None}
    for (module, name), why in skipped.items():
        print(f"{module}::{name}: {why}")
    assert [why for why in skipped.values() if not why.startswith("hardware: ")] == []
    for path in paths:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        mine = [place for place in found if f"{place[0]}.".startswith(f"{module}.")]
        assert any(found[place] is None for place in mine), path


@pytest.mark.parametrize("group", GROUPS)
def test_tests_for_a_gpu_pass(group, environment, tmp_path):
    assert_passed([TESTS / name for name in GROUPS[group]], environment, tmp_path)


@pytest.mark.parametrize("part", ["test_a_function", "test_a_link"])
def test_chainer_agrees_with_numpy(part, environment, tmp_path):
    """In parts, which run side by side: their kernels take minutes to compile."""
    assert_passed([TESTS / FUNCTIONS], environment, tmp_path, "-k", part)


@pytest.mark.slow
def test_the_rest_of_chainer_agrees_with_numpy_in_half_precision(environment, tmp_path):
    assert_passed([TESTS / FUNCTIONS], environment, tmp_path, "-m", "gpu and slow")


@bindings
def test_hints_are_right_with_each_of_nvidias_bindings(ahead, environment, tmp_path):
    path = os.pathsep.join((*ahead, environment["PYTHONPATH"]))
    code = "import cuda.bindings as it; print(it.__version__)"
    inside = {**environment, "PYTHONPATH": path}
    said = subprocess.run([sys.executable, "-c", code], env=inside, capture_output=True, text=True)
    assert said.stdout.startswith("13." if ahead else "12."), said.stderr
    assert_passed([TESTS / DEVICE], inside, tmp_path)


def test_a_failed_test_keeps_no_memory_from_the_next(environment, tmp_path):
    """The failure's traceback holds its arrays: the next test must not find them."""
    path = tmp_path / "test_two.py"
    path.write_text("""
import pytest
from gpu_fixtures import MIB, OnGpu

pytestmark = pytest.mark.gpu

class TestTwo(OnGpu):
    def test_fails(self, device, cupy, use):
        use("managed")
        array = cupy.ones(4 * MIB, "u1")
        assert int(array.sum()) == 0

    def test_finds_nothing(self, device):
        assert device.pools.used_bytes("managed") == 0
        assert device.pools.ledger.reserved()["managed"] == 0
""")
    plugins = ("-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"))
    done, found = run_tests([path], environment, tmp_path, *plugins)
    assert [name for _, name in found] == ["test_fails", "test_finds_nothing"]
    assert set(found.values()) == {None}
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "assert 4194304 == 0" in done.stdout
