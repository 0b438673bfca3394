"""Hints on CUDA: which ranges are asked of cuda.core, and what comes back from it.

The driver's table of attributes is a stand-in with cuda.core's interface; where cuda.core and
its bindings are installed, the interface is held against the real one.
"""

from __future__ import annotations

import inspect
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

cupy = pytest.importorskip("cupy")

from cuda_host_driver import HostDriver, host_memory, installed  # noqa: E402

import umem  # noqa: E402
from umem.devices.base import Location, Policy, Span  # noqa: E402
from umem.devices.cuda import CudaDevice, gpus  # noqa: E402
from umem.devices.cuda import driver as cuda_driver  # noqa: E402
from umem.devices.cuda import ranges as cuda_hints  # noqa: E402
from umem.devices.cuda.driver import Driver  # noqa: E402
from umem.devices.cuda.ranges import CoreHints  # noqa: E402
from umem.devices.presets import PRESETS  # noqa: E402
from umem.errors import DeviceError, HintError, MissingDependencyError  # noqa: E402

NOWHERE, CPU = -2, -1


class Host:
    pass


class Device:
    def __init__(self, device_id):
        self.device_id = device_id


class Ranges:
    """cuda.core with a driver whose attributes belong to exact ranges."""

    Host, Device = Host, Device
    LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM = "legacy", "per thread"
    Stream = types.SimpleNamespace(from_handle=lambda address: f"stream {address}")

    def __init__(self):
        self.attributes, self.prefetches = {}, []
        ranges = self

        class ManagedBuffer:
            @staticmethod
            def from_handle(address, nbytes):
                return Buffer(ranges, (address, nbytes))

        self.ManagedBuffer = ManagedBuffer


class Buffer:
    def __init__(self, ranges, key):
        self._ranges, self._key = ranges, key
        mine = ranges.attributes.setdefault(
            key, {"read_mostly": False, "preferred": None, "by": {}, "last": NOWHERE}
        )
        self._mine = mine

    def prefetch(self, location, *, stream):
        self._ranges.prefetches.append((*self._key, stream))
        self._mine["last"] = CPU if isinstance(location, Host) else location.device_id

    @property
    def read_mostly(self):
        return self._mine["read_mostly"]

    @read_mostly.setter
    def read_mostly(self, value):
        self._mine["read_mostly"] = value

    @property
    def preferred_location(self):
        return self._mine["preferred"]

    @preferred_location.setter
    def preferred_location(self, place):
        if place == "refuse":
            raise ZeroDivisionError
        self._mine["preferred"] = place

    @property
    def accessed_by(self):
        return AccessedBy(self._mine["by"])


class AccessedBy:
    def __init__(self, places):
        self._places = places

    def __iter__(self):
        return iter(self._places.values())

    def _key(self, place):
        return CPU if isinstance(place, Host) else place.device_id

    def add(self, place):
        self._places[self._key(place)] = place

    def discard(self, place):
        self._places.pop(self._key(place), None)


class Bindings:
    """``cuda.bindings.driver``: one attribute of one range."""

    class CUmem_range_attribute:
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4

    def __init__(self, ranges):
        self._ranges = ranges

    def cuMemRangeGetAttribute(self, size, attribute, address, nbytes):
        assert (size, attribute) == (4, 4)
        return 0, self._ranges.attributes[address, nbytes]["last"]


@pytest.fixture
def ranges():
    return Ranges()


@pytest.fixture
def driver():
    return HostDriver()


@pytest.fixture
def device(driver, ranges, monkeypatch):
    hints = CoreHints(ranges, Bindings(ranges))
    monkeypatch.setattr(driver, "load_hints", lambda: hints)
    monkeypatch.setattr(driver, "is_managed", lambda address: True)
    return CudaDevice(driver)


@pytest.fixture
def array(device):
    with installed(device, Policy("managed")):
        return cupy.empty((64, 4096), dtype="u1")


