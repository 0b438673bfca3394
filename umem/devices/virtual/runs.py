"""Runs of equal values in tables with one entry for each block."""

from __future__ import annotations

from collections.abc import Iterator


def first_of_stamp(stamps: list[int], low: int, stop: int, stamp: int) -> int:
    """Return the first block at or after ``low`` with the stamp, or ``stop``."""
    try:
        return stamps.index(stamp, low, stop)
    except ValueError:
        return stop


def end_of_stamp(stamps: list[int], low: int, stop: int, stamp: int) -> int:
    """Return the end of the run of ``stamp`` that starts at ``low``."""
    while low < stop and stamps[low] == stamp:
        low += 1
    return low


def end_of_run(table: bytearray, low: int, stop: int) -> int:
    """Return the end of the run of equal values that starts at ``low``."""
    value = table[low]
    if stop - low == 1 or table.count(value, low, stop) == stop - low:
        return stop
    rest = table[low:stop]
    return low + len(rest) - len(rest.lstrip(bytes((value,))))


def end_of_flags(table: bytearray, low: int, stop: int) -> int:
    """Return `end_of_run` for a table of zeros and ones, several times faster."""
    high = table.find(1 - table[low], low, stop)
    return stop if high < 0 else high


def stretches(table: bytearray, value: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield maximal runs of ``value`` (0 or 1); the table may change behind the position."""
    cursor = start
    while True:
        low = table.find(value, cursor, stop)
        if low < 0:
            return
        high = table.find(1 - value, low, stop)
        cursor = stop if high < 0 else high
        yield low, cursor


def fill(table: bytearray, low: int, high: int, value: int) -> None:
    """Set a range of a table to one value."""
    if high - low == 1:
        table[low] = value
    else:
        table[low:high] = (b"\x00" if value == 0 else bytes((value,))) * (high - low)
