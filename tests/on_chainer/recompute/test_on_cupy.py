"""`Recompute` on CuPy: what it promises is what CuPy's own pool has in use, on the software GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

pytestmark = [needs_compiler, needs_cupy]
START = """
import json, warnings
import numpy as np
import umem
gpu = umem.software_gpu("t4", "256MiB", force=True, model=False)
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L, cupy as cp
pool = cp.get_default_memory_pool()
class Watch(cp.cuda.memory_hook.MemoryHook):
    name, peak = "watch", 0
    def malloc_postprocess(self, **k): self.peak = max(self.peak, pool.used_bytes())
np.random.seed(0)
def block(c): return [L.Convolution2D(c, c, 3, pad=1, nobias=True), L.BatchNormalization(c), F.relu]
net = chainer.Sequential(L.Convolution2D(3, 8, 3, pad=1), *block(8), *block(8), *block(8),
                         *block(8), F.dropout, L.Linear(None, 10))
x = cp.asarray(np.random.randn(16, 3, 16, 16).astype("f"))
t = cp.asarray(np.random.randint(0, 10, 16).astype("i"))
net.to_gpu()
optimizer = chainer.optimizers.Adam().setup(net)
optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
def steps(count):
    peaks, watch = [], Watch()
    with watch:
        for _ in range(count):
            watch.peak = pool.used_bytes()
            optimizer.update(lambda: F.softmax_cross_entropy(net(x), t))
            peaks.append(watch.peak)
    return peaks
steps(1)
"""


@pytest.mark.parametrize("budget", ["min", "85%"])
def test_the_promised_peak_is_the_pool_s_and_it_was_measured(
    budget: str, kernel_cache: Path
) -> None:
    program = f"""
plain = max(steps(2))
with umem.chainer.Recompute({budget!r}) as recompute:
    peaks = steps(6)
print(json.dumps([plain, peaks, recompute.predicted_bytes, recompute.measured_bytes,
                  recompute.report()]))
"""
    plain, peaks, predicted, measured, report = json.loads(run(program, kernel_cache, start=START))
    planned = max(peaks[3:])
    assert planned < 0.9 * plain
    assert abs(predicted - planned) < 0.02 * planned
    assert abs(measured - planned) < 0.02 * planned
    assert max(peaks[:2]) <= plain  # the passes that learn
    assert "measured;" in report


def test_workspace_of_convolutions_is_in_the_floor_and_a_cap_lowers_it(kernel_cache: Path) -> None:
    program = """
def least():
    with umem.chainer.Recompute("min") as recompute:
        peaks = steps(5)
    return recompute.predicted_bytes, peaks[-1], recompute.report()
whole = least()
with umem.chainer.workspace("256KiB"):
    capped = least()
print(json.dumps([whole, capped]))
"""
    whole, capped = json.loads(run(program, kernel_cache, start=START))
    assert "workspace of convolutions" in whole[2]
    assert capped[0] < 0.7 * whole[0]
    for predicted, peak, _ in (whole, capped):  # the pool rounds each array up to 512 bytes
        assert abs(predicted - peak) < 0.02 * peak + 64 * 512


def test_an_allocator_that_cannot_be_measured_is_said_once(kernel_cache: Path) -> None:
    program = """
cp.cuda.set_allocator(cp.cuda.MemoryAsyncPool().malloc)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with umem.chainer.Recompute("min") as recompute:
        steps(5)
print(sum("calls no memory hooks" in str(one.message) for one in told), recompute.measured_bytes)
"""
    assert run(program, kernel_cache, start=START) == "1 None\n"
