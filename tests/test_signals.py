"""A signal inside of a block, or while it is opened, leaves nothing on, and stays what it is.

`enable`, `disable` and operations are interrupted everywhere. Python looks for signals where a
function begins and where a call of C code has returned: at each such place of umem's own code in
turn KeyboardInterrupt is raised.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import umem
from umem._common import scopes
from umem.devices import cuda
from umem.errors import StateError
from umem.memory import enabled
from umem.trace.recording import active, inside, sources

FOLDER = str(Path(umem.__file__).parent)
BLOCKS: dict[str, Callable[[], Any]] = {
    "managed": umem.managed, "hybrid": lambda: umem.hybrid("8MiB"), "unmanaged": umem.unmanaged,
    "record": umem.record, "calibration": lambda: umem.record(measure="workspace"),
    "statistics": umem.statistics, "track": lambda: umem.track(stacks=False, check=True),
    "virtual_gpu": lambda: umem.virtual_gpu("t4"), "enable": umem.enable, "paging": umem.paging,
}  # fmt: skip


def interrupt(number: int, program: Callable[[], Any]) -> tuple[bool, BaseException | None, str]:
    """Run with KeyboardInterrupt at that place; whether it was reached, what came out, where."""
    left, place = number, ""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left, place
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(FOLDER):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                place = f"{event} {frame.f_code.co_name}"
                raise KeyboardInterrupt

    gc.disable()  # what a callback of the collector raises goes nowhere
    sys.setprofile(profile)
    try:
        program()
    except BaseException as error:
        error.__context__ = None  # its traceback holds frames, and they the operation
        return left <= 0, error.with_traceback(None), place
    finally:
        sys.setprofile(None)
        gc.enable()
    return left <= 0, None, place


@pytest.fixture(params=["virtual", "cuda"])
def allocator(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """What allocates, outside of every block; the device is the virtual GPU, or a stand-in."""
    if request.param == "virtual":
        with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu:
            yield lambda: (gpu.policy, gpu.watches, gpu.model.driver.residency.listener)
        return
    cupy = pytest.importorskip("cupy")
    from cuda_host_driver import HostDriver
    from cupti_stand_in import Cupti

    Cupti().install(monkeypatch)
    host = cuda.CudaDevice(HostDriver())
    monkeypatch.setattr(cuda, "open_cuda", lambda ordinal=None: host)
    yield lambda: (
        cupy.cuda.get_allocator(),
        cupy.get_default_memory_pool(),
        [each for each in sys.meta_path if type(each).__name__ == "PoolAlias"],
        host.watches,
        list(cupy.cuda.memory_hook.get_memory_hooks()),
    )


class Probe:
    """What is instrumented while any recorder is active."""

    is_on = False

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False


probe = Probe()


@pytest.fixture(autouse=True)
def _probing() -> Iterator[None]:
    sources.add_source(probe)
    yield
    sources.added.remove(probe)


def state(allocator: Callable[[], Any]) -> tuple[Any, ...]:
    """All that a block of umem changes."""
    wrapped = [f"{module}.{name}" for module, name in _wrapped()]
    return (
        allocator(),
        scopes.inside(),
        enabled(),
        active(),
        probe.is_on,
        tracemalloc.is_tracing(),
        wrapped,
    )


def _wrapped() -> Iterator[tuple[str, str]]:
    chainer = sys.modules.get("chainer")
    if chainer is not None and chainer.FunctionNode.apply.__module__ != "chainer.function_node":
        yield "chainer", chainer.FunctionNode.apply.__module__


@pytest.mark.parametrize("name", BLOCKS)
def test_a_signal_inside_of_a_block_leaves_nothing_on(
    allocator: Callable[[], Any], name: str
) -> None:
    before = state(allocator)
    with pytest.raises(KeyboardInterrupt), BLOCKS[name]():
        assert state(allocator) != before
        raise KeyboardInterrupt
    assert state(allocator) == before


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "enable"])
def test_a_signal_while_a_block_is_opened_leaves_nothing_on(
    allocator: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before, opened = state(allocator), scopes.Scope.open

    def interrupted(scope: scopes.Scope, *payload: Any) -> None:
        opened(scope, *payload)
        raise KeyboardInterrupt

    monkeypatch.setattr(scopes.Scope, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), BLOCKS[name]():
        raise AssertionError("the block has begun")
    assert state(allocator) == before


def test_enable_that_is_interrupted_has_not_happened(allocator: Callable[[], Any]) -> None:
    before = state(allocator)
    for number in itertools.count(1):
        reached, _, place = interrupt(number, umem.enable)
        if not reached:
            break
        assert state(allocator) == before, place
    umem.disable()
    assert number > 20


def test_disable_that_is_interrupted_can_be_called_again(allocator: Callable[[], Any]) -> None:
    before = state(allocator)
    for number in itertools.count(1):
        umem.enable()
        reached, _, place = interrupt(number, umem.disable)
        if enabled() is not None:
            umem.disable()
        assert state(allocator) == before, place
        if not reached:
            break
    assert number > 5


def test_a_gpu_that_is_interrupted_in_an_operation_says_that_it_counts_no_further() -> None:
    said = 0
    for number in itertools.count(1):
        with umem.virtual_gpu("t4", vram="64MiB") as gpu, warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            reached, _, place = interrupt(number, lambda: gpu.xp.ones(10))
            kept = gpu.xp.ones(10) + 1
            before = gpu.figures
            del kept
            assert gpu.usage() and not umem.location(gpu.xp.ones(5)).managed
        whole = before.peak_bytes >= 160
        assert whole or ["counts no further" in str(one.message) for one in w] == [True], place
        said += bool(w)
        if not reached:
            break
    assert 20 < said < number


def test_dead_arrays_are_counted_off_after_a_signal_outside_of_the_model() -> None:
    for number in itertools.count(1):
        with umem.virtual_gpu("t4") as gpu:
            reached, _, place = interrupt(number, lambda: gpu.xp.ones(10))
            assert not inside(), place  # or no operation would be seen any more
        if gpu.model.is_whole:
            assert gpu.figures and not gpu.model.tensors, place
        if not reached:
            break
    assert number > 60


# -- errors of the end itself --------------------------------------------------------------------


def test_nothing_takes_the_place_of_a_keyboard_interrupt() -> None:
    def listen(event: Any) -> None:
        if is_broken:
            raise StateError("the listener is broken")

    from umem.trace.recording import Recorder

    is_broken, recorder = False, Recorder(listen)
    with pytest.raises(KeyboardInterrupt), recorder:
        kept = recorder.access(__import__("numpy").ones(3), "array", "x")
        is_broken = True
        raise KeyboardInterrupt
    assert active() == () and kept


def test_leaving_twice_in_an_interrupt_lets_the_interrupt_through() -> None:
    with umem.virtual_gpu("t4"):
        block = umem.managed()
        with pytest.raises(StateError):
            block.__exit__(None, None, None)
        assert not block.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_reading_the_exit_of_what_is_enabled_switches_nothing_off() -> None:
    with umem.virtual_gpu("t4") as gpu:
        handle = umem.enable()
        assert hasattr(handle, "__exit__") and callable(handle.__exit__)
        assert gpu.policy.mode == "managed"
        with handle:
            assert gpu.policy.mode == "managed"
        assert gpu.policy.mode == "unmanaged"
