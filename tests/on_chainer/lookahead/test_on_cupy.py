"""`LookaheadPrefetch` on the software GPU: moves that were learned stay the same, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import lines, needs_compiler, needs_cupy

from umem.compat import find_package

pytestmark = [
    needs_compiler,
    needs_cupy,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]


def test_steps_are_the_same_once_they_have_settled(kernel_cache: Path) -> None:
    """Arrays that die before the update are known to be free there, though nothing is allocated:
    otherwise each plan has them die one operation later than the plan before.
    """
    program = """
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L
first, second = L.Linear(784, 256), L.Linear(256, 256)
model = chainer.Sequential(first, F.relu, F.dropout, second, F.relu, F.dropout, L.Linear(256, 10))
optimizer = chainer.optimizers.Adam().setup(model)
seen = []
with umem.managed(), umem.chainer.LookaheadPrefetch():
    model.to_device("@cupy:0")
    x, t = cp.ones((4096, 784), "f4"), cp.zeros(4096, "i4")
    for _ in range(14):
        before = gpu.figures
        optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))
        cp.cuda.Device().synchronize()
        after = gpu.figures
        seen.append((after.migrated_in_bytes - before.migrated_in_bytes,
                     after.migrated_out_bytes - before.migrated_out_bytes,
                     after.fault_count - before.fault_count))
print(len(set(seen[4:])), seen[4][0] < 16 << 20, seen[0][2] > 0, seen[-1][2])
"""
    start = """
import umem
gpu = umem.software_gpu("t4", "42MiB", force=True)
import cupy as cp
"""
    assert lines(program, kernel_cache, start=start) == ["1 True True 0"]


def test_without_cuda_core_training_goes_on(kernel_cache: Path) -> None:
    program = """
import sys, warnings
sys.modules["cuda.core"] = None  # not installed
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L
model = chainer.Sequential(*[part for _ in range(8) for part in (L.Linear(256, 256), F.relu)])
optimizer = chainer.optimizers.Adam().setup(model)
with warnings.catch_warnings(record=True) as told, umem.managed():
    warnings.simplefilter("always")
    with umem.chainer.LookaheadPrefetch() as lookahead:
        model.to_device("@cupy:0")
        x = cp.ones((2048, 256), "f4")
        for _ in range(4):
            optimizer.update(lambda: F.mean(model(x) ** 2))
said = [str(one.message) for one in told if one.category.__name__ == "LookaheadWarning"]
print(optimizer.t, len(said), "cuda-core" in said[0], "cuda-core" in str(lookahead.report()))
"""
    start = """
import umem
umem.software_gpu("t4", "16MiB", force=True)
import cupy as cp
"""
    assert lines(program, kernel_cache, start=start) == ["4 1 True True"]
