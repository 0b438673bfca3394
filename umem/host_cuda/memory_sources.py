"""Sources of a program's memory: plain, between inaccessible pages, or address space.

Addresses of plain memory and of address space ascend with time. So results that depend on their
order, such as moved blocks, do not depend on Linux's choice of addresses.

In checked mode each piece is between inaccessible pages, and ends right before one. Freed memory is
inaccessible too, until much other memory has been freed.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import sys
from collections import deque
from dataclasses import dataclass

from umem._common.host import available_bytes
from umem.units import BLOCK_BYTES

GUARD_BYTES = 1 << 20
"""Inaccessible bytes on either side of checked memory (a guess); farther accesses are not found."""
FREED_COUNT = 4096
"""The most freed pieces of checked memory that stay inaccessible (a guess; Linux allows a process
65,530 mappings).
"""
PATTERN = 0xA5
"""Fills the bytes between the start of the page and checked memory."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_HUGE_PAGES, _NO_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", 14), 15  # NumPy advises so, too
_DONT_NEED = getattr(mmap, "MADV_DONTNEED", 4)
_NO_ACCESS, _FIXED, _NO_RESERVE, _FAILED = 0, 0x10, 0x4000, ctypes.c_void_p(-1).value
FIRST_ADDRESS = 1 << 44
"""The first address: a process's other mappings are far above, or at low addresses."""
_addresses = {"next": FIRST_ADDRESS}  # of all sources of the process


class PlainSource:
    """Mapped memory, with each allocation after the previous one.

    If an address is taken, or too large for the machine, Linux chooses another one. Each allocation
    takes at least a page.

    Args:
        cap_bytes: the most bytes allocated at a time; by default the machine's available memory
            now, if known.
    """

    _advice, _advised_bytes = _HUGE_PAGES, BLOCK_BYTES
    """Advice to Linux on allocations, and their least size; it may refuse."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        self._cap_bytes = available_bytes() if cap_bytes is None else cap_bytes
        self._mapped: dict[int, tuple[int, int]] = {}
        self.given_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Allocate memory; returns None if there is no more."""
        if self._cap_bytes is not None and self.given_bytes + nbytes > self._cap_bytes:
            return None
        address = self._taken(nbytes)
        if address is not None:
            self.given_bytes += nbytes
        return address

    def give(self, address: int, nbytes: int) -> None:
        """Free memory of `take`."""
        self.given_bytes -= nbytes
        self._given(address)

    def _taken(self, nbytes: int) -> int | None:
        """Map memory; return None if there is no more."""
        alignment = _alignment(nbytes)
        spare = 0 if alignment == mmap.PAGESIZE else alignment
        length = -(-max(1, nbytes) // alignment) * alignment + spare
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        base = _libc.mmap(_addresses["next"], length, access, flags, -1, 0)
        if base in (None, _FAILED):
            return None
        _addresses["next"] += length
        if nbytes >= self._advised_bytes:
            _libc.madvise(base, length, self._advice)
        address: int = -(-base // alignment) * alignment
        self._mapped[address] = base, length
        return address

    def _given(self, address: int) -> None:
        _libc.munmap(*self._mapped.pop(address))


def _alignment(nbytes: int) -> int:
    """Return the alignment of an allocation: a block's or a page's.

    Advice and prefetches act on pages, which two allocations should not share. Blocks are aligned
    like the driver's, so that a program that counts blocks by address counts the driver's.
    """
    return BLOCK_BYTES if nbytes >= BLOCK_BYTES // 2 else mmap.PAGESIZE


@dataclass
class Fenced:
    """Checked memory and the pages around it."""

    base: int
    length: int
    start: int
    nbytes: int
    is_freed: bool = False

    @property
    def slack(self) -> int:
        """Return the bytes before its start on the same page."""
        return self.start - self.base - GUARD_BYTES


class GuardedSource(PlainSource):
    """Memory between inaccessible pages.

    It ends at the end of its last page, so its address has the alignment of its size.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__(cap_bytes)
        self._bases: list[int] = []
        self._regions: dict[int, Fenced] = {}
        self._freed: deque[Fenced] = deque()

    def _taken(self, nbytes: int) -> int | None:
        """Map memory between inaccessible pages; return None if there is no more."""
        inner = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        length = inner + 2 * GUARD_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        base = _libc.mmap(None, length, _NO_ACCESS, flags, -1, 0)
        if base == _FAILED:
            return None
        if inner and _libc.mprotect(base + GUARD_BYTES, inner, mmap.PROT_READ | mmap.PROT_WRITE):
            _libc.munmap(base, length)
            return None
        region = Fenced(base, length, base + GUARD_BYTES + inner - nbytes, nbytes)
        ctypes.memset(base + GUARD_BYTES, PATTERN, region.slack)
        self._regions[base] = region
        bisect.insort(self._bases, base)  # last: the collector may look for another one meanwhile
        return region.start

    def _given(self, address: int) -> None:
        """Make memory inaccessible, and unmap the oldest freed piece."""
        region = self.find(address)
        assert region is not None
        region.is_freed = True
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | _FIXED
        _libc.mmap(region.base, region.length, _NO_ACCESS, flags, -1, 0)
        self._freed.append(region)
        if len(self._freed) > FREED_COUNT:
            oldest = self._freed.popleft()
            del self._bases[bisect.bisect_left(self._bases, oldest.base)]
            del self._regions[oldest.base]
            _libc.munmap(oldest.base, oldest.length)

    def find(self, address: int) -> Fenced | None:
        """Return the checked memory that contains an address or is near it."""
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        region = self._regions[self._bases[index]]
        return region if address < region.base + region.length else None

    def mended(self, region: Fenced) -> bool:
        """Tell whether bytes right before memory were overwritten, and restore them."""
        if region.is_freed or not region.slack:
            return False
        begin = region.base + GUARD_BYTES
        if ctypes.string_at(begin, region.slack) == bytes([PATTERN]) * region.slack:
            return False
        ctypes.memset(begin, PATTERN, region.slack)
        return True


class UntouchedSource(PlainSource):
    """Address space; the machine backs only touched pages.

    There is no cap, because a dry run touches little of its memory, and a touched byte costs only
    one page.
    """

    _advice, _advised_bytes = _NO_HUGE_PAGES, 1

    def __init__(self) -> None:
        super().__init__(cap_bytes=sys.maxsize)


LEAST_CLEARED = 1 << 16
"""Bytes; less is overwritten with zeros, which is faster than two system calls (a guess)."""


def clear(address: int, nbytes: int) -> None:
    """Make private memory zero; if it is large, by returning its whole pages to Linux."""
    low = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    high = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if high - low < LEAST_CLEARED:
        ctypes.memset(address, 0, nbytes)
        return
    ctypes.memset(address, 0, low - address)
    _libc.madvise(low, high - low, _DONT_NEED)
    ctypes.memset(high, 0, address + nbytes - high)
