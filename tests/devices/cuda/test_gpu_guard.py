"""The guard of GPU tests and benchmarks, on host memory in the place of a GPU."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
from project import ROOT

cupy = pytest.importorskip("cupy")

from cuda_host_driver import GIB, HostDriver, installed  # noqa: E402

from umem.devices.base import Policy  # noqa: E402
from umem.devices.cuda import CudaDevice  # noqa: E402
from umem.errors import LimitError  # noqa: E402

MIB = 1 << 20


def test_what_is_free_is_asked_for_again_at_each_request(monkeypatch):
    driver, free = HostDriver(vram=20 * MIB, host=GIB), [20 * MIB]
    monkeypatch.setattr(driver, "free_bytes", lambda: free[0])
    guard = Guard(CudaDevice(driver))
    with installed(guard.device, Policy("managed")):
        keep = cupy.empty(2 * MIB, dtype="u1")
        free[0] = 7 * MIB  # another program has taken the rest
        with pytest.raises(LimitError, match="less than half"):
            cupy.empty(2 * MIB, dtype="u1")
        free[0] = 20 * MIB
        keep = cupy.empty(2 * MIB, dtype="u1")
    del keep


@pytest.mark.parametrize(("lines", "used", "who"), [
    ("", MIB, None),
    ("7, 300 MiB", MIB, None),
    ("7, 300 MiB\n8, 20000 MiB", MIB, "lists 2 processes: 7, 300 MiB; 8, 20000 MiB"),
    ("", 2 * GIB, "2.0 GiB of VRAM are in use"),
    (None, MIB, "does not answer"),
])  # fmt: skip
def test_who_else_holds_memory_of_the_card_is_found(lines, used, who, monkeypatch):
    def smi(*_, **__):
        if lines is None:
            raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout=lines)

    monkeypatch.setattr(guard_module.subprocess, "run", smi)
    driver = HostDriver(vram=16 * GIB, host=GIB)
    device = CudaDevice(driver)
    used += device.usage().reserved_bytes
    monkeypatch.setattr(driver, "free_bytes", lambda: 16 * GIB - used)
    found = guard_module.others(device)
    assert found is None if who is None else who in found


def load_guard():
    path = ROOT / "bench" / "gpu_guard.py"
    spec = importlib.util.spec_from_file_location("gpu_guard", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


guard_module = load_guard()
Guard = guard_module.Guard


def guarded(free, host, monkeypatch):
    driver = HostDriver(vram=free, host=host)
    monkeypatch.setattr(driver, "free_bytes", lambda: free)
    return Guard(CudaDevice(driver)), driver


@pytest.mark.parametrize(
    ("free", "host", "most"),
    [(141 * GIB, 128 * GIB, 4 * GIB), (6 * GIB, 64 * GIB, 3 * GIB), (16 * GIB, GIB, GIB // 2)],
)
def test_the_budget_is_under_4_gib_and_under_half_of_what_is_free(free, host, most, monkeypatch):
    guard, _ = guarded(free, host, monkeypatch)
    assert guard.budget_bytes == most - 1
    assert guard.check(most - 1) == most - 1
    with pytest.raises(LimitError):
        guard.check(most)


def test_pools_of_every_mode_are_held_to_it(monkeypatch):
    guard, _ = guarded(20 * MIB, GIB, monkeypatch)
    with installed(guard.device, Policy("managed")):
        keep = cupy.empty(6 * MIB, dtype="u1")
        with pytest.raises(LimitError):
            cupy.empty(4 * MIB, dtype="u1")
    with installed(guard.device, Policy("hybrid", limit_bytes=512)), pytest.raises(LimitError):
        cupy.empty(4 * MIB, dtype="u1")
    del keep


def test_memory_beside_the_pools_counts_too(monkeypatch):
    guard, driver = guarded(20 * MIB, GIB, monkeypatch)
    monkeypatch.setattr(cupy.cuda, "malloc_managed", driver.allocate_managed)
    with guard.raw(6 * MIB):
        with pytest.raises(LimitError), guard.raw(4 * MIB):
            pass
        with installed(guard.device, Policy("managed")), pytest.raises(LimitError):
            cupy.empty(4 * MIB, dtype="u1")
    with installed(guard.device, Policy("managed")):
        keep = cupy.empty(6 * MIB, dtype="u1")
    with pytest.raises(LimitError), guard.raw(4 * MIB):
        pass
    del keep
