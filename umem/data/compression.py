"""Lossless compression of buffers by Blosc2: the way is chosen by trying, for each kind of array.

A buffer is compressed by itself, so that taking an item back decodes that item and nothing else.
Blosc2's own pool of threads is never used: what has used it hangs in a child by fork (seen with
blosc2 4.14), one thread decodes some GB/s, and callers have threads of their own, which it lets
run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem._common.extras import needed
from umem._common.locks import safe_lock
from umem.data.codec_report import RAW, CodecReport, KindReport
from umem.errors import DataError
from umem.units import GIB, KIB

KEPT_RAW = 0.9
"""A buffer whose compressed size is above this share of its bytes is stored uncompressed."""
SHORTEST, TOO_LONG = 128, GIB
"""Buffers from the first to below the second size in bytes are compressed: Blosc2's header takes 32
bytes, and it takes less than 2 GiB."""
SAMPLE = 1024 * KIB
"""At most this many bytes of a buffer are compressed as a trial, in four pieces spread over it."""
BETTER = 0.95
"""A setting that decodes more slowly is taken where it leaves at most this share of the bytes."""


class Squeeze(NamedTuple):
    """One setting of Blosc2: codec, level, and the filter applied before."""

    codec: str
    level: int
    filters: tuple[str, ...]

    def __str__(self) -> str:
        return "+".join((*self.filters, self.codec)).lower()


WAYS = (
    Squeeze("LZ4", 5, ()),
    Squeeze("LZ4", 5, ("SHUFFLE",)),
    Squeeze("LZ4", 5, ("BITSHUFFLE",)),
    Squeeze("ZSTD", 1, ("SHUFFLE",)),
    Squeeze("ZSTD", 1, ("BITSHUFFLE",)),
    Squeeze("ZSTD", 1, ("SHUFFLE", "BYTEDELTA")),
    Squeeze("ZSTD", 1, ()),
)
"""The Blosc2 settings that are tried, fastest to decode first; bench/data_cache.py measures them.
Left out: BloscLZ and differences to the first block, which compress no or hardly better; Zstandard
at a higher level, which compresses some data better, and takes longer to write and to read.

