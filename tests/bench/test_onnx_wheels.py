"""onnx_wheels.py, as far as it needs no network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import click
import pytest
from bench_scripts import module

from tests.on_onnx.test_operators import two_layers

pytest.importorskip("onnx")


def test_the_list_has_models_of_many_wheels_each_once() -> None:
    bench = module("onnx_wheels")
    entries = json.loads(bench.LIST.read_text(encoding="utf-8"))
    assert len(entries) >= 30 and len({entry["wheel"] for entry in entries}) >= 12
    assert len({entry["sha256"] for entry in entries}) == len(entries)
    assert {entry["kind"] for entry in entries} == {"float", *bench.REFUSALS}


@pytest.fixture
def cache(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with one wheel, and its entry."""
    content = two_layers(tmp_path / "m.onnx").read_bytes()
    with zipfile.ZipFile(tmp_path / "some_models-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some/m.onnx", content)
    digest = hashlib.sha256(content).hexdigest()
    entry = {"wheel": "some-models", "version": "1.0", "path": "some/m.onnx", "kind": "float"}
    return tmp_path, {**entry, "sha256": digest}


def test_a_model_is_planned_and_compared(
    cache: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = module("onnx_wheels")
    folder, entry = cache
    made = {"h": 2 * 30 * 4, "r": 2 * 30 * 4, "y": 2 * 10 * 4}  # as ONNX Runtime would say
    monkeypatch.setattr(bench, "runtime_bytes", lambda path, sizes: made)
    row = bench.row_of(entry, folder)
    assert row["sizes"] == {"batch": 2} and row["nodes"] == 3 and bench.is_planned(row)
    assert bench.apart(row) == 0 and row["missing"] == []
    made["z"] = 8
    assert bench.apart(bench.row_of(entry, folder)) < 0


def test_another_file_than_the_listed_one_is_refused(cache: tuple[Path, dict[str, Any]]) -> None:
    folder, entry = cache
    with pytest.raises(click.ClickException, match="is another file"):
        module("onnx_wheels").model_file({**entry, "sha256": "0" * 64}, folder)
