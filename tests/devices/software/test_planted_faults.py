"""Faults planted in right CuPy programs: their rules, and the script that looks for them, quick."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from bench_scripts import module
from bench_scripts import run as run_bench
from software_programs import needs_software_gpu


def test_a_hundred_faults_are_planted_ten_in_each_program() -> None:
    mutations = module("fault_mutations")
    programs = module("fault_programs").PROGRAMS
    found = {program.__name__: [*mutations.mutants(program)] for program in programs}
    assert len(found) == 10
    for planted in found.values():
        assert Counter(each.kind for each in planted) == Counter(mutations.MOST)
        assert len({each.source for each in planted}) == 10
    for program in programs:
        for mutant in found[program.__name__]:
            made = mutations.made(mutant, program.__globals__)
            assert made.__name__ == program.__name__ and made is not program


@needs_software_gpu
def test_planted_faults_are_found_and_right_programs_raise_no_alarm(
    kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(kernel_cache))
    path = tmp_path / "faults.json"
    done = run_bench("software_gpu_faults.py", "--quick", "--json", str(path), timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["alarms"] == [] and result["right_runs"] == 60
    assert [row["text"] for row in result["faults"] if row["as_what"] is None] == []
    assert sum(row["found"] for row in result["rows"]) == 10