Left out: BloscLZ and differences to the first block, which leave more or hardly less; Zstandard at
a higher level, which leaves less of some data, and takes longer to write and to read.
"""
Kind = tuple[str, int]
"""Key of arrays that share one choice of codec: dtype, and bytes rounded up to a power of two."""


class BloscCodec:
    """A `Codec` that compresses by Blosc2, choosing a setting for each kind of array by trial.

    The way is chosen by trying all of `WAYS` on the first array of a kind (dtype, and size up to
    the next power of two), again on the 2nd, 4th, 8th and so on, by their bytes together. It
    depends on the data alone, not on how long anything took: the same arrays in the same order are
    stored in the same bytes. Several threads may use one object. A forked child can use it, too;
    after pickling the choices do, and counts begin anew.

    Raises:
        MissingDependencyError: there is no blosc2.
    """

    name = "blosc2"

    def __init__(self) -> None:
        _blosc2().set_releasegil(True)  # other threads run meanwhile: for the process, once
        self._kinds: dict[Kind, KindReport] = {}
        self._tried: dict[Kind, list[int]] = {}
        self._decoded = [0, 0, 0.0]
        self._lock = safe_lock()

    def __getstate__(self) -> dict[str, dict[Kind, list[int]]]:
        with self._lock:
            return {"tried": dict(self._tried)}

    def __setstate__(self, state: dict[str, dict[Kind, list[int]]]) -> None:
        self.__init__()  # type: ignore[misc]
        self._tried.update(state["tried"])

    def compress(self, buffer: memoryview, dtype: str) -> bytes | None:
        """Compress a buffer with the setting chosen for its kind; None if it should stay raw.

        Args:
            buffer: bytes, in one dimension; not changed, and not kept.
            dtype: of the numbers, as NumPy writes it: bytes are shuffled by its size.

        Returns:
            What `decompress` takes; None: it does not shrink below 0.9 of its bytes.
        """
        kind, itemsize = (dtype, _power(buffer.nbytes)), _itemsize(np.dtype(dtype))
        way = self._way(kind, buffer, itemsize)
        stored = None if way is None else squeezed(buffer, way, itemsize)
        if stored is not None and len(stored) >= KEPT_RAW * buffer.nbytes:
            stored = None
        self._count(kind, way, buffer.nbytes, stored)
        return stored

    def decompress(self, data: Any, nbytes: int) -> npt.NDArray[np.uint8]:
        """Decompress a buffer into a new writable uint8 array of shape (nbytes,).

        Args:
            data: a result of `compress`.
            nbytes: how many bytes the buffer had.

        Raises:
            DataError: these are not bytes that `compress` returned for a buffer of ``nbytes``.
        """
        start = time.perf_counter()
        found = np.empty(nbytes, np.uint8)
        _decode(memoryview(data), found)
        with self._lock:
            for place, value in enumerate((1, nbytes, time.perf_counter() - start)):
                self._decoded[place] += value
        return found

    def report(self) -> CodecReport:
        """Return the figures of this process so far, those from before its fork included."""
        with self._lock:
            count, nbytes, seconds = self._decoded
            return CodecReport(tuple(self._kinds.values()), int(count), int(nbytes), seconds)

    def _way(self, kind: Kind, buffer: memoryview, itemsize: int) -> Squeeze | None:
        """Return the setting for a buffer, from all trials of its kind; None to store it raw."""
        if not SHORTEST <= buffer.nbytes < TOO_LONG:
            return None
        with self._lock:
            seen = self._kinds[kind].count if kind in self._kinds else 0
            if seen & (seen + 1) == 0:  # the first, 2nd, 4th, 8th, ...
                self._try(kind, _sample(buffer), itemsize)
            return _best(self._tried[kind])

    def _try(self, kind: Kind, sample: memoryview, itemsize: int) -> None:
        sizes = [len(squeezed(sample, way, itemsize)) for way in WAYS]
        before = self._tried.get(kind, [0] * (1 + len(WAYS)))
        now = zip(before, (sample.nbytes, *sizes), strict=True)
        self._tried[kind] = [old + new for old, new in now]

    def _count(self, kind: Kind, way: Squeeze | None, nbytes: int, stored: bytes | None) -> None:
        """Add one compressed buffer to the figures of its kind."""
        with self._lock:
            found = self._kinds.get(kind, KindReport(*kind))
            self._kinds[kind] = replace(
                found,
                way=RAW if way is None else str(way),
                count=found.count + 1,
                kept_raw_count=found.kept_raw_count + (stored is None),
                array_bytes=found.array_bytes + nbytes,
                stored_bytes=found.stored_bytes + (nbytes if stored is None else len(stored)),
            )


def _power(nbytes: int) -> int:
    return 1 << int(nbytes).bit_length()


def _itemsize(dtype: np.dtype[Any]) -> int:
    """Return the bytes of a number for Blosc2: half of a complex one, 1 if Blosc2 cannot take
    it.
    """
    size = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return size if 1 <= size <= 255 else 1


def _best(tried: Iterable[int]) -> Squeeze | None:
    """Choose the setting with the best trade of size and decoding time from trial results."""
    raw, *sizes = tried
    best, least = None, KEPT_RAW * raw / BETTER
    for way, size in zip(WAYS, sizes, strict=True):
        if size < BETTER * least:
            best, least = way, size
    return best


def _sample(view: memoryview) -> memoryview:
    if view.nbytes <= SAMPLE:
        return view
    piece = SAMPLE // 4
    starts = [place * (view.nbytes - piece) // 3 // 256 * 256 for place in range(4)]
    return memoryview(b"".join(view[start : start + piece] for start in starts))


def squeezed(view: memoryview, way: Squeeze, itemsize: int) -> bytes:
    found: bytes = _blosc2().compress2(view, typesize=itemsize, nthreads=1, **_words(way))
    return found


@cache
def _words(way: Squeeze) -> dict[str, Any]:
    """Describe a setting in Blosc2's words."""
    blosc2 = _blosc2()
    filters = [blosc2.Filter[name] for name in way.filters]
    missing = 6 - len(filters)  # Blosc2 has six places
    return {
        "codec": blosc2.Codec[way.codec],
        "clevel": way.level,
        "filters": filters + [blosc2.Filter.NOFILTER] * missing,
        "filters_meta": [0] * 6,
    }


def _decode(stored: memoryview, found: npt.NDArray[np.uint8]) -> None:
    """Decompress into an array whose size was checked against the header first.

    Blosc2 writes as many bytes as the header says, whatever the array has.
    """
    blosc2 = _blosc2()
    try:
        sizes = blosc2.get_cbuffer_sizes(stored) if stored.nbytes >= 32 else ()
        if tuple(sizes[:2]) != (found.nbytes, stored.nbytes) or not found.nbytes:
            raise ValueError(f"its header says {sizes[:1] or 'nothing'}")
        blosc2.decompress2(stored, dst=found, nthreads=1)
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"{stored.nbytes} bytes are not those of a compressed array of {found.nbytes} bytes "
            f"({error}); load it from its source again"
        ) from error


def _blosc2() -> Any:
    return needed("blosc2", "data", "arrays are compressed with")
