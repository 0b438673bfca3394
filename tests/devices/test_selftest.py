"""``umem doctor``, and the self-test that it runs: every step is seen to fail."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from processes import python

import umem
from umem.cli import main
from umem.devices.base import Location, Policy, Usage
from umem.devices.cuda import cuda_reason
from umem.devices.selftest import Check, run_selftest
from umem.devices.virtual import VirtualGPU
from umem.errors import DeviceError
from umem.units import MIB

NO_GPU = pytest.mark.skipif(cuda_reason() is None, reason="there is a CUDA device")
STEPS = [
    "unmanaged memory", "managed memory", "hybrid memory", "allocate", "prefetch to the GPU",
    "prefetch to the host", "contents", "advise read_mostly", "advise preferred_location",
    "advise accessed_by", "free",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UMEM_MODE", "UMEM_LIMIT", "UMEM_PREFETCH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as device:
        yield device


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# -- the self-test -----------------------------------------------------------------------------


def test_every_step_passes_on_a_device_that_works(gpu: VirtualGPU) -> None:
    checks = run_selftest(gpu)
    assert [check.name for check in checks] == STEPS
    assert all(check.ok and check.detail for check in checks)


def test_it_holds_at_most_16_mib_and_gives_everything_back(gpu: VirtualGPU) -> None:
    before = gpu.policy
    run_selftest(gpu)
    assert gpu.figures.peak_bytes <= 16 * MIB
    assert gpu.usage().peak_bytes <= 16 * MIB
    assert gpu.policy is before and not gpu.model.tensors
    with umem.managed() as memory:
        location = umem.location(memory.xp.ones(8 * MIB, "u1"))
    assert (location.read_mostly, location.preferred, location.accessed_by) == (False, None, ())


def test_it_runs_inside_a_block_and_leaves_it_as_it_is(gpu: VirtualGPU) -> None:
    with umem.managed(limit="32MiB") as memory:
        kept = memory.xp.ones(4 * MIB, "u1")
        assert all(check.ok for check in run_selftest(gpu))
        assert gpu.policy == Policy("managed", 32 * MIB)
        assert int(kept.sum()) == 4 * MIB


def test_a_gpu_that_cannot_oversubscribe_is_told_why_and_hints_are_not_tried() -> None:
    with umem.virtual_gpu("jetson", vram="64MiB") as gpu:
        checks = by_name(run_selftest(gpu))
    assert checks["unmanaged memory"].ok
    for name in ("managed memory", "hybrid memory"):
        assert checks[name].ok is False and "shares its memory" in checks[name].detail
    assert checks["hints"].ok is None and "not tried" in checks["hints"].detail


def located(**changes: Any) -> Callable[[Any, Any], Location]:
    real = VirtualGPU.location
    return lambda self, array: dataclasses.replace(real(self, array), **changes)


def returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def raising(kind: type[Exception], text: str) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise kind(text)  # a new one each time: what it was raised from must not stay alive

    return method


def growing() -> Callable[[Any], Usage]:
    numbers = iter(range(0, 1 << 60, 1 << 30))
    return lambda self: Usage(next(numbers), 0, 1 << 40, None, "unknown")


@pytest.mark.parametrize(
    ("method", "broken", "fails", "text"),
    [
        ("prefetch", returning(0), "prefetch to the host", "should be 8388608, but is 0"),
        ("prefetch", returning(8 * MIB), "prefetch to the host", "should be 'cpu', but is None"),
        (
            "prefetch",
            raising(DeviceError, "the driver refused the hint"),
            "prefetch to the GPU",
            "the driver refused the hint",
        ),
        ("prefetch", raising(OSError, "no library"), "prefetch to the GPU", "OSError: no library"),
        ("location", located(last_prefetch="cpu"), "prefetch to the GPU", "should be 0, but is"),
        ("location", located(read_mostly=False), "advise read_mostly", "should be True, but is F"),
        ("location", located(preferred=0), "advise preferred_location", "should be 'cpu', but is"),
        ("location", located(accessed_by=("cpu",)), "advise accessed_by", r"should be \(0,\), but"),
        ("advise", raising(DeviceError, "no"), "advise accessed_by", "no"),
        ("usage", growing(), "free", "the memory was not reused: 1.0 GiB more"),
        ("usage", returning(Usage(0, 0, 0, None, "")), "managed memory", "not in managed memory"),
        ("install", raising(MemoryError, "no room"), "unmanaged memory", "MemoryError: no room"),
    ],
)
def test_what_is_broken_is_named(
    gpu: VirtualGPU,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    broken: Any,
    fails: str,
    text: str,
) -> None:
    before = gpu.policy
    monkeypatch.setattr(VirtualGPU, method, broken)
    check = by_name(run_selftest(gpu))[fails]
    monkeypatch.undo()
    assert check.ok is False
    assert re.search(text, check.detail)
    assert gpu.policy is before
    assert gpu.usage().managed_bytes <= 16 * MIB and not gpu.model.tensors


def test_contents_that_change_are_noticed(gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    real = VirtualGPU.prefetch

    def prefetch(self: VirtualGPU, array: Any, to: Any, stream: Any) -> int:
        np.asarray(array)[5] = 9
        return real(self, array, to, stream)

    monkeypatch.setattr(VirtualGPU, "prefetch", prefetch)
    check = by_name(run_selftest(gpu))["contents"]
    assert (check.ok, check.detail) == (False, "every byte should be 7, but they are 7 to 9")


def test_an_allocation_that_fails_leaves_no_hints_to_try(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gpu.xp.full

    def full(shape: int, *args: Any) -> Any:
        if shape > 2 * MIB:
            raise MemoryError("no room")
        return real(shape, *args)

    monkeypatch.setattr(gpu.xp, "full", full)
    checks = run_selftest(gpu)
    assert checks[-1] == Check("allocate", False, "MemoryError: no room")
    assert [check.name for check in checks] == STEPS[:4]


# -- the command -------------------------------------------------------------------------------


def test_it_shows_versions_features_and_tests_of_a_virtual_gpu() -> None:
    result = doctor("--device", "virtual:v100-16gb")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("umem", "python", "numpy", "cuda-core", "device", "oversubscription", *STEPS):
        assert any(line.startswith(name) for line in lines), name
    assert lines[-1] == "Everything works on v100-16gb (simulated)."
    assert sum(": " in line and "ok: " in line for line in lines) == len(STEPS) + 1


def test_it_tests_the_device_that_is_on() -> None:
    with umem.virtual_gpu("t4", "64MiB"), umem.managed():
        result = doctor()
    assert result.exit_code == 0
    assert "t4 (simulated)" in result.output and "a block of this thread" in result.output


def test_json_has_it_all() -> None:
    result = doctor("--device", "virtual:t4", "--vram", "32MiB", "--json")
    found = json.loads(result.output)
    assert result.exit_code == 0
    assert list(found) == [
        "ok",
        "reason",
        "platform",
        "versions",
        "mpi",
        "features",
        "environment",
        "status",
        "checks",
    ]
    assert (found["ok"], found["reason"]) == (True, None)
    assert found["status"]["vram_bytes"] == 32 * MIB
    assert [check["name"] for check in found["checks"]] == ["environment", *STEPS]
    assert {feature["name"] for feature in found["features"]} >= {"hints", "paging"}
    assert found["environment"] == {"UMEM_MODE": None, "UMEM_LIMIT": None, "UMEM_PREFETCH": None}


def test_what_fails_is_the_reason_and_the_exit_code_is_1() -> None:
    result = doctor("--device", "virtual:jetson", "--json")
    found = json.loads(result.output)
    assert (result.exit_code, found["ok"]) == (1, False)
    assert found["reason"].startswith("managed memory: Jetson AGX Orin 64 GB shares its memory")
    text = doctor("--device", "virtual:jetson")
    assert text.exit_code == 1
    assert "managed memory              FAILED: Jetson" in text.output
    assert text.output.splitlines()[-1].startswith("A test failed on jetson")
    assert max(map(len, text.output.splitlines())) <= 80


@NO_GPU
def test_without_a_gpu_it_gives_the_reason_and_all_ways_out() -> None:
    for arguments in ((), ("--device", "cuda")):
        result = doctor(*arguments)
        assert result.exit_code == 1
        assert f"no CUDA device: {cuda_reason()}" in " ".join(result.output.split())
        assert "pip install 'cupy-cuda12x" in result.output
        assert "umem doctor --device virtual:v100-16gb" in result.output
        assert 'with umem.virtual_gpu("v100-16gb"): ...' in result.output
        assert "umem run --software t4 SCRIPT" in result.output
        assert max(map(len, result.output.splitlines())) <= 80
    found = json.loads(doctor("--json").output)
    assert found["reason"] == f"device: no CUDA device: {cuda_reason()}"
    assert "umem.virtual_gpu" in found["status"]["why_not"]


def test_variables_are_shown_and_a_bad_one_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMEM_LIMIT", "1.5x")
    assert "ok: UMEM_LIMIT=1.5x" in doctor("--device", "virtual:t4").output
    monkeypatch.setenv("UMEM_PREFETCH", "maybe")
    result = doctor("--device", "virtual:t4")
    assert result.exit_code == 1
    assert "FAILED: UMEM_PREFETCH must be on" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--device", "virtual"], 2, "virtual:NAME or cuda; got virtual"),
        (["--device", "virtual:"], 2, "virtual:NAME or cuda"),
        (["--device", "cuda:0"], 2, "virtual:NAME or cuda; got cuda:0"),
        (["--device", "t4"], 2, "virtual:NAME or cuda; got t4"),
        (["--vram", "1GiB"], 2, "--vram needs --device virtual:NAME"),
        (["--device", "virtual:v101"], 1, "did you mean"),
        (["--device", "virtual:t4", "--vram", "0"], 1, "vram must be above zero"),
        (["--device", "virtual:t4", "--vram", "1MiB"], 1, "vram must be at least one block"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], code: int, text: str) -> None:
    result = doctor(*arguments)
    assert (result.exit_code, "Traceback" in result.output) == (code, False)
    assert text in result.output


def test_the_command_itself_exits_with_the_code() -> None:
    codes = {}
    for device in ("virtual:t4", "virtual:jetson"):
        command = ("doctor", "--device", device, "--vram", "64MiB")
        result = python("-m", "umem", *command, PYTHONWARNINGS="error")
        codes[device] = result.returncode
        assert result.stderr == ""
    assert codes == {"virtual:t4": 0, "virtual:jetson": 1}
