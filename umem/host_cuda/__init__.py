"""CUDA on host memory, under the real CuPy, without a GPU.

The driver, the runtime, streams, the compiler of kernels and NVIDIA's libraries, as CuPy calls
them: arithmetic is real, and kernels run on this machine's processor. `open_host_cuda` puts it
under CuPy for the process, before CuPy is imported. devices/software opens it with umem's model as
its observer; cli and umem_software_gpu use its options and its kernel cache.

    installing.py      is `open_host_cuda`, the only module that modifies CuPy
    options.py         has the limits of its options, and the variable's name
    versions.py        lists the supported builds of CuPy
    linking.py         redirects the C functions that CuPy's modules link to
    overrides.py       replaces C++ functions inside CuPy's modules
    observer.py        is notified of events on the devices, and decides on memory and time

    runtime.py         is a CUDA runtime, with the names of CuPy's module; extends, in this order,
    allocations.py     memory and its owners,
    streams.py         streams, events and captures,
    pools.py           memory pools, limits and peers, and
    copy_checks.py     refusals of copies with invalid ranges or directions
    device_state.py    is one of the devices
    memory_ranges.py   has allocations and byte ranges in them
    memory_sources.py  provides memory: plain, between inaccessible pages, or address space
    pool_blocks.py     has the blocks of CuPy's pools; block_hook.py follows them
    libcuda.py         is the driver's library for cuda-core: advice, prefetches, discards
    driver.py          is modules and kernels, with the names of CuPy's module
    boards.py          has each GPU's limits, clocks and caches

    nvrtc.py           is the run-time compiler, with the names of CuPy's module
    kernels.py         turns a kernel's source into one for the host, and runs it
    dialect.py         translates CUDA C++; templates.py CuPy's own templates, shifts.py shifts
    included.py        inserts a program's headers into its source; host_headers.py refuses others
    kernel_limits.py   has launch bounds and static memory; capabilities.py intrinsics by GPU
    strictness.py      raises CUDA's own errors, with the option that turns them off
    sharing.py         selects kernels for several cores; warps.py kernels with warps in lockstep
    toolchain.py       is the C++ compiler; processors.py its target processors
    kernel_cache.py    is the folder of compiled kernels; compile_lock.py lets one process compile
    kernel_archive.py  has kernels in one file; common_kernels.py compiles common kernels
    libraries/         has NVIDIA's libraries, with NumPy and SciPy

    deferred_streams.py    delays the work of streams; deferred_libraries.py delays libraries
    stream_order.py    draws an order that CUDA allows, and finds unordered accesses
    checked_mode.py    finds out-of-bounds accesses; races.py locates a race in the source
    kernel_guard.py    survives kernels that fault or do not end
    faults.py          ends contexts and revives them; cuda_fault.py is the error
    fork.py            refuses CUDA in a forked child
    dry/               skips the arithmetic

- It imports only `umem.errors`, `umem.units` and `umem._common`.
- Without an observer, it counts bytes against VRAM, and no time passes.
- It compiles only C++ source; it cannot read PTX or machine code.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.host_cuda.common_kernels import DTYPES
    from umem.host_cuda.deferred_streams import DeferredRuntime
    from umem.host_cuda.device_state import DriverCalls
    from umem.host_cuda.dry.dry_runtime import DryRuntime
    from umem.host_cuda.faults import revive
    from umem.host_cuda.installing import (
        DRY_COMPUTES_NOTHING,
        is_open,
        open_host_cuda,
        requirements,
    )
    from umem.host_cuda.kernel_archive import MANIFEST, export_kernels, import_kernels
    from umem.host_cuda.kernel_cache import (
        KernelGroup,
        clear_kernels,
        headers_folder,
        kernel_cache_limit,
        kernel_folder,
        kernel_groups,
        trim_kernels,
    )
    from umem.host_cuda.kernels import KernelCompiler
    from umem.host_cuda.memory_ranges import DEVICE, HOST, MANAGED, Allocation, MemoryRange
    from umem.host_cuda.observer import DeviceCopy, Launch, Observer
    from umem.host_cuda.options import MOST_DEVICES, VARIABLE, check_count, check_seed
    from umem.host_cuda.processors import TARGET_VARIABLE, Processors
    from umem.host_cuda.runtime import HostRuntime
    from umem.host_cuda.streams import DEFAULT_STREAMS
    from umem.host_cuda.toolchain import Toolchain
    from umem.host_cuda.versions import known_cupy
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        common_kernels="DTYPES",
        deferred_streams="DeferredRuntime",
        device_state="DriverCalls",
        dry__dry_runtime="DryRuntime",
        faults="revive",
        installing="DRY_COMPUTES_NOTHING is_open open_host_cuda requirements",
        kernel_archive="MANIFEST export_kernels import_kernels",
        kernel_cache=(
            "KernelGroup clear_kernels headers_folder kernel_cache_limit kernel_folder "
            "kernel_groups trim_kernels"
        ),
        kernels="KernelCompiler",
        memory_ranges="Allocation DEVICE HOST MANAGED MemoryRange",
        observer="DeviceCopy Launch Observer",
        options="MOST_DEVICES VARIABLE check_count check_seed",
        processors="Processors TARGET_VARIABLE",
        runtime="HostRuntime",
        streams="DEFAULT_STREAMS",
        toolchain="Toolchain",
        versions="known_cupy",
    )
