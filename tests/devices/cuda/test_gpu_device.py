"""The CUDA device on a GPU. None of this has run on one yet.

A test whose docstring begins with "Fact n" holds a claim that was read in sources and issue
threads and never seen: the first run confirms or corrects it; test_gpu_facts.py has the others.
All managed memory together stays under the budget of bench/gpu_guard.py; no test oversubscribes.
"""

from __future__ import annotations

import sys
import threading
from contextlib import closing

import pytest
from contracts import DeviceContract
from gpu_fixtures import LAUNCHED, MIB, OnGpu, needs_module, run

import umem
from umem._common.scopes import Scope
from umem.devices.base import Policy
from umem.devices.cuda import open_cuda
from umem.errors import DeviceError
from umem.units import BLOCK_BYTES

pytestmark = pytest.mark.gpu


class TestCudaContract(OnGpu, DeviceContract):
    """What the virtual GPU promises too; most of it is seen through `umem.location`."""

    @pytest.fixture(autouse=True)
    def _with_cuda_core(self):
        needs_module("cuda.core")


class TestModes(OnGpu):
    """Where memory comes from, and what bounds it."""

    def test_the_device_says_what_it_is(self, device):
        assert device.name and device.vram_bytes > 0
        assert device.simulated == ("umem.devices.software.opening" in sys.modules)
        assert open_cuda(device.ordinal) is device
        with pytest.raises(RuntimeError, match="was requested"):
            open_cuda(4096)

    def test_reserved_bytes_agree_with_the_pool(self, device, cupy, use):
        use("managed")
        keep = [cupy.empty(n * MIB, dtype="u1") for n in (1, 5, 2)]
        del keep[1]
        pool = device.pools.pool("managed")
        assert device.pools.ledger.reserved()["managed"] == pool.total_bytes()
        keep.clear()
        pool.free_all_blocks()
        assert device.pools.ledger.reserved()["managed"] == pool.total_bytes() == 0

    def test_spilled_memory_prefers_the_host_and_is_mapped(self, hints, cupy, use):
        use("hybrid", limit_bytes=512)
        location = hints.location(cupy.zeros(4 * MIB, dtype="u1"))
        assert location.preferred == "cpu" and location.accessed_by == (hints.ordinal,)

    def test_prefetch_on_allocation_is_read_back(self, hints, cupy, use):
        """Fact 21, and signatures: the attribute says where an allocation was last sent."""
        use("managed", prefetch=True)
        assert hints.location(cupy.empty(4 * MIB, dtype="u1")).last_prefetch == hints.ordinal

    def test_a_process_that_ends_with_managed_arrays_ends_silently(self):
        code = "import umem; umem.enable(); import cupy; a = cupy.ones(1 << 20); b = [a];"
        code += "b.append(b); view = umem.as_numpy(a[:8]);"
        code += "block = umem.managed(preset='random'); block.__enter__(); c = cupy.ones(1 << 20)"
        done = run(code)
        assert (done.returncode, done.stderr) == (0, "")

    def test_the_default_pool_is_emptied_where_managed_memory_needs_the_room(
        self, device, cupy, use, monkeypatch
    ):
        """Fact 9: cached cudaMalloc blocks are given back to the driver, and not before."""
        use("unmanaged")
        cupy.empty(64 * MIB, dtype="u1")
        cached = cupy.get_default_memory_pool().free_bytes()
        use("managed")
        cupy.empty(4 * MIB, dtype="u1")
        assert cupy.get_default_memory_pool().free_bytes() == cached >= 64 * MIB
        monkeypatch.setattr(type(device.driver), "free_bytes", lambda _: 4 * MIB)
        cupy.empty(8 * MIB, dtype="u1")
        assert cupy.get_default_memory_pool().free_bytes() < 64 * MIB

    def test_a_second_pass_through_managed_blocks_asks_the_driver_for_nothing(self, device, cupy):
        asked = []
        hook = cupy.cuda.memory_hook.MemoryHook()
        hook.name, hook.alloc_preprocess = "asked", lambda **of: asked.append(of["mem_size"])
        for _ in range(2):
            asked.clear()
            with hook:
                for size in (1, 3):
                    cupy.empty(size * MIB, dtype="u1")
                    with umem.managed():
                        cupy.empty(size * MIB, dtype="u1")
        assert asked == []

    def test_hybrid_leaves_vram_free_that_it_does_not_take_for_arrays(self, device, cupy):
        free = device.free_bytes
        with umem.hybrid(headroom=free - 16 * MIB):
            arrays = [cupy.empty(8 * MIB, dtype="u1") for _ in range(4)]
        assert [device.driver.is_managed(a.data.ptr) for a in arrays].count(True) >= 2
        assert device.free_bytes >= free - 16 * MIB

    @LAUNCHED
    def test_growing_in_a_capture_is_refused_and_the_capture_survives(
        self, device, cupy, use, launched
    ):
        """Fact 15: refused before the driver sees it, the capture can still be ended and run."""
        use("managed")
        stream = cupy.cuda.Stream(non_blocking=True)
        array = cupy.zeros(MIB, dtype="f4")
        array += 1  # compiled before the capture
        device.synchronize()
        with stream:
            stream.begin_capture()
            array += 1
            with pytest.raises(DeviceError, match="while a stream is captured"):
                cupy.empty(512 * MIB, dtype="u1")
            graph = stream.end_capture()
        if launched:
            graph.launch(stream)
        stream.synchronize()
        assert float(array[0]) == 1.0 + launched

    def test_arrays_made_in_many_threads_keep_their_contents(self, device, cupy):
        failures = []

        def work(number):
            restore = device.install(Policy("managed"), everywhere=False)
            try:
                arrays = [cupy.full(64 << 10, number, dtype="i4") for _ in range(16)]
                failures.extend(1 for array in arrays if int(array.min()) != number)
            finally:
                restore()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


