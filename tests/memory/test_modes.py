"""Modes of allocation on the virtual GPU: what is in force when, and what every mistake says."""

from __future__ import annotations

import asyncio
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import umem
from umem.devices import Policy, current_device
from umem.devices.cuda import cuda_reason
from umem.devices.virtual import VirtualGPU
from umem.errors import (
    DeviceError,
    DeviceNotFoundError,
    LimitError,
    OutOfMemoryError,
    SizeError,
    StateError,
    UmemError,
    UnknownGpuError,
    UnsupportedError,
)
from umem.trace.recording import active
from umem.units import MIB

UNMANAGED = Policy("unmanaged")
NO_GPU = pytest.mark.skipif(cuda_reason() is None, reason="there is a CUDA device")
NOT_SIZES = ["0", "-1GiB", "12 parsecs", "", "nan", True, 1.5, 0, -1, b"1GiB", [], 2**63]


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as device:
        yield device


def mib(count: int) -> Any:
    """An array of so many MiB on the current device."""
    return current_device().xp.empty(count * MIB, "u1")


# -- blocks ------------------------------------------------------------------------------------


def test_unmanaged_memory_ends_where_vram_ends(gpu: VirtualGPU) -> None:
    held = [mib(30), mib(30)]
    with pytest.raises(OutOfMemoryError) as caught:
        mib(30)
    text = str(caught.value)
    assert "needs 30.0 MiB for 'empty' array; 60.0 MiB of 64.0 MiB of VRAM in use" in text
    assert "simulated Tesla V100" in text
    assert "umem.managed()" in text and "umem.hybrid()" in text
    held.pop()
    mib(30)


