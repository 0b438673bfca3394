"""The CUDA device on the real CuPy without a GPU: host memory stands in for the device's."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import sys
import threading
import types
import warnings
from contextvars import copy_context
from pathlib import Path

import pytest
from processes import printed

cupy = pytest.importorskip("cupy")

from cuda_host_driver import (  # noqa: E402
    GIB,
    PREFER_HOST,
    PREFETCH,
    DriverError,
    HostDriver,
    HostPool,
    installed,
)

from tests.support.allocators import in_force  # noqa: E402
from umem.devices.base import Policy  # noqa: E402
from umem.devices.cuda import CudaDevice, cuda_reason, gpus, open_cuda  # noqa: E402
from umem.devices.cuda import driver as cuda_driver  # noqa: E402
from umem.devices.cuda import install as dispatching  # noqa: E402
from umem.devices.cuda.arena import Arena  # noqa: E402
from umem.devices.cuda.modes import LARGE_BYTES, PROBE_EVERY, Hybrid  # noqa: E402
from umem.devices.cuda.out_of_memory import CudaLimitError, CudaOutOfMemoryError  # noqa: E402
from umem.devices.presets import PRESETS  # noqa: E402
from umem.errors import (  # noqa: E402
    DeviceError,
    DeviceNotFoundError,
    LimitError,
    MissingDependencyError,
    OutOfMemoryError,
    SizeError,
    StateError,
)

MIB = 1 << 20
MANAGED, HYBRID, UNMANAGED = Policy("managed"), Policy("hybrid"), Policy("unmanaged")


@pytest.fixture
def driver():
    return HostDriver()


@pytest.fixture
def device(driver):
    return CudaDevice(driver)


@pytest.fixture
def alone():
    """Whatever a test installs, the next one finds CuPy's allocator as it was."""
    before = cupy.cuda.get_allocator()
    yield
    assert cupy.cuda.get_allocator() is before


@pytest.fixture
def no_gpu():
    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")


def in_another_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


class TestOpening:
    def test_importing_the_device_imports_neither_cupy_nor_cuda_core(self):
        code = (
            "import sys, umem.devices.cuda;"
            "print(sorted({'cupy', 'cuda.core', 'cuda.bindings'} & set(sys.modules)))"
        )
        assert printed("-c", code).strip() == "[]"

    def test_without_cupy_the_reason_says_so(self):
        code = "import sys; sys.modules['cupy'] = None; import umem.devices.cuda.gpus as c;"
        assert printed("-c", code + "print(c.cuda_reason())") == "CuPy is not installed\n"

    def test_an_old_cupy_is_refused_with_its_version(self, monkeypatch):
        monkeypatch.setattr(cupy, "__version__", "12.3.0")
        assert cuda_reason() == "CuPy 12.3.0 is too old; 13 or newer is needed"

    def test_without_a_device_the_error_gives_the_reason_and_both_ways_out(self, no_gpu):
        with pytest.raises(DeviceNotFoundError) as caught:
            open_cuda()
        message = str(caught.value)
        assert cuda_reason() in message
        assert "cupy-cuda12x" in message and "umem.virtual_gpu" in message

    def test_without_a_driver_the_reason_is_the_driver(self, no_gpu):
        if cupy.cuda.runtime.driverGetVersion():
            pytest.skip("there is a driver")
        assert cuda_reason() == "no NVIDIA driver is loaded"

    def test_a_gpu_out_of_range_is_named(self, monkeypatch):
        monkeypatch.setattr(cuda_driver, "visible_gpus", lambda: 2)
        assert cuda_reason(5) == "GPU 5 was requested, but 2 can be seen"

    def test_a_gpu_is_opened_once_and_found_again_without_new_checks(self, device, monkeypatch):
        monkeypatch.setattr(gpus, "opened", {0: device})
        monkeypatch.setattr(cuda_driver, "current_ordinal", lambda: 0)
        assert open_cuda() is device and open_cuda(0) is device

    def test_missing_libraries_are_the_reason_where_a_gpu_is_there(self, monkeypatch):
        monkeypatch.setattr(cuda_driver, "visible_gpus", lambda: 1)
        if cuda_driver.libraries_problem() is None:
            pytest.skip("CUDA's libraries are installed")
        assert cuda_reason().startswith("CUDA libraries are missing (")
        assert "nvrtc" in cuda_reason()


