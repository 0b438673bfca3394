"""UMEM_MODE, UMEM_LIMIT and UMEM_PREFETCH: who reads them, when, and what wins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from processes import printed

import umem
from umem.devices import Policy
from umem.devices.cuda import cuda_reason
from umem.devices.virtual import VirtualGPU
from umem.errors import DeviceNotFoundError, SizeError, StateError
from umem.memory import environment
from umem.units import MIB

UNMANAGED = Policy("unmanaged")
OFF = ["0", "false", "off", "no", "", "OFF", " False ", "No"]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as device:
        yield device


def enabled(gpu: VirtualGPU, *args: Any, **kwargs: Any) -> Policy:
    """What is in force while umem is enabled with these arguments."""
    with umem.enable(*args, **kwargs):
        return gpu.policy


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Policy("managed")),
        ({"UMEM_MODE": "hybrid"}, Policy("hybrid")),
        ({"UMEM_MODE": " Managed "}, Policy("managed")),
        ({"UMEM_MODE": "unmanaged", "UMEM_LIMIT": "8MiB"}, Policy("unmanaged", 8 * MIB)),
        ({"UMEM_LIMIT": "1.5x"}, Policy("managed", 96 * MIB)),
        ({"UMEM_LIMIT": str(MIB)}, Policy("managed", MIB)),
        ({"UMEM_PREFETCH": "1"}, Policy("managed", prefetch=True)),
        ({"UMEM_PREFETCH": "On"}, Policy("managed", prefetch=True)),
        ({"UMEM_PREFETCH": "true", "UMEM_MODE": "hybrid"}, Policy("hybrid", prefetch=True)),
    ],
)
def test_enable_takes_what_it_is_not_given_from_the_environment(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Policy
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert enabled(gpu) == expected


def test_an_argument_goes_before_its_variable_and_leaves_the_others(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(environment.MEMORY_VARIABLES, ("hybrid", "8MiB", "yes"), strict=True):
        monkeypatch.setenv(name, value)
    assert enabled(gpu) == Policy("hybrid", 8 * MIB, prefetch=True)
    assert enabled(gpu, "managed") == Policy("managed", 8 * MIB, prefetch=True)
    assert enabled(gpu, limit="4MiB") == Policy("hybrid", 4 * MIB, prefetch=True)
    assert enabled(gpu, prefetch=False) == Policy("hybrid", 8 * MIB)
    assert enabled(gpu, "unmanaged", limit=MIB, prefetch=False) == Policy("unmanaged", MIB)


def test_an_argument_is_not_disturbed_by_a_bad_variable(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.MEMORY_VARIABLES:
        monkeypatch.setenv(name, "nonsense")
    assert enabled(gpu, "hybrid", limit=MIB, prefetch=False) == Policy("hybrid", MIB)


@pytest.mark.parametrize("off", OFF, ids=repr)
def test_off_is_off(gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv("UMEM_LIMIT", off)
    monkeypatch.setenv("UMEM_PREFETCH", off)
    assert enabled(gpu) == Policy("managed")
    monkeypatch.setenv("UMEM_MODE", off)
    assert enabled(gpu) == UNMANAGED


def test_a_mode_that_is_off_keeps_enable_from_changing_anything(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMEM_MODE", "off")
    handle = umem.enable(limit="nonsense")
    assert umem.enable() is handle
    status = umem.status()
    assert (status.on, status.mode, handle.policy) == (False, "unmanaged", None)
    assert "UMEM_MODE keeps it off" in str(status)
    assert handle.xp is gpu.xp and handle.device is gpu
    with umem.managed():
        assert gpu.policy.mode == "managed"
    with pytest.raises(StateError, match=r"while UMEM_MODE was off, .*umem\.disable\(\) first"):
        umem.enable("managed")
    umem.disable()
    assert enabled(gpu, "managed") == Policy("managed")
    with pytest.raises(StateError, match="umem is not enabled"):
        umem.disable()


@pytest.mark.skipif(cuda_reason() is None, reason="there is a CUDA device")
def test_a_mode_that_is_off_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMEM_MODE", "0")
    with umem.enable() as handle:
        with pytest.raises(DeviceNotFoundError):
            _ = handle.xp
        with umem.virtual_gpu("t4", vram="64MiB"):
            assert not umem.status().on
    monkeypatch.setenv("UMEM_MODE", "managed")
    with pytest.raises(DeviceNotFoundError):
        umem.enable()


def test_a_mode_that_is_off_ends_with_its_virtual_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMEM_MODE", "off")
    with umem.virtual_gpu("t4", vram="64MiB"):
        umem.enable()
    with pytest.raises(StateError, match="umem is not enabled"):
        umem.disable()


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        (
            "UMEM_MODE",
            "mangaed",
            StateError,
            "UMEM_MODE must be unmanaged, managed, hybrid, or off "
            r"\(0, false, off, no, nothing\); got 'mangaed'",
        ),
        ("UMEM_MODE", "1", StateError, "UMEM_MODE must be"),
        (
            "UMEM_PREFETCH",
            "maybe",
            StateError,
            r"UMEM_PREFETCH must be on \(1, true, on, yes\) or "
            r"off \(0, false, off, no, nothing\); got 'maybe'",
        ),
        ("UMEM_LIMIT", "lots", SizeError, "UMEM_LIMIT must be a size.*got 'lots'.*of VRAM"),
        ("UMEM_LIMIT", "0x", SizeError, "UMEM_LIMIT must be above zero"),
        ("UMEM_LIMIT", "120%", SizeError, "UMEM_LIMIT must be at most 100%"),
        ("UMEM_LIMIT", "-1", SizeError, "UMEM_LIMIT must be a size"),
        ("UMEM_LIMIT", "1" * 39 + "x", SizeError, "UMEM_LIMIT of 1+x.*is not a valid size"),
    ],
)
def test_a_bad_value_is_an_error_that_names_its_variable(
    gpu: VirtualGPU,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(error, match=f"^{text}"):
        umem.enable()
    assert gpu.policy == UNMANAGED
    with pytest.raises(StateError, match="umem is not enabled"):
        umem.disable()


def test_blocks_do_not_read_the_environment(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.MEMORY_VARIABLES:
        monkeypatch.setenv(name, "nonsense")
    with umem.managed():
        assert gpu.policy == Policy("managed")


def test_the_variables_are_read_when_they_are_needed_and_not_at_import() -> None:
    code = (
        "import os, umem\n"
        "os.environ['UMEM_MODE'] = 'hybrid'\n"
        "with umem.virtual_gpu('t4', vram='64MiB'):\n"
        "    print(umem.status().on, umem.enable().policy.mode)\n"
    )
    found = printed("-c", code, UMEM_MODE="nonsense", UMEM_LIMIT=0, UMEM_PREFETCH=0)
    assert found == "False hybrid\n"


def test_the_same_environment_again_is_the_same_and_another_is_not(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMEM_LIMIT", "8MiB")
    with umem.enable() as handle:
        assert umem.enable() is umem.enable("managed", limit=8 * MIB) is handle
        monkeypatch.setenv("UMEM_LIMIT", "9MiB")
        with pytest.raises(StateError, match="with other arguments"):
            umem.enable()
