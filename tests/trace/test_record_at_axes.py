"""A step of Chainer recorded along its batch, length and width says what others take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import printed
from project import ROOT

from umem.compat.installation import find_package

if find_package() is None:
    pytest.skip("Chainer is not installed", allow_module_level=True)

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import umem
from umem.errors import ScalingError
from umem.trace.events import Alloc


def attention() -> Any:
    """Scores are the square of the length, weights that of the width; a model for each width."""
    models: dict[int, Any] = {}

    def run(batch: int, length: int, width: int = 32) -> None:
        if width not in models:
            project = L.Linear(width, 3 * width)
            models[width] = project, chainer.optimizers.Adam().setup(project)
        project, optimizer = models[width]
        rows = project(np.ones((batch * length, width), np.float32))
        q, k, v = F.split_axis(F.reshape(rows, (batch, length, 3 * width)), 3, 2)
        weights = F.softmax(F.matmul(q, k, transb=True), axis=2)
        project.cleargrads()
        F.sum(F.matmul(weights, v)).backward()
        optimizer.update()

    return run


@pytest.mark.thorough
def test_the_peak_at_eight_times_the_length_is_that_of_a_recording_there() -> None:
    run = attention()
    trace = umem.record_at(run, sizes={"batch": (8, 16), "length": (32, 64)})
    assert [size["length"] for size in trace.sizes[:3]] == [32, 64, 96]  # squares need a third
    assert len(trace.sizes) == 6
    real = umem.record_at(lambda length: run(16, length), sizes=(256, 512))
    for length in (256, 512):
        predicted = trace.at({"batch": 16, "length": length})
        assert predicted.peak_bytes == pytest.approx(real.at(length).peak_bytes, rel=0.02)
        found, expected = ([op.flops for op in t.ops] for t in (predicted, real.at(length)))
        assert found == expected


@pytest.mark.thorough
def test_the_width_is_an_axis_of_parameters_too() -> None:
    run = attention()
    sizes = {"length": (16, 32), "width": (32, 64)}
    trace = umem.record_at(lambda length, width: run(4, length, width), sizes)
    assert len(trace.sizes) == 9
    real = umem.record_at(lambda batch: run(batch, 64, 256), sizes=(2, 4)).at(4)
    found = trace.at({"length": 64, "width": 256})
    assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    states = [e.nbytes for e in found.events if isinstance(e, Alloc) and e.kind == "state"]
    assert sum(states) == 2 * 4 * (3 * 256 * 256 + 3 * 256)  # two of Adam's, float32, and a bias


def test_what_is_a_line_along_every_axis_is_recorded_at_four_points() -> None:
    calls: list[tuple[int, int]] = []

    def run(batch: int, length: int) -> None:
        calls.append((batch, length))
        F.relu(np.ones((batch, length, 8), np.float32))

    trace = umem.record_at(run, {"batch": (2, 4), "length": (16, 32)})
    assert len(trace.sizes) == 4
    assert len(calls) == 12  # three times each


@pytest.mark.thorough
def test_a_third_size_that_the_step_does_not_take_is_explained() -> None:
    run = attention()

    def short(batch: int, length: int) -> None:
        if length > 32:
            raise ValueError("at most 32 positions")
        run(batch, length)

    with pytest.raises(ScalingError, match=r"fails at size batch 2, length 48.*give three"):
        umem.record_at(short, {"batch": (2, 4), "length": (16, 32)})
    trace = umem.record_at(short, {"batch": (2, 4), "length": (8, 16, 32)})
    assert len(trace.sizes) == 6


@pytest.mark.thorough
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "predicting.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(first.partition("trace = ")[0] + "".join(others), encoding="utf-8")
    found = printed(script, cwd=tmp_path)
    assert "size batch 64, length 512" in found
    assert "length doubled: peak 1.1 GiB, 3.7 times as much; time 3." in found
    command = ["choose", "axes.umem.gz", "--size", "batch=64,length=512", "--gpu", "t4", "--json"]
    assert '"length": 512' in printed("-m", "umem", *command, cwd=tmp_path)
