"""Claims about CUDA and CuPy that umem leans on, and that were never seen on a GPU.

Each docstring says what is claimed ("Fact n", numbered as in umem's notes on CUDA) and what is
expected; the first run confirms or corrects it. What would need oversubscription (failures that
show late, a prefetch of more than fits) is left out on purpose: all managed memory together stays
under the budget of bench/gpu_guard.py.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import time
import warnings
import weakref
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_fixtures import LAUNCHED, MIB, OnGpu, gpu_guard

import umem
from umem.devices import PRESETS
from umem.errors import DeviceError, HintError, StateError

pytestmark = pytest.mark.gpu
MADV_DONTFORK = 10


def major(cupy):
    return int(cupy.__version__.split(".")[0])


class Token:
    """Something that can be weakly referenced."""


def slow_add(cupy):
    """A kernel that takes about 50 ms and then adds one: something to be too early for."""
    kernel = cupy.ElementwiseKernel(
        "int64 cycles",
        "int32 x",
        "long long start = clock64(); while (clock64() - start < cycles) {} x += 1;",
        "umem_slow_add",
    )
    return lambda array: kernel(80_000_000, array)


def in_child(work, seconds=60.0):
    """The exit code of a child by fork, which leaves without Python's clean-up.

    A child may hang, on a lock that a thread of its parent held: then it is killed.
    """
    with warnings.catch_warnings():
        # From Python 3.12 on a fork with threads warns; a process that uses CUDA has some.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"a child by fork did not end within {seconds} s")


class TestTargets(OnGpu):
    """Fact 1: the host as a target of prefetch and advice."""

    @pytest.mark.hardware("the software GPU has CUDA 12's CuPy")
    def test_cupys_own_advice_misses_the_host_on_cuda_13(self, hints, cupy, use):
        """Expected: CuPy 13 raises; CuPy 14 advises another place than the host.

        If it fails because the host is preferred after all, `Driver.check_advice` asks for
        cuda-core where CuPy would do.
        """
        if hints.driver.cuda_major < 13:
            pytest.skip("test_gpu_device.py has CUDA 12")
        use("managed")
        array = cupy.ones(4 * MIB, dtype="u1")
        try:
            cupy.cuda.runtime.memAdvise(array.data.ptr, array.nbytes, 3, -1)
        except cupy.cuda.runtime.CUDARuntimeError:
            return
        assert hints.location(array).preferred != "cpu"
        hints.advise(array, "preferred_location", "cpu", unset=True)

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_a_presets_pool_is_advised_on_cuda_12_and_13(self, hints, cupy, use, name):
        """Expected: advice is there before the first touch, and arrays compute as ever."""
        use("managed", preset=name)
        array = cupy.empty(4 * MIB, dtype="u1")
        location = hints.location(array)
        array.fill(7)
        assert location.read_mostly == (name == "read_mostly")
        assert location.preferred == {"random": hints.ordinal, "read_mostly": None}.get(name, "cpu")
        assert int(array.min()) == int(array.max()) == 7

    def test_memory_that_prefers_the_host_stays_there_when_the_gpu_writes_it(
        self, hints, cupy, use
    ):
        """Expected: written over the bus in place, no slower to read on the host than before."""
        use("managed", preset="streaming")
        array = cupy.ones(64 * MIB, dtype="u1")
        hints.prefetch(array, "cpu", None)
        array += 1
        assert umem.as_numpy(array).max() == 2
        assert hints.location(array).last_prefetch == "cpu"


class TestPools(OnGpu):
    """Facts 4, 7 and 8: what CuPy's pools hand out, and how long it lives."""

    def test_a_pool_that_dies_frees_what_arrays_use_up_to_cupy_13(self, device, cupy):
        """Fact 4. Expected: CuPy 13 lets go of the block, CuPy 14 keeps it."""
        taken = []
        with gpu_guard.guard(device).raw(MIB) as kept:  # whatever the pool does, it stays

            def grow(nbytes):
                token = Token()
                taken.append(weakref.ref(token))
                memory = cupy.cuda.UnownedMemory(kept.ptr, nbytes, token, device.ordinal)
                return cupy.cuda.MemoryPointer(memory, 0)

            pool = cupy.cuda.MemoryPool(grow)
            pointer = pool.malloc(MIB)
            del pool
            gc.collect()
            alive = taken[0]() is not None
            del pointer
        assert alive == (major(cupy) >= 14)

    def test_pooled_memory_cannot_be_weakly_referenced(self, device, cupy, use):
        """Fact 7. Expected: TypeError, so that watching needs memory of our own."""
        use("managed")
        with pytest.raises(TypeError):
            weakref.ref(cupy.empty(MIB, dtype="u1").data.mem)

    def test_an_allocation_of_nothing_is_plain_memory(self, device, cupy):
        """Fact 8. Expected: not pooled, so nothing may be asked of it."""
        pointer = cupy.cuda.MemoryPool().malloc(0)
        assert type(pointer.mem) is cupy.cuda.Memory and pointer.ptr == 0


