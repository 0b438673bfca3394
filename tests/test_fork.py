"""What a child process may do: everything on a virtual GPU, nothing on CUDA, and it is told so.

Each test is a program of its own, because a fork copies whatever the tests have running.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import printed_quietly

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
]
# From Python 3.12 on a fork with threads warns, and NumPy may have some; that is the subject here.
FORK = """
import os, sys, threading, traceback, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import umem

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
CUDA = """
from cuda_host_driver import HostDriver, installed
import cupy
from umem.devices.cuda import CudaDevice, gpus, driver as cuda_driver
from umem.errors import StateError
gpu = gpus.opened[0] = CudaDevice(HostDriver())
cuda_driver.current_ordinal = lambda: 0

def refused(*calls):
    for call in calls:
        try:
            call()
        except StateError as error:
            assert "forked" in str(error) and "spawn" in str(error)
        else:
            raise AssertionError(f"{call} was not refused")
"""


def run(code: str, *, cuda: bool = False) -> str:
    """The output of a program that must end well, and without noise."""
    if cuda:
        pytest.importorskip("cupy")
    program = FORK + (CUDA if cuda else "") + textwrap.dedent(code)
    return printed_quietly("-W", "error", "-c", program)


# -- the virtual GPU -----------------------------------------------------------------------------


def test_a_child_goes_on_inside_a_block_and_the_parent_sees_none_of_it() -> None:
    run("""
        with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu, umem.managed() as memory:
            a = memory.xp.ones(8 << 20, "u1")
            before = gpu.figures

            def work():
                b = memory.xp.full(96 << 20, 2, "u1")
                assert int(a.max()) == 1 and int(b.min()) == 2
                assert umem.prefetch(a, "cpu") == a.nbytes
                assert umem.location(a).resident_bytes == 0
                assert gpu.figures.migrated_out_bytes > 0
                assert umem.status().on

            in_child(work)
            assert gpu.figures == before
            assert umem.location(a).resident_bytes == a.nbytes
    """)


def test_a_block_left_in_the_child_is_left_in_the_parent_too() -> None:
    run("""
        block = umem.virtual_gpu("t4")
        gpu = block.__enter__()
        handle = umem.enable()
        in_child(lambda: (umem.disable(), block.__exit__(None, None, None)))
        assert umem.status().on
        umem.disable()
        block.__exit__(None, None, None)
    """)


def test_a_recorder_follows_the_child_in_a_trace_of_its_own() -> None:
    run("""
        from umem.trace import Op
        names = lambda recorder: [e.name for e in recorder.trace.events if isinstance(e, Op)]
        with umem.virtual_gpu("t4") as gpu, umem.record() as recorder:
            a = gpu.xp.ones(4)

            def work():
                global a
                a * 2
                assert names(recorder) == ["ones", "multiply"]
                del a
                gpu.xp.zeros(4)
                assert names(recorder) == ["ones", "multiply", "zeros"]

            in_child(work)
            a + 1
        assert names(recorder) == ["ones", "add"]
    """)


HELD = {
    "enable": """
        with umem.virtual_gpu("t4") as own:
            serve_all = own.serve_all
            own.serve_all = lambda *given: (busy(), serve_all(*given))
            umem.enable()
            umem.disable()
    """,
    "record": """
        umem.trace.recording.sources.add_source(types.SimpleNamespace(start=busy, stop=busy))
    """,
    "model": """
        with gpu.model.lock:
            busy()
    """,
}


@pytest.mark.parametrize("name", HELD)
def test_a_lock_that_another_thread_holds_is_free_in_the_child(name: str) -> None:
    held = textwrap.indent(textwrap.dedent(HELD[name]), " " * 12)
    run(f"""
        import time, types, umem.errors, umem.trace.recording.sources

        is_held = threading.Event()

        def busy():
            is_held.set()
            time.sleep(0.2)  # a fork that came after it would show nothing, and not fail

        def hold(gpu):
            {held.strip()}

        def work():  # not in a thread, which may be taken for the one that held the lock
            with umem.virtual_gpu("v100-16gb") as gpu:
                with umem.record(), umem.managed() as memory:
                    memory.xp.ones(4)
                try:
                    umem.enable()
                except umem.errors.StateError:  # the other thread's, as the fork found it
                    pass
                umem.disable()

        with umem.virtual_gpu("t4") as gpu:
            thread = threading.Thread(target=hold, args=(gpu,))
            thread.start()
            is_held.wait()
            in_child(work)
            thread.join()
            work()
    """)


def test_locks_that_are_gone_are_forgotten() -> None:
    run("""
        from umem._common import locks as forking
        before = len(forking.locks)
        kept = [forking.safe_lock() for _ in range(3)]
        assert len(forking.locks) == before + 3
        del kept[1:]
        assert len(forking.locks) == before + 1
        in_child(lambda: kept[0].acquire(timeout=1) or sys.exit("held"))
    """)


