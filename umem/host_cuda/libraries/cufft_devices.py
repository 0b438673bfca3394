"""Transforms of one dimension over several devices: cuFFT's functions on descriptors.

Models: transforms in place; each device has some of the transforms, or a part of a single
transform's elements. Does not model: cuFFT's permutation of the parts of a single transform, which
stay in order here, so that copies keep it; the time of exchanges between devices.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from umem._common.arithmetic import of_dtype
from umem.host_cuda.libraries.cufft import FORWARD, INVALID_PLAN, SUCCESS, HostFft, flops
from umem.host_cuda.libraries.handles import Array, scipy_module
from umem.host_cuda.observer import Launch

INVALID_DEVICE = 11
"""Value of cufftResult, from cufft.h."""
TO_DEVICES, TO_HOST = 0, 1
"""Values of cufftXtCopyType from cufftXt.h; 2 copies from devices to devices."""
MOST_PARTS = 64
C_FUNCTIONS = {
    "cufftXtSetGPUs": "iip",
    "cufftXtSetWorkArea": "ip",
    "cufftXtMemcpy": "ippi",
    "cufftXtExecDescriptorC2C": "ippi",
    "cufftXtExecDescriptorZ2Z": "ippi",
}
"""The functions that CuPy calls for several devices; see `umem.host_cuda.linking`."""


class _XtParts(ctypes.Structure):
    """cudaXtDesc, of cudalibxt.h."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("count", ctypes.c_int),
        ("devices", ctypes.c_int * MOST_PARTS),
        ("addresses", ctypes.c_void_p * MOST_PARTS),
        ("sizes", ctypes.c_size_t * MOST_PARTS),
        ("state", ctypes.c_void_p),
    )


class _XtDescriptor(ctypes.Structure):
    """cudaLibXtDesc, of cudalibxt.h."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("parts", ctypes.POINTER(_XtParts)),
        ("library", ctypes.c_int),
        ("format", ctypes.c_int),
        ("own", ctypes.c_void_p),
    )


def _parts(descriptor: int) -> list[tuple[int, int, int]]:
    """Return the device, the address and the bytes of each part."""
    found = _XtDescriptor.from_address(descriptor).parts.contents
    pieces = zip(found.devices, found.addresses, found.sizes, strict=True)
    return [(n, address or 0, size) for n, address, size in [*pieces][: found.count]]


class DeviceFft(HostFft):
    """cuFFT's functions for plans on one or several devices."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counts: dict[int, int] = {}  # of devices, by plan
        self.cufftXtExecDescriptorC2C = self.cufftXtExecDescriptorZ2Z = self._transform_parts

    def cufftXtSetGPUs(self, plan: int, count: int, devices: int) -> int:
        if not all(0 <= n < self._runtime.count for n in self._vector("i4", devices, count)):
            return INVALID_DEVICE
        self._counts[plan] = count
        return SUCCESS

    cufftXtSetWorkArea = HostFft.fine

    def cufftMakePlan1d(self, plan: int, length: int, kind: int, count: int, work: int) -> int:
        sizes = (ctypes.c_size_t * self._counts.get(plan, 1)).from_address(work)
        sizes[:] = [0] * len(sizes)
        return super().cufftMakePlan1d(plan, length, kind, count, work)

    def cufftDestroy(self, plan: int) -> int:
        self._counts.pop(plan, None)
        return super().cufftDestroy(plan)

    def cufftXtMemcpy(self, plan: int, made: int, given: int, kind: int) -> int:
        """Copy each part; on the host the parts are contiguous."""
        parts = _parts(given if kind == TO_HOST else made)
        others = [address for _, address, _ in _parts(given)] if kind > TO_HOST else []
        place = given if kind == TO_DEVICES else made
        for index, (_, address, size) in enumerate(parts):
            other = others[index] if others else place
            target, source = (other, address) if kind == TO_HOST else (address, other)
            self._runtime.copy(target, source, size)
            place += size
        return SUCCESS

    def _transform_parts(self, plan: int, given: int, made: int, direction: int) -> int:
        """Transform in place the parts on several devices that the descriptor ``given`` lists.

        Returns:
            `SUCCESS`; or INVALID_PLAN if there is no such plan.
        """
        found = self._made.get(plan)
        if found is None:
            return INVALID_PLAN
        dtype, length = np.dtype(found.given.dtype), found.shape[0]
        parts: list[Array] = []
        for device, address, size in _parts(given):
            part = self._vector(dtype, address, size // dtype.itemsize)
            access = self._runtime.access_of(part)
            work = int(flops(length, part.size / length))
            launch = Launch("fft", device, access, access, flops=work, arithmetic=of_dtype(dtype))
            self._runtime.operation(launch)
            parts.append(part)
        is_one = found.given.shape[0] == 1
        for rows in [np.concatenate(parts)] if is_one else parts:
            _transform_rows(rows.reshape(-1, length), direction)
            if is_one:
                ends = np.cumsum([part.size for part in parts])[:-1]
                for part, made_part in zip(parts, np.split(rows, ends), strict=True):
                    part[...] = made_part
        return SUCCESS


def _transform_rows(rows: Array, direction: int) -> None:
    fft = scipy_module("fft")
    rows[...] = fft.fft(rows) if direction == FORWARD else fft.ifft(rows, norm="forward")
