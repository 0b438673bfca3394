"""Any nesting of modes over several threads: what is in force is what a simple model says.

Each thread does what it is told, one thing at a time, so that a failure can be repeated and
shrunk. The same machine drives the virtual GPU and the real CuPy, whose GPU is made of host memory.
"""

from __future__ import annotations

import importlib.util
import queue
import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import umem
from umem import memory
from umem.devices import cuda
from umem.devices.base import Device, Policy
from umem.devices.virtual import VirtualGPU
from umem.errors import LimitError, SizeError, StateError
from umem.units import GIB, MIB

pytestmark = pytest.mark.thorough

UNMANAGED = Policy("unmanaged")
VRAM_BYTES = 64 * MIB
LIMITS = {None: None, 8 * MIB: 8 * MIB, "16MiB": 16 * MIB, "0.5x": 32 * MIB}
"""As they are written, and what they come to."""
MODES = st.sampled_from(["unmanaged", "managed", "hybrid"])
THREADS = st.integers(0, 2)
MANY = settings(max_examples=40, stateful_step_count=25, deadline=None)


class Worker:
    """A thread that does what it is told, and hands back what came of it."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self, action: Callable[[], Any]) -> Any:
        self._todo.put(action)
        result, error = self._done.get(timeout=30)
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        self._todo.put(None)
        self._thread.join(30)

    def _work(self) -> None:
        while (action := self._todo.get()) is not None:
            try:
                self._done.put((action(), None))
            except BaseException as error:
                self._done.put((None, error))


class Nesting(RuleBasedStateMachine):
    """Three threads that enable, disable, enter and leave at random.

    The model: a stack of policies for each thread, and at most one for the process, which belongs
    to the device that it was enabled on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.workers = [Worker() for _ in range(3)]
        self.entered: list[list[tuple[Any, Policy]]] = [[], [], []]
        self.enabled: tuple[Device, Policy, Any] | None = None
        self.devices = self.set_up()

    def set_up(self) -> list[Any]:
        """The device of each thread."""
        raise NotImplementedError

    def tear_down(self) -> None:
        """Undo `set_up`, when every block has been left and nothing is enabled."""

    def teardown(self) -> None:
        for worker, stack in zip(self.workers, self.entered, strict=True):
            while stack:
                worker(lambda stack=stack: stack.pop()[0].__exit__(None, None, None))
        if self.enabled is not None:
            umem.disable()
        self.tear_down()
        for worker in self.workers:
            worker.stop()

    def expected(self, thread: int) -> Policy | None:
        """What the thread ought to allocate by; None is whatever was there before."""
        if self.entered[thread]:
            return self.entered[thread][-1][1]
        if self.enabled is not None and self.enabled[0] is self.devices[thread]:
            return self.enabled[1]
        return None

    @rule(thread=THREADS, mode=MODES, limit=st.sampled_from(list(LIMITS)))
    def enable(self, thread: int, mode: Any, limit: Any) -> None:
        device, policy = self.devices[thread], Policy(mode, LIMITS[limit])

        def call() -> Any:
            return umem.enable(mode, limit=limit)

        if self.enabled is None and not self.entered[thread]:
            self.enabled = device, policy, self.workers[thread](call)
        elif self.enabled is not None and self.enabled[:2] == (device, policy):
            assert self.workers[thread](call) is self.enabled[2]
        else:
            with pytest.raises(StateError):
                self.workers[thread](call)

    @rule(thread=THREADS)
    def disable(self, thread: int) -> None:
        inside = self.enabled and self.entered[thread] and self.enabled[0] is self.devices[thread]
        if self.enabled is None or inside:
            with pytest.raises(StateError):
                self.workers[thread](umem.disable)
        else:
            self.workers[thread](umem.disable)
            self.enabled = None

    @rule(thread=THREADS, mode=MODES, limit=st.sampled_from(list(LIMITS)))
    def enter(self, thread: int, mode: Any, limit: Any) -> None:
        block = getattr(umem, mode)(limit)
        self.workers[thread](block.__enter__)
        self.entered[thread].append((block, Policy(mode, LIMITS[limit])))

    @rule(thread=THREADS, error=st.sampled_from([None, ZeroDivisionError, KeyboardInterrupt]))
    def leave(self, thread: int, error: Any) -> None:
        if self.entered[thread]:
            block, _ = self.entered[thread].pop()
            assert not self.workers[thread](lambda: block.__exit__(error, error and error(), None))

    @precondition(lambda self: any(self.entered))
    @rule(thread=THREADS, other=THREADS)
    def leave_what_another_thread_entered(self, thread: int, other: int) -> None:
        blocks = [block for block, _ in self.entered[other]]
        mine = self.entered[thread][-1][0] if self.entered[thread] else None
        if blocks and blocks[-1] is not mine:
            with pytest.raises(StateError):
                self.workers[thread](lambda: blocks[-1].__exit__(None, None, None))

    @rule(thread=THREADS, mode=MODES, size=st.sampled_from(["0x", "101%", "", True]))
    def ask_for_what_is_no_limit(self, thread: int, mode: Any, size: Any) -> None:
        for make in (lambda: getattr(umem, mode)(size), lambda: umem.enable(mode, limit=size)):
            with pytest.raises(SizeError):
                self.workers[thread](make)

    @rule(thread=THREADS, mode=MODES, fails=st.booleans())
    def call_a_decorated_function(self, thread: int, mode: Any, fails: bool) -> None:
        @getattr(umem, mode)("0.5x")
        def run() -> Any:
            self.check(thread, Policy(mode, VRAM_BYTES // 2))
            if fails:
                raise ZeroDivisionError

        if fails:
            with pytest.raises(ZeroDivisionError):
                self.workers[thread](run)
        else:
            self.workers[thread](run)

    def check(self, thread: int, policy: Policy | None) -> None:
        """In that thread: is ``policy`` in force?"""
        status = umem.status()
        assert status.on == (policy is not None)
        known = policy or UNMANAGED
        assert (status.mode, status.limit_bytes) == (known.mode, known.limit_bytes)

    @invariant()
    def every_thread_allocates_by_what_it_asked_for(self) -> None:
        for thread, worker in enumerate(self.workers):
            worker(lambda thread=thread: self.check(thread, self.expected(thread)))


class VirtualNesting(Nesting):
    """Threads 0 and 1 share one virtual GPU, which no user can; thread 2 has its own."""

    def set_up(self) -> list[Any]:
        self.blocks = [umem.virtual_gpu("t4", vram=VRAM_BYTES) for _ in range(2)]
        shared = self.workers[0](self.blocks[0].__enter__)
        self.workers[1](lambda: memory._local.virtual.append(shared))
        return [shared, shared, self.workers[2](self.blocks[1].__enter__)]

    def tear_down(self) -> None:
        self.workers[1](lambda: memory._local.virtual.pop())
        for thread, block in ((0, self.blocks[0]), (2, self.blocks[1])):
            self.workers[thread](lambda block=block: block.__exit__(None, None, None))

    def check(self, thread: int, policy: Policy | None) -> None:
        super().check(thread, policy)
        gpu: VirtualGPU = self.devices[thread]
        assert gpu.policy == (policy or UNMANAGED)
        if thread != 1:  # whose arrays nobody follows: its GPU was entered elsewhere
            array = gpu.xp.empty(1000, "u1")
            assert umem.location(array).managed == (gpu.policy.mode == "managed")


class CupyNesting(Nesting):
    """One GPU for all; what must be in force is CuPy's allocator."""

    _open: ClassVar[Any] = staticmethod(cuda.open_cuda)

    def set_up(self) -> list[Any]:
        import cupy
        from cuda_host_driver import HostDriver

        device = cuda.CudaDevice(HostDriver(vram=VRAM_BYTES))
        cuda.open_cuda = lambda ordinal=None: device  # type: ignore[assignment]
        self.get_allocator = cupy.cuda.get_allocator
        self.before = [worker(self.get_allocator) for worker in self.workers]
        return [device] * 3

    def tear_down(self) -> None:
        after = [worker(self.get_allocator) for worker in self.workers]
        cuda.open_cuda = self._open  # type: ignore[assignment]
        assert all(now is then for now, then in zip(after, self.before, strict=True))

    def check(self, thread: int, policy: Policy | None) -> None:
        super().check(thread, policy)
        device, found = self.devices[thread], self.get_allocator()
        assert device._installer.policy() == policy
        if policy is None:
            assert found is self.before[thread]
        elif policy.mode == "hybrid":
            assert type(found.__self__).__name__ == "Hybrid"
            assert found.__self__._pool is device._pools.pool("unmanaged")
        elif policy.mode == "managed":
            assert found is device._pools.malloc("managed")
        elif policy.limit_bytes is None:
            assert found == device._driver.default_pool.malloc
        else:
            assert found is device._pools.malloc("unmanaged")


TestVirtualNesting = VirtualNesting.TestCase
TestVirtualNesting.settings = MANY
if importlib.util.find_spec("cupy") is not None:
    TestCupyNesting = CupyNesting.TestCase
    TestCupyNesting.settings = MANY


# -- at the same time --------------------------------------------------------------------------


def visit(rng: random.Random, depth: int, look: Callable[[], Policy], held: list[Any]) -> None:
    """Enter and leave blocks at random; after each, what was in force before is again."""
    for _ in range(rng.randrange(3) if depth else 3):
        before, mode = look(), rng.choice(["unmanaged", "managed", "hybrid"])
        try:
            with getattr(umem, mode)(rng.choice(["0.5x", GIB, None])) as block:
                assert look().mode == mode
                held.append(block.xp.empty(rng.randrange(1, 64 << 10), "u1"))
                if depth < 4:
                    visit(rng, depth + 1, look, held)
                if rng.random() < 0.3:
                    raise KeyError
        except KeyError:
            pass
        assert look() == before


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(seed: int) -> None:
        try:
            start.wait(30)
            work(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_with_virtual_gpus_of_their_own_do_not_disturb_each_other() -> None:
    def work(seed: int) -> None:
        with umem.virtual_gpu("t4", vram="64MiB") as gpu:
            held: list[Any] = []
            visit(random.Random(seed), 0, lambda: gpu.policy, held)
            assert gpu.policy == UNMANAGED
            held.clear()
            assert gpu.usage() and not gpu.model.tensors

    in_threads(work)


def test_threads_on_one_gpu_nest_for_themselves_and_every_byte_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = pytest.importorskip("cupy")
    from cuda_host_driver import HostDriver

    device = cuda.CudaDevice(HostDriver())
    monkeypatch.setattr(cuda, "open_cuda", lambda: device)
    before = cupy.cuda.get_allocator()

    def work(seed: int) -> None:
        held: list[Any] = []
        visit(random.Random(seed), 0, lambda: device._installer.policy() or UNMANAGED, held)
        assert cupy.cuda.get_allocator() is before

    in_threads(work)
    device._pools.give_back("managed", "spill", "unmanaged")
    device._driver.default_pool.free_all_blocks()
    assert device.usage().reserved_bytes == 0


def test_only_one_of_many_threads_enables_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cupy")
    from cuda_host_driver import HostDriver

    device = cuda.CudaDevice(HostDriver())
    monkeypatch.setattr(cuda, "open_cuda", lambda: device)
    on: list[int] = []
    told: list[int] = []

    def work(seed: int) -> None:
        try:
            umem.enable(limit=(seed + 1) * MIB)
        except StateError:
            told.append(seed)
        else:
            on.append(seed)

    in_threads(work)
    with pytest.raises(LimitError):
        device.xp.empty(9 * MIB, "u1")
    umem.disable()
    assert (len(on), len(told)) == (1, 7)
