"""Host views of managed memory, on the virtual GPU and on CuPy's arrays over host memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import umem
from umem._common.host import host_view
from umem.devices.virtual import VirtualGPU
from umem.errors import DeviceError, DeviceNotFoundError, HintError
from umem.trace.recording import address_of

VIEWS: dict[str, Callable[[Any], Any]] = {
    "all": lambda a: a,
    "a part": lambda a: a[2:5, 1:],
    "reversed": lambda a: a[::-1, ::-2],
    "transposed": lambda a: a.T,
    "one": lambda a: a[3, 4],
    "empty": lambda a: a[4:4],
}


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as device:
        yield device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA device on host memory, as the current device."""
    pytest.importorskip("cupy")
    from cuda_host_driver import HostDriver

    from umem.devices.cuda import CudaDevice

    driver = HostDriver()
    monkeypatch.setattr(driver, "is_managed", lambda address: True)
    monkeypatch.setattr(driver, "synchronize", lambda: driver.calls.append(("synchronize",)))
    device = CudaDevice(driver)
    monkeypatch.setattr("umem.devices.cuda.open_cuda", lambda: device)
    return device


@pytest.fixture(params=["virtual", "cuda"])
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The array module of a managed block, on each device."""
    request.getfixturevalue("gpu" if request.param == "virtual" else "cuda")
    with umem.managed() as memory:
        yield memory.xp


# -- the bare view -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", ["f4", "c16", "?", "S3", "i2,f8"])
def test_a_view_of_any_strides_and_type_is_the_array_itself(name: str, dtype: str) -> None:
    whole = np.zeros((6, 8), dtype)
    whole.view("u1").ravel()[...] = np.arange(whole.nbytes) % 2
    a = VIEWS[name](whole) if name != "one" else whole[3:4, 4:5]
    found = host_view(address_of(a), a.shape, a.strides, a.dtype, a)
    assert (found.shape, found.dtype) == (a.shape, a.dtype)
    assert found.tobytes() == a.tobytes()
    assert not a.size or found.strides == a.strides
    assert not a.size or np.shares_memory(found, a)


def test_a_view_of_repeated_elements_reaches_no_further_than_they_do() -> None:
    row = np.arange(3.0)
    a = np.broadcast_to(row, (4, 3))
    found = host_view(address_of(a), a.shape, a.strides, a.dtype, a)
    assert found.tolist() == a.tolist() and len(memoryview(found.base)) == row.nbytes


def test_the_owner_lives_as_long_as_any_view_of_the_view() -> None:
    owner = np.arange(4.0).view(type("Owner", (np.ndarray,), {}))
    gone = weakref.ref(owner)
    part = host_view(address_of(owner), (4,), (8,), "f8", owner)[1:].reshape(3, 1)[::-1]
    del owner
    gc.collect()
    assert gone() is not None and part.ravel().tolist() == [3.0, 2.0, 1.0]
    del part
    gc.collect()
    assert gone() is None


# -- on each device ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_writes_are_seen_on_both_sides(xp: Any, name: str) -> None:
    whole = xp.empty((6, 8), dtype="f4")
    a = VIEWS[name](whole)
    view = umem.as_numpy(a)
    assert type(view) is np.ndarray and view.flags.writeable
    assert (view.shape, view.dtype, view.nbytes) == (a.shape, a.dtype, a.nbytes)
    if view.size:
        assert view.strides == a.strides and address_of(view) == address_of(a)
        view[...] = 7
        again = umem.as_numpy(a)
        again += 1
        assert view.min() == view.max() == 8


def test_the_memory_stays_while_there_is_a_view(xp: Any) -> None:
    a = xp.empty(1 << 20, dtype="u1")
    address = address_of(a)
    view = umem.as_numpy(a)
    view[:] = 3
    del a
    gc.collect()
    others = [xp.empty(1 << 20, dtype="u1") for _ in range(3)]
    assert address not in map(address_of, others)
    for other in others:
        umem.as_numpy(other)[:] = 9
    assert view.min() == view.max() == 3


def test_a_view_waits_for_the_gpu(gpu: VirtualGPU, cuda: Any) -> None:
    with umem.managed() as memory:
        a = memory.xp.ones(1 << 20)
        for _ in range(20):
            a += 1
        umem.as_numpy(a)
        assert gpu.model.clock.host_seconds == gpu.model.clock.seconds


def test_a_view_waits_for_the_real_gpu_before_it_is_made(cuda: Any) -> None:
    with umem.managed() as memory:
        umem.as_numpy(memory.xp.empty(8))
    assert ("synchronize",) in cuda.driver.calls


# -- what has none -------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [None, 3, "text", [1.0], (), np.float32(1)])
def test_what_is_no_array_is_refused(gpu: VirtualGPU, x: Any) -> None:
    with pytest.raises(HintError, match=f"takes one array; got {type(x).__name__}$"):
        umem.as_numpy(x)


def test_a_variable_is_refused_with_the_way_out(gpu: VirtualGPU) -> None:
    class Variable:
        array = np.ones(3)

    with pytest.raises(HintError, match=r"got Variable; pass its \.array"):
        umem.as_numpy(Variable())


def test_memory_that_is_not_managed_has_no_view(gpu: VirtualGPU) -> None:
    for a in (gpu.xp.ones((2, 3)), np.ones((2, 3))):
        with pytest.raises(HintError, match=r"shape \(2, 3\) is not managed memory.*\.get\(\)"):
            umem.as_numpy(a)


def test_neither_has_memory_of_cupys_that_is_not_managed(cuda: Any, monkeypatch: Any) -> None:
    with umem.managed() as memory:
        a = memory.xp.empty((2, 3))
    monkeypatch.setattr(cuda.driver, "is_managed", lambda address: False)
    with pytest.raises(HintError, match=r"shape \(2, 3\) is not managed memory"):
        umem.as_numpy(a)


def test_an_array_of_the_host_is_none_of_a_cuda_device(cuda: Any) -> None:
    with pytest.raises(DeviceError, match="not an array of GPU 0: ndarray"):
        umem.as_numpy(np.ones(3))


def test_an_array_of_another_gpu_is_refused_with_the_way_out(cuda: Any) -> None:
    import cupy
    from cuda_host_driver import host_memory

    with cupy.cuda.using_allocator(lambda nbytes: host_memory(nbytes, device=1)):
        elsewhere = cupy.empty(8)
    for use in (umem.as_numpy, umem.prefetch):
        with pytest.raises(DeviceError, match=r"is on GPU 1.*with cupy\.cuda\.Device\(1\)"):
            use(elsewhere)


def test_without_concurrent_access_the_host_may_not_look(cuda: Any) -> None:
    with umem.managed() as memory:
        a = memory.xp.empty(8)
    cuda.driver.problem = "GPU 0 has no concurrent managed access"
    with pytest.raises(DeviceError, match=r"cannot share an array.*no concurrent managed access"):
        umem.as_numpy(a)
    assert ("synchronize",) not in cuda.driver.calls


def test_waiting_would_end_a_capture_so_it_is_refused(cuda: Any) -> None:
    with umem.managed() as memory:
        a = memory.xp.empty(8)
    cuda.driver.is_capturing = True
    with pytest.raises(DeviceError, match="would end the capture"):
        umem.as_numpy(a)
    assert ("synchronize",) not in cuda.driver.calls


def test_without_a_device_there_is_nothing_to_view() -> None:
    pytest.importorskip("cupy")
    from umem.devices.cuda import cuda_reason

    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    with pytest.raises(DeviceNotFoundError):
        umem.as_numpy(np.ones(3))
