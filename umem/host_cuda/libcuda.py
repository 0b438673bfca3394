"""A stand-in for the driver's library, ``libcuda.so.1``: advice, prefetches and discards.

Models: advice and the last prefetch of managed memory, by page; notifies the observer. Refuses, as
CUDA does: ranges outside one allocation, batches on the legacy default stream, and prefetches and
discards on a captured stream, which end the capture. Every other function of the driver returns
CUDA_ERROR_NOT_SUPPORTED.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from umem.host_cuda.linking import returning_status
from umem.host_cuda.memory_ranges import MANAGED
from umem.host_cuda.runtime import CPU, DRIVER_VERSION, HostRuntime
from umem.host_cuda.toolchain import Toolchain

PAGE_BYTES = 4096
INVALID, INVALID_DEVICE, NOT_SUPPORTED, UNKNOWN = 1, 101, 801, 999
"""Values of CUresult, from cuda.h."""
LEGACY = (0, 1)
"""The two handles of the legacy default stream."""
ON_DEVICE, ON_HOST, NOWHERE = 1, 2, -2
"""CUmemLocationType's device and host; CU_DEVICE_INVALID."""
_SET_CONTEXT, _OF_STREAM = 1, 2
"""Requests of libcuda.c about contexts; 0 requests the current one."""
_SOURCE = Path(__file__).parent / "include" / "libcuda.c"


@dataclass(frozen=True)
class _Page:
    """The advice and last prefetch of a page."""

    preferred: int = NOWHERE
    read_mostly: bool = False
    accessed_by: frozenset[int] = frozenset()
    prefetched: int = NOWHERE


