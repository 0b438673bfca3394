"""Limits: how much memory a mode may reserve, as people write it.

A limit is bytes as an int, or text: ``"24GiB"``, ``"1.5x"`` (of VRAM), or ``"90%"`` (of the host
memory that is available). Shares are resolved when a mode is switched on, because only then the
device is known, and because the host's memory changes.
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
        """Return the limit in bytes, for this device and now.

        Costs nothing for bytes and shares of VRAM; a few file reads for a share of the host.

        Raises:
            SizeError: the share comes to less than a byte or more than addresses reach, or the
                host does not say what is available.
        """
        if self.of == "bytes":
            return int(self.amount)
        whole = device.vram_bytes if self.of == "vram" else self._host_bytes(device)
        nbytes = int(self.amount * whole)
        if 0 < nbytes <= MAX_BYTES:
            return nbytes
        raise SizeError(
            f"{self.name} of {self.text}, with {format_bytes(whole)} there, is no size. {ACCEPTED}"
        )

    def _host_bytes(self, device: Device) -> int:
        available = device.host_available_bytes()
        if available is None:
            raise SizeError(
                f"{self.name} of {self.text} cannot be resolved: this system does not say how much "
                'host memory is available. Give bytes, or a share of VRAM such as "1.5x"'
            )
        return available


def parse_limit(limit: Size, name: str = "limit") -> Limit:
    """Parse a limit without asking a device.

    Args:
        limit: above zero; a percentage is at most 100.
        name: of the argument; it starts the error message.

    Raises:
        SizeError: it is no limit; the message names what is accepted.

    >>> parse_limit("1.5x").amount, parse_limit("24GiB").amount
    (Fraction(3, 2), 25769803776)
    """
    size = parse_size(limit, name, "%x", ACCEPTED)
    if not isinstance(size, RelativeSize):
        return Limit("bytes", size, str(limit), name)
    return Limit("vram" if size.unit == "x" else "host", size.factor, str(limit).strip(), name)
