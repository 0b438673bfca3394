"""The table of devices, and the one that the calling code uses.

A device is a folder here and a row of the table; `register` adds a device from outside umem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from umem._common.scopes import derived
from umem.devices import cuda_source  # noqa: F401 (recordings of CuPy)
from umem.devices.base import Device, Restore
from umem.errors import DeviceError

if TYPE_CHECKING:
    from umem._common.specs import GpuSpec


class Opener(Protocol):
    """Opens a kind of device."""

    def __call__(
        self, gpu: str | GpuSpec | None = None, vram_bytes: int | None = None
    ) -> Device | None:
        """Open the device that models ``gpu`` with the given VRAM.

        With neither, return the process's own device, or None if there is none. Raises
        DeviceNotFoundError if no other device may replace it.
        """


@dataclass(frozen=True)
class DeviceKind:
    """A row of the table of devices.

    Args:
        name: its name for ``--device``.
        simulated: whether residency and time are modelled; the user then names the GPU.
        open: opens a device of this kind.
        why_not: returns why a process has no such device outside blocks; None if it has one.
    """

    name: str
    simulated: bool
    open: Opener
    why_not: Callable[[], str | None]


def _open_virtual(gpu: str | GpuSpec | None = None, vram_bytes: int | None = None) -> Device | None:
    if gpu is None:
        return None
    from umem.devices.virtual import VirtualGPU  # half of what importing umem would cost

    return VirtualGPU(gpu, vram_bytes=vram_bytes)


def _open_cuda(gpu: str | GpuSpec | None = None, vram_bytes: int | None = None) -> Device:
    from umem.devices import cuda  # looked up at each call: tests put another opener there

    return cuda.open_cuda()


def _why_no_cuda() -> str | None:
    from umem.devices import cuda

    return cuda.cuda_reason()


_kinds = [
    DeviceKind("virtual", True, _open_virtual, lambda: "umem.virtual_gpu opens it for a block"),
    DeviceKind("cuda", False, _open_cuda, _why_no_cuda),
]
"""The table; its last row explains a missing device."""


def register(kind: DeviceKind) -> Restore:
    """Add a row before all others; returns a function that removes it."""
    _kinds.insert(0, kind)
    return lambda: _kinds.remove(kind)


def device_kind(name: str) -> DeviceKind:
    """Return a row by name.

    Raises:
        DeviceError: there is no such row; the message names the rows.
    """
    for kind in _kinds:
        if kind.name == name:
            return kind
    raise _no_such(name)


def parse_device(text: str) -> tuple[DeviceKind, str | None]:
    """Parse the value of ``--device``: a kind of device and, after a colon, the GPU to model.

    Raises:
        DeviceError: the kind is unknown; a simulated kind lacks its GPU; or another kind has one.

    >>> parse_device("virtual:t4")[1]
    't4'
    """
    name, _, gpu = text.partition(":")
    kind = device_kind(name)
    if kind.simulated != bool(gpu):
        raise _no_such(text)
    return kind, gpu or None


def _no_such(text: str) -> DeviceError:
    known = [f"{kind.name}:NAME" if kind.simulated else kind.name for kind in _kinds]
    from umem._common.nearest import did_you_mean  # importing umem does not need it

    hint = did_you_mean(text.partition(":")[0], [kind.name for kind in _kinds])
    return DeviceError(f"a device is {' or '.join(known)}; got {text}{hint and '.'}{hint}")


def current_device() -> Device:
    """Return the device of the calling code's innermost block, else the process's.

    Raises:
        DeviceNotFoundError: there is neither; the message names the ways out of it.
    """
    device = entered_device()
    for kind in _kinds:
        device = device or kind.open()
    assert device is not None  # the last row raises
    return device


def entered_device() -> Device | None:
    """Return the device of the calling code's innermost block (`umem.virtual_gpu`)."""
    return derived(_innermost)


def _innermost(payload: tuple[Any, ...]) -> Device | None:
    found = [part for part in payload if isinstance(part, Device)]
    return found[-1] if found else None
