"""Checked mode: each array has its own memory, and a kernel that leaves it raises an error.

A kernel that touches a page outside all arrays ends there, with an error that names the kernel and
the argument; its earlier writes stay. Writes right before an array, on its own page, are found when
the kernel has ended. The kernel itself finds races of shared memory.

If the software GPU is strict, misaligned accesses, threads of a block at different barriers, and
pointers to host memory are errors too.

Does not find: accesses that land in another array, or more than 1 MiB outside their own; accesses
beyond shared memory or the kernel's own variables.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

from umem.host_cuda.allocations import NO_MEMORY
from umem.host_cuda.copy_checks import is_variable
from umem.host_cuda.faults import ILLEGAL_ADDRESS, MISALIGNED_ADDRESS, Finding, KernelFault
from umem.host_cuda.kernel_guard import KernelGuard, ProcessorFault
from umem.host_cuda.kernels import Kernel
from umem.host_cuda.memory_sources import Fenced, GuardedSource
from umem.host_cuda.runtime import HostRuntime
from umem.host_cuda.strictness import hint
from umem.units import GIB

FAR = GIB
"""Bytes; arguments farther than this from a fault are not named (a guess)."""
_VERBS = {1: "reads", 2: "writes"}


Parameter = tuple[int, str]
"""A kernel's parameter: its number and text."""
Pointers = Sequence[tuple[Parameter, int]]
"""Pointer arguments, and their values."""
_PAGEABLE = 88
"""cudaDevAttrPageableMemoryAccess, from driver_types.h."""
_WIDEST = 16
"""Bytes of the widest access of a thread."""


class CheckedKernels:
    """Runs kernels in checked mode, and turns accesses that the processor refuses into errors.

    Args:
        runtime: its memory source finds the memory near an address.
        guard: runs kernels, and survives faults.
    """

    def __init__(self, runtime: HostRuntime, guard: KernelGuard) -> None:
        assert isinstance(runtime.source, GuardedSource)
        self._runtime, self._source, self._guard = runtime, runtime.source, guard

    def run(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, given: int
    ) -> None:
        """Run a kernel as `Kernel.run` does.

        Raises:
            KernelFault: it left the memory of its arguments, accessed memory that a GPU could not,
                or took too long. Its earlier writes stay.
        """
        pointers = kernel.pointers(given)
        if self._runtime.is_strict:
            self._refuse_host(kernel, pointers)
        fault = self._guard.fault_of(kernel, grid, block, shared, given)
        self._refuse_misaligned(kernel, pointers)
        if fault is not None:
            raise self._error(kernel, given, fault)
        kernel.check()
        for parameter, address in pointers:
            region = self._source.find(address)
            if region is not None and self._source.mended(region):
                raise KernelFault(
                    ILLEGAL_ADDRESS,
                    f"the kernel {kernel.name} writes right before the start of "
                    f"{_named(parameter)}, which has {region.nbytes:,} bytes",
                    _memcheck(kernel, [parameter]),
                )

    def _refuse_host(self, kernel: Kernel, pointers: Pointers) -> None:
        """Raise for a pointer to host memory that the GPU cannot access.

        A GPU accesses pageable memory if the system gives it the host's page tables.
        """
        for parameter, address in pointers:
            if not address or self._source.find(address) or self._runtime.allocation_of(address):
                continue
            here = self._runtime.device_here
            if is_own_memory(address) and not self._runtime.deviceGetAttribute(_PAGEABLE, here):
                raise KernelFault(
                    ILLEGAL_ADDRESS,
                    f"the kernel {kernel.name} gets {_named(parameter)}, which points to host "
                    f"memory: the GPU cannot access it. {hint()}",
                    _memcheck(kernel, [parameter]),
                )

    def _refuse_misaligned(self, kernel: Kernel, pointers: Pointers) -> None:
        """Raise for an access that is misaligned in its array.

        Arrays begin at multiples of 256 on a GPU, but not here.
        """
        for code, alignment, is_write, address in kernel.misaligned():
            region = self._source.find(address)
            if (address - (region.start if region else 0)) % min(alignment, _WIDEST) == 0:
                continue
            mine = [name for name, low in pointers if region and self._source.find(low) is region]
            where = f" of {' or '.join(map(_named, mine))}" if mine else ""
            place = f"byte {address - region.start:,}{where}" if region else f"address {address:#x}"
            does = f"{_VERBS[1 + is_write]} {place} in {kernel.line_of(code)}"
            raise KernelFault(
                MISALIGNED_ADDRESS,
                f"the kernel {kernel.name} {does}, a misaligned address: a multiple of {alignment} "
                f"is needed. {hint()}",
                _memcheck(kernel, mine),
            )

    def _error(self, kernel: Kernel, given: int, fault: ProcessorFault) -> KernelFault:
        """Return the error of a fault, with the kernel, the access, and the array that it left.

        Far from all arrays, names the arguments that may have led there.
        """
        does = f"the kernel {kernel.name} {_VERBS.get(fault.access, 'touches')}"
        region = self._source.find(fault.address)
        pointers = kernel.pointers(given)
        if region is None:
            mine, near = _nearest(fault.address, pointers)
            sentence = f"{does} address {fault.address:#x}, where no array is{near}"
        else:
            mine = [name for name, address in pointers if self._source.find(address) is region]
            name = " or ".join(map(_named, mine)) or "an array that no argument points to"
            place = _place(region, fault.address)
            sentence = f"{does} {place} {name}, which has {region.nbytes:,} bytes"
        return KernelFault(ILLEGAL_ADDRESS, sentence, _memcheck(kernel, mine))


