"""Limits: what is accepted, what it comes to, and what every mistake says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import umem
from umem._common import host as host_memory
from umem.devices import Policy
from umem.devices.virtual import VirtualGPU
from umem.errors import LimitError, SizeError
from umem.memory.limits import parse_limit
from umem.units import GIB, MAX_BYTES, MIB

HOST_BYTES = 40 * MIB
MAKERS = [umem.managed, umem.hybrid, umem.unmanaged]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGPU]:
    """A virtual GPU of 64 MiB beside a host with 40 MiB available."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: HOST_BYTES)
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as device:
        yield device


ACCEPTED = [
    (7, 7), ("7", 7), ("24MiB", 24 * MIB), (" 1.5 MiB ", 3 * MIB // 2), ("3.x", 192 * MIB),
    ("1x", 64 * MIB), ("1.5x", 96 * MIB), (".25X", 16 * MIB), (" 2 x ", 128 * MIB),
    ("100%", HOST_BYTES), ("90%", 36 * MIB), ("0.5 %", HOST_BYTES // 200), ("12.5%", 5 * MIB),
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("limit", "nbytes"), ACCEPTED, ids=repr)
def test_a_limit_is_bytes_or_a_share_of_vram_or_of_the_host(
    gpu: VirtualGPU, make: Callable[..., Any], limit: Any, nbytes: int
) -> None:
    with make(limit=limit) as memory:
        assert gpu.policy == Policy(memory.mode, nbytes)
        assert umem.status().limit_bytes == nbytes
    with umem.enable(memory.mode, limit=limit):
        assert gpu.policy == Policy(memory.mode, nbytes)


REFUSED = [
    ("0x", "above zero"), ("0%", "above zero"), ("0.0x", "above zero"), (0, "above zero"),
    ("x", "a size such as"), ("%", "a size such as"), ("-5%", "a size such as"),
    ("nan%", "a size such as"), ("inf%", "a size such as"), ("-1x", "a size such as"),
    ("1e3x", "a size such as"), ("0x10", "a size such as"), ("5%%", "a size such as"),
    ("5 x x", "a size such as"), ("", "a size such as"), ("1,5x", "a size such as"),
    ("120%", "at most 100%"), ("100.01%", "at most 100%"), (True, "as an int"), (1.5, "as an int"),
    (b"1x", "as an int"), ([], "as an int"), ("1" * 41 + "x", "at most 40 digits"),
]  # fmt: skip


@pytest.mark.parametrize(("limit", "reason"), REFUSED, ids=repr)
def test_what_is_no_limit_is_refused_before_anything_changes(
    gpu: VirtualGPU, limit: Any, reason: str
) -> None:
    for make in (*MAKERS, umem.enable):
        with pytest.raises(SizeError, match=f"^limit must (be|have) .*{reason}") as caught:
            make(limit=limit)
        assert isinstance(caught.value, ValueError)
    assert gpu.policy == Policy("unmanaged") and not umem.status().on


@pytest.mark.parametrize("limit", ["0x", "x", "-5%", "nan%", [], "12 parsecs"], ids=repr)
def test_the_refusal_names_what_is_accepted(limit: Any) -> None:
    with pytest.raises(SizeError) as caught:
        parse_limit(limit)
    for part in ("bytes as an int", '"24GiB"', '"1.5x" of VRAM', '"90%" of the host memory'):
        assert part in str(caught.value)


def test_a_share_is_resolved_whenever_the_block_is_entered(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, multiple = umem.managed("50%"), umem.managed("0.5x")
    seen = []
    for available in (8 * MIB, 6 * MIB):
        monkeypatch.setattr(host_memory, "available_bytes", lambda now=available: now)
        with share:
            seen.append(gpu.policy.limit_bytes)
    with multiple:
        seen.append(gpu.policy.limit_bytes)
    with umem.virtual_gpu("t4", vram="16MiB") as other, multiple:
        seen.append(other.policy.limit_bytes)
    assert seen == [4 * MIB, 3 * MIB, 32 * MIB, 8 * MIB]


@pytest.mark.parametrize(
    ("limit", "available", "reason"),
    [
        ("90%", None, "does not report its available host memory"),
        ("90%", 0, "is not a valid size"),
        ("1%", 99, "is not a valid size"),
        (f"{10**30}x", HOST_BYTES, "is not a valid size"),
    ],
)
def test_a_share_that_comes_to_nothing_is_refused_on_entering(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch, limit: str, available: Any, reason: str
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    for enter in (umem.managed(limit).__enter__, lambda: umem.enable(limit=limit)):
        with pytest.raises(SizeError, match=f"^limit of {limit}.*{reason}"):
            enter()
    assert gpu.policy == Policy("unmanaged") and not umem.status().on


@pytest.mark.parametrize("limit", ["0.5x", "80%", 32 * MIB])
def test_reaching_a_share_is_reaching_a_limit(gpu: VirtualGPU, limit: Any) -> None:
    with umem.managed(limit) as memory:
        held = memory.xp.ones(24 * MIB, "u1")
        with pytest.raises(LimitError, match=r"the limit of 32\.0 MiB"):
            memory.xp.ones(16 * MIB, "u1")
    del held


def test_hybrids_share_bounds_its_unmanaged_part(gpu: VirtualGPU) -> None:
    with umem.hybrid("0.5x") as memory:
        a, b = memory.xp.empty(32 * MIB, "u1"), memory.xp.empty(8 * MIB, "u1")
    assert [umem.location(x).managed for x in (a, b)] == [False, True]


def test_enabling_again_with_the_same_share_is_the_same(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    with umem.enable(limit="50%") as handle:
        monkeypatch.setattr(host_memory, "available_bytes", lambda: MIB)
        assert umem.enable(limit="50.0 %") is handle
        assert gpu.policy.limit_bytes == HOST_BYTES // 2


def test_the_machines_own_memory_is_what_a_percentage_is_of() -> None:
    if host_memory.available_bytes() is None:
        pytest.skip("this machine does not say")
    with umem.virtual_gpu("t4", vram="16MiB") as gpu, umem.managed("50%"):
        assert gpu.policy.limit_bytes and gpu.policy.limit_bytes > MIB


@given(st.fractions(0, 100).filter(bool), st.integers(1, 2**50), st.sampled_from("x%"))
def test_a_share_is_rounded_down(share: Fraction, whole: int, unit: str) -> None:
    text = f"{float(share):.20f}"
    exact = Fraction(text) * whole / (100 if unit == "%" else 1)

    class Device:
        vram_bytes = whole

        def host_available_bytes(self) -> int:
            return whole

    if exact >= 1 and Fraction(text) <= 100:
        assert parse_limit(text + unit).resolve(Device()) == exact // 1  # type: ignore[arg-type]


@given(st.text("0123456789.xX% GiBkMe+-", max_size=12))
def test_whatever_is_typed_is_a_limit_or_a_size_error(text: str) -> None:
    try:
        limit = parse_limit(text)
    except SizeError as error:
        assert str(error).startswith("limit must ")
    else:
        assert 0 < limit.amount <= MAX_BYTES or limit.of == "vram"


def test_bytes_mean_the_same_however_they_are_written() -> None:
    assert parse_limit("1GiB") == parse_limit(GIB) == parse_limit("1024MiB")
    assert parse_limit("1.50x") == parse_limit("1.5X") != parse_limit("1.5%")