def test_threads_that_fork_at_once_do_not_wait_for_each_other() -> None:
    run("""
        with umem.virtual_gpu("t4") as gpu:
            threads = [threading.Thread(target=in_child, args=(lambda: gpu.figures,))
                       for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
    """)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_of_every_kind_use_virtual_gpus(method: str, tmp_path: Path) -> None:
    program = tmp_path / "workers.py"
    program.write_text(
        FORK
        + textwrap.dedent(f"""
        import multiprocessing

        def work(size):
            with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu, umem.managed() as memory:
                memory.xp.ones(size << 20, "u1")
                return gpu.usage().managed_bytes

        if __name__ == "__main__":
            with umem.virtual_gpu("t4") as gpu, umem.managed() as memory:
                memory.xp.ones(1 << 20, "u1")
                pool = multiprocessing.get_context({method!r}).Pool(2)
                assert pool.map(work, [8, 96]) == [8 << 20, 96 << 20]
                pool.close()
                pool.join()
        """)
    )
    printed_quietly("-W", "error", program)


# -- CUDA ----------------------------------------------------------------------------------------


def test_a_child_is_refused_cuda_with_the_way_out_and_the_parent_is_not() -> None:
    run(
        """
        import numpy as np
        with umem.managed() as memory:
            a = cupy.empty(1 << 20, dtype="u1")

            def work():
                refused(
                    lambda: umem.managed().__enter__(), umem.enable, lambda: umem.prefetch(a),
                    lambda: umem.advise(a, "read_mostly"), lambda: umem.location(a),
                    lambda: umem.as_numpy(a), lambda: gpu.prefetch(a, 0, None), gpu.usage,
                    gpu.synchronize, lambda: gpu.why_not("managed"),
                )
                assert "forked" in str(umem.status())  # it never raises
                in_child(lambda: refused(umem.enable))

            in_child(work)
            assert cupy.empty(1 << 20, dtype="u1").nbytes == gpu.usage().managed_bytes // 2
        """,
        cuda=True,
    )


def test_allocations_of_the_child_are_refused_those_from_the_cache_too() -> None:
    run(
        """
        from umem.devices import Policy
        for everywhere in (False, True):
            with installed(gpu, Policy("managed"), everywhere=everywhere):
                cupy.empty(1 << 20, dtype="u1")  # free again, and cached
                allocator = cupy.cuda.get_allocator()
                in_child(lambda: refused(lambda: cupy.empty(1 << 20, dtype="u1"),
                                         lambda: cupy.empty(2 << 20, dtype="u1")))
                assert cupy.cuda.get_allocator() is allocator
                cupy.empty(1 << 20, dtype="u1")
        """,
        cuda=True,
    )


def test_a_pool_does_not_grow_in_a_child_that_nothing_was_installed_in() -> None:
    run(
        """
        def work():
            refused(lambda: gpu.pools.malloc("managed")(512))
            assert cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc

        gpu.pools.malloc("managed")
        in_child(work)
        """,
        cuda=True,
    )


def test_a_child_leaves_the_blocks_of_its_parent_and_frees_its_arrays_in_silence() -> None:
    run(
        """
        import gc
        block = umem.managed()
        block.__enter__()
        a = cupy.empty(1 << 20, dtype="u1")

        def work():
            global a
            del a
            gc.collect()
            block.__exit__(None, None, None)

        in_child(work)
        block.__exit__(None, None, None)
        assert gpu.usage().managed_bytes == 1 << 20
        """,
        cuda=True,
    )


def test_a_child_may_use_a_virtual_gpu_where_its_parent_used_cuda() -> None:
    run(
        """
        def work():
            with umem.virtual_gpu("t4"), umem.managed() as memory:
                assert int(memory.xp.ones(4).sum()) == 4

        with umem.managed():
            in_child(work)
        """,
        cuda=True,
    )


def test_a_child_of_a_parent_that_used_cuda_without_umem_learns_the_reason() -> None:
    pytest.importorskip("cupy")
    from umem.devices.cuda import count_problem

    reason = count_problem(SimpleNamespace(status=3))
    assert "forked" in reason and "spawn" in reason


def test_a_spawned_child_is_free_of_its_parents_past(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    program = tmp_path / "spawned.py"
    program.write_text(
        FORK
        + CUDA
        + textwrap.dedent("""
        import multiprocessing

        def work(size):
            with umem.managed() as memory:  # the stand-in of this process, made by its import
                return memory.xp.empty(size, dtype="u1").nbytes

        if __name__ == "__main__":
            with umem.managed():
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    assert pool.map(work, [512, 1024]) == [512, 1024]
        """)
    )
    printed_quietly(program)
