"""umem.status(): every feature on or off and why, what is held, and nothing that raises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import printed

import umem
from umem._common import host as machine
from umem._common.specs import GPUS
from umem.devices import Feature
from umem.devices.cuda import CudaDevice, cuda_reason
from umem.devices.virtual import VirtualGPU
from umem.errors import MissingDependencyError
from umem.units import MIB

NO_GPU = pytest.mark.skipif(cuda_reason() is None, reason="there is a CUDA device")
NAMES = [
    "mode", "managed memory", "concurrent access", "oversubscription", "hybrid's spill",
    "pageable memory", "integrated", "WSL", "hints", "host check", "resident bytes", "paging",
]  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as device:
        yield device


def assert_readable(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80
    assert text == text.rstrip()


# -- on a virtual GPU --------------------------------------------------------------------------


def test_every_virtual_gpu_says_of_each_feature_whether_and_why() -> None:
    for name in GPUS:
        with umem.virtual_gpu(name, vram="64MiB"):
            status = umem.status()
        assert [feature.name for feature in status.features] == NAMES
        assert all(isinstance(feature.on, bool) and feature.why for feature in status.features)
        assert_readable(str(status))
        assert (status.why_not is None) == _on(status, "oversubscription") == _on(status, "hints")
        assert _on(status, "integrated") == name.startswith("jetson")


def test_str_is_the_table_and_then_the_features(gpu: VirtualGPU) -> None:
    with umem.managed(limit="1.5x"):
        status = umem.status()
    table, features = str(status).split("\n\n")
    assert table == status.table()
    assert table.splitlines()[:2] == ["umem          on", "mode          managed, limit 96.0 MiB"]
    assert features.splitlines()[0] == "mode                on: a block of this thread"
    assert "oversubscription    on: modelled: blocks move over the host link" in features


def test_why_umem_is_on_or_off_is_said(gpu: VirtualGPU) -> None:
    seen = [umem.status().feature("mode")]
    with umem.enable():
        seen.append(umem.status().feature("mode"))
        with umem.unmanaged():
            seen.append(umem.status().feature("mode"))
    assert seen == [
        Feature("mode", False, "umem.enable() was not called, and this thread is in no block"),
        Feature("mode", True, "umem.enable() was called, for the whole process"),
        Feature("mode", True, "a block of this thread"),
    ]
    assert umem.status().feature("no such feature") is None


def test_what_is_held_is_counted_and_the_peak_stays(gpu: VirtualGPU) -> None:
    with umem.managed() as memory:
        array = memory.xp.ones(96 * MIB, "u1")
    held = umem.status()
    assert (held.reserved_bytes, held.factor, held.resident_bytes) == (96 * MIB, 1.5, 64 * MIB)
    assert re.fullmatch(r"\d+ faults \(simulated\)", held.paging)
    del array
    gpu.model.driver.managed.free_all_blocks()
    assert umem.status().reserved_bytes == 96 * MIB  # what died is noticed when it is asked
    gpu.model.driver.managed.free_all_blocks()
    after = umem.status()
    assert (after.reserved_bytes, after.peak_bytes, after.factor) == (0, 96 * MIB, 0.0)


def test_it_goes_to_json_and_its_repr_stays_short(gpu: VirtualGPU) -> None:
    status = umem.status()
    found = json.loads(json.dumps(status.to_json()))
    assert found["device"] == "v100-16gb" and found["vram_bytes"] == 64 * MIB
    assert found["features"][1] == {
        "name": "managed memory",
        "on": True,
        "why": "modelled in blocks of 2 MiB (simulated)",
    }
    assert found["versions"]["umem"] == umem.__version__
    assert len(repr(status)) < 400


def test_versions_are_of_what_is_installed(gpu: VirtualGPU) -> None:
    import numpy

    versions = umem.status().versions
    assert list(versions) == ["umem", "python", "numpy", "chainer", "scipy", "cupy", "cuda-core"]
    assert versions["numpy"] == numpy.__version__


# -- it never raises ---------------------------------------------------------------------------


def test_a_device_that_answers_nothing_is_reported_as_such(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    for method in ("usage", "features", "why_not", "versions"):
        monkeypatch.setattr(gpu, method, broken)
    status = umem.status()
    assert (status.reserved_bytes, status.peak_bytes, status.factor) == (None, None, None)
    assert status.paging == "unknown" and status.why_not == "it cannot be read"
    asked = {feature.name: feature for feature in status.features}
    for name in ("usage", "features", "modes", "versions"):
        assert asked[name].on is None
        assert asked[name].why == "RuntimeError: an illegal memory access was encountered"
    assert_readable(str(status))
    json.dumps(status.to_json())


@pytest.mark.parametrize("error", [OSError("no library"), MemoryError(), SystemError("driver")])
def test_a_device_that_cannot_be_opened_is_no_device(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken() -> Any:
        raise error

    monkeypatch.setattr("umem.devices.cuda.open_cuda", broken)
    status = umem.status()
    assert (status.on, status.device) == (False, None)
    assert type(error).__name__ in str(status.why_not)
    assert_readable(str(status))


@NO_GPU
def test_without_a_device_the_reason_and_both_ways_out_are_there() -> None:
    status = umem.status()
    assert (status.device, status.features, status.factor) == (None, (), None)
    assert status.why_not is not None
    assert "cupy-cuda12x" in status.why_not and "umem.virtual_gpu" in status.why_not
    assert_readable(str(status))
    json.dumps(status.to_json())


def test_asking_imports_no_gpu_library_inside_a_virtual_gpu() -> None:
    code = (
        "import sys, umem\n"
        "with umem.virtual_gpu('t4'): str(umem.status())\n"
        "print([n for n in ('cupy', 'cuda.core', 'chainer', 'click', 'rich') if n in sys.modules])"
    )
    assert printed("-c", code) == "[]\n"


# -- on CUDA, with host memory in the place of a GPU -------------------------------------------


class TestCuda:
    """What a GPU's attributes mean in words."""

    @pytest.fixture
    def driver(self) -> Any:
        pytest.importorskip("cupy")
        from cuda_host_driver import HostDriver

        return HostDriver()

    @pytest.fixture
    def status(self, driver: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], umem.Status]:
        device = CudaDevice(driver)
        monkeypatch.setattr("umem.devices.cuda.open_cuda", lambda: device)
        monkeypatch.delenv("CUPY_GPU_MEMORY_LIMIT", raising=False)
        return umem.status

    def test_a_gpu_that_can_everything(self, driver: Any, status: Any) -> None:
        found = status()
        assert [f.name for f in found.features] == [*NAMES[:10], "CuPy's limit", *NAMES[10:]]
        for name in ("managed memory", "concurrent access", "oversubscription", "hybrid's spill"):
            assert _on(found, name)
        assert _why(found, "concurrent access") == "the driver says ConcurrentManagedAccess = 1"
        assert _on(found, "pageable memory") is _on(found, "integrated") is False
        assert _why(found, "integrated") == "1.0 GiB of VRAM of its own"
        assert _why(found, "host check") == "2.0 GiB of host memory are available"
        assert found.versions["nvidia driver"] == "550.54.14"
        assert found.versions["cuda of driver"] == "12.4"

    def test_residency_and_paging_are_unknown_and_it_says_why(
        self, driver: Any, status: Any
    ) -> None:
        found = status()
        assert (found.resident_bytes, found.paging) == (None, "unknown")
        assert _on(found, "resident bytes") is _on(found, "paging") is None
        assert "resident      unknown: CUDA reports it to its profiler only" in found.table()
        assert "paging        unknown: CUDA reports it to its profiler only" in found.table()
        assert_readable(str(found))

    def test_a_gpu_under_windows_rules(
        self, driver: Any, status: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.problem = "GPU 0 has no concurrent managed access"
        driver.attributes["ConcurrentManagedAccess"] = 0
        monkeypatch.setattr(machine, "is_wsl", lambda: True)
        found = status()
        assert found.why_not == _why(found, "oversubscription") == driver.problem
        for name in ("concurrent access", "oversubscription", "hints"):
            assert not _on(found, name)
        assert _on(found, "hybrid's spill")
        assert _why(found, "hybrid's spill").startswith("to pinned host memory")
        assert _on(found, "WSL")
        driver.attributes["CanMapHostMemory"] = 0
        assert not _on(status(), "hybrid's spill")

    @pytest.mark.parametrize(
        ("attributes", "on", "why"),
        [
            ({}, False, "neither HMM nor ATS"),
            ({"PageableMemoryAccess": 1}, True, "HMM"),
            ({"PageableMemoryAccess": 1, "PageableMemoryAccessUsesHostPageTables": 1}, True, "ATS"),
            ({"PageableMemoryAccess": None}, None, "does not know"),
        ],
    )
    def test_hmm_and_ats_are_told_apart(
        self, driver: Any, status: Any, attributes: dict[str, Any], on: bool, why: str
    ) -> None:
        driver.attributes.update(attributes)
        found = status()
        assert _on(found, "pageable memory") is on
        assert why in _why(found, "pageable memory")

    def test_an_integrated_gpu_has_nothing_to_oversubscribe(self, driver: Any, status: Any) -> None:
        driver.integrated = True
        found = status()
        assert _on(found, "integrated")
        assert not _on(found, "oversubscription")
        assert "share one memory" in _why(found, "oversubscription")

    def test_an_attribute_that_cupy_does_not_know_is_unknown(
        self, driver: Any, status: Any
    ) -> None:
        driver.attributes["ManagedMemory"] = None
        assert _on(status(), "managed memory") is None

    def test_hints_are_what_cuda_core_gives_or_the_reason_why_not(
        self, driver: Any, status: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver, "load_hints", lambda: None, raising=False)
        assert "through cuda-core" in _why(status(), "hints") and _on(status(), "hints")

        def fail() -> None:
            raise MissingDependencyError("cuda-core 1.2.2, cuda-bindings 12.8.0")

        monkeypatch.setattr(driver, "load_hints", fail)
        assert "cuda-bindings 12.8.0" in _why(status(), "hints") and not _on(status(), "hints")

    def test_a_host_that_does_not_say_is_not_checked(self, driver: Any, status: Any) -> None:
        driver.host = None
        assert not _on(status(), "host check")

    def test_cupys_own_limit_is_named(
        self, driver: Any, status: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not _on(status(), "CuPy's limit")
        monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", "50%")
        assert "CUPY_GPU_MEMORY_LIMIT=50% limits unmanaged" in _why(status(), "CuPy's limit")


# -- what files say ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Linux version 5.15.90.1-microsoft-standard-WSL2 (oe-user@oe-host)", True),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", True),
        ("Linux version 6.8.0-45-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-13)", False),
    ],
)
def test_windows_subsystem_is_known_by_its_kernel(
    tmp_path: Path, text: str, expected: bool
) -> None:
    assert not machine.is_wsl(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text(text)
    assert machine.is_wsl(tmp_path) == expected


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build (dvs)\n",
    ],
)
def test_the_kernel_drivers_version_is_read_from_its_file(tmp_path: Path, text: str) -> None:
    assert machine.kernel_driver_version(tmp_path) is None
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert machine.kernel_driver_version(tmp_path) == "550.54.14"
    path.write_text("something else")
    assert machine.kernel_driver_version(tmp_path) is None


def _on(status: umem.Status, name: str) -> bool | None:
    feature = status.feature(name)
    assert feature is not None, name
    return feature.on


def _why(status: umem.Status, name: str) -> str:
    feature = status.feature(name)
    assert feature is not None, name
    return feature.why