class HostHints:
    """Advice by page, and the stand-in library that receives it, which stays loaded."""

    def __init__(self, runtime: HostRuntime, tools: Toolchain) -> None:
        self._runtime = runtime
        runtime.hints = self
        self._starts: dict[int, list[int]] = {}  # by allocation, where another value begins
        self._values: dict[int, list[_Page]] = {}
        source = _SOURCE.read_text(encoding="utf-8")
        options = ["-Wl,-soname,libcuda.so.1", f"-DVERSION={DRIVER_VERSION}"]
        path = tools.shared_object(source, "c", [*options, "-ldl"])
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        word, size, number = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
        self._kept = [
            self._give("umem_advise", self._advise, word, size, number, number, number),
            self._give("umem_prefetch", self._prefetch, word, size, number, number, word),
            self._give("umem_batch", self._batch, *[ctypes.c_void_p] * 3, size, word, number),
            self._give("umem_range", self._range, ctypes.c_void_p, size, number, word, size),
            self._give("umem_pointer", self._pointer, ctypes.c_void_p, number, word),
            self._give("umem_wait", self._wait, ctypes.c_void_p),
            self._give("umem_device", self._device, ctypes.c_void_p, number, number),
            self._give("umem_context", self._context, number, word),
        ]
        ctypes.c_int.in_dll(self.library, "umem_count").value = runtime.count

    def raise_version(self, version: int) -> None:
        """Report this driver version if it is newer than the default."""
        reported = ctypes.c_int.in_dll(self.library, "umem_version")
        reported.value = max(reported.value, version)

    def _give(self, name: str, function: Any, *types: Any) -> Any:
        """Point the library at a function, or after a fault at the fault's status."""

        def status(error: BaseException) -> int:
            return int(getattr(error, "status", UNKNOWN))

        def unless_ended(*given: Any) -> int:
            fault = self._runtime.here.fault
            return fault.status if fault is not None else int(function(*given))

        kept = ctypes.CFUNCTYPE(ctypes.c_int, *types)(returning_status(unless_ended, status))
        ctypes.c_void_p.in_dll(self.library, name).value = ctypes.cast(kept, ctypes.c_void_p).value
        return kept

    # -- pages -----------------------------------------------------------------------------

    def _pages(self, address: int, nbytes: int) -> tuple[int, int, int] | None:
        """Return the allocation and pages of a managed range; None if it is not managed."""
        found = self._runtime.allocation_of(address)
        if found is None or found.kind != MANAGED or not nbytes:
            return None
        if address + nbytes > found.address + found.nbytes:
            return None
        first = address // PAGE_BYTES
        return found.number, first, -(-(address + nbytes) // PAGE_BYTES)

    def _cut(self, number: int, page: int) -> int:
        starts = self._starts.setdefault(number, [0])
        values = self._values.setdefault(number, [_Page()])
        index = bisect_right(starts, page) - 1
        if starts[index] != page:
            starts.insert(index + 1, page)
            values.insert(index + 1, values[index])
            index += 1
        return index

    def _change(self, pages: tuple[int, int, int], change: Callable[[_Page], _Page]) -> None:
        number, start, stop = pages
        first, last = self._cut(number, start), self._cut(number, stop)
        for index in range(first, last):
            self._values[number][index] = change(self._values[number][index])

    def _within(self, pages: tuple[int, int, int]) -> Iterator[_Page]:
        number, start, stop = pages
        starts = self._starts.setdefault(number, [0])
        values = self._values.setdefault(number, [_Page()])
        index = bisect_right(starts, start) - 1
        while index < len(starts) and starts[index] < stop:
            yield values[index]
            index += 1

    # -- what the library calls ------------------------------------------------------------

    def advise(self, address: int, nbytes: int, advice: int, device: int) -> int:
        """Set or unset advice on a managed range; returns a CUresult."""
        pages = self._pages(address, nbytes)
        if pages is None:
            return INVALID
        if advice in (3, 5, 6) and not CPU <= device < self._runtime.count:
            return INVALID_DEVICE
        changes: dict[int, Callable[[_Page], _Page]] = {
            1: lambda page: replace(page, read_mostly=True),
            2: lambda page: replace(page, read_mostly=False),
            3: lambda page: replace(page, preferred=device),
            4: lambda page: replace(page, preferred=NOWHERE),
            5: lambda page: replace(page, accessed_by=page.accessed_by | {device}),
            6: lambda page: replace(page, accessed_by=page.accessed_by - {device}),
        }
        if advice not in changes:
            return INVALID
        self._change(pages, changes[advice])
        self._runtime.advise(address, nbytes, advice, device)
        return 0

    def prefetch(self, address: int, nbytes: int, device: int, stream: int) -> int:
        """Prefetch a managed range; returns a CUresult."""
        pages = self._pages(address, nbytes)
        if pages is None:
            return INVALID
        if not CPU <= device < self._runtime.count:
            return INVALID_DEVICE
        self._runtime.refuse_captured(stream)
        self._change(pages, lambda page: replace(page, prefetched=device))
        self._runtime.prefetch(address, nbytes, device, stream)
        return 0

    def batch(self, ranges: list[tuple[int, int]], places: list[int], stream: int) -> int:
        """Prefetch managed ranges to places, or without places discard them; returns a CUresult.

        Refuses the legacy default stream, as CUDA does for all batches, without any effect.
        """
        pages = [self._pages(*each) for each in ranges]
        if not ranges or stream in LEGACY or None in pages:
            return INVALID
        if not all(CPU <= place < self._runtime.count for place in places):
            return INVALID_DEVICE
        self._runtime.refuse_captured(stream)
        if not places:
            self._runtime.discard(ranges, stream)
        for (address, nbytes), place in zip(ranges, places, strict=bool(places)):
            self.prefetch(address, nbytes, place, stream)
        return 0

    def _batch(
        self, addresses: int, sizes: int, places: int | None, count: int, stream: int, discards: int
    ) -> int:
        """Decode a batched call's arrays, and discard or prefetch the ranges; returns a
        CUresult.
        """
        starts = (ctypes.c_uint64 * count).from_address(addresses)
        ranges = [*zip(starts, (ctypes.c_size_t * count).from_address(sizes), strict=True)]
        given: Any = [] if places is None else (ctypes.c_int * (2 * count)).from_address(places)
        devices = [
            id if kind == ON_DEVICE else CPU
            for kind, id in zip(given[::2], given[1::2], strict=True)
        ]
        if discards and devices:
            status = self.batch(ranges, [], stream)
            return status or self.batch(ranges, devices, stream)
        return self.batch(ranges, devices, stream)

    def _advise(self, address: int, nbytes: int, advice: int, kind: int, device: int) -> int:
        return self.advise(address, nbytes, advice, device if kind == ON_DEVICE else CPU)

    def _prefetch(self, address: int, nbytes: int, kind: int, device: int, stream: int) -> int:
        return self.prefetch(address, nbytes, device if kind == ON_DEVICE else CPU, stream)

    def _range(self, out: int, size: int, attribute: int, address: int, nbytes: int) -> int:
        """Write a range's attribute to memory; returns a CUresult."""
        pages = self._pages(address, nbytes)
        if pages is None:
            return INVALID
        found = list(self._within(pages))
        numbers = (ctypes.c_int * (size // 4)).from_address(out)
        if attribute == 3:
            by_all = sorted(frozenset.intersection(*(page.accessed_by for page in found)))
            by_all.sort(key=lambda place: place == CPU)  # the host last
            for index in range(len(numbers)):
                numbers[index] = by_all[index] if index < len(by_all) else NOWHERE
            return 0
        preferred = {page.preferred for page in found}
        prefetched = {page.prefetched for page in found}
        one = preferred.pop() if len(preferred) == 1 else NOWHERE
        last = prefetched.pop() if len(prefetched) == 1 else NOWHERE
        answers = {
            1: int(all(page.read_mostly for page in found)), 2: one, 4: last,
            5: {NOWHERE: 0, CPU: ON_HOST}.get(one, ON_DEVICE), 6: max(one, 0),
            7: {NOWHERE: 0, CPU: ON_HOST}.get(last, ON_DEVICE), 8: max(last, 0),
        }  # fmt: skip
        if attribute not in answers:
            return NOT_SUPPORTED
        numbers[0] = answers[attribute]
        return 0

    def _pointer(self, out: int, attribute: int, address: int) -> int:
        found = self._runtime.pointerGetAttributes(address)
        kind = found.type
        answers = {2: {0: 0, 1: 1}.get(kind, 2), 8: int(kind == MANAGED), 9: found.device}
        if attribute not in answers:
            return INVALID
        ctypes.c_int.from_address(out).value = answers[attribute]
        return 0

    def _device(self, out: int, attribute: int, device: int) -> int:
        found = self._runtime.deviceGetAttribute(attribute, device)
        ctypes.c_int.from_address(out).value = found
        return 0

    def _context(self, request: int, number: int) -> int:
        """Make a device's context current, or return the current context's device or a stream's."""
        if request == _SET_CONTEXT:
            self._runtime.setDevice(number)
        return self._runtime.device_here if request != _OF_STREAM else self._runtime.home_of(number)

    def _wait(self, stream: int | None) -> int:
        self._runtime.streamSynchronize(stream or 0)
        return 0