class TestCuPyIsAsWeAssume:
    """Names, signatures and failures of the CuPy that is installed."""

    def test_every_driver_call_reaches_the_driver(self, no_gpu):
        driver = cuda_driver.Driver.__new__(cuda_driver.Driver)
        driver.ordinal = 0
        calls = [
            lambda: cuda_driver.Driver(0),
            cuda_driver.current_ordinal,
            driver.bind,
            lambda: driver.allocate(512),
            lambda: driver.allocate_managed(512),
            lambda: driver.prefer_host(4096, 4096),
            lambda: driver.give_preset(4096, 4096, "read_mostly"),
            lambda: driver.prefetch_here(4096, 4096),
            driver.default_pool_bytes,
            driver.free_bytes,
            driver.capturing,
            lambda: driver.is_managed(4096),
            driver.synchronize,
            driver.managed_problem,
        ]
        for call in calls:  # a wrong name or signature would be another error
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
                call()

    def test_the_numbers_that_cupy_does_not_export_are_right(self, no_gpu):
        runtime = cupy.cuda.runtime
        assert runtime.memoryTypeManaged == cuda_driver.MANAGED_POINTER
        with pytest.raises(runtime.CUDARuntimeError) as caught:
            runtime.getDeviceCount()
        assert caught.value.status in (cuda_driver.INSUFFICIENT_DRIVER, cuda_driver.NO_DEVICE)

    def test_a_pool_has_the_methods_we_call(self):
        pool = cupy.cuda.MemoryPool(lambda nbytes: None)
        names = ("malloc", "free_all_blocks", "used_bytes", "total_bytes", "set_limit")
        assert all(callable(getattr(pool, name)) for name in names)
        assert pool.malloc is not pool.malloc and pool.malloc == pool.malloc

    def test_arrays_are_made_of_host_memory_and_know_their_device(self, device, alone):
        with installed(device, MANAGED):
            array = cupy.empty((4, 8), dtype="f4")
        assert array.device.id == 0 and array.strides == (32, 4)
        assert isinstance(array.data.mem, cupy.cuda.UnownedMemory)

    def test_a_memory_pointer_of_no_bytes_needs_no_driver_with_an_explicit_device(self):
        memory = cupy.cuda.UnownedMemory(0, 0, None, device_id=0)
        assert cupy.cuda.MemoryPointer(memory, 0).ptr == 0

    def test_streams_give_their_address(self, driver):
        address = cuda_driver.Driver.stream_address
        assert address(driver, cupy.cuda.Stream.null) == 0
        assert address(driver, cupy.cuda.Stream.ptds) == 2
        assert address(driver, types.SimpleNamespace(__cuda_stream__=lambda: (0, 77))) == 77
        with pytest.raises(DeviceError, match="stream must be a CuPy stream; got str"):
            address(driver, "side")

    def test_chainers_alias_exists_under_the_name_we_follow(self):
        spec = importlib.util.find_spec("chainer")
        if spec is None:
            pytest.skip("Chainer is not installed")
        source = (Path(spec.origin).parent / "backends/cuda.py").read_text()
        assert "memory_pool = cupy.get_default_memory_pool()" in source


class TestErrors:
    def test_an_out_of_memory_error_is_umems_cupys_and_pythons(self):
        error = CudaLimitError("no room")
        for kind in (LimitError, OutOfMemoryError, MemoryError, CudaOutOfMemoryError):
            assert isinstance(error, kind)
        assert isinstance(error, cupy.cuda.memory.OutOfMemoryError)
        assert str(error) == "no room"

    def test_it_can_be_pickled(self):
        error = pickle.loads(pickle.dumps(CudaOutOfMemoryError("no room")))
        assert type(error) is CudaOutOfMemoryError and str(error) == "no room"