def test_a_prefetch_covers_the_array_and_not_its_pool_segment(device, ranges, array):
    view = array[16:48]
    assert device.prefetch(view, 0, None) == view.nbytes
    assert ranges.prefetches == [(view.data.ptr, view.nbytes, "legacy")]


def test_streams_are_passed_on(device, ranges, array):
    side = types.SimpleNamespace(ptr=4711)
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream.ptds, side):
        device.prefetch(array, 0, stream)
    assert [call[2] for call in ranges.prefetches] == ["legacy", "per thread", "stream 4711"]


def test_advice_is_given_read_back_and_taken_back(device, array):
    assert device.location(array) == Location(managed=True)
    device.advise(array, "read_mostly", None, unset=False)
    device.advise(array, "preferred_location", "cpu", unset=False)
    device.advise(array, "accessed_by", None, unset=False)
    device.advise(array, "accessed_by", "cpu", unset=False)
    device.prefetch(array, "cpu", None)
    assert device.location(array) == Location(True, "cpu", (0, "cpu"), "cpu", True)
    device.advise(array, "read_mostly", None, unset=True)
    device.advise(array, "preferred_location", "cpu", unset=True)
    device.advise(array, "accessed_by", "cpu", unset=True)
    device.prefetch(array, 0, None)
    assert device.location(array) == Location(True, None, (0,), 0, False)


def test_ranges_that_differ_report_none_for_what_they_differ_in(device, ranges, array):
    hints = device.driver.load_hints()
    one, two = Span(4096, 4096), Span(65536, 4096)
    hints.advise([one, two], "accessed_by", 0, unset=False)
    hints.advise([one], "accessed_by", "cpu", unset=False)
    hints.advise([one], "preferred_location", "cpu", unset=False)
    hints.advise([one], "read_mostly", 0, unset=False)
    hints.prefetch([one], "cpu", 0)
    assert hints.location([one, two]) == Location(True, None, (0,), None, False)
    assert hints.location([one]) == Location(True, "cpu", (0, "cpu"), "cpu", True)


def test_the_context_is_bound_before_a_hint(device, driver, array):
    device.prefetch(array, 0, None)
    assert driver.calls == [("bind",)]


def test_a_prefetch_that_would_end_a_capture_is_refused_and_others_are_not(
    device, driver, ranges, array
):
    captured, side = types.SimpleNamespace(ptr=11), types.SimpleNamespace(ptr=12)
    driver.captured_streams = {11}
    with pytest.raises(DeviceError, match="cannot be captured"):
        device.prefetch(array, 0, captured)
    assert not ranges.prefetches
    assert device.prefetch(array, 0, side) == array.nbytes


def test_memory_that_is_not_managed_is_left_alone(device, driver, ranges, array, monkeypatch):
    monkeypatch.setattr(driver, "is_managed", lambda address: False)
    assert device.prefetch(array, 0, None) == 0
    assert device.advise(array, "read_mostly", None, unset=False) == 0
    assert device.location(array) == Location(managed=False, resident_bytes=array.nbytes)
    assert not ranges.prefetches and not ranges.attributes


def test_an_empty_array_is_left_alone(device, array):
    assert device.prefetch(array[:0], 0, None) == 0
    assert device.location(array[:0]).resident_bytes == 0


def test_what_is_not_an_array_of_this_gpu_is_refused(device):
    with pytest.raises(DeviceError, match="not an array of GPU 0: ndarray"):
        device.prefetch(np.zeros(3), 0, None)
    with cupy.cuda.using_allocator(lambda nbytes: host_memory(nbytes, device=1)):
        elsewhere = cupy.empty(8)
    with pytest.raises(DeviceError, match="is on GPU 1, and this is GPU 0"):
        device.advise(elsewhere, "read_mostly", None, unset=False)


