"""Modes on the real CuPy without a GPU: spilling without managed memory, CuPy's own limit, and
Chainer's alias of the pool, whichever is imported or switched on first."""

from __future__ import annotations

import sys
import textwrap

import pytest
from processes import printed

cupy = pytest.importorskip("cupy")

from cuda_host_driver import GIB, HostDriver, installed  # noqa: E402

from umem.devices.base import Policy  # noqa: E402
from umem.devices.cuda import CudaDevice  # noqa: E402
from umem.devices.cuda import driver as cuda_driver  # noqa: E402
from umem.devices.cuda.out_of_memory import CudaLimitError, CudaOutOfMemoryError  # noqa: E402
from umem.errors import DeviceError, LimitError  # noqa: E402

MIB = 1 << 20
PROBLEM = "GPU 0 has no concurrent managed access"
HYBRID = Policy("hybrid", limit_bytes=4 * MIB)


@pytest.fixture
def driver():
    return HostDriver()


@pytest.fixture
def device(driver):
    return CudaDevice(driver)


@pytest.fixture(autouse=True)
def alone():
    before = cupy.cuda.get_allocator()
    yield
    assert cupy.cuda.get_allocator() is before


class TestSpillingWithoutOversubscription:
    """Windows, WSL2, before Pascal: managed memory is refused, hybrid spills to pinned memory."""

    @pytest.fixture(autouse=True)
    def no_oversubscription(self, driver):
        driver.problem = PROBLEM
        driver.attributes["ConcurrentManagedAccess"] = 0

    def test_hybrid_spills_to_pinned_host_memory(self, device, driver):
        assert device.why_not("hybrid") is None
        with installed(device, HYBRID):
            fits, spilled = cupy.empty(4 * MIB, dtype="u1"), cupy.empty(2 * MIB, dtype="u1")
        assert driver.pinned_blocks == {spilled.data.ptr} and not driver.managed_blocks
        assert driver.calls == []  # no advice: it is not managed memory
        assert spilled.device.id == fits.device.id == 0

    def test_what_is_pinned_is_reserved_and_neither_managed_nor_resident(self, device):
        with installed(device, HYBRID):
            fits, spilled = cupy.empty(4 * MIB, dtype="u1"), cupy.empty(2 * MIB, dtype="u1")
        usage = device.usage()
        assert (usage.reserved_bytes, usage.managed_bytes, usage.peak_bytes) == (
            6 * MIB,
            0,
            6 * MIB,
        )
        assert device.location(fits).resident_bytes == 4 * MIB
        assert device.location(spilled).resident_bytes == 0
        assert device.prefetch(spilled, 0, None) == 0
        del fits, spilled
        device.pools.give_back("pinned", "unmanaged")
        assert device.usage().reserved_bytes == 0

    def test_it_is_cached_and_comes_back(self, device, driver):
        with installed(device, HYBRID):
            keep = cupy.empty(4 * MIB, dtype="u1")
            for _ in range(3):
                cupy.empty(2 * MIB, dtype="u1")
        assert len(driver.pinned_blocks) == 1
        del keep

    def test_the_host_is_not_filled_up(self, device, driver):
        driver.host = 10 * MIB
        with installed(device, HYBRID):
            keep = [cupy.empty(4 * MIB, dtype="u1"), cupy.empty(8 * MIB, dtype="u1")]
            with pytest.raises(CudaOutOfMemoryError, match=r"may use 9\.0 MiB of host memory"):
                cupy.empty(2 * MIB, dtype="u1")
        assert device.usage().reserved_bytes == 12 * MIB
        del keep

    def test_a_system_that_pins_no_more_says_so_as_out_of_memory(self, device, driver):
        driver.pinned_left = MIB
        with installed(device, HYBRID):
            keep = cupy.empty(4 * MIB, dtype="u1")
            with pytest.raises(CudaOutOfMemoryError, match="no more pinned memory"):
                cupy.empty(2 * MIB, dtype="u1")
        assert device.usage().reserved_bytes == 4 * MIB
        del keep

    def test_it_is_not_pinned_during_a_capture(self, device, driver):
        with installed(device, HYBRID):
            keep = cupy.empty(4 * MIB, dtype="u1")
            driver.is_capturing = True
            with pytest.raises(DeviceError, match="while a stream is captured"):
                cupy.empty(2 * MIB, dtype="u1")
        del keep

    def test_a_cap_bounds_it_too(self, device):
        device.cap_managed(MIB)
        with installed(device, HYBRID):
            keep = cupy.empty(4 * MIB, dtype="u1")
            with pytest.raises(LimitError, match=r"may have 1\.0 MiB in all"):
                cupy.empty(2 * MIB, dtype="u1")
        del keep

    def test_memory_that_migrates_is_refused_with_the_way_out(self, device):
        with pytest.raises(DeviceError, match=f"cannot migrate.*{PROBLEM}.*spill='host'"):
            device.install(Policy("hybrid", spill="migrate"), everywhere=False)
        assert device.policy is None and device.usage().reserved_bytes == 0

    def test_it_needs_no_cuda_core_on_cuda_13_either(self, device, driver, monkeypatch):
        driver.cuda_major = 13
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        with installed(device, HYBRID):
            assert cupy.empty(8 * MIB, dtype="u1").nbytes == 8 * MIB

    def test_managed_is_refused_all_the_same(self, device):
        with pytest.raises(DeviceError, match=PROBLEM):
            device.install(Policy("managed"), everywhere=False)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"CanMapHostMemory": 0}, "cannot map host memory"),
            ({"UnifiedAddressing": 0}, "cannot map host memory"),
        ],
    )
    def test_where_host_memory_cannot_be_mapped_hybrid_is_refused(
        self, device, driver, change, reason
    ):
        driver.attributes.update(change)
        with pytest.raises(DeviceError, match=f"{PROBLEM}.*{reason}"):
            device.install(HYBRID, everywhere=False)

    def test_an_integrated_gpu_has_nothing_to_spill_to(self, device, driver):
        driver.integrated = True
        with pytest.raises(DeviceError, match="shares the host's memory"):
            device.install(HYBRID, everywhere=False)

    def test_the_real_driver_is_asked_for_pinned_memory(self):
        if cuda_driver.visible_gpus() and not isinstance(cuda_driver.visible_gpus(), str):
            pytest.skip("there is a CUDA device")
        driver = cuda_driver.Driver.__new__(cuda_driver.Driver)
        driver.ordinal = 0
        calls = [
            lambda: driver.allocate_pinned(512),
            lambda: driver.is_on_host(4096),
            lambda: driver.attribute("CanMapHostMemory"),
            driver.hybrid_problem,
        ]
        for call in calls:  # a wrong name or signature would be another error
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
                call()
        assert driver.attribute("NoSuchAttribute") is None
        assert driver.versions()["cuda of cupy"].count(".") == 1


