"""Watching allocations on a GPU. None of this has run on one yet.

What tests/memory/test_counters.py shows over host memory, here with CuPy's own pool; and what only
a GPU can show: kernels on watched arrays, streams, workspaces, graphs. All managed memory together
stays under the budget of bench/gpu_guard.py.
"""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from gpu_fixtures import LAUNCHED, forget_failure, gpu_guard, needs_module

import umem
from tests.support.allocators import in_force
from umem.devices.cuda import open_cuda

pytestmark = pytest.mark.gpu
MIB = 1 << 20
BLOCKS = {"managed": umem.managed, "hybrid": umem.hybrid, "unmanaged": umem.unmanaged}


@pytest.fixture
def device():
    device = open_cuda()
    if device.why_not("managed"):
        pytest.skip(device.why_not("managed"))
    forget_failure(device)
    gpu_guard.guard(device)
    yield device
    gc.collect()
    forget_failure(device)


@pytest.fixture
def cupy(device):
    return device.xp


@pytest.mark.parametrize("mode", BLOCKS)
def test_bytes_and_counts_of_a_block(cupy, mode):
    with BLOCKS[mode](), umem.statistics() as s:
        a = cupy.ones((MIB,), "f4")
        b = a * 2
        del a
        assert (s.current_bytes, s.peak_bytes, s.total_bytes) == (4 * MIB, 8 * MIB, 8 * MIB)
        assert float(b[0]) == 2.0
        del b
    assert (s.current_bytes, s.current_count, s.peak_count) == (0, 0, 2)


def test_watched_arrays_compute_as_others_do(cupy):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 256), dtype="f4")

    def work():
        a = cupy.asarray(x)
        return cupy.asnumpy(((a @ a.T)[::2, ::-1] + a[::2]).sum(axis=0))

    with umem.managed():
        plain = work()
        with umem.statistics() as s, umem.track() as t:
            watched = work()
    assert np.array_equal(plain, watched)
    assert s.total_count > 3 and s.current_bytes == 0 and t.outstanding() == []


def test_the_pool_counts_the_same_in_units_of_512_bytes(device, cupy):
    with umem.managed():
        pool = device.pools.pool("managed")
        before = pool.used_bytes()
        with umem.statistics() as s:
            keep = [cupy.empty(n, "u1") for n in (1, 512, 513, 3 * MIB)]
            assert pool.used_bytes() - before == 512 + 512 + 1024 + 3 * MIB
            assert s.current_bytes == sum(a.nbytes for a in keep)
            del keep
        assert pool.used_bytes() == before


def test_without_a_watcher_managed_is_the_pools_own_method(device, cupy):
    bare = device.pools.malloc("managed")
    for limit in (None, "1GiB"):
        with umem.managed(limit):
            assert in_force() is bare
            with umem.statistics():
                assert in_force() is not bare
            assert in_force() is bare


def test_memory_freed_on_another_stream_and_thread_is_seen(cupy):
    with umem.managed(), umem.statistics() as s:
        held = []
        with cupy.cuda.Stream(non_blocking=True) as stream:
            held.append(cupy.ones(MIB, "u1"))
            stream.synchronize()
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert (s.current_bytes, s.total_bytes) == (0, MIB)


@pytest.mark.hardware("the software GPU sorts without a workspace")
def test_workspace_that_cupy_takes_for_itself_is_counted(cupy):
    x = cupy.random.default_rng(0).random(MIB, dtype="f4")
    with umem.managed(), umem.statistics() as s:
        y = cupy.sort(x)
    assert s.current_bytes == y.nbytes
    assert s.total_count > 1 and s.peak_bytes > y.nbytes


def test_stacks_leave_cupy_out(cupy):
    with umem.managed(), umem.track() as t:
        array = cupy.linspace(0, 1, MIB)
    assert t.outstanding()[0].stack[0].file == __file__
    assert t.outstanding()[0].label == "managed memory"
    del array


@LAUNCHED
def test_a_warm_graph_can_be_captured_while_watched(cupy, launched):
    with umem.managed(), umem.statistics() as s:
        x = cupy.ones(MIB, "f4")
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            y = x + 1  # fills the stream's pool
            del y
            stream.begin_capture()
            y = x + 1
            graph = stream.end_capture()
            if launched:
                graph.launch()
            stream.synchronize()
        assert not launched or float(y[0]) == 2.0
        assert s.current_count == 2


def test_hints_work_on_watched_arrays(device, cupy):
    needs_module("cuda.core")
    with umem.managed(), umem.statistics():
        array = cupy.ones(4 * MIB, "u1")
        assert umem.prefetch(array, "cpu") == array.nbytes
        device.synchronize()
        assert umem.location(array).last_prefetch == "cpu"