def test_a_gpu_that_cannot_page_refuses_hints_with_the_reason(device, driver, array):
    driver.problem = "GPU 0 has no concurrent managed access"
    with pytest.raises(DeviceError, match="no concurrent managed access"):
        device.prefetch(array, 0, None)


def test_what_the_driver_refuses_is_a_device_error(device, array, ranges, monkeypatch):
    monkeypatch.setattr(ranges, "Device", lambda ordinal: "refuse")
    with pytest.raises(DeviceError, match="the driver refused the hint"):
        device.advise(array, "preferred_location", 0, unset=False)


def test_advice_that_does_not_exist_is_a_hint_error(device, array):
    with pytest.raises(HintError, match="unknown advice 'faster'"):
        device.advise(array, "faster", 0, unset=False)


def test_on_cuda_13_the_spill_pool_is_advised_through_cuda_core(driver, ranges):
    driver.cuda_major = 13
    driver.load_hints = lambda: CoreHints(ranges, Bindings(ranges))
    driver.check_advice()
    Driver.prefer_host(driver, 4096, 8192)
    mine = ranges.attributes[4096, 8192]
    assert isinstance(mine["preferred"], Host) and [*mine["by"]] == [0]


@pytest.mark.parametrize(
    ("major", "version", "why"),
    [
        (12, None, r"it is not installed: pip install 'cuda-core\[cu12.*cuda12\)$"),
        (13, "1.0.2", r"1\.0\.2 is installed: pip install 'cuda-core\[cu13.*cuda13\)$"),
    ],
)
def test_without_a_new_cuda_core_the_error_names_the_extra(monkeypatch, major, version, why):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(cuda_hints, "installed_version", lambda name: version)
    with pytest.raises(MissingDependencyError, match=why):
        cuda_hints.load(major)


def test_a_cuda_core_without_managed_buffers_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", types.ModuleType("cuda.core"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", types.ModuleType("driver"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.ModuleType("cuda.bindings"))
    with pytest.raises(MissingDependencyError, match=r"cuda-core 1\.1 or newer"):
        cuda_hints.load(12)


@pytest.mark.parametrize("error", [ModuleNotFoundError, ValueError, TypeError])
def test_a_cuda_core_that_does_not_import_names_what_is_installed(monkeypatch, error):
    """As pip leaves it where cupti-python 12.8.0 has brought its own cuda-bindings."""
    versions = {"cuda-core": "1.10", "cuda-bindings": "12.8.0", "cupti-python": "12.8.0"}

    def fail(name):
        raise error(f"no {name} with cynvvm\nmore")

    monkeypatch.setattr(cuda_hints, "installed_version", versions.get)
    monkeypatch.setattr(cuda_hints.importlib, "import_module", fail)
    with pytest.raises(MissingDependencyError) as raised:
        cuda_hints.load(12)
    assert str(raised.value).endswith(
        "cuda.core cannot be imported (cuda-core 1.10, cuda-bindings 12.8.0, cupti-python 12.8.0 "
        "installed): no cuda.core with cynvvm. Install the newest bindings: "
        "pip install --upgrade 'cuda-bindings==12.*'"
    )


class TestCudaCoreIsAsWeAssume:
    @pytest.fixture
    def hints(self):
        pytest.importorskip("cuda.bindings", exc_type=ImportError)
        pytest.importorskip("cuda.core", exc_type=ImportError)
        return cuda_hints.load(12)

    def test_its_names_are_there(self, hints):
        core = hints.core
        for name in ("Device", "LEGACY_DEFAULT_STREAM", "PER_THREAD_DEFAULT_STREAM"):
            assert hasattr(core, name)
        assert callable(core.Stream.from_handle) and isinstance(core.Host(), core.Host)
        attribute = hints.bindings.CUmem_range_attribute
        assert int(attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION) == 4

    def test_a_prefetch_takes_a_place_and_a_stream_by_name(self, hints):
        prefetch = inspect.signature(hints.core.ManagedBuffer.prefetch)
        assert [*prefetch.parameters] == ["self", "location", "stream"]
        assert prefetch.parameters["stream"].kind is inspect.Parameter.KEYWORD_ONLY

    def test_a_range_is_wrapped_without_owning_it_or_asking_the_driver(self, hints):
        buffer = hints.core.ManagedBuffer.from_handle(4096, 8192)
        assert int(buffer.handle) == 4096 and buffer.size == 8192

    def test_advice_is_by_properties(self, hints):
        managed = hints.core.ManagedBuffer
        for name in ("read_mostly", "preferred_location", "accessed_by"):
            assert isinstance(inspect.getattr_static(managed, name), property)