class TestInstalling:
    def test_plain_managed_installs_the_pools_own_method_with_or_without_a_limit(
        self, device, alone
    ):
        own = device.pools.malloc("managed")
        assert own == device.pools.pool("managed").malloc
        for policy in (MANAGED, Policy("managed", limit_bytes=GIB)):
            with installed(device, policy):
                assert in_force() is own
            with installed(device, policy, everywhere=True):
                assert cupy.cuda.get_allocator() is own

    def test_with_the_real_pool_it_is_a_builtin_method_of_memory_pool(self, alone):
        class RealPools(HostDriver):
            def make_pool(self, grow):
                return Pool(grow)

        class Pool(cupy.cuda.MemoryPool):
            def set_limit(self, size):
                """CuPy's own asks which GPU is the current one."""

        device = CudaDevice(RealPools())
        with installed(device, MANAGED, everywhere=True):
            assert isinstance(cupy.cuda.get_allocator().__self__, cupy.cuda.MemoryPool)
            assert type(cupy.cuda.get_allocator()).__name__ in (
                "builtin_function_or_method",
                "cython_function_or_method",
            )

    @pytest.mark.parametrize("inside", ["umem", "cupy"])
    def test_everywhere_inside_a_block_is_refused_with_the_reason(self, device, alone, inside):
        block = (
            installed(device, UNMANAGED)
            if inside == "umem"
            else cupy.cuda.using_allocator(device.pools.malloc("managed"))
        )
        with block:
            allocator = cupy.cuda.get_allocator()
            with pytest.raises(StateError, match="cannot be switched on inside a block"):
                device.install(MANAGED, everywhere=True)
            assert cupy.cuda.get_allocator() is allocator
        assert device.policy is None

    def test_switching_off_inside_a_block_is_refused_and_works_after_it(self, device, alone):
        restore = device.install(MANAGED, everywhere=True)
        with installed(device, UNMANAGED):
            with pytest.raises(StateError, match="cannot be switched off inside a block"):
                restore()
        assert device.policy is MANAGED
        restore()

    def test_an_allocation_follows_what_other_threads_do_meanwhile(self, device, driver, alone):
        def is_managed():
            return cupy.empty(1000, dtype="u1").data.ptr in driver.managed_blocks

        leave = device.install(MANAGED, everywhere=False)
        assert is_managed()
        with cupy.cuda.using_allocator(driver.default_pool.malloc):  # CuPy's own needs a GPU
            own = copy_context().run(device.install, HYBRID, everywhere=False)
            inner = device.install(MANAGED, everywhere=False)
            assert is_managed()
            in_another_thread(inner)
            assert not is_managed()
            own()
        in_another_thread(leave)
        dispatching.clear()

    def test_code_outside_of_blocks_follows_the_process(self, device, driver, alone):
        restores = []
        beside = copy_context().run(device.install, HYBRID, everywhere=False)
        outside = cupy.cuda.get_allocator()  # the thread's, of which this code needs the process's
        for policy in (MANAGED, Policy("unmanaged", limit_bytes=GIB), MANAGED):
            in_another_thread(
                lambda policy=policy: restores.append(device.install(policy, everywhere=True))
            )
            found = outside(512)
            assert (found.ptr in driver.managed_blocks) == (policy is MANAGED)
        while restores:
            in_another_thread(restores.pop())
        beside()

    def test_putting_back_the_asynchronous_allocator_does_not_warn(self, device, alone):
        before = cupy.cuda.get_allocator()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # CuPy 13 warns, CuPy 14 does not
            cupy.cuda.set_allocator(cupy.cuda.malloc_async)
        try:
            with installed(device, MANAGED, everywhere=True):
                pass
            assert cupy.cuda.get_allocator() is cupy.cuda.malloc_async
        finally:
            cupy.cuda.set_allocator(before)

    def test_a_device_that_cannot_oversubscribe_refuses_managed(self, device, driver):
        driver.problem = "GPU 0 has no concurrent managed access"
        assert device.why_not("unmanaged") is None
        with pytest.raises(DeviceError, match="no concurrent managed access"):
            device.install(MANAGED, everywhere=False)
        assert device.policy is None

    def test_only_managed_and_pinned_memory_wait_and_none_is_freed_in_a_capture(
        self, device, driver, alone
    ):
        for policy in (MANAGED, Policy("unmanaged", GIB)):
            with installed(device, policy):
                cupy.empty(4 * MIB, dtype="u1")
                driver.is_capturing = True
                device.pools.give_back_everything()
                assert device.pools.ledger.reserved()[policy.mode] == 4 * MIB
                driver.is_capturing = False
                device.pools.give_back_everything()
                assert device.pools.ledger.reserved()[policy.mode] == 0
            assert driver.synchronize_count == 1

    def test_entering_a_block_frees_nothing(self, device, driver, alone):
        with installed(device, MANAGED):
            keep = cupy.empty(4 * MIB, dtype="u1")
        with installed(device, UNMANAGED):
            cupy.empty(GIB - 2 * MIB, dtype="u1")
        for policy in (MANAGED, HYBRID):
            with installed(device, policy):
                assert driver.default_pool.total_bytes() == GIB - 2 * MIB
        del keep

    def test_managed_memory_larger_than_vram_leaves_the_default_pool_what_a_loop_needs(
        self, device, driver, alone
    ):
        """Its free blocks are given back once as much has been grown, and not at each growth."""
        with installed(device, MANAGED):
            keep = [cupy.empty(GIB, dtype="u1")]
        with installed(device, UNMANAGED):
            cupy.empty(8 * MIB, dtype="u1")
        left = []
        for _ in range(4):
            with installed(device, MANAGED):
                keep.append(cupy.empty(2 * MIB, dtype="u1"))
            left.append(driver.default_pool.total_bytes() // MIB)
        assert left == [8, 8, 8, 0]

    def test_what_grows_without_vram_has_the_default_pools_free_blocks_given_back(
        self, device, driver, alone
    ):
        for policy in (MANAGED, HYBRID):
            with installed(device, UNMANAGED):
                cupy.empty(GIB - 2 * MIB, dtype="u1")
            with installed(device, policy):
                assert driver.default_pool.total_bytes()
                keep = cupy.empty(4 * MIB, dtype="u1")
                assert driver.default_pool.total_bytes() == 0
                kind = "managed" if policy is MANAGED else "unmanaged"
                assert device.pools.ledger.reserved()[kind] == 4 * MIB
            del keep
            device.pools.give_back("managed", "unmanaged")

    def test_a_block_in_a_loop_leaves_caches_alone_where_vram_has_room(self, device, driver, alone):
        with installed(device, UNMANAGED):
            cupy.empty(MIB, dtype="u1")
        for policy in (MANAGED, HYBRID) * 2:
            with installed(device, policy):
                cupy.empty(4 * MIB, dtype="u1")
        assert driver.default_pool.total_bytes() == MIB
        assert len(driver.managed_blocks) == 1

    def test_hybrid_spills_what_would_take_the_headroom(self, device, driver, alone):
        with installed(device, Policy("hybrid", headroom_bytes=GIB - 8 * MIB)):
            keep = [cupy.empty(size * MIB, dtype="u1") for size in (4, 4, 2)]
        spilled = [array.data.ptr in driver.managed_blocks for array in keep]
        assert spilled == [False, False, True]
        assert driver.free_bytes() == GIB - 8 * MIB
        del keep

    @pytest.mark.parametrize("mode", ["hybrid", "unmanaged"])
    def test_modes_that_count_vram_count_each_gpus_own(self, driver, alone, mode):
        driver.gpus, second = 2, HostDriver()
        second.ordinal = second.gpu_in_use = 1
        other = CudaDevice(second)
        device = CudaDevice(driver, {1: other}.__getitem__)
        policy = Policy(mode, 4 * MIB)
        with installed(device, policy, everywhere=True):
            keep = [cupy.empty(3 * MIB, dtype="u1")]
            driver.gpu_in_use = 1
            keep.append(cupy.empty(2 * MIB, dtype="u1"))
            assert [each.usage().reserved_bytes for each in (device, other)] == [3 * MIB, 2 * MIB]
            if mode == "unmanaged":
                with pytest.raises(CudaLimitError, match=r"2\.0 MiB of the 4\.0 MiB"):
                    cupy.empty(3 * MIB, dtype="u1")
            else:
                keep.append(cupy.empty(3 * MIB, dtype="u1"))
                assert other.usage().managed_bytes == 3 * MIB and not device.usage().managed_bytes
            driver.gpu_in_use = 0
            keep.append(cupy.empty(MIB, dtype="u1"))
        assert device.pools.ledger.reserved()["unmanaged"] == 4 * MIB
        assert other.policy is None
        del keep

    def test_repeated_places_are_those_of_their_own_gpu(self, driver):
        asked = []
        arena = Arena(driver, driver.allocate_managed, lambda nbytes: asked.append(nbytes))
        arena.open()
        keep = arena.malloc(MIB)
        driver.gpu_in_use = 1  # whose default stream has the same number
        assert arena.malloc(2 * MIB) is None and asked == [2 * MIB]
        del keep

    def test_vram_that_other_programs_have_is_not_counted_on(self, device, driver, alone):
        driver.host, driver.unmanaged_left = 0, 64 * MIB
        with installed(device, MANAGED):
            keep = [cupy.empty(32 * MIB, dtype="u1") for _ in range(2)]
            driver.unmanaged_left = 0  # our own pages have come in
            with pytest.raises(CudaOutOfMemoryError, match=r"and 64\.0 MiB of VRAM"):
                cupy.empty(MIB, dtype="u1")
        del keep

    def test_gpus_that_are_numa_nodes_are_found(self):
        class Runtime:
            CUDARuntimeError = DriverError

            def getDeviceCount(self):
                return 3

            def deviceGetAttribute(self, attribute, ordinal):
                if ordinal == 2:
                    raise DriverError(1)  # invalid value: an old driver
                return {gpus.NUMA_CONFIG: ordinal, gpus.NUMA_ID: 7 + ordinal}[attribute]

        assert gpus.nodes_of_gpus(Runtime()) == {8}

    def test_a_gpu_keeps_headroom_and_the_software_gpu_none(self, driver):
        assert CudaDevice(driver).headroom_bytes == 512 * MIB
        driver.vram_bytes = 80 * GIB
        assert CudaDevice(driver).headroom_bytes == 80 * GIB * 3 // 100
        driver.vram_bytes = 64 * MIB
        assert CudaDevice(driver).headroom_bytes == 32 * MIB
        driver.name = "T4 (simulated)"
        assert CudaDevice(driver).headroom_bytes == 0


class TestGrowing:
    def test_reserved_bytes_are_counted_until_the_pool_gives_them_back(self, device, alone):
        with installed(device, MANAGED):
            first = cupy.empty(2 * MIB, dtype="u1")
            second = cupy.empty(MIB, dtype="u1")
        assert device.usage().managed_bytes == 3 * MIB
        del first, second
        assert device.usage().reserved_bytes == 3 * MIB  # cached
        device.pools.pool("managed").free_all_blocks()
        usage = device.usage()
        assert (usage.reserved_bytes, usage.managed_bytes, usage.peak_bytes) == (0, 0, 3 * MIB)
        assert usage.resident_bytes is None and usage.paging == "unknown"

    def test_the_default_pool_is_part_of_what_is_reserved_and_of_the_peak(self, device, alone):
        with installed(device, UNMANAGED):
            keep = cupy.empty(MIB, dtype="u1")
        with installed(device, MANAGED):
            also = cupy.empty(MIB, dtype="u1")
        usage = device.usage()
        assert (usage.reserved_bytes, usage.managed_bytes, usage.peak_bytes) == (
            2 * MIB,
            MIB,
            2 * MIB,
        )
        del keep, also

    def test_a_limit_raises_before_anything_is_allocated(self, device, driver, alone):
        with installed(device, Policy("managed", limit_bytes=4 * MIB)):
            keep = cupy.empty(3 * MIB, dtype="u1")
            with pytest.raises(CudaLimitError) as caught:
                cupy.empty(2 * MIB, dtype="u1")
        text = "needs 2.0 MiB; 3.0 MiB of the 4.0 MiB that the limit allows are reserved"
        assert str(caught.value).startswith(text)
        assert device.usage().managed_bytes == 3 * MIB and len(driver.managed_blocks) == 1
        del keep

    def test_cached_blocks_are_given_back_before_a_limit_is_reached(self, device, alone):
        with installed(device, Policy("managed", limit_bytes=4 * MIB)):
            cupy.empty(3 * MIB, dtype="u1")
            array = cupy.empty(2 * MIB, dtype="u1")
        assert device.usage().managed_bytes == array.nbytes

    def test_garbage_in_cycles_is_collected_before_a_limit_is_reached(self, device, alone):
        with installed(device, Policy("managed", limit_bytes=4 * MIB)):
            cycle = [cupy.empty(3 * MIB, dtype="u1")]
            cycle.append(cycle)
            del cycle
            assert cupy.empty(2 * MIB, dtype="u1").nbytes == 2 * MIB

    def test_a_limit_is_the_threads_own_before_the_processs(self, device, alone):
        with installed(device, Policy("managed", limit_bytes=4 * MIB), everywhere=True):
            with installed(device, Policy("managed", limit_bytes=8 * MIB)):
                keep = cupy.empty(6 * MIB, dtype="u1")
            errors = []

            def elsewhere():
                try:
                    cupy.empty(MIB, dtype="u1")
                except LimitError as error:
                    errors.append(str(error))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert "6.0 MiB of the 4.0 MiB" in errors[0]
        del keep

    def test_a_limit_below_what_is_in_use_is_refused_at_once(self, device, alone):
        with installed(device, MANAGED):
            keep = cupy.empty(3 * MIB, dtype="u1")
        with pytest.raises(SizeError, match=r"limit of 2\.0 MiB is below the 3\.0 MiB of managed"):
            device.install(Policy("managed", limit_bytes=2 * MIB), everywhere=False)
        assert device.policy is None
        del keep

    def test_a_limit_on_unmanaged_bounds_a_pool_of_its_own(self, device, driver, alone):
        with installed(device, Policy("unmanaged", limit_bytes=MIB)):
            keep = cupy.empty(MIB, dtype="u1")
            with pytest.raises(LimitError, match="reserved as unmanaged memory"):
                cupy.empty(MIB, dtype="u1")
        assert driver.default_pool.total_bytes() == 0 and device.usage().managed_bytes == 0
        del keep

    def test_a_refusal_keeps_nothing_of_its_callers_alive(self, device, alone):
        def step():
            array = cupy.empty(MIB, dtype="u1")
            with pytest.raises(LimitError):
                cupy.empty(MIB, dtype="u1")
            return array.nbytes

        gc.collect()
        gc.disable()
        try:
            with installed(device, Policy("managed", limit_bytes=MIB)):
                assert step() == MIB and device.pools.used_bytes("managed") == 0
        finally:
            gc.enable()

    def test_host_memory_is_checked_before_the_kernel_would_kill(self, device, driver, alone):
        driver.host = 100 * MIB  # 90% of it, and 1 GiB of VRAM
        with installed(device, MANAGED):
            keep = cupy.empty(GIB, dtype="u1")
            with pytest.raises(CudaOutOfMemoryError, match="process killed"):
                cupy.empty(91 * MIB, dtype="u1")
            also = cupy.empty(90 * MIB, dtype="u1")
        del keep, also

    def test_pages_of_ours_that_land_on_the_host_are_not_counted_twice(self, device, driver, alone):
        driver.host, driver.vram_bytes = 100 * MIB, 0
        with installed(device, MANAGED):
            keep = cupy.empty(60 * MIB, dtype="u1")
            driver.host = 40 * MIB  # they were written
            also = cupy.empty(30 * MIB, dtype="u1")
            driver.host = 5 * MIB  # and somebody else took 5 MiB
            with pytest.raises(CudaOutOfMemoryError):
                cupy.empty(MIB, dtype="u1")
        del keep, also

    def test_vram_that_unmanaged_memory_holds_does_not_count_for_managed(
        self, device, driver, alone
    ):
        driver.host = 0
        with installed(device, UNMANAGED):
            keep = cupy.empty(GIB // 2, dtype="u1")
        with installed(device, MANAGED):
            with pytest.raises(CudaOutOfMemoryError):
                cupy.empty(GIB // 2 + 512, dtype="u1")
            also = cupy.empty(GIB // 2, dtype="u1")
        del keep, also

    def test_an_integrated_gpu_has_no_memory_beside_the_hosts(self, device, driver, alone):
        driver.host, driver.integrated = 100 * MIB, True
        with installed(device, MANAGED), pytest.raises(CudaOutOfMemoryError):
            cupy.empty(91 * MIB, dtype="u1")

    def test_where_the_hosts_memory_is_unknown_nothing_is_refused(self, device, driver, alone):
        driver.host = None
        with installed(device, MANAGED):
            assert cupy.empty(8 * GIB, dtype="u1").nbytes == 8 * GIB

    def test_a_cap_bounds_managed_memory_of_every_mode_together(self, device, alone):
        device.cap_managed(4 * MIB)
        with installed(device, MANAGED):
            keep = cupy.empty(3 * MIB, dtype="u1")
        with installed(device, Policy("hybrid", limit_bytes=512)):
            with pytest.raises(LimitError, match=r"may have 4\.0 MiB in all"):
                cupy.empty(2 * MIB, dtype="u1")
            device.cap_managed(None)
            assert cupy.empty(2 * MIB, dtype="u1").nbytes == 2 * MIB
        del keep

    def test_growing_during_a_capture_is_refused_and_the_cache_still_serves(
        self, device, driver, alone
    ):
        with installed(device, MANAGED):
            cupy.empty(MIB, dtype="u1")
            driver.is_capturing = True
            assert cupy.empty(MIB, dtype="u1").nbytes == MIB
            with pytest.raises(DeviceError, match="while a stream is captured"):
                cupy.empty(2 * MIB, dtype="u1")
        assert device.usage().managed_bytes == MIB

    def test_the_drivers_own_out_of_memory_becomes_ours_after_trying_again(
        self, device, driver, alone
    ):
        with installed(device, Policy("unmanaged", limit_bytes=8 * GIB)):
            cupy.empty(GIB, dtype="u1")  # cached: given back for the next
            keep = cupy.empty(GIB // 2, dtype="u1")
            with pytest.raises(CudaOutOfMemoryError, match="no more unmanaged memory"):
                cupy.empty(GIB, dtype="u1")
        assert device.usage().reserved_bytes == GIB // 2
        del keep

    def test_another_driver_error_passes_and_nothing_stays_counted(self, device, driver, alone):
        def broken(address, nbytes):
            raise RuntimeError("an illegal memory access")

        driver.prefer_host = broken
        with installed(device, Policy("hybrid", limit_bytes=512)):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                cupy.empty(MIB, dtype="u1")
        assert device.usage().reserved_bytes == 0

    def test_arrays_of_no_bytes_reserve_nothing(self, device, alone):
        for policy in (MANAGED, HYBRID, Policy("managed", prefetch=True)):
            with installed(device, policy):
                assert cupy.empty(0).size == 0
        assert device.usage().reserved_bytes == 0

    @pytest.mark.thorough
    def test_threads_cannot_pass_a_limit_together(self, device, alone):
        policy = Policy("managed", limit_bytes=8 * MIB)
        kept, refused = [], []

        def work():
            with installed(device, policy):
                for _ in range(8):
                    try:
                        kept.append(cupy.empty(MIB, dtype="u1"))
                    except LimitError:
                        refused.append(1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(kept) == 8 and len(refused) == 24
        assert device.usage().managed_bytes == 8 * MIB


class TestPresets:
    """Advice belongs to addresses, so each preset has a pool of its own."""

    def test_memory_is_advised_where_the_pool_grows_and_the_allocator_stays_bare(
        self, device, driver, alone
    ):
        with installed(device, Policy("managed", preset="streaming")):
            assert in_force() is device.pools.malloc("managed", "streaming")
            cupy.empty(MIB, dtype="u1")
            cupy.empty(MIB, dtype="u1")
        advised = [("preferred_location", "cpu", MIB), ("accessed_by", 0, MIB)]
        assert driver.calls == advised

    @pytest.mark.parametrize("name", PRESETS)
    def test_each_preset_gives_what_it_advises(self, device, driver, alone, name):
        with installed(device, Policy("managed", preset=name)):
            cupy.empty(MIB, dtype="u1")
        places = {"cpu": "cpu", "gpu": 0, None: 0}
        assert driver.calls == [(advice, places[where], MIB) for advice, where in PRESETS[name]]

    def test_a_limit_bounds_all_managed_memory_and_free_blocks_of_any_pool_make_room(
        self, device, alone
    ):
        preset = Policy("managed", limit_bytes=4 * MIB, preset="random")
        with installed(device, MANAGED):
            cupy.empty(3 * MIB, dtype="u1")  # free again, and cached
        with installed(device, preset):
            keep = cupy.empty(2 * MIB, dtype="u1")
            with installed(device, Policy("managed", limit_bytes=4 * MIB)):
                with pytest.raises(LimitError, match=r"2\.0 MiB of the 4\.0 MiB"):
                    cupy.empty(3 * MIB, dtype="u1")
        with pytest.raises(SizeError):
            device.install(Policy("managed", limit_bytes=MIB), everywhere=False)
        assert device.usage().managed_bytes == keep.nbytes


class TestPrefetchOnAllocation:
    def test_every_allocation_is_prefetched(self, device, driver, alone):
        with installed(device, Policy("managed", prefetch=True)):
            cupy.empty(MIB, dtype="u1")
            cupy.empty(MIB, dtype="u1")
        assert driver.calls == [(PREFETCH, MIB)] * 2

    def test_but_not_during_a_capture(self, device, driver, alone):
        with installed(device, Policy("managed", prefetch=True)):
            cupy.empty(MIB, dtype="u1")
            driver.is_capturing = True
            cupy.empty(MIB, dtype="u1")
        assert driver.calls == [(PREFETCH, MIB)]

    def test_on_cuda_13_without_cuda_core_it_is_refused_and_nothing_installed(
        self, device, driver, monkeypatch
    ):
        driver.cuda_major = 13
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        monkeypatch.setattr("umem.devices.cuda.ranges.installed_version", lambda name: None)
        for policy in (Policy("managed", prefetch=True), HYBRID):
            with pytest.raises(MissingDependencyError, match=r"'cuda-core\[cu13\]"):
                device.install(policy, everywhere=False)
        assert device.policy is None


class TestHybrid:
    def test_it_is_unmanaged_until_vram_is_full_then_spills_to_the_host(
        self, device, driver, alone
    ):
        with installed(device, HYBRID):
            fits = cupy.empty(GIB, dtype="u1")
            assert device.usage().managed_bytes == 0
            spilled = cupy.empty(MIB, dtype="u1")
        assert device.usage().managed_bytes == MIB
        assert driver.calls == [(PREFER_HOST, MIB)]
        del fits, spilled

    def test_spilled_memory_may_migrate_instead(self, device, driver, alone):
        policy = Policy("hybrid", limit_bytes=512, spill="migrate", prefetch=True)
        with installed(device, policy):
            cupy.empty(MIB, dtype="u1")
        assert driver.calls == [(PREFETCH, MIB)]
        assert device.pools.ledger.reserved()["managed"] == MIB

    def test_a_spill_that_the_host_cannot_take_raises_without_a_chain(self, device, driver, alone):
        driver.host = MIB
        with installed(device, Policy("hybrid", limit_bytes=512)):
            with pytest.raises(CudaOutOfMemoryError, match="process killed") as caught:
                cupy.empty(2 * MIB, dtype="u1")
        assert not isinstance(caught.value, LimitError)


class CountingFast:
    """A fast pool of a given capacity that counts how often it is asked to grow."""

    def __init__(self, capacity):
        self.capacity, self.grown = capacity, 0
        self.pool = HostPool(self.grow)

    def grow(self, nbytes):
        self.grown += 1
        if self.pool.total_bytes() + nbytes > self.capacity:
            raise CudaOutOfMemoryError("full")
        return HostDriver(vram=1 << 40).allocate(nbytes)


class TestPressure:
    @pytest.fixture
    def fast(self):
        return CountingFast(8 * MIB)

    @pytest.fixture
    def collections(self, monkeypatch):
        seen = []
        monkeypatch.setattr(cuda_driver, "collect_garbage", lambda: seen.append(1))
        return seen

    @pytest.fixture
    def hybrid(self, driver, fast, collections):
        return Hybrid(driver, fast.pool.malloc, HostPool(driver.allocate_managed).malloc, fast.pool)

    def test_large_requests_go_straight_to_managed_memory_while_it_lasts(
        self, hybrid, fast, collections
    ):
        keep = hybrid.malloc(8 * MIB)
        assert not hybrid.under_pressure
        spilled = [hybrid.malloc(2 * MIB)]
        assert hybrid.under_pressure and len(collections) == 1
        grown = fast.grown
        spilled += [hybrid.malloc(2 * MIB) for _ in range(PROBE_EVERY - 1)]
        assert fast.grown == grown and len(collections) == 1
        del keep

    def test_it_comes_back_when_there_is_room(self, hybrid, fast):
        keep = hybrid.malloc(8 * MIB)
        hybrid.malloc(2 * MIB)
        del keep
        used = fast.pool.used_bytes()
        again = hybrid.malloc(8 * MIB)
        assert fast.pool.used_bytes() == used + 8 * MIB
        del again

    def test_free_blocks_of_another_shape_make_room_under_pressure_too(self, hybrid, fast):
        keep = [hybrid.malloc(2 * MIB) for _ in range(4)]
        hybrid.malloc(2 * MIB)
        keep.clear()  # four cached blocks of 2 MiB, none of 8
        again = hybrid.malloc(8 * MIB)
        assert fast.pool.used_bytes() == 8 * MIB
        del again

    def test_small_requests_are_still_tried_and_never_collect_garbage_again(
        self, hybrid, fast, collections
    ):
        small = LARGE_BYTES // 2
        keep = hybrid.malloc(8 * MIB - small)
        hybrid.malloc(2 * MIB)
        fits = hybrid.malloc(small)
        assert fast.pool.used_bytes() == 8 * MIB
        spilled = hybrid.malloc(small)
        assert fast.pool.used_bytes() == 8 * MIB and len(collections) == 1
        del keep, fits, spilled

    def test_vram_that_others_freed_is_found_by_a_probe(self, hybrid, fast):
        keep = hybrid.malloc(8 * MIB)
        hybrid.malloc(2 * MIB)
        fast.capacity = 64 * MIB
        spilled = [hybrid.malloc(2 * MIB) for _ in range(PROBE_EVERY)]
        assert fast.pool.used_bytes() == 10 * MIB
        del keep, spilled
