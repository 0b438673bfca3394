"""bench/software_agreement.py runs, and the two GPUs agree on a small graph."""

from __future__ import annotations

import json

import pytest
from bench_scripts import RESULTS, written
from software_programs import needs_compiler, needs_cupy

pytestmark = [pytest.mark.thorough, needs_compiler, needs_cupy]


def test_the_virtual_and_the_software_gpu_agree_on_a_small_graph(tmp_path):
    report, printed = written(tmp_path, "software_agreement.py", "--quick")
    assert "simulated" in printed and report["simulated"] is True
    replayed, live, software = report["rows"]
    for virtual in (replayed, live):
        assert software["peak_bytes"] == pytest.approx(virtual["peak_bytes"], rel=0.02)
        assert software["losses"] == pytest.approx(virtual["losses"], rel=1e-6)
    assert software["step_seconds"] == pytest.approx(live["step_seconds"], rel=0.15)


def test_the_result_that_is_shown_keeps_to_what_was_promised_between_live_runs():
    rows = json.loads((RESULTS / "software_agreement.json").read_text())["rows"]
    _, live, software = rows
    assert software["peak_bytes"] == pytest.approx(live["peak_bytes"], rel=0.02)
    assert software["moved_bytes"] == pytest.approx(live["moved_bytes"], rel=0.10)
    assert software["step_seconds"] == pytest.approx(live["step_seconds"], rel=0.15)
