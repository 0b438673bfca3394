"""Library calls on the software GPU give the same bits on however many cores they use."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

from umem.host_cuda.libraries.cores import cut

pytestmark = [
    needs_cupy,
    needs_compiler,
    pytest.mark.skipif(find_spec("scipy") is None, reason="no SciPy"),
]
START = """
import os
import threading
import numpy as np
import umem
gpu = umem.software_gpu("t4", "1GiB", force=True)
import cupy as cp

os.environ.pop("OMP_NUM_THREADS", None)
host = np.random.default_rng(0)
line = host.integers(0, 1 << 16, 1 << 20).astype("f4")
short = cp.asarray(line[:1 << 19].astype("u2"))
line[::7] = np.nan
x = cp.asarray(line)
rows = x.reshape(8, -1)
many = cp.asarray(host.standard_normal((4096, 3, 3)))
waves = cp.asarray(host.standard_normal((64, 64, 64)))

def results():
    rng, state = cp.random.default_rng(1), cp.random.RandomState(1)
    yield from (rng.random(1 << 20), rng.integers(0, 9, 1 << 20, "u4"), rng.random(3))
    yield from (rng.poisson(abs(waves.ravel()).repeat(4)), state.randn(1 << 20), state.rand(3))
    yield from (cp.sort(x), cp.argsort(x), cp.sort(rows), cp.argsort(rows, axis=0), cp.sort(short))
    yield from (cp.fft.fftn(waves), cp.fft.rfft(waves), cp.fft.irfft(cp.fft.rfft(waves, axis=0)))
    yield from (cp.linalg.solve(many, many[..., :1]), cp.linalg.det(many), *cp.linalg.svd(many))

def on(cores):
    os.sched_getaffinity = lambda pid: set(range(cores))
    started.clear()
    return [cp.asnumpy(each) for each in results()]

started, start = [], threading.Thread.start
threading.Thread.start = lambda self: started.append(1) or start(self)
"""


def test_the_bits_do_not_depend_on_how_many_cores_there_are(kernel_cache: Path) -> None:
    program = """
one = on(1)
assert not started
for cores in (2, 3):
    for at, (a, b) in enumerate(zip(one, on(cores), strict=True)):
        if a.tobytes() != b.tobytes():
            print(cores, at)
    assert len(started) > 20, started
assert np.array_equal(one[6], np.sort(line), equal_nan=True)
assert (one[7] == np.argsort(line, kind="stable")).all()
assert np.unique(one[0]).size > 1_048_000 and abs(one[4].mean()) < 0.01
"""
    assert run(program, kernel_cache, start=START) == ""


def test_a_range_is_cut_for_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 3, 5, 7})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cut(10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert cut(2, 3) == [(0, 2)] and cut(0, 3) == [(0, 0)]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert cut(10, 3) == [(0, 5), (5, 10)]
