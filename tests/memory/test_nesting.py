"""Any nesting and overlap of modes over several threads and contexts, as asyncio's tasks have
them: what is in force is what a simple model says.

Each thread does what it is told, one thing at a time, so that a failure can be repeated and
shrunk. The same machine drives the virtual GPU and the real CuPy, whose GPU is made of host memory.
"""

from __future__ import annotations

import importlib.util
import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import umem
from umem._common import scopes
from umem._common.scopes import Scope
from umem.devices import Device, Policy, cuda
from umem.devices.virtual import VirtualGPU
from umem.errors import LimitError, SizeError, StateError
from umem.units import GIB, MIB

pytestmark = pytest.mark.thorough

UNMANAGED = Policy("unmanaged")
VRAM_BYTES = 64 * MIB
LIMITS = {None: None, 8 * MIB: 8 * MIB, "16MiB": 16 * MIB, "0.5x": 32 * MIB}
"""As they are written, and what they come to."""
MODES = st.sampled_from(["unmanaged", "managed", "hybrid"])
THREADS, CONTEXTS = st.integers(0, 2), st.integers(0, 3)
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
        result, error = self._done.get(timeout=300)
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        self._todo.put(None)
        self._thread.join(300)

    def _work(self) -> None:
        while (action := self._todo.get()) is not None:
            try:
                self._done.put((action(), None))
            except BaseException as error:
                self._done.put((None, error))


class Entered:
    """What the model knows of a block: where it was entered, and whether anybody has left it."""

    def __init__(self, thread: int, policy: Policy, leave: Callable[[Any], Any]) -> None:
        self.thread, self.policy, self.leave = thread, policy, leave
        self.is_open = True


def inside(block: Any) -> Iterator[None]:
    """A generator that is suspended inside a block."""
    with block:
        yield


