"""bench/founding_table.py runs dry or trains; the published network has its parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_scripts import ROOT, module, written
from software_programs import needs_software_gpu

import umem.chainer

pytestmark = pytest.mark.thorough

assert umem.chainer


def test_the_network_has_84_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "examples")])
    network = module("masked_lm.network")
    sizes = {**module("founding_table").PUBLISHED}
    del sizes["batch"]
    model = network.MaskedLanguageModel(**sizes)
    assert sum(p.size for p in model.params()) == pytest.approx(84e6, rel=0.01)


@needs_software_gpu
def test_a_dry_table_is_simulated(tmp_path: Path) -> None:
    content, printed = written(tmp_path, "founding_table.py", "--quick")
    assert content["simulated"] and "(simulated)" in printed
    base, recomputed = content["rows"]
    assert base["technique"] == "base" and base["time_ratio"] == 1
    assert 0 < recomputed["simulated_peak_mib"] < base["simulated_peak_mib"]
    assert recomputed["time_ratio"] > 1
    assert recomputed["published_change"] == pytest.approx(8_311 / 12_589 - 1)


@pytest.mark.slow
def test_what_is_measured_is_of_trainings_that_ran(tmp_path: Path) -> None:
    asked = ["--measure", "--quick", "--repeats", "1"]
    content, printed = written(tmp_path, "founding_table.py", *asked)
    assert not content["simulated"] and "(measured)" in printed
    base, diet, everything = content["rows"]
    assert base["technique"] == "base" and base["time_ratio"] == 1
    for row in (diet, everything):
        assert row["tensor_bytes"] > 0  # on so small a network, above all of the techniques
        assert row["process_bytes"] > 0 and row["time_ratio"] > 0
        assert row["tensors_saved"] == pytest.approx(1 - row["tensor_bytes"] / base["tensor_bytes"])
