"""Limits: how much memory a mode may reserve.

A limit is bytes as an int, or text: ``"24GiB"``, ``"1.5x"`` (of VRAM), or ``"90%"`` (of the host
memory that is available). Shares are resolved when a mode is turned on, because only then is the
device known, and because the available host memory changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, SupportsIndex

from umem.devices import Device
from umem.errors import SizeError
from umem.units import MAX_BYTES, RelativeSize, format_bytes, parse_size

if TYPE_CHECKING:
    from fractions import Fraction

Size = str | SupportsIndex

ACCEPTED = (
    'A limit is bytes as an int, or text: "24GiB", "1.5x" of VRAM, or "90%" of the host memory '
    "that is available"
)


@dataclass(frozen=True)
class Limit:
    """A limit as given: in ``"bytes"``, or as a share of ``"vram"`` or ``"host"``."""

    of: Literal["bytes", "vram", "host"]
    amount: int | Fraction
    text: str = field(compare=False)
    name: str = field(compare=False, default="limit")

    def resolve(self, device: Device) -> int:
        """Return the limit in bytes, for this device at this time.

        Bytes and shares of VRAM cost nothing; a share of the host costs a few file reads.

        Raises:
            SizeError: the share is less than a byte or more than the address space, or the
                available host memory is unknown.
        """
        if self.of == "bytes":
            return int(self.amount)
        whole = device.vram_bytes if self.of == "vram" else self._host_bytes(device)
        nbytes = int(self.amount * whole)
        if 0 < nbytes <= MAX_BYTES:
            return nbytes
        raise SizeError(
            f"{self.name} of {self.text} of {format_bytes(whole)} is not a valid size. {ACCEPTED}"
        )

    def _host_bytes(self, device: Device) -> int:
        available = device.host_available_bytes()
        if available is None:
            raise SizeError(
                f"{self.name} of {self.text} cannot be resolved: this system does not report its "
                'available host memory. Give bytes, or a share of VRAM such as "1.5x"'
            )
        return available


def parse_limit(limit: Size, name: str = "limit") -> Limit:
    """Parse a limit without asking a device.

    Args:
        limit: above zero; a percentage is at most 100.
        name: the argument's name, which begins the error message.

    Raises:
        SizeError: the limit is invalid; the message names the accepted forms.

    >>> parse_limit("1.5x").amount, parse_limit("24GiB").amount
    (Fraction(3, 2), 25769803776)
    """
    size = parse_size(limit, name, "%x", ACCEPTED)
    if not isinstance(size, RelativeSize):
        return Limit("bytes", size, str(limit), name)
    return Limit("vram" if size.unit == "x" else "host", size.factor, str(limit).strip(), name)
