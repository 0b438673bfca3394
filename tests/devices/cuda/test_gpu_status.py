"""Limits, status, the doctor and pinned spill on a GPU. None of this has run on one yet.

A test whose docstring begins with "Unseen" holds what was read in documentation only: the first
run confirms or corrects it. No test holds more than 64 MiB of managed memory, and none
oversubscribes.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from gpu_fixtures import forget_failure, gpu_guard, needs_module
from processes import printed, python

import umem
from umem.devices.base import Policy
from umem.devices.cuda import open_cuda
from umem.devices.selftest import run_selftest

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def device():
    device = open_cuda()
    forget_failure(device)
    gpu_guard.guard(device)
    yield device
    forget_failure(device)


def test_every_feature_has_a_reason(device):
    status = umem.status()
    assert status.device == device.name and status.vram_bytes == device.vram_bytes
    assert len(status.features) == 13 and all(feature.why for feature in status.features)
    assert (status.why_not is None) == status.feature("concurrent access").on
    for name in ("nvidia driver", "cuda of driver", "cuda of cupy"):
        print(name, status.versions[name])
    print(status)
    assert max(map(len, str(status).splitlines())) <= 80
    json.dumps(status.to_json())


def test_the_self_test_passes_where_managed_memory_can_be_oversubscribed(device):
    if device.why_not("managed"):
        pytest.skip(device.why_not("managed"))
    needs_module("cuda.core")
    failed = [check for check in run_selftest(device) if not check.ok]
    assert not failed


def test_the_doctor_says_the_same_in_a_process_of_its_own(device):
    result = python("-m", "umem", "doctor", "--json")
    found = json.loads(result.stdout)
    assert found["status"]["device"] == device.name
    assert result.returncode == (0 if found["ok"] else 1), found["reason"]


def test_pinned_memory_is_read_and_written_by_kernels_and_copies(device):
    """Unseen: one address for both sides, under unified addressing, also for CuPy's copies."""
    cupy = device.xp
    if device.driver.hybrid_problem() and device.why_not("managed"):
        pytest.skip(device.driver.hybrid_problem())
    with cupy.cuda.using_allocator(device.driver.allocate_pinned):
        array = cupy.arange(MIB, dtype="i4")
        array *= 3
        copy = cupy.asarray(np.arange(MIB, dtype="i4"))
    assert device.driver.is_on_host(array.data.ptr)
    assert int(array.sum(dtype="i8")) == 3 * MIB * (MIB - 1) // 2
    np.testing.assert_array_equal(copy.get(), np.arange(MIB))
    array[:] = copy
    assert bool((array == copy).all())


def test_hybrid_without_oversubscription_spills_to_pinned_memory_and_computes(device, monkeypatch):
    """Unseen: as under Windows and WSL2, whose answer is put in the driver's mouth."""
    monkeypatch.setattr(device.driver, "managed_problem", lambda: "as if it could not")
    if device.why_not("hybrid"):
        pytest.skip(device.why_not("hybrid"))
    restore = device.install(Policy("hybrid", limit_bytes=8 * MIB), everywhere=False)
    try:
        arrays = [device.xp.full(4 * MIB, n, dtype="u1") for n in range(4)]
        on_host = [device.driver.is_on_host(array.data.ptr) for array in arrays]
        assert on_host == [False, False, True, True]
        assert device.pools.ledger.reserved()["pinned"] == 8 * MIB
        assert [int(array.max()) for array in arrays] == [0, 1, 2, 3]
    finally:
        restore()


def test_cupys_own_limit_bounds_unmanaged_memory_and_not_managed(device):
    if device.why_not("managed"):
        pytest.skip(device.why_not("managed"))
    code = """
import cupy, umem
def fits(block):
    with block:
        try: return cupy.empty(24 << 20, "u1").nbytes > 0
        except cupy.cuda.memory.OutOfMemoryError: return False
print(fits(umem.unmanaged()), fits(umem.managed()), fits(umem.hybrid()))
"""
    assert printed("-c", code, CUPY_GPU_MEMORY_LIMIT=16 * MIB).split() == ["False", "True", "True"]
