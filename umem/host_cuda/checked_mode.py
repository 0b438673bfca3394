"""Checked mode: each array has memory of its own, and a kernel that leaves it is an error.

A kernel that touches a page that is no array's ends there, with an error that names it and the
argument; what it wrote before stays written. Writes right before an array, on its own page, are
seen when the kernel has ended. Races of shared memory are found by the kernel itself.

An access whose type does not divide its address, threads of a block at different barriers, and a
pointer to the host's own memory are errors as well, unless the software GPU is not strict.

Does not model: what stays inside another array of the same pointer's reach, beyond 1 MiB on either
side; the end of shared memory, and variables of the kernel's own.
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
"""Bytes; an argument that is farther than this from a fault is not named (a guess)."""
_VERBS = {1: "reads", 2: "writes"}


Parameter = tuple[int, str]
"""A parameter of a kernel: its number and text."""
Pointers = Sequence[tuple[Parameter, int]]
"""Pointer arguments, and their values."""
_PAGEABLE = 88
"""cudaDevAttrPageableMemoryAccess, from driver_types.h."""
_WIDEST = 16
"""Bytes of the widest access of a thread."""


class CheckedKernels:
    """Runs kernels in checked mode, and turns what the processor refuses into errors.

    Args:
        runtime: its source knows what an address is near to.
        guard: runs them, and comes back from faults.
    """

    def __init__(self, runtime: HostRuntime, guard: KernelGuard) -> None:
        assert isinstance(runtime.source, GuardedSource)
        self._runtime, self._source, self._guard = runtime, runtime.source, guard

    def run(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, given: int
    ) -> None:
        """Run a kernel as `Kernel.run` does.

        Raises:
            KernelFault: it left the memory of its arguments, accessed what a GPU could not, or
                took too long. What it wrote before stays.
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
        """Raise for a pointer to memory of the host that no GPU reaches.

        A GPU reads pageable memory where the system gives it the host's page tables.
        """
        for parameter, address in pointers:
            if not address or self._source.find(address) or self._runtime.allocation_of(address):
                continue
            here = self._runtime.device_here
            if is_own_memory(address) and not self._runtime.deviceGetAttribute(_PAGEABLE, here):
                raise KernelFault(
                    ILLEGAL_ADDRESS,
                    f"the kernel {kernel.name} gets {_named(parameter)}, which leads to memory of "
                    f"the host: the GPU cannot reach it. {hint()}",
                    _memcheck(kernel, [parameter]),
                )

    def _refuse_misaligned(self, kernel: Kernel, pointers: Pointers) -> None:
        """Raise for an access whose place in its array its type does not divide.

        Arrays begin at multiples of 256 on a GPU, and not here.
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
        """Return the error of a fault: the kernel, the access, and the array whose bounds it left.

        Or, far from all arrays, the arguments that the place may have been reached from.
        """
        does = f"the kernel {kernel.name} {_VERBS.get(fault.access, 'touches')}"
        region = self._source.find(fault.address)
        pointers = kernel.pointers(given)
        if region is None:
            mine, near = _nearest(fault.address, pointers)
            sentence = f"{does} address {fault.address:#x}, where no array is{near}"
        else:
            mine = [name for name, address in pointers if self._source.find(address) is region]
            name = " or ".join(map(_named, mine)) or "an array that no argument leads to"
            place = _place(region, fault.address)
            sentence = f"{does} {place} {name}, which has {region.nbytes:,} bytes"
        return KernelFault(ILLEGAL_ADDRESS, sentence, _memcheck(kernel, mine))


def _memcheck(kernel: Kernel, parameters: Sequence[Parameter]) -> Finding:
    """Return what memcheck would find: a kernel and the first of some arguments."""
    return Finding("memcheck", kernel.name, *(f"{n} ({text})" for n, text in parameters[:1]))


def _nearest(place: int, pointers: Pointers) -> tuple[list[Parameter], str]:
    """Return arguments that a place may have been reached from, and say so; none if all are far."""
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
    """Tell whether an address is in the process's memory, and not in a library or a kernel."""
    if is_variable(address):
        return False
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_libc.msync(page, 1, _ASYNC) == 0)  # -1 where nothing is mapped


class Unpooled:
    """Stands in for CuPy's memory pool; each array is an allocation of its own.

    Args:
        runtime: counts what is given out, of all pools together.
        allocator: gives memory for a number of bytes.
    """

    def __init__(self, runtime: HostRuntime, allocator: Callable[[int], Any]) -> None:
        self._runtime, self._allocator = runtime, allocator
        self._limit = 0

    def malloc(self, size: int) -> Any:
        """Allocate; raise CuPy's OutOfMemoryError where the driver has no room, as a pool does."""
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
        """Do nothing, as nothing is cached."""

    free_all_free = free_all_blocks

    def get_limit(self) -> int:
        return self._limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        if size or fraction:
            raise NotImplementedError("in checked mode pools have no limit")


def bypass_pools(cupy: Any, runtime: HostRuntime) -> None:
    """Give every array and pinned buffer of CuPy its own allocation."""
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