class TestStreams(OnGpu):
    """Fact 15: what waits, and what a capture does not survive."""

    @pytest.mark.hardware("kernels of the software GPU have ended when their launch returns")
    def test_freeing_managed_memory_beside_a_pool_waits_for_the_gpu(self, device, cupy, use):
        """Expected: the kernel that ran when the free began has ended when it returns."""
        use("managed")
        busy, slow = cupy.zeros(1, dtype="i4"), slow_add(cupy)
        slow(busy)
        device.synchronize()
        with gpu_guard.guard(device).raw(4 * MIB) as pointer:
            slow(busy)
            ended = cupy.cuda.Event()
            ended.record()
            assert not ended.done
            del pointer
            gc.collect()
            assert ended.done
        device.synchronize()

    @LAUNCHED
    def test_a_prefetch_is_refused_in_a_capture_and_the_capture_survives(
        self, hints, cupy, use, launched
    ):
        """Expected: refused before the driver sees it; the graph can be ended and run."""
        use("managed")
        array, stream = cupy.zeros(MIB, dtype="f4"), cupy.cuda.Stream(non_blocking=True)
        array += 1
        hints.synchronize()
        with stream:
            stream.begin_capture()
            array += 1
            for refused in (lambda: umem.prefetch(array), lambda: umem.as_numpy(array)):
                with pytest.raises(DeviceError, match="capture"):
                    refused()
            graph = stream.end_capture()
        if launched:
            graph.launch(stream)
        stream.synchronize()
        assert float(array[0]) == 1.0 + launched

    @LAUNCHED
    def test_a_prefetch_on_another_stream_leaves_a_capture_alone(self, hints, cupy, use, launched):
        """Expected: in CuPy's relaxed mode of capture, calls on other streams are allowed."""
        use("managed")
        array, other = cupy.zeros(MIB, dtype="f4"), cupy.ones(MIB, dtype="f4")
        array += 1
        hints.synchronize()
        side = cupy.cuda.Stream(non_blocking=True)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            array += 1
            assert umem.prefetch(other, "cpu", stream=side) == other.nbytes
            graph = stream.end_capture()
        if launched:
            graph.launch(stream)
        stream.synchronize()
        side.synchronize()
        assert float(array[0]) == 1.0 + launched and float(other[0]) == 1.0


