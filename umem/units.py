"""Parse and format sizes and times: ``"1.5GiB"``, ``"60%"``, ``"1.5x"``.

Bytes are ints everywhere in umem; KiB, MiB and GiB (powers of 1024) appear only in text that a
person reads or types.
"""

from __future__ import annotations

import math
import operator
import re
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from umem.errors import SizeError

if TYPE_CHECKING:
    from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
MAX_BYTES = (1 << 63) - 1
BLOCK_BYTES = 2 * MIB
"""The unit in which the driver moves managed memory (uvm_va_block.h of NVIDIA's open driver)."""


_FACTORS = {
    "": 1, "B": 1,
    "K": KIB, "KIB": KIB, "M": MIB, "MIB": MIB, "G": GIB, "GIB": GIB, "T": TIB, "TIB": TIB,
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*|%)\s*")


def parse_bytes(size: str | SupportsIndex, name: str = "size") -> int:
    """Parse a size: an int, or text such as ``"1.5GiB"``, ``"256MiB"``, ``"24G"`` or ``"8GB"``.

    ``KiB``, ``MiB``, ``GiB`` and the bare letters are powers of 1024, ``kB``, ``MB`` and ``GB``
    powers of 1000.

    Args:
        size: the size, above zero.
        name: the argument's name, which begins the error message.

    Raises:
        SizeError: the size is invalid, zero, negative, or 8 EiB or more.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if isinstance(size, str):
        value = _parse_text(size, name)
    else:
        try:
            if isinstance(size, bool):
                raise TypeError
            value = operator.index(size)
        except TypeError:
            raise SizeError(
                f'{name} must be bytes as an int, or text such as "1.5GiB"; got {size!r}'
            ) from None
    if value <= 0:
        raise SizeError(f"{name} must be above zero; got {size!r}")
    if value > MAX_BYTES:
        raise SizeError(f"{name} must be below 8 EiB, the end of 64-bit addresses; got {size!r}")
    return value


def _parse_text(text: str, name: str) -> int:
    """Parse a size given as text.

    Raises:
        SizeError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise SizeError(f'{name} must be a size such as "256MiB" or "1.5GiB"; got {text!r}')
    return round(_number(match, name) * factor)


def _number(match: re.Match[str], name: str) -> Fraction:
    """Return the number of a size.

    Raises:
        SizeError: the number has more than 40 digits.
    """
    if len(match[1]) > 40:  # more than any size needs, and fewer than Python's own limit
        raise SizeError(f"{name} must be a size of at most 40 digits; got {match[0]!r}")
    from fractions import Fraction  # loads decimal too, so not when umem is imported

    return Fraction(match[1])


class RelativeSize(NamedTuple):
    """A size as ``factor`` times another one; ``unit`` is "%" or "x"."""

    factor: Fraction
    unit: str


def parse_size(
    size: str | SupportsIndex, name: str, shares: str, accepted: str
) -> int | RelativeSize:
    """Parse a size as `parse_bytes` does, or a share such as ``"60%"`` or ``"1.5x"``.

    Args:
        size: above zero; a percentage is at most 100.
        name: the argument's name, which begins the error message.
        shares: the accepted units of shares, ``"%"`` or ``"%x"``.
        accepted: a sentence on the accepted values, which ends the error message.

    Raises:
        SizeError: the size is neither.

    >>> parse_size("60%", "budget", "%", "A budget is ...")
    RelativeSize(factor=Fraction(3, 5), unit='%')
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = match[2].lower() if match else ""
    try:
        if match and unit and unit in shares:
            return _parse_share(match, unit, name)
        return parse_bytes(size, name)
    except SizeError as error:
        raise SizeError(f"{error}. {accepted}") from None


def _parse_share(match: re.Match[str], unit: str, name: str) -> RelativeSize:
    """Parse a size that is a share.

    Raises:
        SizeError: the share is 0, above 100%, or has more than 40 digits.
    """
    number = _number(match, name)
    if not number:
        raise SizeError(f"{name} must be above zero; got {match[0]!r}")
    if unit == "%" and number > 100:
        raise SizeError(f"{name} must be at most 100%; got {match[0]!r}")
    return RelativeSize(number / 100 if unit == "%" else number, unit)


def format_bytes(nbytes: int | float | None) -> str:
    """Format a size for a person; None is "unknown".

    >>> format_bytes(1610612736), format_bytes(512)
    ('1.5 GiB', '512 B')
    """
    if nbytes is None:
        return "unknown"
    return _scaled(nbytes, 1)


def _scaled(nbytes: int | float, digits: int) -> str:
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def format_apart(*sizes: int) -> list[str]:
    """Format sizes with enough digits that different ones read differently.

    >>> format_apart(1788 << 20, 1789 << 20), format_apart(1 << 30, (1 << 30) + 1)
    (['1.746 GiB', '1.747 GiB'], ['1073741824 B', '1073741825 B'])
    """
    for digits in (1, 2, 3):
        shown = [_scaled(nbytes, digits) for nbytes in sizes]
        if len(set(shown)) == len(set(sizes)):
            return shown
    return [f"{nbytes} B" for nbytes in sizes]


def format_seconds(seconds: float | None) -> str:
    """Format a time for a person; None is "unknown".

    >>> format_seconds(0.0123), format_seconds(7300)
    ('12.3 ms', '2 h 2 min')
    """
    if seconds is None:
        return "unknown"
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds == 0:
        return "0 s"
    for unit, factor in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.95 * factor:
            return f"{seconds / factor:.1f} {unit}"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
