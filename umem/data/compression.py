"""Lossless compression of buffers by Blosc2.

A buffer is compressed by itself, so that taking an item back decodes that item and nothing else.
Blosc2's own thread pool is never used: after its use, a forked child hangs (seen with blosc2 4.14).
One thread decodes some GB/s, and Blosc2 releases Python's lock, so callers can use threads of their
own.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from umem._common.extras import needed
from umem._common.locks import safe_lock
from umem.data.codec_report import CodecReport, KindReport
from umem.errors import DataError
from umem.units import GIB, KIB

KEPT_RAW = 0.9
"""A buffer whose compressed size is above this share of its bytes is stored uncompressed. A guess:
less memory must be worth the time of decoding."""
SHORTEST, TOO_LONG = 128, GIB
"""Buffers from the first to below the second size in bytes are compressed: Blosc2's header takes 32
bytes, and it takes less than 2 GiB."""
SAMPLE = 64 * KIB
"""Bytes of a buffer that are compressed by both filters: a guess, few beside most arrays."""
FILTERS = ("SHUFFLE", "BITSHUFFLE")
"""Bytes or bits of numbers are sorted before Zstandard compresses them, at its level 1. Neither
alone brings the three kinds of bench/data_cache.py --codecs below 0.6 of their bytes: features are
0.56 and 0.76 of them, pixels / 255 are 0.72 and 0.49. LZ4 decodes two to five times as fast and
leaves 0.74 of features; higher levels of Zstandard take longer and hardly leave less."""


class BloscCodec:
    """A `Codec` that compresses with Blosc2, each buffer with the filter that suits it.

    The result depends on the data alone: equal arrays compress to equal bytes. Several threads may
    use one object, and so may forked children; pickling resets the counts.

    Raises:
        MissingDependencyError: blosc2 is not installed.
    """

    name = "blosc2"

    def __init__(self) -> None:
        _blosc2().set_releasegil(True)  # other threads run meanwhile: for the process, once
        self._kinds: dict[tuple[str, int], KindReport] = {}
        self._decoded = [0, 0, 0.0]
        self._lock = safe_lock()

    def __reduce__(self) -> Any:
        return BloscCodec, ()

    def compress(self, buffer: memoryview, dtype: str) -> bytes | None:
        """Compress a buffer; None if it should stay uncompressed.

        Args:
            buffer: one-dimensional bytes; neither changed nor kept.
            dtype: the numbers' dtype, as NumPy writes it; its size is the width of the shuffle.

        Returns:
            Bytes for `decompress`; None if the buffer does not shrink below 0.9 of its bytes.
        """
        stored = None
        if SHORTEST <= buffer.nbytes < TOO_LONG:
            stored = _squeezed(buffer, _itemsize(np.dtype(dtype)))
            if len(stored) >= KEPT_RAW * buffer.nbytes:
                stored = None
        self._count(dtype, buffer.nbytes, stored)
        return stored

    def decompress(self, data: Any, nbytes: int) -> npt.NDArray[np.uint8]:
        """Decompress a buffer into a new writable uint8 array of shape (nbytes,).

        Args:
            data: a result of `compress`.
            nbytes: the buffer's uncompressed bytes.

        Raises:
            DataError: `compress` did not return these bytes for a buffer of ``nbytes``.
        """
        start = time.perf_counter()
        found = np.empty(nbytes, np.uint8)
        _decode(memoryview(data), found)
        with self._lock:
            for place, value in enumerate((1, nbytes, time.perf_counter() - start)):
                self._decoded[place] += value
        return found

    def report(self) -> CodecReport:
        """Return the figures of this process so far, figures from before its fork included."""
        with self._lock:
            count, nbytes, seconds = self._decoded
            return CodecReport(tuple(self._kinds.values()), int(count), int(nbytes), seconds)

    def _count(self, dtype: str, nbytes: int, stored: bytes | None) -> None:
        """Add one compressed buffer to the figures of its kind: dtype and range of sizes."""
        kind = dtype, 1 << nbytes.bit_length()
        with self._lock:
            found = self._kinds.get(kind, KindReport(*kind))
            self._kinds[kind] = replace(
                found,
                count=found.count + 1,
                kept_raw_count=found.kept_raw_count + (stored is None),
                array_bytes=found.array_bytes + nbytes,
                stored_bytes=found.stored_bytes + (nbytes if stored is None else len(stored)),
            )


def _itemsize(dtype: np.dtype[Any]) -> int:
    """Return the bytes of a number for Blosc2: half of a complex one, 1 if Blosc2 cannot take
    it.
    """
    size = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return size if 1 <= size <= 255 else 1


def _squeezed(buffer: memoryview, itemsize: int) -> bytes:
    """Compress a buffer by the filter that leaves less of a piece from its middle."""
    start = max(0, (buffer.nbytes - SAMPLE) // 2 // itemsize * itemsize)
    sample = buffer[start : start + SAMPLE]
    tried = {name: _compressed(sample, name, itemsize) for name in FILTERS}
    name = min(FILTERS, key=lambda name: len(tried[name]))
    return tried[name] if sample.nbytes == buffer.nbytes else _compressed(buffer, name, itemsize)


def _compressed(buffer: memoryview, name: str, itemsize: int) -> bytes:
    """Compress a buffer by Zstandard after one filter, in this thread alone."""
    blosc2 = _blosc2()
    unused = [blosc2.Filter.NOFILTER] * 5  # Blosc2 has six places
    found: bytes = blosc2.compress2(
        buffer, typesize=itemsize, nthreads=1, codec=blosc2.Codec.ZSTD, clevel=1,
        filters=[blosc2.Filter[name], *unused], filters_meta=[0] * 6,
    )  # fmt: skip
    return found


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
            f"{stored.nbytes} bytes are not a compressed array of {found.nbytes} bytes ({error}); "
            "load it from its source again"
        ) from error


def _blosc2() -> Any:
    return needed("blosc2", "data", "arrays are compressed with")