class TestFork(OnGpu):
    """Fact 16: children by fork."""

    def test_a_child_is_refused_and_its_parent_keeps_its_data(self, device, cupy, use):
        """Expected: clear errors in the child, and the parent computes on as before."""
        use("managed")
        array = cupy.arange(MIB, dtype="i4")
        view = umem.as_numpy(array)

        def work():
            assert "forked" in str(umem.status())
            for call in (lambda: umem.prefetch(array), lambda: cupy.empty(MIB, dtype="u1")):
                try:
                    call()
                except StateError:
                    continue
                raise AssertionError("not refused")

        assert in_child(work) == 0
        array += 1
        device.synchronize()
        assert int(array[-1]) == MIB and view[-1] == MIB

    def test_a_child_that_drops_arrays_frees_nothing_of_its_parent(self, device, cupy, use):
        """Expected: they go back to the child's copy of the pool, without a call to the driver."""
        use("managed")
        arrays = [cupy.full(MIB, 7, dtype="i4")]

        def work():
            arrays.clear()
            gc.collect()

        assert in_child(work) == 0
        assert int(arrays[0].min()) == int(arrays[0].max()) == 7

    @pytest.mark.hardware("memory of the software GPU is the process's own, so a child has a copy")
    def test_the_childs_copy_of_managed_pages_is_not_readable(self, device, cupy, use):
        """Expected: the driver does not share managed pages: the child dies of a signal.

        The reason why a worker must not be handed a view of managed memory.
        """
        use("managed")
        view = umem.as_numpy(cupy.full(MIB, 7, dtype="i4"))
        code = in_child(lambda: int(view[0]))
        print("the child ended with", code)
        assert code < 0

    def test_pages_that_are_not_copied_on_fork_stay_the_parents(self, device, cupy, use):
        """Expected: madvise(MADV_DONTFORK) is accepted on managed memory and changes nothing."""
        use("managed")
        array = cupy.full(4 * MIB, 7, dtype="i4")
        low = -(-array.data.ptr // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (array.data.ptr + array.nbytes - low) // mmap.PAGESIZE * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        pages = ctypes.c_void_p(low), ctypes.c_size_t(nbytes)
        assert libc.madvise(*pages, MADV_DONTFORK) == 0, os.strerror(ctypes.get_errno())
        assert in_child(lambda: None) == 0
        array += 1
        assert int(array.min()) == int(array.max()) == 8
        assert libc.madvise(*pages, 11) == 0  # MADV_DOFORK

    def test_a_spawned_child_uses_the_gpu(self, device):
        """Expected: a process of its own, with nothing of its parent's."""
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(managed_sum, [4096]) == [4096]


def managed_sum(size):
    with umem.managed() as memory:
        return int(memory.xp.ones(size, "int32").sum())


class TestHostViews(OnGpu):
    """Fact 17: the host looks at managed memory in place."""

    def test_what_a_kernel_writes_is_there_when_the_view_is_made(self, device, cupy, use):
        """Expected: as_numpy waits, for kernels on other streams too."""
        use("managed")
        slow, array, other = slow_add(cupy), *cupy.zeros((2, 4), dtype="i4")
        device.synchronize()  # the other stream does not wait for the zeros
        slow(array)
        with cupy.cuda.Stream(non_blocking=True):
            slow(other)
        assert umem.as_numpy(array).tolist() == umem.as_numpy(other).tolist() == [1] * 4

    def test_dlpack_gives_the_same_view(self, device, cupy, use):
        """Expected with NumPy 2.1 and CuPy 13.6 or newer: the same address, and it waits too."""
        use("managed")
        slow, array = slow_add(cupy), cupy.arange(4, dtype="i4")
        slow(array)
        view = np.from_dlpack(array, device="cpu", copy=False)
        assert view.ctypes.data == umem.as_numpy(array).ctypes.data == array.data.ptr
        assert view.tolist() == [1, 2, 3, 4]

    def test_the_gpu_sees_what_the_host_wrote_and_back(self, hints, cupy, use):
        """Expected: from wherever the pages are, after a prefetch to either side too."""
        use("managed")
        array = cupy.zeros(4 * MIB, dtype="u1")
        for value, place in enumerate(("cpu", hints.ordinal, "cpu"), 1):
            hints.prefetch(array, place, None)
            umem.as_numpy(array[::-2])[:] = value
            assert int(array[1::2].min()) == value and int(array[::2].max()) == 0

    def test_unmanaged_memory_has_no_view_by_any_way(self, device, cupy, use):
        """Expected: as_numpy and DLPack without a copy both refuse."""
        use("unmanaged")
        array = cupy.ones(8)
        with pytest.raises(HintError):
            umem.as_numpy(array)
        with pytest.raises((BufferError, ValueError, RuntimeError)):
            np.from_dlpack(array, device="cpu", copy=False)


class TestSeveralGpus(OnGpu):
    """Fact 18: managed arrays of another GPU."""

    @pytest.fixture
    def other(self, cupy, device):
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("there is one GPU")
        return next(n for n in range(2) if n != device.ordinal)

    def test_cupys_peer_check_stands_in_the_way_and_wrapping_again_helps(
        self, device, cupy, use, other
    ):
        """Expected: CuPy warns or raises without peer access; the wrapped array computes."""
        use("managed")
        array = cupy.ones(MIB, dtype="i4")
        device.synchronize()
        peers = cupy.cuda.runtime.deviceCanAccessPeer(other, device.ordinal)
        with cupy.cuda.Device(other), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                total = int(array.sum())
            except ValueError as error:
                said, total = [error], MIB
            assert total == MIB and (peers or said)
            memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, array, other)
            again = cupy.ndarray(
                array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), array.strides
            )
            assert int(again.sum()) == MIB

    def test_hints_for_an_array_of_another_gpu_are_refused(self, device, cupy, use, other):
        use("managed")
        array = cupy.ones(MIB, dtype="i4")
        with cupy.cuda.Device(other):
            for hint in (umem.prefetch, umem.location, umem.as_numpy):
                with pytest.raises(DeviceError, match=rf"Device\({device.ordinal}\)"):
                    hint(array)

    def test_an_array_moves_to_another_gpu_by_prefetch(self, hints, cupy, use, other):
        """Expected: any GPU is a target, without peer access too."""
        use("managed")
        array = cupy.ones(MIB, dtype="i4")
        assert umem.prefetch(array, other) == array.nbytes
        hints.synchronize()
        assert umem.location(array).last_prefetch == other


