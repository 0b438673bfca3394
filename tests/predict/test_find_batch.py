"""`find_batch` of Chainer's steps: recorded small, found without a trial, confirmed on a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

from umem.compat.installation import find_package

if find_package() is None:
    pytest.skip("Chainer is not installed", allow_module_level=True)

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from software_programs import needs_compiler, needs_cupy, run

import umem
from umem.devices.specs import gpu_spec
from umem.errors import BudgetError, ScalingError, SizeError, StateError
from umem.predict.techniques.step_variants import StepVariants


def make_step(width: int = 128) -> Any:
    model = chainer.Sequential(L.Linear(64, width), F.relu, L.Linear(width, 10))
    optimizer = chainer.optimizers.Adam().setup(model)

    def step(batch: int) -> None:
        x, t = np.zeros((batch, 64), np.float32), np.zeros(batch, np.int32)
        optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))

    return step


@pytest.mark.thorough
def test_the_batch_that_is_found_fits_as_a_recording_of_it_does() -> None:
    """Judged on a real step of both batches, by the code of choose."""
    step = make_step()
    found = umem.chainer.find_batch(step, "t4", "16MiB", sizes=(64, 128))
    real = umem.record_at(step, sizes=(found.batch, found.batch + 200))
    spec = gpu_spec("t4").with_vram(16 << 20)
    assert StepVariants(real, [spec], found.batch).fits(spec)
    assert not StepVariants(real, [spec], found.batch + 200).fits(spec)
    assert found.next_batch == found.batch + 1
    assert (found.confirmed, found.confirmation) == (None, None)


def test_a_trace_is_taken_as_it_was_recorded() -> None:
    trace = umem.record_at(make_step(), sizes=(64, 128))
    found = umem.chainer.find_batch(trace, vram="16MiB")
    assert found.batch == umem.chainer.find_batch(trace, vram="16MiB", confirm=False).batch


@pytest.mark.thorough
def test_a_step_along_axes_has_its_batch_found() -> None:
    model = L.Linear(32, 32)
    optimizer = chainer.optimizers.SGD().setup(model)

    def step(batch: int, length: int) -> None:
        x = np.zeros((batch * length, 32), np.float32)
        optimizer.update(lambda: F.sum(F.relu(model(x))))

    sizes = {"batch": (16, 32), "length": (16, 32)}
    found = umem.chainer.find_batch(step, vram="32MiB", sizes=sizes, size={"length": 64})
    assert found.size == {"batch": found.batch, "length": 64}
    assert found.next_batch == found.batch + 1


# -- bad input ---------------------------------------------------------------------------------


def test_bad_steps_are_refused() -> None:
    with pytest.raises(ScalingError, match="does not take that"):
        umem.chainer.find_batch(lambda: None)
    with pytest.raises(ScalingError, match="nothing of the step depends on the size"):
        umem.chainer.find_batch(lambda batch: make_step_of_one_size())
    with pytest.raises(SizeError, match="at least 1"):
        umem.chainer.find_batch(make_step(), sizes=(0, 4))
    with pytest.raises(SizeError, match="at least 1"):
        umem.chainer.find_batch(make_step(), sizes=(4, 8.5))

    def failing(batch: int) -> None:
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        umem.chainer.find_batch(failing)


def make_step_of_one_size() -> None:
    F.sum(F.relu(np.ones((8, 8), np.float32)))


def test_vram_too_small_names_what_could_help() -> None:
    with pytest.raises(BudgetError, match=r"a batch of one does not fit: it needs .* umem.choose"):
        umem.chainer.find_batch(make_step(width=4096), vram="2MiB")


@pytest.mark.thorough
def test_there_is_nothing_to_confirm_on_without_a_device() -> None:
    with pytest.raises(StateError, match="there is no device to confirm a batch on"):
        umem.chainer.find_batch(make_step(), confirm=True)
    trace = umem.record_at(make_step(), sizes=(64, 128))
    with pytest.raises(StateError, match="a trace cannot be run"):
        umem.chainer.find_batch(trace, confirm=True)


# -- on a device -------------------------------------------------------------------------------

PROGRAM = """
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L

model = chainer.Sequential(L.Linear(64, 128), F.relu, L.Linear(128, 10))
model.to_device("@cupy:0")
optimizer = chainer.optimizers.Adam().setup(model)
ran = []

def step(batch):
    ran.append(batch)
    x, t = cp.zeros((batch, 64), "f4"), cp.zeros(batch, "i4")
    optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))

found = umem.chainer.find_batch(step, "t4", {vram!r}, sizes=(64, 128))
pool = cp.get_default_memory_pool()
held = pool.used_bytes()
print(found.confirmed, ran[-1] == found.batch, len(ran), held < 4 << 20)
print(found.confirmation)
step(16)
print(pool.used_bytes() <= held + 4096)
"""


@needs_compiler
@needs_cupy
def test_the_largest_batch_is_confirmed_on_a_software_gpu(kernel_cache: Path) -> None:
    said = run(PROGRAM.format(vram="24MiB"), kernel_cache).splitlines()
    assert said[0] == "True True 8 True"
    assert said[1].startswith("Confirmed: size ")
    assert said[2] == "True"


@needs_compiler
@needs_cupy
def test_running_out_of_memory_is_survived_and_nothing_of_it_is_kept(kernel_cache: Path) -> None:
    """The GPU that was asked for has more VRAM than the one that is there."""
    said = run(PROGRAM.format(vram="8GiB"), kernel_cache).splitlines()
    assert said[0] == "False True 7 True"
    assert "ran out of memory on the device" in said[1]
    assert said[-1] == "True"


# -- the page ----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "all figures are simulated" in done.stdout