class TestHints(OnGpu):
    """Where memory goes."""

    def test_advice_stays_with_the_address_when_the_block_is_reused(self, hints, cupy, use):
        """Fact 3."""
        use("managed")
        array = cupy.ones(4 * MIB, dtype="u1")
        address = array.data.ptr
        hints.advise(array, "read_mostly", None, unset=False)
        del array
        again = cupy.empty(4 * MIB, dtype="u1")
        assert again.data.ptr == address and hints.location(again).read_mostly
        hints.advise(again, "read_mostly", None, unset=True)

    def test_a_side_stream_orders_a_prefetch(self, hints, cupy, use):
        use("managed")
        array = cupy.ones(4 * MIB, dtype="u1")
        hints.synchronize()
        with cupy.cuda.Stream(non_blocking=True) as side:
            hints.prefetch(array, "cpu", None)
            hints.prefetch(array, hints.ordinal, side)
        hints.prefetch(array, "cpu", cupy.cuda.Stream.ptds)
        hints.synchronize()
        assert hints.location(array).last_prefetch in ("cpu", hints.ordinal)

    def test_a_thread_that_never_used_the_gpu_can_give_hints(self, hints, cupy, use):
        """The driver's calls need a current context, which a fresh thread does not have."""
        use("managed")
        array, moved = cupy.ones(4 * MIB, dtype="u1"), []
        thread = threading.Thread(target=lambda: moved.append(hints.prefetch(array, "cpu", None)))
        thread.start()
        thread.join()
        assert moved == [array.nbytes]

    @pytest.mark.parametrize("options", [{"preset": "random"}, {"prefetch": True}])
    def test_what_cuda_13_asks_of_cuda_core_works_in_a_fresh_thread(
        self, hints, cupy, use, monkeypatch, options
    ):
        """There the pools advise and prefetch through cuda.core, which wants a bound context."""
        monkeypatch.setattr(hints.driver, "core", hints.driver.load_hints())
        hints.pools.give_back("managed")
        found = []

        def work():
            restore = hints.install(Policy("managed", **options), everywhere=False)
            try:
                array = cupy.empty(32 * MIB, dtype="u1")
                found.append(hints.location(array))
            finally:
                restore()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        expected = "preferred" if "preset" in options else "last_prefetch"
        assert [getattr(location, expected) for location in found] == [hints.ordinal]

    def test_what_cuda_core_refuses_is_an_error_of_umems(self, hints):
        """Memory that is not managed takes no prefetch; cuda.core's own class is private."""
        hints.driver.core = hints.driver.load_hints()
        try:
            with pytest.raises(DeviceError, match="the driver refused the hint"):
                hints.driver.prefetch_here(1 << 21, MIB)
        finally:
            hints.driver.core = None
        hints.synchronize()


class TestFacts(OnGpu):
    """What the rest of umem takes for granted."""

    def test_cupys_own_advice_may_mean_the_host(self, hints, cupy, use):
        """Fact 1: right on CUDA 12, where our spill pool uses it; raises or misses on CUDA 13."""
        if hints.driver.cuda_major >= 13:
            pytest.skip("there cuda.core is used")
        use("managed")
        array = cupy.ones(4 * MIB, dtype="u1")
        cupy.cuda.runtime.memAdvise(array.data.ptr, array.nbytes, 3, -1)
        assert hints.location(array).preferred == "cpu"
        cupy.cuda.runtime.memAdvise(array.data.ptr, array.nbytes, 4, -1)

    def test_managed_memory_may_show_in_free_memory(self, device, cupy, use):
        """Fact 19: how far memGetInfo falls where managed memory is written on the GPU.

        Never by more than that memory; how much of it shows is printed, and nothing leans on it.
        """
        use("managed")
        cupy.ones(MIB, dtype="u1")
        device.synchronize()
        before = device.free_bytes
        array = cupy.ones(256 * MIB, dtype="u1")
        device.synchronize()
        fell = before - device.free_bytes
        print("free bytes fell by", fell, "of", array.nbytes)
        assert fell < array.nbytes + 64 * MIB

    def test_a_captured_stream_is_seen_and_others_are_not(self, device, cupy):
        stream = cupy.cuda.Stream(non_blocking=True)
        assert not device.driver.capturing()
        with stream:
            stream.begin_capture()
            capturing = device.driver.capturing()
            stream.end_capture()
        assert capturing and not device.driver.capturing()