class Nesting(RuleBasedStateMachine):
    """Three threads that enable, disable, enter and leave at random, each in several contexts.

    The model: for each context the blocks that were entered in it, or before in the one that it is
    a copy of, whether anybody has left them, and in which thread they were entered; and at most one
    policy for the process, which belongs to the device that it was enabled on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.workers = [Worker() for _ in range(3)]
        self.contexts = [[worker(copy_context)] for worker in self.workers]
        self.seen: list[list[list[Entered]]] = [[[]], [[]], [[]]]
        self.enabled: tuple[Device, Policy, Any] | None = None
        self.devices = self.set_up()

    def set_up(self) -> list[Any]:
        """The device of each thread."""
        raise NotImplementedError

    def tear_down(self) -> None:
        """Undo `set_up`, when every block has been left and nothing is enabled."""

    def run(self, thread: int, number: int, action: Callable[[], Any]) -> Any:
        """In that thread and the context of that number, counted round."""
        contexts = self.contexts[thread]
        return self.workers[thread](lambda: contexts[number % len(contexts)].run(action))

    def where(self, thread: int, number: int) -> list[Entered]:
        """What was entered there, or before where that is a copy of."""
        return self.seen[thread][number % len(self.seen[thread])]

    def open_blocks(self) -> list[Entered]:
        found = [block for thread in self.seen for seen in thread for block in seen]
        return [block for block in dict.fromkeys(found) if block.is_open]

    def teardown(self) -> None:
        for block in self.open_blocks():
            self.run(block.thread, 0, lambda block=block: block.leave(None))
        if self.enabled is not None:
            umem.disable()
        self.tear_down()
        for worker, contexts in zip(self.workers, self.contexts, strict=True):
            for context in contexts:
                assert worker(lambda context=context: context.run(scopes.inside)) == ()
            worker.stop()

    def here(self, thread: int, number: int) -> list[Entered]:
        """The open blocks that this code of the thread is inside of."""
        seen = self.where(thread, number)
        return [block for block in seen if block.is_open and block.thread == thread]

    def expected(self, thread: int, number: int) -> Policy | None:
        """What the code ought to allocate by; None is whatever was there before."""
        if self.here(thread, number):
            return self.here(thread, number)[-1].policy
        if self.enabled is not None and self.enabled[0] is self.devices[thread]:
            return self.enabled[1]
        return None

    def stands_in_the_way(self, thread: int, number: int) -> bool:
        """Whether nothing can be switched for the process there."""
        return bool(self.here(thread, number))

    @rule(thread=THREADS, number=CONTEXTS)
    def make_a_task(self, thread: int, number: int) -> None:
        if len(self.contexts[thread]) < 4:
            self.contexts[thread].append(self.run(thread, number, copy_context))
            self.seen[thread].append([*self.where(thread, number)])

    @rule(thread=THREADS, number=CONTEXTS, mode=MODES, limit=st.sampled_from(list(LIMITS)))
    def enable(self, thread: int, number: int, mode: Any, limit: Any) -> None:
        device, policy = self.devices[thread], Policy(mode, LIMITS[limit])

        def call() -> Any:
            return umem.enable(mode, limit=limit)

        if self.enabled is None and not self.stands_in_the_way(thread, number):
            self.enabled = device, policy, self.run(thread, number, call)
        elif self.enabled is not None and self.enabled[:2] == (device, policy):
            assert self.run(thread, number, call) is self.enabled[2]
        else:
            with pytest.raises(StateError):
                self.run(thread, number, call)

    @rule(thread=THREADS, number=CONTEXTS)
    def disable(self, thread: int, number: int) -> None:
        mine = self.enabled is not None and self.enabled[0] is self.devices[thread]
        if self.enabled is None or (mine and self.stands_in_the_way(thread, number)):
            with pytest.raises(StateError):
                self.run(thread, number, umem.disable)
        else:
            self.run(thread, number, umem.disable)
            self.enabled = None

    @rule(thread=THREADS, number=CONTEXTS, mode=MODES, limit=st.sampled_from(list(LIMITS)))
    def enter(self, thread: int, number: int, mode: Any, limit: Any) -> None:
        block = getattr(umem, mode)(limit)
        self.run(thread, number, block.__enter__)

        def leave(error: Any) -> Any:
            return block.__exit__(error, error and error(), None)

        self.where(thread, number).append(Entered(thread, Policy(mode, LIMITS[limit]), leave))

    @rule(thread=THREADS, number=CONTEXTS, mode=MODES)
    def enter_in_a_generator(self, thread: int, number: int, mode: Any) -> None:
        generator = inside(getattr(umem, mode)())
        self.run(thread, number, generator.__next__)
        policy = Policy(mode)
        entered = Entered(thread, policy, lambda error: generator.close())
        self.where(thread, number).append(entered)

    @precondition(lambda self: self.open_blocks())
    @rule(
        thread=THREADS,
        number=CONTEXTS,
        which=st.integers(0, 5),
        error=st.sampled_from([None, ZeroDivisionError, KeyboardInterrupt]),
    )
    def leave_any_anywhere(self, thread: int, number: int, which: int, error: Any) -> None:
        blocks = self.open_blocks()
        block = blocks[which % len(blocks)]
        assert not self.run(thread, number, lambda: block.leave(error))
        block.is_open = False

    @precondition(lambda self: any(self.here(thread, 0) for thread in range(3)))
    @rule(thread=THREADS, number=CONTEXTS)
    def leave_the_innermost(self, thread: int, number: int) -> None:
        if self.here(thread, number):
            block = self.here(thread, number)[-1]
            self.run(thread, number, lambda: block.leave(None))
            block.is_open = False

    @rule(thread=THREADS, mode=MODES, size=st.sampled_from(["0x", "101%", "", True]))
    def ask_for_what_is_no_limit(self, thread: int, mode: Any, size: Any) -> None:
        for make in (lambda: getattr(umem, mode)(size), lambda: umem.enable(mode, limit=size)):
            with pytest.raises(SizeError):
                self.run(thread, 0, make)

    @rule(thread=THREADS, number=CONTEXTS, mode=MODES, fails=st.booleans())
    def call_a_decorated_function(self, thread: int, number: int, mode: Any, fails: bool) -> None:
        @getattr(umem, mode)("0.5x")
        def run() -> Any:
            self.check(thread, number, Policy(mode, VRAM_BYTES // 2))
            if fails:
                raise ZeroDivisionError

        if fails:
            with pytest.raises(ZeroDivisionError):
                self.run(thread, number, run)
        else:
            self.run(thread, number, run)

    def check(self, thread: int, number: int, policy: Policy | None) -> None:
        """There: is ``policy`` in force?"""
        status = umem.status()
        assert status.on == (policy is not None)
        known = policy or UNMANAGED
        assert (status.mode, status.limit_bytes) == (known.mode, known.limit_bytes)

    @invariant()
    def all_code_allocates_by_what_it_asked_for(self) -> None:
        for thread, contexts in enumerate(self.contexts):
            for number in range(len(contexts)):
                policy = self.expected(thread, number)
                self.run(
                    thread,
                    number,
                    lambda t=thread, n=number, policy=policy: self.check(t, n, policy),
                )


class VirtualNesting(Nesting):
    """Threads 0 and 1 share one virtual GPU, which no user can; thread 2 has its own."""

    def set_up(self) -> list[Any]:
        self.blocks = [umem.virtual_gpu("t4", vram=VRAM_BYTES) for _ in range(2)]
        shared = self.run(0, 0, self.blocks[0].__enter__)
        self.shared = self.run(1, 0, Scope)
        self.run(1, 0, lambda: self.shared.open(shared))
        return [shared, shared, self.run(2, 0, self.blocks[1].__enter__)]

    def tear_down(self) -> None:
        self.run(1, 0, self.shared.close)
        for thread, block in ((0, self.blocks[0]), (2, self.blocks[1])):
            self.run(thread, 0, lambda block=block: block.__exit__(None, None, None))

    def check(self, thread: int, number: int, policy: Policy | None) -> None:
        super().check(thread, number, policy)
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

        from tests.support.allocators import in_force
        from umem.devices.cuda import install as dispatching

        class NoHeadroom(HostDriver):
            headroom_bytes = 0  # as on the virtual GPU, beside which this one is tested

        device = cuda.CudaDevice(NoHeadroom(vram=VRAM_BYTES))
        cuda.open_cuda = lambda ordinal=None: device  # type: ignore[assignment]
        self.dispatching, self.in_force = dispatching, in_force
        self.get_allocator = cupy.cuda.get_allocator
        self.before = [worker(self.get_allocator) for worker in self.workers]
        return [device] * 3

    def stands_in_the_way(self, thread: int, number: int) -> bool:
        return any(block.thread == thread for block in self.open_blocks())

    def tear_down(self) -> None:
        for worker in self.workers:
            worker(self.dispatching.clear)
        after = [worker(self.get_allocator) for worker in self.workers]
        cuda.open_cuda = self._open  # type: ignore[assignment]
        assert all(now is then for now, then in zip(after, self.before, strict=True))

    def check(self, thread: int, number: int, policy: Policy | None) -> None:
        super().check(thread, number, policy)
        device, found = self.devices[thread], self.in_force()
        assert device.policy == policy
        if policy is not None:
            array = device.xp.empty(1000, "u1")
            is_managed = array.data.ptr in device.driver.managed_blocks
            assert is_managed == (policy.mode == "managed")
        if policy is None:
            assert found is self.before[thread]
        elif policy.mode == "hybrid":
            assert type(found.__self__).__name__ == "Hybrid"
            assert found.__self__.pool is device.pools.pool("unmanaged")
        elif policy.mode == "managed":
            assert found is device.pools.malloc("managed")
        elif policy.limit_bytes is None:
            assert found == device.driver.default_pool.malloc
        else:
            assert found is device.pools.malloc("unmanaged")


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
            start.wait(300)
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
        visit(random.Random(seed), 0, lambda: device.policy or UNMANAGED, held)
        assert cupy.cuda.get_allocator() is before

    in_threads(work)
    device.pools.give_back("managed", "spill", "unmanaged")
    device.driver.default_pool.free_all_blocks()
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