def _memcheck(kernel: Kernel, parameters: Sequence[Parameter]) -> Finding:
    """Return memcheck's finding: a kernel and the first of some arguments."""
    return Finding("memcheck", kernel.name, *(f"{n} ({text})" for n, text in parameters[:1]))


def _nearest(place: int, pointers: Pointers) -> tuple[list[Parameter], str]:
    """Return arguments that may have led to an address, and their text; none if all are far."""
    near = sorted((abs(place - at), at, name) for name, at in pointers)
    near = [one for one in near if one[0] <= FAR]
    null = [name for _, at, name in near if not at]
    if null:
        return null, f"; {' and '.join(map(_named, null))}: a null pointer, or an empty array"
    text = "".join(f"; {_named(name)} is {n:,} bytes away" for n, _, name in near[:1])
    return [name for _, _, name in near[:1]], text


def _place(region: Fenced, address: int) -> str:
    if region.is_freed:
        return f"{address - region.start:,} bytes after the start of what was freed,"
    if address < region.start:
        return f"{region.start - address:,} bytes before the start of"
    return f"{address - region.start - region.nbytes:,} bytes behind the end of"


def _named(parameter: Parameter) -> str:
    return f"argument {parameter[0]} ({parameter[1]})"


_libc = ctypes.CDLL(None)
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_ASYNC = 1


def is_own_memory(address: int) -> bool:
    """Tell whether an address is in the process's memory, outside libraries and kernels."""
    if is_variable(address):
        return False
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_libc.msync(page, 1, _ASYNC) == 0)  # -1 where nothing is mapped


class Unpooled:
    """Stands in for CuPy's memory pool; each array has its own allocation.

    Args:
        runtime: counts the allocations of all pools together.
        allocator: allocates a number of bytes.
    """

    def __init__(self, runtime: HostRuntime, allocator: Callable[[int], Any]) -> None:
        self._runtime, self._allocator = runtime, allocator
        self._limit = 0

    def malloc(self, size: int) -> Any:
        """Allocate; raise CuPy's OutOfMemoryError if the driver has no memory, as a pool does."""
        from cupy.cuda import memory, runtime  # CuPy has begun to be imported by now

        try:
            return self._allocator(size)
        except runtime.CUDARuntimeError as error:
            if error.status != NO_MEMORY:
                raise
            raise memory.OutOfMemoryError(size, self.used_bytes()) from None

    def used_bytes(self) -> int:
        return self._runtime.source.given_bytes

    total_bytes = used_bytes

    def free_bytes(self) -> int:
        return 0

    n_free_blocks = free_bytes

    def free_all_blocks(self, stream: Any = None) -> None:
        """Do nothing, because there is no cache."""

    free_all_free = free_all_blocks

    def get_limit(self) -> int:
        return self._limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        if size or fraction:
            raise NotImplementedError("in checked mode pools have no limit")


def bypass_pools(cupy: Any, runtime: HostRuntime) -> None:
    """Give each array and pinned buffer of CuPy its own allocation."""
    memory = cupy.cuda.memory

    class MemoryPool(Unpooled, memory.MemoryPool):  # type: ignore[name-defined]
        def __init__(self, allocator: Any = None) -> None:
            memory.MemoryPool.__init__(self)
            Unpooled.__init__(self, runtime, allocator or memory._malloc)

    # Not cupy.cuda.memory.MemoryPool: CuPy's compiled modules import the C type of that name.
    cupy.cuda.MemoryPool = MemoryPool
    # What get_default_memory_pool() returns; there is no public setter.
    cupy._default_memory_pool = MemoryPool()
    cupy.cuda.set_allocator(cupy._default_memory_pool.malloc)
    cupy.cuda.set_pinned_memory_allocator(None)
