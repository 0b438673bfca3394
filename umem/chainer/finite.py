"""Searches for infinities, NaN and numbers that are too large, by the bits of floats.

Magnitudes of floats have the order of their bits, with infinity and NaN above all numbers, so that
no floating-point temporaries are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from chainer.backends import cuda

from umem.devices import is_dry

Named = tuple[str, Any]
SQUARED = 1.8446743e19
"""Squares of larger values overflow float32."""
LARGEST = float(np.finfo(np.float64).max)
LARGEST_SINGLE = float(np.finfo(np.float32).max)
_CHUNK = 1 << 16
"""Numbers checked at once on NumPy: 256 KiB of float32, in the cache of any of today's cores. A
choice, not measured."""
_TILE = 1 << 14
"""Numbers of a block of threads. A choice, not measured."""
_SOURCE = r"""
extern "C" __global__
void any_not_finite(const unsigned long long* tiles, bool* found) {
    const unsigned long long* tile = tiles + 5 * blockIdx.x;
    const unsigned long long count = tile[1], most = tile[3];
    bool is_beyond = false;
    for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x) {
        if (tile[2] == 2) {
            const unsigned short* bits = reinterpret_cast<const unsigned short*>(tile[0]);
            is_beyond |= (bits[i] & 0x7FFFu) > most;
        } else if (tile[2] == 4) {
            const unsigned int* bits = reinterpret_cast<const unsigned int*>(tile[0]);
            is_beyond |= (bits[i] & 0x7FFFFFFFu) > most;
        } else {
            const unsigned long long* bits = reinterpret_cast<const unsigned long long*>(tile[0]);
            is_beyond |= (bits[i] & 0x7FFFFFFFFFFFFFFFull) > most;
        }
    }
    if (is_beyond) {
        found[tile[4]] = true;
    }
}
"""


def all_finite(arrays: Sequence[Any]) -> bool:
    """Tell whether floating-point arrays have no infinity and no NaN; see `first_beyond`."""
    return first_beyond([("", array) for array in arrays]) is None


def is_finite(array: Any) -> bool:
    """Tell whether an array has no infinity and no NaN."""
    return all_finite([array])


def first_beyond(arrays: Iterable[Named], largest: float = LARGEST) -> Named | None:
    """Find the first named array with a value that is not finite, or too large; None without one.

    Reads each array once. On a GPU one kernel checks all arrays, with one wait.

    Args:
        arrays: of floats of 16, 32 or 64 bits, by name; of NumPy, or with some of CuPy, all on one
            device.
        largest: the largest allowed absolute value.
    """
    named = list(arrays)
    if all(isinstance(array, np.ndarray) for _, array in named):
        found = np.array([_is_beyond(array, largest) for _, array in named], bool)
    else:
        found = _beyond_on_gpu([array for _, array in named], largest)
    return named[int(found.argmax())] if found.any() else None


def why(array: Any, largest: float = LARGEST) -> str:
    """Describe what is wrong with an array: how many values, and where the first is."""
    values = np.asarray(cuda.to_cpu(array), np.float64)
    wrong = ~(np.abs(values) <= largest)
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    is_finite = np.isfinite(values).all()
    what = f"beyond {largest:.1e} in size" if is_finite else "NaN or infinity"
    return f"{int(wrong.sum())} of {values.size} values are {what}, the first at {where}"


def _most(dtype: Any, largest: float) -> Any:
    """Return the bits of the largest allowed number of a type, as an integer."""
    limits = np.finfo(dtype)
    most = np.array(min(largest, float(limits.max)), dtype)
    if float(most) > largest:  # rounded up
        most = np.nextafter(most, np.array(0, dtype))
    return most.view(f"u{most.itemsize}")[()]


def _is_beyond(array: np.ndarray[Any, Any], largest: float) -> bool:
    """Check an array chunk by chunk, without temporaries larger than the cache."""
    if array.dtype.kind != "f":  # integers from a file
        array = array.astype(np.float64)
    most = _most(array.dtype, largest)
    sign_free = np.iinfo(most.dtype).max >> 1
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    for start in range(0, array.size, _CHUNK):
        part = np.ascontiguousarray(flat[start : start + _CHUNK])
        if not _is_clearly_within(part, largest):
            if (part.view(most.dtype) & sign_free).max() > most:
                return True
    return False


def _is_clearly_within(part: np.ndarray[Any, Any], largest: float) -> bool:
    """Tell whether a float32 sum of squares is finite, which proves fast that each square is."""
    if part.dtype != np.float32 or largest < SQUARED:
        return False
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(part, part)))


def _beyond_on_gpu(arrays: list[Any], largest: float) -> np.ndarray[Any, Any]:
    """Tell for each array whether it has a value beyond ``largest``; NumPy's are uploaded."""
    found = cuda.cupy.zeros(len(arrays), bool)
    whole = [cuda.cupy.ascontiguousarray(array) for array in arrays]
    tiles = np.concatenate([_tiles(array, i, largest) for i, array in enumerate(whole)])
    if len(tiles):
        _kernel()((len(tiles),), (256,), (cuda.cupy.asarray(tiles), found))
    # This is also read in a dry run, which waits as long.
    flags: np.ndarray[Any, Any] = cuda.cupy.asnumpy(found)
    return flags & (not is_dry())


def _tiles(array: Any, index: int, largest: float) -> np.ndarray[Any, Any]:
    """Return the work of blocks of threads: rows of address, count, item size, bits, and index."""
    starts = np.arange(0, array.size, _TILE, dtype=np.uint64)
    tiles = np.empty((len(starts), 5), np.uint64)
    tiles[:, 0] = np.uint64(array.data.ptr) + starts * np.uint64(array.itemsize)
    tiles[:, 1] = np.minimum(np.uint64(_TILE), np.uint64(array.size) - starts)
    tiles[:, 2:] = array.itemsize, _most(array.dtype, largest), index
    return tiles


@cache
def _kernel() -> Any:
    return cuda.cupy.RawKernel(_SOURCE, "any_not_finite")
