"""Refuses copies and fills whose ranges or directions CUDA refuses.

A range that begins in an allocation may not leave it, and a fill needs device memory. A direction
that does not match its pointers is undefined in CUDA, and an error in checked mode.
"""

from __future__ import annotations

import ctypes

from umem.host_cuda.memory_ranges import DEVICE, Allocation
from umem.host_cuda.pools import INVALID_VALUE, HostPools
from umem.host_cuda.strictness import refuse

INVALID_PITCH, INVALID_DIRECTION = 12, 21
"""Values of cudaError, from driver_types.h."""
_DEFAULT = 4
"""cudaMemcpyDefault: the pointers determine the direction."""
_FROM_HOST, _TO_HOST = (0, 1), (0, 2)
"""Values of cudaMemcpyKind with the host on one side."""


class _Object(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


_dladdr = ctypes.CDLL(None).dladdr
_dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Object)]


def is_variable(address: int) -> bool:
    """Tell whether an address is in a shared object, as the variables of kernels are."""
    return bool(_dladdr(address, ctypes.byref(_Object())))


class CopyChecks(HostPools):
    """Refuses copies and fills before they have any effect."""

    def refuse_range(self, name: str, address: int, nbytes: int) -> None:
        """Raise if a fill or a copy leaves an allocation; see `_checked`."""
        if self.is_strict and nbytes:
            found = self._checked(name, address, nbytes)
            if found is None and name == "fill" and not is_variable(address):
                why = f"a fill of {nbytes:,} bytes at {address:#x}, where no array of a GPU is"
                refuse(self.fail, INVALID_VALUE, why)

    def refuse_copy(self, dst: int, src: int, nbytes: int, kind: int) -> None:
        """Raise if a copy leaves an allocation, or has an invalid or wrong direction.

        Checks for a wrong direction in checked mode only.
        """
        if not self.is_strict:
            return
        if not 0 <= kind <= _DEFAULT:
            refuse(self.fail, INVALID_DIRECTION, f"{kind} is not a direction of a copy")
        if nbytes:
            source = self._checked("copy", src, nbytes)
            target = self._checked("copy", dst, nbytes)
            if self.is_checked and kind != _DEFAULT:
                self._refuse_side("source", src, source, kind in _FROM_HOST)
                self._refuse_side("target", dst, target, kind in _TO_HOST)

    def refuse_copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, kind: int
    ) -> None:
        """Raise for a copy of rows, as `refuse_copy`, or if rows are wider than their pitch."""
        if not (self.is_strict and width and height):
            return
        if width > min(dst_pitch, src_pitch):
            pitches = f"{dst_pitch:,} and {src_pitch:,} bytes apart"
            refuse(self.fail, INVALID_PITCH, f"rows of {width:,} bytes are {pitches}")
        self.refuse_copy(dst, src, width, kind)
        self._checked("copy", dst, (height - 1) * dst_pitch + width)
        self._checked("copy", src, (height - 1) * src_pitch + width)

    def _checked(self, name: str, address: int, nbytes: int) -> Allocation | None:
        """Return the allocation that contains a range; None if it begins outside all.

        Raises CuPy's error for a null pointer, and for a range that leaves its allocation.
        """
        if not address:
            refuse(self.fail, INVALID_VALUE, f"a {name} of {nbytes:,} bytes has a null pointer")
        found = self.allocation_of(address)
        if found is not None and address + nbytes > found.address + found.nbytes:
            left = found.address + found.nbytes - address
            why = f"a {name} of {nbytes:,} bytes, {left:,} before the end of an allocation"
            refuse(self.fail, INVALID_VALUE, why)
        return found

    def _refuse_side(
        self, side: str, address: int, found: Allocation | None, is_host: bool
    ) -> None:
        """Raise if a pointer contradicts the direction; pinned memory matches both sides."""
        is_of_device = found is not None and found.kind == DEVICE
        is_pageable = found is None and not is_variable(address)
        if is_of_device if is_host else is_pageable:
            claimed, there = ("host", "GPU") if is_host else ("GPU", "host")
            why = f"a copy whose {side} is memory of the {there}, but its direction says {claimed}"
            refuse(self.fail, INVALID_VALUE, why)
