"""cuFFT with SciPy: the C functions that ``cupy.cuda.cufft`` calls, under the same names.

Models: plans of one or several dimensions, in single and double precision; `cufft_devices` has
plans for several devices. Does not model: half precision, callbacks; such a call returns "not
supported".
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from umem.host_cuda.libraries.handles import DATA_TYPES, Array, HostLibrary, scipy_module
from umem.host_cuda.runtime import HostRuntime
from umem.host_cuda.sharing import usable_cores

VERSION = 11302
SUCCESS, INVALID_PLAN, NOT_SUPPORTED = 0, 1, 16
"""Values of cufftResult, from cufft.h."""
KINDS = {
    0x2A: ("f4", "c8"), 0x2C: ("c8", "f4"), 0x29: ("c8", "c8"),
    0x6A: ("f8", "c16"), 0x6C: ("c16", "f8"), 0x69: ("c16", "c16"),
}  # fmt: skip
"""Values of cufftType from cufft.h: R2C, C2R, C2C, and the same in double precision."""
FORWARD = -1
C_FUNCTIONS = {
    "cufftGetVersion": "p",
    "cufftCreate": "p",
    "cufftDestroy": "i",
    "cufftSetAutoAllocation": "ii",
    "cufftSetWorkArea": "ip",
    "cufftSetStream": "ip",
    "cufftMakePlan1d": "iiiip",
    "cufftMakePlanMany": "iippiipiiiip",
    "cufftXtMakePlanMany": "iippllipllilpi",
    "cufftExecC2C": "ippi",
    "cufftExecZ2Z": "ippi",
    "cufftExecR2C": "ipp",
    "cufftExecD2Z": "ipp",
    "cufftExecC2R": "ipp",
    "cufftExecZ2D": "ipp",
    "cufftXtExec": "ippi",
}
"""The functions that CuPy calls, with their argument types; see `umem.host_cuda.linking`."""


class FftSide(NamedTuple):
    """Layout of one side of a transform: dtype, lengths and steps, in elements."""

    dtype: Any
    shape: tuple[int, ...]
    steps: tuple[int, ...]


class FftPlan(NamedTuple):
    """A transform of `shape`, repeated by the first length of both sides."""

    shape: tuple[int, ...]
    given: FftSide
    made: FftSide


class HostFft(HostLibrary):
    """cuFFT's functions; plans are identified by handle, and each call returns a cufftResult."""

    def __init__(self, runtime: HostRuntime) -> None:
        super().__init__(runtime)
        self.cufftExecC2C = self.cufftExecZ2Z = self.cufftXtExec = self._transform
        self.cufftExecR2C = self.cufftExecD2Z = self.cufftExecC2R = self._transform
        self.cufftExecZ2D = self._transform

    def cufftGetVersion(self, version: int) -> int:
        self._vector("i4", version, 1)[0] = VERSION
        return SUCCESS

    def cufftCreate(self, plan: int) -> int:
        self._vector("i4", plan, 1)[0] = self._keep(None)
        return SUCCESS

    def cufftDestroy(self, plan: int) -> int:
        self._drop(plan)
        return SUCCESS

    def fine(self, *_: int) -> int:
        """Return success: streams and work areas have no effect."""
        return SUCCESS

    cufftSetAutoAllocation = cufftSetWorkArea = cufftSetStream = fine

    # -- plans -----------------------------------------------------------------------------

    def cufftMakePlan1d(self, plan: int, length: int, kind: int, count: int, work: int) -> int:
        return self._plan(plan, (length,), KINDS[kind], (None, None), count, work)

    def cufftMakePlanMany(
        self, plan: int, rank: int, lengths: int, embedded: int, step: int, distance: int,
        out_embedded: int, out_step: int, out_distance: int, kind: int, count: int, work: int,
    ) -> int:  # fmt: skip
        sides = (embedded, step, distance), (out_embedded, out_step, out_distance)
        return self._plan_many(plan, rank, "i4", lengths, sides, KINDS[kind], count, work)

    def cufftXtMakePlanMany(
        self, plan: int, rank: int, lengths: int, embedded: int, step: int, distance: int,
        given_type: int, out_embedded: int, out_step: int, out_distance: int, made_type: int,
        count: int, work: int, compute_type: int,
    ) -> int:  # fmt: skip
        """Make a plan with a separate type for each side."""
        types = DATA_TYPES.get(given_type), DATA_TYPES.get(made_type)
        kinds = tuple(None if kind is None else np.dtype(kind).str[1:] for kind in types)
        if kinds not in KINDS.values():
            return NOT_SUPPORTED
        sides = (embedded, step, distance), (out_embedded, out_step, out_distance)
        return self._plan_many(plan, rank, "i8", lengths, sides, kinds, count, work)

    def _plan_many(
        self, plan: int, rank: int, index: str, lengths: int, sides: Any, kinds: Any, count: int,
        work: int,
    ) -> int:  # fmt: skip
        """Make a plan from the lengths and layouts at addresses."""
        shape = tuple(int(n) for n in self._vector(index, lengths, rank))
        layouts = [
            ([int(n) for n in self._vector(index, embedded, rank)], step, distance)
            if embedded
            else None
            for embedded, step, distance in sides
        ]
        return self._plan(plan, shape, kinds, layouts, count, work)

    def _plan(
        self, plan: int, shape: tuple[int, ...], kinds: Any, sides: Any, count: int, work: int
    ) -> int:
        """Make a plan; no work area is needed."""
        half = (*shape[:-1], shape[-1] // 2 + 1)
        is_real = [np.dtype(kind).kind == "f" for kind in kinds]
        given, made = (
            _layout(kind, half if any(is_real) and not real else shape, side, count)
            for kind, real, side in zip(kinds, is_real, sides, strict=True)
        )
        self._made[plan] = FftPlan(shape, given, made)
        ctypes.c_size_t.from_address(work).value = 0
        return SUCCESS

    # -- transforms ------------------------------------------------------------------------

    def _side(self, layout: FftSide, address: int) -> Array:
        dtype = np.dtype(layout.dtype)
        strides = tuple(step * dtype.itemsize for step in layout.steps)
        return self._runtime.view(address, dtype, layout.shape, strides)

    def _transform(self, plan: int, given: int, made: int, direction: int = FORWARD) -> int:
        """Run a plan from one address to another."""
        found = self._made.get(plan)
        if found is None:
            return INVALID_PLAN
        read, written = self._side(found.given, given), self._side(found.made, made)
        work = flops(math.prod(found.shape), written.shape[0])
        self._tell("fft", (read,), (written,), work)
        fft, axes, workers = scipy_module("fft"), tuple(range(1, read.ndim)), usable_cores()
        if read.dtype.kind == "f":
            written[...] = fft.rfftn(read, axes=axes, workers=workers)
        elif written.dtype.kind == "f":  # a sum that nothing divides, as in cuFFT
            written[...] = fft.irfftn(read, found.shape, axes, norm="forward", workers=workers)
        elif direction == FORWARD:
            written[...] = fft.fftn(read, axes=axes, workers=workers)
        else:
            written[...] = fft.ifftn(read, axes=axes, norm="forward", workers=workers)
        return SUCCESS


def flops(points: int, count: float) -> float:
    """Estimate the operations of transforms."""
    return 5 * count * points * math.log2(max(2, points))


def _layout(kind: str, shape: tuple[int, ...], side: Any, count: int) -> FftSide:
    """Return the layout of one side: packed, or cuFFT's advanced layout."""
    embedded, step, distance = side or (shape, 1, math.prod(shape))
    steps = [step * math.prod(embedded[axis + 1 :]) for axis in range(len(shape))]
    return FftSide(kind, (count, *shape), (distance, *steps))