def frames_of(error: BaseException) -> list[str]:
    """The functions of an error's traceback, the innermost last."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_the_traceback_of_an_error_that_leaves_a_virtual_gpu_ends_at_the_programs_line() -> None:
    def makes_too_much(xp: Any) -> None:
        xp.ones(60 * MIB, "u1") + 1

    def refused(xp: Any) -> None:
        xp.ones(3).nonzero()

    me = "test_the_traceback_of_an_error_that_leaves_a_virtual_gpu_ends_at_the_programs_line"
    for work in (makes_too_much, refused):
        with pytest.raises(UmemError) as caught, umem.virtual_gpu("t4", vram="64MiB") as device:
            work(device.xp)
        assert frames_of(caught.value) == [me, work.__name__]


def test_the_traceback_of_any_other_error_is_whole() -> None:
    with pytest.raises(ValueError, match="negative") as caught, umem.virtual_gpu("t4") as device:
        device.xp.ones(-1)
    assert len(frames_of(caught.value)) > 1


def test_unmanaged_memory_can_be_carved_out_of_a_managed_block(gpu: VirtualGPU) -> None:
    with umem.managed() as outer:
        a = mib(1)
        with umem.unmanaged() as inner:
            b = mib(1)
            assert umem.status().mode == "unmanaged"
        c = mib(1)
        assert umem.status().mode == "managed"
    assert [umem.location(x).managed for x in (a, b, c)] == [True, False, True]
    assert (outer.mode, inner.mode) == ("managed", "unmanaged")
    assert outer.device is inner.device is gpu
    assert repr(outer) == "<managed memory on v100-16gb (simulated)>"


def test_hybrid_memory_leaves_headroom_free(gpu: VirtualGPU) -> None:
    free = gpu.vram_bytes - (4 << 20)
    with umem.hybrid(headroom=free):
        keep = [gpu.xp.ones(2 << 20, "u1") for _ in range(4)]
        assert umem.status().headroom_bytes == free
        assert "of VRAM left free" in str(umem.status())
    assert gpu.usage().managed_bytes == 4 << 20
    with umem.hybrid(headroom=0), umem.hybrid():
        assert umem.status().headroom_bytes == 0
    del keep


@pytest.mark.parametrize("headroom", [-1, True, "3 apples", "1.5x"])
def test_headroom_that_is_no_size_is_refused_at_once(headroom: Any) -> None:
    with pytest.raises(SizeError, match="headroom"):
        umem.hybrid(headroom=headroom)


def test_headroom_that_leaves_no_vram_is_refused_on_entering(gpu: VirtualGPU) -> None:
    block = umem.hybrid(headroom=gpu.vram_bytes)
    with pytest.raises(SizeError, match=r"leaves nothing of the .* of VRAM of v100-16gb"), block:
        pass
    assert gpu.policy == Policy("unmanaged")


def test_a_limit_bounds_what_managed_memory_reserves(gpu: VirtualGPU) -> None:
    with umem.managed(limit="20MiB"):
        held = [mib(15)]
        with pytest.raises(LimitError, match=r"20\.0 MiB.*Raise the limit") as caught:
            mib(10)
        assert isinstance(caught.value, MemoryError)
        held[:] = []
        held.append(mib(20))
        with pytest.raises(SizeError, match=r"limit of 10\.0 MiB is below the 20\.0 MiB"):
            umem.managed(limit="10MiB").__enter__()
        assert gpu.policy.limit_bytes == 20 * MIB
    with pytest.raises(SizeError, match="below"), umem.managed(limit=10 * MIB):
        pass
    assert gpu.policy == UNMANAGED


def test_unknown_modes_and_spills_are_refused(gpu: VirtualGPU) -> None:
    for mode in ("mangaed", "off", "", [], 3):
        with pytest.raises(StateError, match="mode must be one of unmanaged, managed, hybrid"):
            umem.enable(mode)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="spill must be 'host' or 'migrate'; got 'disk'"):
        umem.hybrid(spill="disk")  # type: ignore[arg-type]


def test_a_block_left_out_of_order_ends_alone(gpu: VirtualGPU) -> None:
    outer, inner = umem.managed(), umem.hybrid()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert gpu.policy.mode == "hybrid"
    with pytest.raises(StateError, match="left more often than"):
        outer.__exit__(None, None, None)
    assert gpu.policy.mode == "hybrid"
    inner.__exit__(None, None, None)
    assert gpu.policy == UNMANAGED


def test_one_block_can_be_entered_again_and_inside_itself(gpu: VirtualGPU) -> None:
    block = umem.managed()
    for _ in range(2):
        with block, umem.unmanaged(), block:
            assert gpu.policy.mode == "managed"
        assert gpu.policy == UNMANAGED


def test_one_block_can_be_entered_by_two_threads_at_once() -> None:
    block, errors = umem.managed(), []
    both, one_left = threading.Barrier(2), threading.Event()

    def work(first: bool) -> None:
        try:
            with umem.virtual_gpu("t4", "64MiB") as gpu:
                with block:
                    both.wait(300)
                    assert first or one_left.wait(300)
                    assert gpu.policy.mode == "managed"
                if first:
                    one_left.set()
                assert gpu.policy == UNMANAGED
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_thread_of_its_own_has_no_virtual_gpu(gpu: VirtualGPU) -> None:
    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(umem.status()))
    thread.start()
    thread.join()
    assert seen[0].device is None


# -- decorators --------------------------------------------------------------------------------


def test_a_decorated_function_runs_inside_the_block_each_time(gpu: VirtualGPU) -> None:
    @umem.managed(limit="32MiB")
    def mode(depth: int = 0) -> list[str]:
        """Says what is in force."""
        found = [gpu.policy.mode]
        with umem.unmanaged():
            return found + (mode(depth - 1) if depth else [gpu.policy.mode])

    assert mode() == mode() == ["managed", "unmanaged"]
    assert mode(2) == ["managed"] * 3 + ["unmanaged"]
    assert (mode.__name__, mode.__doc__) == ("mode", "Says what is in force.")
    assert gpu.policy == UNMANAGED


def test_a_decorated_function_may_run_in_two_threads_at_once(gpu: VirtualGPU) -> None:
    inside = threading.Barrier(2)
    seen: list[str] = []

    @umem.virtual_gpu("t4", vram="64MiB")
    @umem.managed()
    def work() -> None:
        inside.wait(300)
        seen.append(umem.status().mode)
        inside.wait(300)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["managed"] * 2


def test_a_virtual_gpu_decorates_a_function_with_a_fresh_one_each_time() -> None:
    @umem.virtual_gpu("t4", vram="64MiB")
    def run() -> VirtualGPU:
        mib(4)
        device = current_device()
        assert isinstance(device, VirtualGPU)
        return device

    first, second = run(), run()
    assert first is not second
    assert first.figures.peak_bytes == second.figures.peak_bytes == 4 * MIB


@pytest.mark.parametrize("make", [umem.managed, lambda: umem.virtual_gpu("t4")])
def test_what_runs_after_its_call_cannot_be_decorated(make: Callable[[], Any]) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        await asyncio.sleep(0)

    async def both() -> Any:
        yield 1

    for func in (generator, coroutine, both):
        with pytest.raises(UnsupportedError, match=f"{func.__name__} runs after the call"):
            make()(func)


def test_a_generator_may_have_a_block_of_its_own(gpu: VirtualGPU) -> None:
    def batches() -> Iterator[str]:
        with umem.managed():
            yield gpu.policy.mode

    assert list(batches()) == ["managed"]
    assert gpu.policy == UNMANAGED


# -- enable and disable ------------------------------------------------------------------------


def test_enable_serves_everything_until_disable(gpu: VirtualGPU) -> None:
    handle = umem.enable(limit="48MiB", prefetch=True)
    assert gpu.policy == Policy("managed", 48 * MIB, prefetch=True)
    assert handle.xp is gpu.xp
    with umem.unmanaged():
        assert gpu.policy == UNMANAGED
    assert gpu.policy.mode == "managed"
    umem.disable()
    assert gpu.policy == UNMANAGED


def test_enable_twice_is_once_with_the_same_arguments_and_an_error_with_others(
    gpu: VirtualGPU,
) -> None:
    handle = umem.enable(limit="48MiB")
    assert umem.enable(limit=48 * MIB) is handle
    for arguments in (
        {},
        {"limit": "47MiB"},
        {"limit": "48MiB", "prefetch": True},
        {"mode": "hybrid", "limit": "48MiB"},
    ):
        with pytest.raises(StateError, match=r"managed memory is enabled.*umem\.disable\(\) first"):
            umem.enable(**arguments)  # type: ignore[arg-type]
    assert gpu.policy == Policy("managed", 48 * MIB)
    umem.disable()


def test_disable_without_enable_is_an_error(gpu: VirtualGPU) -> None:
    for _ in range(2):
        with pytest.raises(StateError, match=r"umem is not enabled; call umem\.enable\(\) first"):
            umem.disable()


def test_enable_and_disable_are_refused_inside_a_block(gpu: VirtualGPU) -> None:
    with umem.managed():
        with pytest.raises(StateError, match=r"umem\.enable\(\) inside a block"):
            umem.enable()
    assert gpu.policy == UNMANAGED
    umem.enable("hybrid")
    with umem.managed():
        with pytest.raises(StateError, match=r"umem\.disable\(\) inside a block"):
            umem.disable()
        assert gpu.policy.mode == "managed"
    assert gpu.policy.mode == "hybrid"
    umem.disable()


def test_an_enable_that_fails_leaves_nothing_on(gpu: VirtualGPU) -> None:
    with umem.managed():
        held = mib(20)
    with pytest.raises(SizeError, match="below"):
        umem.enable(limit="10MiB")
    assert gpu.policy == UNMANAGED
    with pytest.raises(StateError, match="umem is not enabled"):
        umem.disable()
    del held


def test_a_handle_is_a_context_manager_and_may_be_disabled_before(gpu: VirtualGPU) -> None:
    with umem.enable() as handle:
        assert umem.status().on
    assert not umem.status().on
    with handle:  # it is over, and stays so
        assert not umem.status().on
    with umem.enable():
        umem.disable()
        umem.enable("hybrid")
    assert umem.status().mode == "hybrid"
    umem.disable()
    with pytest.raises(ZeroDivisionError), umem.enable():
        raise ZeroDivisionError
    assert not umem.status().on


# -- the virtual GPU ---------------------------------------------------------------------------


def test_enable_inside_a_virtual_gpu_ends_with_it() -> None:
    with umem.virtual_gpu("t4", vram="64MiB"):
        umem.enable()
    with pytest.raises(StateError, match="umem is not enabled"):
        umem.disable()
    with umem.virtual_gpu("t4", vram="64MiB") as gpu:
        assert gpu.policy == UNMANAGED


def test_an_inner_virtual_gpu_knows_nothing_of_the_outer_ones_mode(gpu: VirtualGPU) -> None:
    umem.enable("hybrid")
    with umem.managed(), umem.virtual_gpu("t4", vram="64MiB") as inner:
        assert (inner.policy, gpu.policy.mode) == (UNMANAGED, "managed")
        assert not umem.status().on
        with pytest.raises(StateError, match="hybrid memory is enabled on v100-16gb"):
            umem.enable("managed")
    assert umem.status().mode == "hybrid"
    umem.disable()


def test_a_virtual_gpu_can_be_entered_again_and_leaves_by_an_exception() -> None:
    block = umem.virtual_gpu("t4", vram="64MiB")
    with block as first:
        mib(4)
        with block as second:
            assert current_device() is second
        assert current_device() is first
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError
    assert first.figures.peak_bytes == 4 * MIB
    assert second.figures.peak_bytes == 0


def test_a_virtual_gpu_left_with_a_block_open_ends_the_block() -> None:
    gpu, block = umem.virtual_gpu("t4", vram="64MiB"), umem.managed()
    gpu.__enter__()
    umem.enable("hybrid")
    block.__enter__()
    gpu.__exit__(None, None, None)
    block.__exit__(None, None, None)  # over with the GPU around it
    with pytest.raises(StateError, match="left more often"):
        block.__exit__(None, None, None)
    with pytest.raises(StateError, match="left more often"):
        gpu.__exit__(None, None, None)
    with pytest.raises(StateError, match="umem is not enabled"):
        umem.disable()


def test_what_another_thread_leaves_is_over_for_the_one_that_entered_it() -> None:
    block, inner = umem.virtual_gpu("t4", vram="64MiB"), umem.managed()
    gpu = block.__enter__()
    inner.__enter__()
    thread = threading.Thread(target=lambda: inner.__exit__(None, None, None))
    thread.start()
    thread.join()
    assert gpu.policy == UNMANAGED
    thread = threading.Thread(target=lambda: block.__exit__(None, None, None))
    thread.start()
    thread.join()
    assert umem.status().device != "t4" and not active()
    with pytest.raises(StateError, match="left more often"):
        block.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v100", "v100-16gb or v100-32gb"),
        ("a100", "a100-40gb or a100-80gb"),
        ("rtx4090", "rtx-4090"),
        ("V100 16 GB", "v100-16gb"),
        ("h100", "h100-pcie or h100-sxm"),
    ],
)
def test_an_unknown_gpu_is_told_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(UnknownGpuError, match=f"no GPU named '{name}'; did you mean.*") as caught:
        umem.virtual_gpu(name)
    assert all(known in str(caught.value) for known in near.split(" or "))
    assert isinstance(caught.value, KeyError)


def test_a_name_like_no_other_is_told_all_of_them() -> None:
    with pytest.raises(UnknownGpuError, match=r"known: .*v100-16gb.*jetson"):
        umem.virtual_gpu("zzzzzz")
    for name in ("", None, 3, b"t4"):
        with pytest.raises(UnknownGpuError):
            umem.virtual_gpu(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [*NOT_SIZES, "1MiB", 2 * MIB - 1], ids=repr)
def test_vram_that_is_no_size_or_less_than_a_block_is_refused_at_once(size: Any) -> None:
    with pytest.raises(SizeError):
        umem.virtual_gpu("t4", vram=size)


def test_one_block_of_vram_is_enough_for_managed_memory() -> None:
    with umem.virtual_gpu("t4", vram="2MiB") as gpu, umem.managed() as memory:
        a = memory.xp.ones(5 * MIB, "u1")
        assert int((a + 1)[::MIB].sum()) == 10
    assert gpu.figures.resident_peak_bytes == 2 * MIB


def test_a_jetson_refuses_what_it_cannot_oversubscribe() -> None:
    with umem.virtual_gpu("jetson-orin-64gb", vram="64MiB") as gpu:
        for enter in (umem.managed().__enter__, umem.hybrid().__enter__, umem.enable):
            with pytest.raises(DeviceError, match=r"cannot serve .* memory: .*shares its memory"):
                enter()
            assert gpu.policy == UNMANAGED
        with umem.unmanaged():
            mib(4)
        assert "refused: Jetson" in str(umem.status())
        assert not umem.status().on


# -- no device ---------------------------------------------------------------------------------


@NO_GPU
@pytest.mark.parametrize(
    "call",
    [
        umem.enable,
        umem.managed().__enter__,
        umem.hybrid().__enter__,
        umem.unmanaged().__enter__,
        lambda: umem.prefetch(np.ones(3)),
        lambda: umem.advise(np.ones(3), "read_mostly"),
        lambda: umem.preset(np.ones(3), "streaming"),
        lambda: umem.location(np.ones(3)),
    ],
)
def test_without_a_device_both_ways_out_are_named(call: Callable[[], Any]) -> None:
    with pytest.raises(DeviceNotFoundError, match="no CUDA device") as caught:
        call()
    text = str(caught.value)
    assert re.search(r"pip install 'cupy-cuda12x.*, or pip install 'cupy-cuda13x", text)
    assert 'with umem.virtual_gpu("v100-16gb")' in text
    assert isinstance(caught.value, RuntimeError)
