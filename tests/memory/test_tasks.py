"""Asyncio tasks, generators and threads whose blocks overlap: each has its own, and takes off its
own. The virtual GPU, and the real CuPy whose GPU is made of host memory."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import umem
from umem.devices import Device, cuda, current_device
from umem.trace.recording import active


@pytest.fixture(params=["virtual", "cuda"])
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if request.param == "virtual":
        with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu:
            yield gpu
        return
    cupy = pytest.importorskip("cupy")
    from cuda_host_driver import HostDriver

    host = cuda.CudaDevice(HostDriver())
    monkeypatch.setattr(cuda, "open_cuda", lambda ordinal=None: host)
    before = cupy.cuda.get_allocator()
    with cupy.cuda.using_allocator(host.driver.default_pool.malloc):  # CuPy's own needs a GPU
        inside = cupy.cuda.get_allocator()
        yield host
        assert cupy.cuda.get_allocator() is inside
    assert cupy.cuda.get_allocator() is before


def is_managed(device: Device) -> bool:
    """Whether an array that is made now lies in managed memory."""
    array = device.xp.empty(1000, "u1")
    if device.simulated:
        return umem.location(array).managed
    return array.data.ptr in device.driver.managed_blocks  # type: ignore[attr-defined]


def run(*parts: Callable[[], Any]) -> list[Any]:
    """What the coroutine functions return, as tasks of one loop."""

    async def main() -> list[Any]:
        return await asyncio.gather(*(part() for part in parts))

    return asyncio.run(main())


# -- tasks ---------------------------------------------------------------------------------------


def test_ten_tasks_switch_in_the_middle_of_everything(device: Device) -> None:
    async def work(number: int) -> bool:
        found = []
        for turn in range(20):
            managed = bool((number + turn) % 2)
            with umem.managed() if managed else umem.unmanaged("32MiB"):
                await asyncio.sleep(0)
                found.append(is_managed(device) == managed)
                with umem.statistics() as s:
                    kept = device.xp.empty(number + 1, "u1")
                    await asyncio.sleep(0)
                found.append((s.total_bytes, s.total_count) == (number + 1, 1))
                del kept
            await asyncio.sleep(0)
        return all(found)

    assert all(run(*(lambda n=n: work(n) for n in range(10))))
    assert not umem.status().on


def test_a_task_is_inside_the_blocks_of_the_code_that_made_it_until_they_end(
    device: Device,
) -> None:
    async def main() -> list[bool]:
        over = asyncio.Event()

        async def made_inside() -> list[bool]:
            found = [is_managed(device)]
            await over.wait()
            return [*found, is_managed(device)]

        with umem.managed():
            task = asyncio.create_task(made_inside())
            await asyncio.sleep(0)
        over.set()
        return await task

    assert asyncio.run(main()) == [True, False]


def test_a_block_is_not_for_the_threads_that_a_task_uses(device: Device) -> None:
    async def main() -> tuple[str, Any]:
        with umem.managed(), umem.record():
            return await asyncio.to_thread(lambda: (threading.current_thread().name, active()))

    name, followers = asyncio.run(main())
    assert name != threading.current_thread().name and followers == ()


def test_each_task_records_what_it_does() -> None:
    async def work(name: str, count: int) -> list[str]:
        with umem.virtual_gpu("t4") as gpu, umem.record() as recorder:
            for _ in range(count):
                await asyncio.sleep(0)
                getattr(gpu.xp, name)(10)
            assert current_device() is gpu
        return [op.name for op in recorder.trace.ops]

    found = run(lambda: work("ones", 3), lambda: work("zeros", 4), lambda: work("arange", 2))
    assert found == [["ones"] * 3, ["zeros"] * 4, ["arange"] * 2]
    assert active() == ()


def test_a_task_that_is_cancelled_leaves_its_blocks(device: Device) -> None:
    async def main() -> bool:
        async def waits() -> None:
            with umem.managed(), umem.statistics():
                await asyncio.sleep(60)

        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return is_managed(device)

    assert asyncio.run(main()) is False


# -- generators ----------------------------------------------------------------------------------


def suspended(block: Any) -> Iterator[None]:
    with block:
        yield


@pytest.mark.parametrize("how", ["close", "forget", "collect"])
def test_a_generator_given_up_inside_a_block_takes_off_its_own(device: Device, how: str) -> None:
    with umem.unmanaged():
        generator = suspended(umem.managed())
        next(generator)
        with umem.unmanaged("32MiB"):
            if how == "close":
                generator.close()
            elif how == "forget":
                del generator
            else:
                cycle: list[Any] = [generator]
                cycle.append(cycle)
                del generator, cycle
                gc.collect()
            assert umem.status().limit_bytes == 32 << 20
        assert umem.status().mode == "unmanaged" and not is_managed(device)
    assert not umem.status().on


def test_a_generator_may_outlive_the_block_around_it(device: Device) -> None:
    with umem.unmanaged():
        generator = suspended(umem.managed())
        next(generator)
    assert is_managed(device)
    generator.close()
    assert not is_managed(device) and not umem.status().on


@pytest.mark.parametrize("kind", ["virtual", "cuda"])
def test_enable_that_is_left_around_a_suspended_generator_is_off(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "cuda":
        cupy = pytest.importorskip("cupy")
        from cuda_host_driver import HostDriver

        host = cuda.CudaDevice(HostDriver())
        monkeypatch.setattr(cuda, "open_cuda", lambda ordinal=None: host)
        before = cupy.cuda.get_allocator()
    with umem.virtual_gpu("t4") if kind == "virtual" else nullcontext():
        with umem.enable("hybrid"):
            generator = suspended(umem.managed())
            next(generator)
        assert umem.status().mode == "managed"
        generator.close()
        assert not umem.status().on
    assert kind == "virtual" or cupy.cuda.get_allocator() is before


def test_an_asynchronous_generator_is_closed_by_another_task(device: Device) -> None:
    async def batches() -> AsyncIterator[bool]:
        with umem.managed():
            while True:
                yield is_managed(device)

    async def main() -> bool:
        async for managed in batches():
            assert managed
            break  # the loop closes the generator, in a task of its own
        for _ in range(5):
            await asyncio.sleep(0)
        return is_managed(device)

    assert asyncio.run(main()) is False
    assert not umem.status().on


# -- threads -------------------------------------------------------------------------------------


def in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_recorder_left_in_another_thread_is_over_where_it_was_entered() -> None:
    with umem.virtual_gpu("t4") as gpu:
        recorder = umem.record()
        recorder.__enter__()
        gpu.xp.ones(3)
        in_a_thread(lambda: recorder.__exit__(None, None, None))
        assert recorder not in active()
        gpu.xp.zeros(3)
        assert [op.name for op in recorder.trace.ops] == ["ones"]
    assert active() == ()


# -- arrays that die late ------------------------------------------------------------------------


def test_arrays_that_die_after_their_virtual_gpu_was_left_are_counted_off() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu, umem.managed():
        kept = [gpu.xp.ones(1 << 20, "u1") for _ in range(8)]
    peak, timeline = gpu.figures.peak_bytes, gpu.timeline
    assert len(gpu.model.tensors) == 8
    del kept[:5]
    assert gpu.usage() and len(gpu.model.tensors) == 3
    kept.clear()
    assert gpu.figures.peak_bytes == peak == 8 << 20
    assert not gpu.model.tensors and gpu.model.driver.managed.used_bytes == 0
    assert gpu.timeline == timeline  # what the run was does not change


@pytest.mark.skipif(importlib.util.find_spec("chainer") is None, reason="Chainer is missing")
def test_a_model_that_outlives_its_virtual_gpu_is_counted_off_when_it_dies() -> None:
    import numpy as np

    import umem.chainer  # isort: split
    from chainer import functions as F
    from chainer import links as L

    with umem.virtual_gpu("t4") as gpu:
        model = L.Linear(5, 5)
        loss = F.sum(model(np.ones((3, 5), "f")))
        loss.backward()
    assert gpu.figures and gpu.model.tensors
    del model, loss
    gc.collect()
    assert gpu.figures and not gpu.model.tensors


def test_a_recording_that_is_over_hears_of_no_deaths() -> None:
    with umem.virtual_gpu("t4") as gpu, umem.record() as recorder:
        kept = gpu.xp.ones(3)
    before = len(recorder.trace)
    del kept
    recorder.flush()
    assert len(recorder.trace) == before