class TestCuPysOwnLimit:
    """CUPY_GPU_MEMORY_LIMIT: every new pool starts with it, also one over managed memory."""

    @pytest.fixture
    def device(self, monkeypatch):
        monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", str(4 * MIB))
        return CudaDevice(HostDriver())

    def test_it_bounds_unmanaged_memory(self, device):
        with installed(device, Policy("unmanaged")):
            keep = cupy.empty(3 * MIB, dtype="u1")
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="limit set to"):
                cupy.empty(2 * MIB, dtype="u1")
        del keep

    def test_it_bounds_unmanaged_memory_with_a_limit_of_ours_too(self, device):
        with installed(device, Policy("unmanaged", limit_bytes=3 * MIB)):
            keep = cupy.empty(3 * MIB, dtype="u1")
            with pytest.raises(CudaLimitError, match="that the limit allows"):
                cupy.empty(MIB, dtype="u1")
        with installed(device, Policy("unmanaged", limit_bytes=GIB)):
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
                cupy.empty(2 * MIB, dtype="u1")
        del keep

    def test_it_does_not_forbid_oversubscription(self, device):
        with installed(device, Policy("managed")):
            assert cupy.empty(GIB, dtype="u1").nbytes == GIB
        with installed(device, Policy("managed", preset="streaming")):
            assert cupy.empty(8 * MIB, dtype="u1").nbytes == 8 * MIB

    def test_hybrid_spills_where_it_ends(self, device):
        with installed(device, Policy("hybrid")):
            keep = [cupy.empty(2 * MIB, dtype="u1") for _ in range(5)]
        reserved = device.pools.ledger.reserved()
        assert (reserved["unmanaged"], reserved["spill"]) == (4 * MIB, 6 * MIB)
        del keep

    def test_status_says_what_it_bounds(self, device):
        found = {feature.name: feature for feature in device.features()}["CuPy's limit"]
        assert found.on and f"CUPY_GPU_MEMORY_LIMIT={4 * MIB}" in found.why


