"""A dry run says of a function of CuPy's what a run with arithmetic says: shapes, memory, time.

What runs with arithmetic say is recorded in real_functions.jsonl, by
``PYTHONPATH=tests/support setarch -R python tests/support/dry_function_calls.py real 0``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from software_programs import needs_compiler, needs_cupy

pytestmark = [
    needs_cupy,
    needs_compiler,
    pytest.mark.skipif(find_spec("scipy") is None, reason="no SciPy"),
]
RECORDED = Path(__file__).with_name("real_functions.jsonl")
CALLS = Path(__file__).parents[2] / "support" / "dry_function_calls.py"
FIGURES = ("peak_bytes", "reserved_peak_bytes", "seconds", "uploaded_bytes")
Rows = dict[tuple[str, bool], dict[str, Any]]
EVERY = 5
"""Every fifth function is among the quick tests, large: that compiles next to nothing."""


def read(lines: Sequence[str]) -> tuple[dict[str, str], Rows]:
    """The versions and the rows, by name and whether large."""
    versions, *rows = map(json.loads, lines)
    return versions, {(row["name"], row["large"]): row for row in rows}


def called(how: str, cache: Path, *options: str) -> tuple[dict[str, str], Rows]:
    """Call functions in a process whose hashes and addresses are the same each time."""
    fixed = [path, "-R"] if (path := shutil.which("setarch")) else []
    done = subprocess.run(
        [*fixed, sys.executable, str(CALLS), how, *options],
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(cache),
            "CUPY_CACHE_DIR": str(cache),
            "PYTHONHASHSEED": "0",
        },
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read(done.stdout.splitlines())


def differences(dry: Rows, real: Rows) -> list[str]:
    """What dry runs say otherwise than runs with arithmetic, a line each."""
    return [
        f"{name}, {'large' if large else 'small'}: {said}"
        for (name, large), row in dry.items()
        for said in difference(row, real[name, large])
    ]


def difference(dry: dict[str, Any], real: dict[str, Any]) -> list[str]:
    """What a dry call says otherwise; see `dry_function_cases.SHAPE`."""
    if "error" in dry or "error" in real:
        return [f"dry {dry.get('error')}, real {real.get('error')}"]
    kind = dry["kind"] if dry["large"] else "shape"
    found = []
    if not are_results_right(dry["results"], real["results"], kind):
        found.append(f"results {dry['results']} for {real['results']}")
    for key in FIGURES:
        ours, theirs = dry[key], real[key]
        if kind == "asked" or (kind == "values" and key in ("seconds", "uploaded_bytes")):
            continue
        is_least = kind in ("bound", "values")
        is_right = ours >= theirs * 0.99 if is_least else ours == pytest.approx(theirs, 1e-9)
        if not is_right:
            found.append(f"{key} {ours} for {theirs}")
    if dry.get("values") != real.get("values"):
        found.append(f"values {dry['values']} for {real['values']}")
    return found


def are_results_right(dry: list[Any], real: list[Any], kind: str) -> bool:
    """Whether results are the same, or no smaller, or of the same types."""
    if kind in ("shape", "values"):
        return dry == real
    return len(dry) == len(real) and all(
        one[1] == other[1]
        and (kind == "asked" or all(a >= b for a, b in zip(one[0], other[0], strict=True)))
        if isinstance(one, list) and isinstance(one[0], list)
        else one == other
        for one, other in zip(dry, real, strict=True)
    )


def test_the_comparison_finds_what_differs() -> None:
    row = {"name": "x", "kind": "bound", "large": True, "results": [[[3], "int64", [8]]]}
    row |= dict.fromkeys(FIGURES, 4)
    assert not difference(row, row)
    assert not difference(row, {**row, "results": [[[2], "int64", [8]]], "peak_bytes": 3})
    assert difference(row, {**row, "results": [[[4], "int64", [8]]]})
    assert difference(row, {**row, "peak_bytes": 5})
    exact = {**row, "kind": "shape"}
    assert difference(exact, {**exact, "peak_bytes": 3})
    assert difference({**exact, "error": "KeyError"}, exact)


@pytest.mark.thorough
def test_a_large_call_says_dry_what_it_says_with_arithmetic(tmp_path: Path) -> None:
    _, recorded = read(RECORDED.read_text("utf-8").splitlines())
    names = list(dict.fromkeys(name for name, _ in recorded))[::EVERY]
    versions, rows = called("dry", tmp_path, "0", "large", *names)
    _skip_other_versions(versions)
    assert len(rows) >= 50
    assert not differences(rows, recorded)


@pytest.mark.slow
def test_each_call_says_dry_what_it_says_with_arithmetic(kernel_cache: Path) -> None:
    _, recorded = read(RECORDED.read_text("utf-8").splitlines())
    versions, rows = called("dry", kernel_cache, "0", "both")
    _skip_other_versions(versions)
    assert rows.keys() == recorded.keys()
    assert not differences(rows, recorded)


@pytest.mark.slow
def test_calls_of_other_shapes_say_dry_what_they_say_with_arithmetic(kernel_cache: Path) -> None:
    dry, real = (called(how, kernel_cache, "1", "both")[1] for how in ("dry", "real"))
    assert not differences(dry, real)


def _skip_other_versions(versions: dict[str, str]) -> None:
    recorded, _ = read(RECORDED.read_text("utf-8").splitlines())
    if versions != recorded:
        pytest.skip(f"recorded with {recorded}, not {versions}: other arrays and kernels")
