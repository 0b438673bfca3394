"""docs/hardware.md is what its script writes, and has every public function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import BENCH, module, run

from tests.house.test_docs_site import public_names

pytest.importorskip("umem.chainer")
hardware_page = module("hardware_page")
calls = module("gpu_run_parts.calls")
NO_CALL = {"umem.data.Codec"}
"""A protocol, which is not called."""


def test_the_page_is_what_the_kept_runs_say() -> None:
    done = run("hardware_page.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_function_has_a_call() -> None:
    covered = {
        name for group in calls.GROUPS for call in calls.calls_of(group) for name in call.covers
    }
    assert covered == set(public_names()) - NO_CALL


def test_the_names_of_calls_are_different() -> None:
    for group in calls.GROUPS:
        names = [call.name for call in calls.calls_of(group)]
        assert len(set(names)) == len(names)


def run_of(device: str, simulated: bool, date: str, **states: str) -> dict[str, Any]:
    lines = [
        {"name": name, "covers": [f"umem.{name}"], "state": state, "step": "first-light"}
        for name, state in states.items()
    ]
    versions = {"python": "3.12", "cupy-cuda13x": "14.0", "cuda of cupy": "13.0"}
    return {
        "device": device, "simulated": simulated, "date": date, "versions": versions,
        "calls": lines,
    }  # fmt: skip


def rows(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `umem.{name}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def test_where_a_function_has_run_is_said() -> None:
    runs = [
        run_of("H200", False, "2026-01-02", managed="passed", blocks="failed", track="hung"),
        run_of("T4", True, "2026-01-01", managed="passed", blocks="passed", mark="missing"),
    ]
    names = [f"umem.{name}" for name in ("managed", "blocks", "track", "mark", "new")]
    text = hardware_page.page(runs, names)
    assert rows(text, "managed") == ["H200, 2026-01-02", "T4", ""]
    assert rows(text, "blocks") == ["H200, 2026-01-02: **failed**", "T4", ""]
    assert rows(text, "track") == ["H200, 2026-01-02: **hung**", "-", ""]
    assert rows(text, "mark") == rows(text, "new") == ["-", "-", "not at all"]
    assert "| no card |" not in text and "1 failed, 1 hung, 1 passed" in text


def test_the_newest_run_of_a_device_counts() -> None:
    runs = [
        run_of("H200", False, "2026-01-01", managed="failed"),
        run_of("H200", False, "2026-01-02", managed="passed"),
    ]
    assert rows(hardware_page.page(runs, ["umem.managed"]), "managed")[0] == "H200, 2026-01-02"


def test_stand_ins_are_named() -> None:
    found = run_of("H200", False, "2026-01-02", memory_resource="passed")
    found["calls"][0]["stand_in"] = "RMM's classes"
    text = hardware_page.page([found], ["umem.memory_resource"])
    assert rows(text, "memory_resource")[2] == "with stand-ins: RMM's classes"


def test_a_run_is_kept_without_what_names_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = module("gpu_run_parts.archive").Archive(tmp_path / "out.zip")
    with pytest.raises(SystemExit, match="does not say of which machine"):
        hardware_page.keep(tmp_path / "out.zip", "card")
    machine = {
        "device": "H200", "simulated": False, "versions": {"python": "3.12"},
        "cuda": {"cuda of cupy": "13.0"}, "nvidia_smi": "secret",
    }  # fmt: skip
    archive.add("01-machine", {"began": "2026-01-02T03:04:05Z", "result": machine})
    line = {"name": "managed", "covers": ["umem.managed"], "state": "passed", "where": "/home/me"}
    archive.add("02-first-light", {"result": [{**line, "found": {"bytes": 4, "report": "/x"}}]})
    monkeypatch.setattr(hardware_page, "KEPT", tmp_path / "kept")
    text = hardware_page.keep(tmp_path / "out.zip", "card").read_text()
    assert "secret" not in text and "/home" not in text and "/x" not in text
    kept = json.loads(text)
    assert kept["date"] == "2026-01-02"
    assert kept["calls"] == [
        {"name": "managed", "covers": ["umem.managed"], "state": "passed",
         "found": {"bytes": 4, "report": None}, "step": "first-light"},
    ]  # fmt: skip
    assert hardware_page.kept() == [kept]


def test_kept_runs_name_no_folder_of_a_machine() -> None:
    for path in (BENCH / "results" / "gpu_run").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "/home/" not in text and "/work/" not in text and "/tmp/" not in text, path.name
