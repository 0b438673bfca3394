"""The scripts that run CuPy's own tests and call its functions count what happened, crashes too."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import CONFORMANCE, module, written
from software_programs import needs_compiler, needs_cupy

pytestmark = pytest.mark.thorough
CASES = """
import os
import time
import cupy
import pytest

def test_passes():
    assert cupy.arange(3).sum() == 3

def test_fails():
    assert cupy.arange(3).sum() == 4

@pytest.mark.skip(reason="not here")
def test_skips(): ...

@pytest.mark.slow
def test_left_out(): ...

def test_with_NVCC(): ...

def test_crashes():
    os.abort()

def test_hangs():
    time.sleep(1000)

def test_after(): ...
"""
CHAINERS = """
import unittest
import chainer
import mock
import pytest
from chainer import testing
from chainer.testing import attr

@attr.gpu
def test_on_one_gpu():
    assert chainer.backends.cuda.cupy.arange(3).sum() == 3

@testing.inject_backend_tests(["test_it"], [{"use_cuda": True, "cuda_device": d} for d in (0, 1)])
class TestTwo(unittest.TestCase):
    def test_it(self, config):
        pass

@attr.gpu
@attr.cudnn
def test_cudnn(): ...

def test_on_numpy(): ...
"""


@needs_cupy
@needs_compiler
def test_own_tests_are_counted(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    folder = tmp_path / "tests" / "core_tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(CASES)
    kept = tmp_path / "kept"
    run = ["cupy_own_tests.py", str(folder.parent), "--under", "core_tests", "--kept", str(kept)]
    result, _ = written(tmp_path, *run, "--minutes", "0")
    assert result["rows"][-1]["not_run_count"] == 6 and not result["failures"]
    result, _ = written(tmp_path, *run, "--seconds", "20")
    row = result["rows"][-1]
    assert row["passed_count"] == 2 and row["skipped_count"] == 1 and row["left_out_count"] == 2
    assert row["failed_count"] == 3 and row["passed_share"] == 0.4
    said = {case.partition("::")[2]: text for case, text in result["failures"].items()}
    assert said["test_crashes"] == "did not end: signal 6" and "assert" in said["test_fails"]
    assert said["test_hangs"] == "did not end: out of time after 20 s"
    assert result["left_out_by_reason"] == {"marked slow": 1, "nvcc": 1}
    assert result["skipped_by_reason"] == {"not here": 1}
    again, _ = written(tmp_path, *run)
    assert again["rows"] == result["rows"] and len(kept.read_text().splitlines()) == 6


@needs_cupy
@needs_compiler
def test_own_tests_of_chainer_are_counted(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("umem.chainer")
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    folder = tmp_path / "tests" / "chainer_tests" / "links_tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(CHAINERS)
    run = ["chainer_own_tests.py", str(tmp_path / "tests"), "--under", "links_tests"]
    result, _ = written(tmp_path, *run)
    row = result["rows"][-1]
    assert row["case_count"] == 3 and row["passed_count"] == 2 and row["skipped_count"] == 1
    assert result["skipped_by_reason"] == {"2 GPUs required": 1}


def _reasons(name: str) -> list[tuple[str, str]]:
    tests = module("foreign_tests")
    pairs: list[tuple[str, str]] = tests.reasons(CONFORMANCE / f"{name}_left_out.txt")
    return pairs


def test_every_case_left_out_has_a_reason_that_is_allowed() -> None:
    allowed = {
        "streams at once", "textures", "CUDA graphs", "nvcc", "jitify", "CUB-specific",
        "PTX and cubin", "marked slow", "a network",
    }  # fmt: skip
    assert {reason for reason, _ in _reasons("cupy")} <= allowed


def test_a_case_ends_as_its_last_word_says() -> None:
    ends = module("foreign_tests").ends

    def said(case: str, *phases: str) -> list[dict[str, object]]:
        lines: list[dict[str, object]] = [{"case": case, "phase": "start"}]
        for phase in phases:
            name, _, outcome = phase.partition(" ")
            lines.append({"case": case, "phase": name, "outcome": outcome, "said": phase})
        return [{"seconds": 1.0, **line} for line in lines]

    lines = [
        *said("a", "setup passed", "call passed", "teardown passed"),
        *said("b", "setup skipped", "teardown passed"),
        *said("c", "setup passed", "call passed", "teardown failed"),
        *said("d", "setup passed"),
    ]
    found = ends(["a", "b", "c", "d", "e"], lines, "signal 9")
    assert {case: end.outcome for case, end in found.items()} == {
        "a": "passed", "b": "skipped", "c": "failed", "d": "failed",
    }  # fmt: skip
    assert found["d"].said == "did not end: signal 9"
    assert ends(["e"], [], "ended")["e"].said == "not run"
    assert ends(["e", "f"], [], "signal 9") == {"e": ("failed", "not begun: signal 9", 0.0)}


def test_cases_are_cut_into_chunks_that_keep_files_together() -> None:
    cases = ["a::1", "b::1", "a::2", "c::1", "c::2", "c::3"]
    assert list(module("foreign_tests").chunks(cases, 2)) == [
        ["a::1", "a::2"], ["b::1"], ["c::1", "c::2"], ["c::3"],
    ]  # fmt: skip


@needs_cupy
@needs_compiler
def test_functions_are_called_and_compared(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    page = tmp_path / "page.md"
    only = ("--only", "cupy.hypot", "--only", "cupyx.zeros_pinned", "--only", "cupy.find_common")
    result, _ = written(tmp_path, "cupy_sweep.py", *only, "--page", str(page))
    found = {line["name"]: line["status"] for line in result["calls"]}
    assert found == {
        "cupy.hypot": "works", "cupyx.zeros_pinned": "no oracle", "cupy.find_common_type": "error",
    }  # fmt: skip
    assert "| cupy | 2 | 1 |" in page.read_text()


def test_results_are_compared_by_value_and_shape() -> None:
    pytest.importorskip("scipy")
    import numpy as np

    same = module("cupy_calls")._same
    one = np.array([1.0, 2.0])
    assert not same(one, one + 1e-9, False) and not same((1, one), (1, one), False)
    assert same(one, one[:1], False) and same(one, one + 1, False) and same((1,), (1, 2), False)
    assert same(one, -one, False) and not same(one, -one[::-1], True)
