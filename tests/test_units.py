"""Sizes and times: what is accepted, what is refused and in which words, and how they read."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.errors import SizeError
from umem.units import (
    GIB,
    KIB,
    MIB,
    format_apart,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("512B", 512),
        ("1.5GiB", 3 << 29),
        ("256MiB", 256 << 20),
        ("24G", 24 << 30),
        ("8GB", 8 * 10**9),
        ("2 mib", 2 << 20),
        (" 4KiB\n", 4096),
        (".5K", 512),
        ("3.TB", 3 * 10**12),
        ("1tib", 1 << 40),
    ],
)
def test_text_is_read_as_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("value", [1, 2**63 - 1, np.int64(7), np.uint8(7), np.array(7)])
def test_whole_numbers_are_bytes_and_become_python_ints(value: object) -> None:
    size = parse_bytes(value)  # type: ignore[arg-type]
    assert size == int(value)  # type: ignore[call-overload]
    assert type(size) is int


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "0",
        "0GiB",
        "-1GiB",
        "+1GiB",
        "12 parsecs",
        "1,5GiB",
        "1.5.2G",
        "GiB",
        "1e3",
        "0x10",
        "inf",
        "nan",
        "1 2",
        "1G iB",
        "٣GiB",
        "0.1B",
        True,
        False,
        1.5,
        2.0,
        None,
        [],
        b"1GiB",
        0,
        -5,
        np.float32(2),
        np.array([1, 2]),
    ],
)
def test_what_is_no_size_is_refused_by_the_name_the_caller_gave(value: object) -> None:
    with pytest.raises(SizeError, match=r"^limit must be ") as caught:
        parse_bytes(value, "limit")  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "size", ["9" * 400, "9" * 400 + ".5TiB", "9" * 5000, "8388608TiB", "0." + "1" * 99, 2**63]
)
def test_what_no_address_reaches_is_no_size(size: str | int) -> None:
    with pytest.raises(SizeError, match=r"^vram must be "):
        parse_bytes(size, "vram")


def test_whole_numbers_in_text_are_exact() -> None:
    assert parse_bytes("9007199254740993") == 9007199254740993
    assert parse_bytes("1125899906842625.5KiB") == 1125899906842625 * KIB + 512


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_size_error(text: str) -> None:
    try:
        assert parse_bytes(text) > 0
    except SizeError as error:
        assert "size" in str(error)


@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from(["KiB", "MiB", "GiB", "GB"]))
def test_fractions_are_within_a_byte_of_exact_arithmetic(
    whole: int, thousandths: int, unit: str
) -> None:
    factor = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "GB": 10**9}[unit]
    exact = Fraction(whole * 1000 + thousandths, 1000) * factor
    got = parse_bytes(f"{whole}.{thousandths:03}{unit}")
    assert abs(got - exact) <= max(1, exact * Fraction(1, 2**52))


def test_sizes_read_well() -> None:
    shown = [format_bytes(n) for n in (0, 1, 1023, 1024, 1536 << 20, 5 << 40, -2048, None)]
    assert shown == ["0 B", "1 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB", "-2.0 KiB", "unknown"]


@given(st.integers(1, 2**60))
def test_a_size_that_was_shown_reads_back_within_its_rounding(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.051)


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=4))
def test_sizes_that_differ_never_read_the_same(sizes: list[int]) -> None:
    shown = format_apart(*sizes)
    for a, one in zip(sizes, shown, strict=True):
        for b, other in zip(sizes, shown, strict=True):
            assert (a == b) == (one == other)
    assert format_apart(1 << 30) == ["1.0 GiB"]


def test_times_read_well() -> None:
    seconds = (
        0,
        1e-6,
        0.0123,
        0.99999,
        1,
        119,
        119.97,
        131,
        150,
        3599.4,
        3599.6,
        7300,
        None,
        float("inf"),
    )
    assert [format_seconds(s) for s in seconds] == [
        "0 s",
        "1.0 us",
        "12.3 ms",
        "1.0 s",
        "1.0 s",
        "119.0 s",
        "120.0 s",
        "2 min 11 s",
        "2 min 30 s",
        "59 min 59 s",
        "60 min",
        "2 h 2 min",
        "unknown",
        "inf",
    ]


def test_a_size_may_be_a_share() -> None:
    texts = {"60%": (Fraction(3, 5), "%"), " 1.5 X ": (Fraction(3, 2), "x"), "12GiB": 12 << 30}
    assert {text: parse_size(text, "budget", "%x", "") for text in texts} == texts


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ("1.5x", "be a size such as"), ("101%", "be at most 100%"), ("0%", "be above zero"),
        ("1e1%", "be a size such as"), (0.5, "be bytes as an int"), ("1" * 41 + "%", "be a size "),
    ],
)  # fmt: skip
def test_what_is_no_size_nor_a_share_says_what_is(size: Any, reason: str) -> None:
    with pytest.raises(SizeError, match=rf"^budget must {reason}.*\. A budget is so and so$"):
        parse_size(size, "budget", "%", "A budget is so and so")
