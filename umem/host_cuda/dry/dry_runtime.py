"""The runtime of a dry run: decides which calls to compute and which to skip.

Models: the known bytes, by address; counts of flags, as if all were set. Does not model: values
that the host reads from pinned memory, or through a view of managed memory.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any, NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from umem._common.specs import GpuSpec
from umem._common.stacks import is_own_work, program_line
from umem.errors import DeviceError
from umem.host_cuda.dry.known_memory import (
    FULLY_KNOWN,
    GUESSED,
    KNOWN,
    UNKNOWN,
    KnownMemory,
    Origin,
)
from umem.host_cuda.memory_ranges import HOST, MemoryRange
from umem.host_cuda.memory_sources import UntouchedSource, clear
from umem.host_cuda.observer import Launch, Observer
from umem.host_cuda.runtime import HostRuntime, LeftOut
from umem.units import format_bytes

COMPUTED_BYTES = 1 << 18
"""A call that touches at most this much is computed: about 0.1 ms, as much as deciding takes. The
sizes are guesses; bench/dry_runs.py shows the time of whole dry runs with them.
"""
COMPUTED_WHOLE_BYTES = 32 << 20
"""The same for calls that write only whole numbers and flags, because these determine sizes."""
COPIED_ON_DEVICE_BYTES = 1 << 20
"""A copy within GPU memory up to this size is made, which takes as little time."""
COPIED_BYTES = 8 << 20
"""A copy from the host up to this size is made: larger ones are data, not indexes or tables."""
GUESSED_BYTES, GUESSED_WHOLE_BYTES = 64, 1 << 12
"""Results of skipped calls up to this size are guessed, fractions and whole numbers separately.
Several flags are not guessed: an unknown mask has all flags set.
"""
GUESSES = {"cupy_all": 1, "cupy_isfinite": 1}
"""Guessed bytes by kernel: the answer with which a program continues. Other guesses are zero."""
DIFFERENT = {
    "cupy_all": (re.compile("^cupy_equal__"), 0),
    "cupy_any": (re.compile(r"^cupy_not_equal__(\w+)_\1_bool$"), 1),
}
"""Guessed bytes by kernel and the writer of its flags: unknown arrays differ, so that loops that
wait for convergence or for the end of all items run to their limit. A single number is not an
array: `(info != 0).any()` is a check.
"""
SUMS = re.compile("bsum|sum$|count_nonzero|cupy_sum|by_csr_step1$")
"""Kernels that count flags once; the other kernels in `COUNTS` (scans) accumulate."""
COUNTS = re.compile("bsum_shfl|scan|cumsum|count_nonzero|^cupy_sum|by_csr_step1$")
"""Kernels that count flags: unknown flags count as set, which needs the most memory."""
COUNTS_BESIDE = re.compile("by_csr_step1$")
"""Kernels that count but also write fractions: the products whose places they count."""
BY_ADDRESS = re.compile("concatenate|any_not_finite")
"""Kernels that read memory at addresses in an array: CuPy's and umem's."""
_UNDER_CUPY = (os.path.dirname(os.path.dirname(__file__)) + os.sep,)
_WHOLE_KINDS = {1: "?", 2: "i2", 4: "i4", 8: "i8"}
_REAL_KINDS = {1: "?", 2: "f2", 4: "f4", 8: "f8", 16: "c16"}
"""Dtypes of written `answers`, by item size."""

Range = tuple[int, int]
"""The first address, and the one after the last."""
Written = tuple[int, int, int]
"""A range, and its item size, 0 if unknown."""


class DryRuntime(HostRuntime):
    """CuPy's runtime on mostly untouched address space.

    Args:
        spec, count, observer: see `HostMemory`.

    Attributes:
        reads: how often the host read unknown data, by the program's line as ``"file:line"`` and
            the kernel that would have written the data.
        answers: values that the host reads instead, by ``"file:line"``; ``file`` may be the last
            part of the path.
        counts: the numbers of computed and of skipped calls.
    """

    def __init__(self, spec: GpuSpec, count: int = 1, observer: Observer | None = None) -> None:
        super().__init__(spec, count, observer)
        self.source = UntouchedSource()
        self.memory = KnownMemory()
        self.reads: Counter[tuple[str, str]] = Counter()
        self.answers: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self._as_if_pinned: set[int] = set()
        self._depths: dict[int, int] = {}  # of calls of libraries, by thread

    def refuse_memory(self, nbytes: int) -> NoReturn:
        raise DeviceError(
            f"this machine gives no address space for {format_bytes(nbytes)}: a dry run needs as"
            " much as the program allocates, though hardly any memory. Raise the limit"
            " (`ulimit -v unlimited`, or the container's)"
        )

    def fill_fresh(self, address: int, nbytes: int) -> None:
        """Fill nothing, because touched memory would use the machine's memory."""

    # -- blocks of pools ---------------------------------------------------------------------

    def new_block(self, address: int, nbytes: int) -> None:
        """Record a pool's block as known, because a program must not read it before writing it."""
        super().new_block(address, nbytes)
        clear(address, nbytes)
        self.memory.put(address, address + nbytes, FULLY_KNOWN)

    def release(self, ptr: int) -> None:
        found = self.allocation_of(ptr) if ptr else None
        if found is not None:
            self.memory.put(found.address, found.address + max(1, found.nbytes), FULLY_KNOWN)
        super().release(ptr)

    # -- calls ---------------------------------------------------------------------------------

    def decide(
        self,
        name: str,
        reads: Iterable[Range],
        writes: Sequence[Written],
        *,
        is_whole: bool = False,
        flags: float = 0,
    ) -> bool:
        """Return whether a call is computed: if its inputs are small, and known or guessed.

        Marks its results as known, guessed or unknown, and writes guesses into small skipped ones.

        Args:
            name: the kernel, or the library's operation.
            reads, writes: the memory that it accesses.
            is_whole: whether it writes only whole numbers and flags.
            flags: the number of flags it counts; 0 if it counts none.
        """
        level, source, touched = KNOWN, "", sum(each[1] - each[0] for each in writes)
        for low, high in reads:
            touched += high - low
            origin = self.memory.worst(low, high)
            if origin.level > level:
                level, source = origin.level, origin.name
        most = COMPUTED_WHOLE_BYTES if is_whole else COMPUTED_BYTES
        runs = level < UNKNOWN and touched <= most
        if level == GUESSED and any(is_whole and _are_flags(each) for each in writes):
            runs = False  # flags by guessed numbers: a mask of these would be empty
        self.counts["computed" if runs else "left out"] += 1
        for low, high, itemsize in writes:
            if not runs:
                self._leave_out(name, low, high, itemsize, is_whole, flags, source)
            elif level == KNOWN:
                self.memory.put(low, high, FULLY_KNOWN)
            else:
                self.memory.put(low, high, Origin(GUESSED, name, is_whole=is_whole))
        return runs

    def _leave_out(
        self,
        name: str,
        low: int,
        high: int,
        itemsize: int,
        is_whole: bool,
        flags: float,
        source: str = "",
    ) -> None:
        """Record that a result is not computed, and guess it if small."""
        nbytes = high - low
        weight = flags * itemsize / nbytes if flags else 0.0
        is_mask = is_whole and _are_flags((low, high, itemsize))
        most = GUESSED_WHOLE_BYTES if is_whole else GUESSED_BYTES
        level = GUESSED if nbytes <= most and not is_mask else UNKNOWN
        origin = Origin(level, name, itemsize, low, weight, not SUMS.search(name), is_whole)
        if nbytes <= GUESSED_WHOLE_BYTES:
            ctypes.memset(low, _guess(name, source), nbytes)
            if weight and itemsize in (4, 8):
                kind = np.dtype(_WHOLE_KINDS[itemsize])
                counts = self.view(low, kind, (nbytes // itemsize,), (itemsize,))
                counts[...] = [origin.count(number) for number in range(len(counts))]
        self.memory.put(low, high, origin)

    def leave_out(self, name: str, array: NDArray[Any]) -> None:
        """Record that a call's result is not computed."""
        if array.size:
            low, high = byte_bounds(array)
            self._leave_out(name, low, high, array.itemsize, array.dtype.kind in "biu", 0)

    def pointed_at(self, low: int, high: int) -> list[Range]:
        """Return the blocks at the addresses in a known range."""
        if self.memory.worst(low, high).level == UNKNOWN or high - low > COMPUTED_BYTES:
            return []
        word = np.dtype("u8")
        found = self.view(low, word, ((high - low) // 8,), (8,)).tolist()
        return [
            (address, self.end_of(address))
            for address in found
            if self.allocation_of(address) is not None
        ]

    def flags_in(self, low: int, high: int, item_count: int) -> float:
        """Return the number of flags that a range counts; other items are one flag each."""
        return item_count * (self.memory.worst(low, high).weight or 1.0)

    def counts_copied(self, name: str, low: int, high: int, item_count: int) -> tuple[str, float]:
        """Return the writer of the counts that a call copies and their flags; or its name and 0."""
        origin = self.memory.worst(low, high)
        if origin.weight and low == origin.low:
            return origin.name, origin.weight * item_count
        if origin.weight and item_count == 1:  # sums of a longer part would begin anew
            return origin.name, origin.count((low - origin.low) // origin.itemsize)
        return name, 0.0

    def enter_library(self) -> None:
        """Make `operation` raise LeftOut in this thread, until `leave_library`."""
        thread = get_ident()
        self._depths[thread] = self._depths.get(thread, 0) + 1

    def leave_library(self) -> None:
        thread = get_ident()
        self._depths[thread] -= 1
        if not self._depths[thread]:
            del self._depths[thread]

    def operation(
        self, launch: Launch, decisive: Sequence[MemoryRange] | None = None, is_whole: bool = False
    ) -> None:
        """Report an operation; raises LeftOut in a library call that is skipped."""
        super().operation(launch)
        if get_ident() not in self._depths:
            return
        reads = launch.reads if decisive is None else decisive
        read = [(each.low, each.high) for each in reads]
        written = [(each.low, each.high, 0) for each in launch.writes]
        if not self.decide(launch.name, read, written, is_whole=is_whole):
            raise LeftOut(launch.name)

    # -- copies and fills -----------------------------------------------------------------------

    def pointerGetMemoryType(self, ptr: int) -> int:
        """Report the program's own memory as pinned, and remember that for one copy.

        CuPy asks before it copies a NumPy array through pinned memory. A copy that runs at once, or
        is skipped, does not need that.
        """
        found = super().pointerGetMemoryType(ptr)
        if not found:
            self._as_if_pinned.add(ptr)
        return found or HOST

    def is_pinned(self, ptr: int) -> bool:
        return ptr in self._as_if_pinned or super().is_pinned(ptr)

    def copy(self, dst: int, src: int, size: int, stream: int = 0) -> None:
        """Report a copy, and run it if it is small and known.

        A copy of unknown data to the host returns an answer, and is counted in `reads`.
        """
        self.tell_copy(dst, src, size, self.home_of(stream), stream)
        self._as_if_pinned.discard(src)
        source, target = self.allocation_of(src), self.allocation_of(dst)
        origin = FULLY_KNOWN if source is None else self.memory.worst(src, src + size)
        if target is None:
            if origin.level == KNOWN:
                ctypes.memmove(dst, src, size)
            else:
                self._read(dst, src, size, origin)
            return
        is_from_host = source is None or HOST in (source.kind, target.kind)
        most = COPIED_BYTES if is_from_host else COPIED_ON_DEVICE_BYTES
        if size <= most and origin.level < UNKNOWN:
            ctypes.memmove(dst, src, size)
        else:
            origin = Origin(
                UNKNOWN, origin.name or "copy", origin.itemsize, dst, origin.weight,
                origin.is_running, origin.is_whole,
            )  # fmt: skip
        self.memory.put(dst, dst + size, origin)

    def _read(self, dst: int, src: int, size: int, origin: Origin) -> None:
        """Give the host unknown data: an answer, a count, or the memory's contents."""
        line = program_line(whole_path=True)
        if not is_own_work(_UNDER_CUPY):  # whoever judges by values asks `is_dry`
            self.reads[line, origin.name] += 1
        answer = self._answer(line)
        itemsize = origin.itemsize or size
        kinds = _WHOLE_KINDS if origin.is_whole else _REAL_KINDS
        if answer is not None and itemsize in kinds:
            kind = np.dtype(kinds[itemsize])
            self.view(dst, kind, (size // itemsize,), (itemsize,))[...] = answer
        elif (
            origin.level == UNKNOWN and origin.weight and size == origin.itemsize and size in kinds
        ):
            kind = np.dtype(kinds[size])
            self.view(dst, kind, (1,), (size,))[0] = origin.count((src - origin.low) // size)
        elif size <= COPIED_BYTES:
            ctypes.memmove(dst, src, size)  # zeros, but for what was guessed
        else:
            ctypes.memset(dst, 0, size)

    def _answer(self, line: str) -> float | None:
        for place, value in self.answers.items():
            if line == place or line.endswith(f"/{place}"):
                return value
        return None

    def fill(self, ptr: int, value: int, size: int) -> None:
        """Report a fill, and run it unless it is large and not of zeros."""
        self.tell_fill(ptr, size)
        origin = FULLY_KNOWN
        if not value:
            clear(ptr, size)
        elif size <= COMPUTED_WHOLE_BYTES:
            ctypes.memset(ptr, value, size)
        else:
            origin = Origin(UNKNOWN, "memset", 0, ptr)
        self.memory.put(ptr, ptr + size, origin)

    def put_other_bytes(self, ranges: Sequence[tuple[int, int]], stream: int) -> None:
        for address, nbytes in ranges:
            self.memory.put(address, address + nbytes, Origin(UNKNOWN, "discard"))


def _guess(name: str, source: str) -> int:
    """Return the guessed bytes of a kernel that reads results of ``source``."""
    kernel = name.partition("__")[0]
    flags, guess = DIFFERENT.get(kernel, (None, 0))
    return guess if flags and flags.search(source) else GUESSES.get(kernel, 0)


def _are_flags(written: Written) -> bool:
    """Tell whether a range has several flags or bytes: a mask, whose flags may all be set."""
    low, high, itemsize = written
    return itemsize == 1 and high - low > 1