class TestCost(OnGpu):
    """Facts 20 and 21: what can be compared, and what a first touch costs."""

    def test_a_first_touch_is_told_by_fault_and_by_prefetch(self, hints, cupy):
        """Fact 21. Expected: twice as dear at least; bench/cuda_constants.py measures it well."""
        touch = cupy.ElementwiseKernel("", "uint32 x", "x = 1", "umem_first_touch")
        seconds = {"fault": [], "prefetch": []}
        for repeat in range(4):
            for way, found in seconds.items():
                with gpu_guard.guard(hints).raw(64 * MIB) as pointer:
                    array = cupy.ndarray((16 * MIB,), dtype="u4", memptr=pointer)
                    hints.synchronize()
                    start = time.perf_counter()
                    if way == "prefetch":
                        hints.prefetch(array, hints.ordinal, None)
                    touch(array)
                    hints.synchronize()
                    found.extend([time.perf_counter() - start] if repeat else [])
                    del array, pointer
        medians = {way: float(np.median(found)) for way, found in seconds.items()}
        print(medians)
        assert all(len(found) == 3 for found in seconds.values())

    def test_a_graph_network_computes_the_same_in_every_mode(self, device, cupy):
        """Fact 20. Expected: the same losses; cuSPARSE's default product may round otherwise."""
        if find_spec("chainer") is None:
            pytest.skip("Chainer is not installed")
        import umem.chainer  # makes Chainer ready, so it comes before Chainer
        from umem.chainer import Workload

        work = Workload.generate(2000, 3)
        losses = []
        for block in (umem.unmanaged(), umem.managed(), umem.hybrid("4MiB")):
            with block:
                losses.append(list(work.train(lambda step: None)))
        for found in losses[1:]:
            np.testing.assert_allclose(found, losses[0], rtol=1e-4)
        print("equal bit for bit:", losses[0] == losses[1] == losses[2])


class TestConversions(OnGpu):
    def test_floats_that_no_integer_holds_become_the_nearest(self, cupy):
        """Claim of the software GPU. Expected: by way of 32 or 64 bits; NaN as in PTX."""
        given = [-1.0, 3.7, 1e20, -1e20, np.inf, np.nan, 300.0, -200.0]
        wanted = {
            ("f", "uint8"): [0, 3, 255, 0, 255, 0, 44, 0],
            ("f", "int32"): [-1, 3, 2**31 - 1, -(2**31), 2**31 - 1, 0, 300, -200],
            ("f", "uint32"): [0, 3, 2**32 - 1, 0, 2**32 - 1, 0, 300, 0],
            ("d", "int32"): [-1, 3, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 300, -200],
            ("d", "uint64"): [0, 3, 2**64 - 1, 0, 2**64 - 1, 2**63, 300, 0],
        }
        found = {key: cupy.asarray(given, key[0]).astype(key[1]).get().tolist() for key in wanted}
        assert found == wanted