CHAINER = {
    "chainer/__init__.py": "from chainer.backends import cuda\nfrom chainer import functions\n",
    "chainer/backends/__init__.py": "",
    "chainer/backends/cuda.py": "import cupy\nmemory_pool = cupy.get_default_memory_pool()\n",
    "chainer/functions.py": "",
}
"""What matters of Chainer on a machine with a GPU: it binds the name, then imports more."""


class TestChainersAlias:
    """Each in a process of its own, with a Chainer that thinks that there is a GPU."""

    @pytest.fixture
    def run(self, tmp_path):
        for name, text in CHAINER.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        start = f"""
            import sys
            sys.path.insert(0, {str(tmp_path)!r})
            import cupy, umem
            from umem.devices import cuda
            from cuda_host_driver import HostDriver
            device = cuda.CudaDevice(HostDriver())
            cuda.open_cuda = lambda: device
            def managed():
                pool = chainer.backends.cuda.memory_pool
                assert pool is cupy.get_default_memory_pool()
                return type(pool).__name__ == "PoolInUse"
            finders = list(sys.meta_path)
        """

        def run(code):
            code = textwrap.dedent(start) + textwrap.dedent(code)
            return printed("-W", "error", "-c", code).split()

        return run

    def test_it_follows_whichever_comes_first(self, run):
        before = "umem.enable(); import chainer; print(managed()); umem.disable(); print(managed())"
        after = "import chainer; umem.enable(); print(managed()); umem.disable(); print(managed())"
        assert run(before) == run(after) == ["True", "False"]

    def test_it_is_cupys_own_again_and_nothing_watches_the_imports_any_more(self, run):
        code = """
            with umem.enable():
                import chainer
            print(chainer.backends.cuda.memory_pool is cupy.get_default_memory_pool())
            print(sys.meta_path == finders)
        """
        assert run(code) == ["True", "True"]

    def test_without_chainer_nothing_stays_either(self, run):
        code = """
            with umem.enable():
                import colorsys
                print("chainer" in sys.modules, len(sys.meta_path) - len(finders))
            print(sys.meta_path == finders)
        """
        assert run(code) == ["False", "1", "True"]

    def test_it_follows_again_and_again(self, run):
        code = """
            umem.enable(); umem.disable(); umem.enable()
            import chainer
            print(managed()); umem.disable(); print(managed()); umem.enable(); print(managed())
            umem.disable()
        """
        assert run(code) == ["True", "False", "True"]

    def test_it_follows_through_the_compatibility_layer(self, run):
        code = """
            from umem.compat import finder
            finder.installation.require_supported = lambda path: "7.8.1"
            finder.ShimFinder.__init__.__defaults__ = ((),)
            umem.enable(); finder.arm()
            import chainer
            print(finder.active() is not None, managed())
        """
        assert run(code) == ["True", "True"]