class TestDiscards(OnGpu):
    """Managed memory that is moved on one stream, discarded on another and used on a third.

    CUDA leaves undefined what runs beside a discard: nothing may. 8 MiB at a time.
    """

    @pytest.fixture
    def places(self, hints, use):
        use("managed")
        with closing(Scope("places")) as scope:
            hints.repeat_places(scope)
            if not hints.forgets:
                pytest.skip("hardware: a driver before CUDA 13 has no discards")
            yield hints

    def test_what_goes_is_discarded_and_comes_again_computes_the_same(self, places, cupy):
        side = cupy.cuda.Stream(non_blocking=True)
        count, sums = 2 * MIB, []
        for turn in range(12):
            x = cupy.full(count, turn + 1, "i4")
            sums.append((x.sum(), count * (turn + 1)))
            umem.prefetch(x, "cpu", stream=side)
            blocks = range(x.data.ptr // BLOCK_BYTES, (x.data.ptr + x.nbytes) // BLOCK_BYTES)
            del x
            assert places.discard_free(blocks) == len(blocks) * BLOCK_BYTES > 0
            places.make_ready(blocks, side)
            y = cupy.full(count, -turn, "i4")
            umem.prefetch(y, stream=side)
            sums.append((y.sum(), -count * turn))
            del y
        assert [int(found) for found, _ in sums] == [expected for _, expected in sums]

    def test_nothing_is_discarded_while_the_stream_is_captured(self, hints, cupy, use):
        use("managed")
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, closing(Scope("places")) as scope:
            hints.repeat_places(scope)
            x = cupy.ones(2 * MIB, "i4")
            x += 1
            first = x.data.ptr // BLOCK_BYTES
            y = cupy.zeros(4, "i4")
            y += 1
            stream.synchronize()
            del x
            stream.begin_capture()
            y += 1
            assert hints.discard_free([first]) == 0
            stream.end_capture()

    def test_memory_goes_back_when_its_arrays_are_gone_and_what_was_queued_is_done(
        self, hints, cupy, use
    ):
        use("managed")
        with closing(Scope("places")) as scope:
            hints.repeat_places(scope)
            x = cupy.full(8 * MIB, 3, "i4")
        results = []
        for _ in range(50):
            results = [x * 2, *results[:1]]
        del x
        hints.pools.give_back("managed")
        assert int((results[0] != 6).sum()) == 0
        del results
        hints.pools.give_back("managed")
        assert hints.usage().managed_bytes == 0


class TestRecordings(OnGpu):
    """What recordings have of CuPy's memory."""

    def test_arrays_and_the_workspace_of_functions_are_the_pools(self, device, cupy):
        kept = cupy.zeros(MIB, "u1")
        pool = cupy.get_default_memory_pool()
        before, hooks = pool.used_bytes(), set(cupy.cuda.memory_hook.get_memory_hooks())
        with umem.record(stacks=True) as recorder:
            x = cupy.zeros(2 * MIB, "u1")
            umem.mark("step")
            del x
            used = pool.used_bytes()
            y = cupy.zeros(512, "u1")
        trace = recorder.trace
        found = {event.nbytes for event in trace.events if hasattr(event, "nbytes")}
        assert found >= {2 * MIB, y.nbytes}
        assert kept.nbytes in found or trace.backend == "software"  # there no operation used it
        assert trace.step_count == 1 and used == before
        assert cupy.cuda.memory_hook.get_memory_hooks().keys() == hooks

    def test_a_function_has_the_workspace_that_the_pool_handed_out(self, device, cupy):
        pytest.importorskip("umem.chainer")
        import chainer.functions as F

        x, w = cupy.ones((2, 8, 32, 32), "f4"), cupy.ones((8, 8, 3, 3), "f4")
        F.convolution_2d(x, w, pad=1)
        with umem.record() as recorder:
            F.convolution_2d(x, w, pad=1)
        [op] = recorder.trace.ops
        assert op.host_seconds is None and op.workspace_bytes is not None
        if not hasattr(cupy, "cudnn"):  # CuPy 14: by columns of nine times the images
            assert op.workspace_bytes >= 9 * x.nbytes
