"""CUDA on host memory: what stands under the real CuPy where there is no GPU.

The driver, the runtime, streams, the compiler of kernels and NVIDIA's libraries, as CuPy calls
them: arithmetic is real, and kernels run on this machine's processor. `open_host_cuda` puts it
under CuPy before that is imported, for the process; `installing.py` is the one place that touches
CuPy. Of the rest, `runtime.py` and `driver.py` are CUDA's functions by their names, each layer of
the runtime a class that the next one extends (`allocations.py`, `streams.py`, `pools.py`,
`copy_checks.py`); `kernels.py` makes C++ for the host of CUDA's (`dialect.py`, `templates.py`,
`include/`), `toolchain.py` compiles and keeps it; `deferred_streams.py` is streams that run late,
`checked_mode.py` finds what leaves its array, `dry/` leaves out the arithmetic.

It knows nothing of VRAM that is full, of pages and of time: an `Observer` is told what happens, and
asked what is allowed and when. It imports `umem.errors`, `umem.units` and `umem._common` alone.
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