# -- through umem's own functions ----------------------------------------------------------------


@pytest.fixture
def current(device, monkeypatch):
    """The device as the current one of umem's functions."""
    monkeypatch.setattr(gpus, "opened", {0: device})
    monkeypatch.setattr(cuda_driver, "current_ordinal", lambda: 0)
    return device


def test_every_container_gives_its_bytes_once(current, ranges, array):
    weight, bias, mean, more = (array[i * 16 : i * 16 + 16] for i in range(4))
    held = [weight, {"bias": bias}, (mean, more), weight]
    assert umem.prefetch({"a": [held, (weight,)], "b": held, "c": None}) == array.nbytes
    assert sorted(call[:2] for call in ranges.prefetches) == [
        (part.data.ptr, part.nbytes) for part in (weight, bias, mean, more)
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_given_read_back_and_taken_back(current, array, name):
    assert umem.preset(array, name) == array.nbytes
    given, found = dict(PRESETS[name]), umem.location(array)
    places = {"cpu": "cpu", "gpu": 0, None: None}
    assert found.preferred == places[given.get("preferred_location")]
    assert found.accessed_by == ((0,) if "accessed_by" in given else ())
    assert found.read_mostly == ("read_mostly" in given)
    assert umem.preset(array, name, unset=True) == array.nbytes
    assert umem.location(array) == Location(managed=True)


def test_strict_refuses_before_anything_is_asked_of_the_driver(
    current, driver, ranges, array, monkeypatch
):
    plain = array[32:]
    monkeypatch.setattr(driver, "is_managed", lambda address: address != plain.data.ptr)
    with pytest.raises(HintError, match=r"shape \(32, 4096\) is not managed"):
        umem.prefetch([array[:32], plain], strict=True)
    assert not ranges.prefetches
    assert umem.prefetch([array[:32], plain]) == array[:32].nbytes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_hints_reach_every_page_of_a_view_and_no_page_beside_it(data):
    """Oracle: the address of every element, one by one."""
    ranges, driver = Ranges(), HostDriver()
    driver.load_hints = lambda: CoreHints(ranges, Bindings(ranges))
    driver.is_managed = lambda address: True
    device = CudaDevice(driver)
    steps = st.sampled_from([-3, -2, -1, 1, 2, 3])
    with installed(device, Policy("managed")):
        whole = cupy.empty((6, 5, 4096), dtype="u1")
    start, stop = data.draw(st.integers(0, 3)), data.draw(st.integers(3, 6))
    view = whole[start:stop][:: data.draw(steps), :: data.draw(steps), :: data.draw(steps)]
    view = view.transpose(data.draw(st.permutations(range(3))))
    moved = device.prefetch(view, 0, None)
    offsets = sum(
        np.arange(n).reshape([-1 if axis == other else 1 for other in range(3)]) * step
        for axis, (n, step) in enumerate(zip(view.shape, view.strides, strict=True))
    )
    pages = {*((view.data.ptr + np.asarray(offsets)) // 4096).ravel().tolist()}
    reached = set()
    for address, nbytes, _ in ranges.prefetches:
        reached.update(range(address // 4096, (address + nbytes - 1) // 4096 + 1))
    assert reached == pages
    assert moved == sum(nbytes for _, nbytes, _ in ranges.prefetches) >= view.size
