"""A real GPU, through CuPy and cuda.core: the only package that imports them for allocation.

Importing it imports neither; opening a device imports CuPy, and the first hint cuda.core.
devices/open.py opens it; chainer, memory, choosing and cli use its meters, hooks and streams.

    gpus.py           opens each GPU of the machine once, or explains why there is none
    device.py         is the device: modes, hints, and the state of its memory
    driver.py         makes all calls to CuPy and the driver, and decides nothing
    modes.py          makes the allocator of each mode
    install.py        replaces CuPy's allocators: the process's, and a thread's while blocks are
                      open
    pools.py          has the pools of a GPU, and their source of memory, which checks limits
    pool_in_use.py    stands in for CuPy's default pool while `umem.enable` is in force
    bounds.py         limits what pools reserve: the user's limit, the host's memory
    ledger.py         counts the bytes that pools have reserved
    arena.py          repeats the managed addresses of the previous step, and discards free blocks
    ranges.py         prefetches, advises and queries attributes with cuda.core
    streams.py        distinguishes streams
    captures.py       tells whether a given or any stream is being captured
    fork.py           refuses CUDA in a forked child of a process that used it
    out_of_memory.py  has the errors that are both umem's and CuPy's
    retrying.py       calls callbacks when memory runs out, and retries
    address_hook.py   watches allocations with CuPy's memory hooks
    watching.py       watches the allocations of one allocator
    pool_meter.py     has `PoolMeter`, which measures a GPU's memory, and `GpuPools`, which reserves
                      a pass's memory in one piece
    cupy_blocks.py    is the source of recordings: the blocks of CuPy's pools
    large_arrays.py   follows the large arrays of a program, for `umem.choosing`
    cupti.py          reports page moves from CUPTI's counters; never run on a GPU
    features.py       describes the features of the GPU, its driver and its libraries

- CUDA reports faults, migrated and resident bytes only to its profiler. Without it these figures
  are None, and the status calls them unknown; no number is made up.
- An allocation from a pool's cache costs what it costs in CuPy. Limits and checks wrap the
  allocator that a pool calls when it grows.
- A pool lives as long as the process: up to CuPy 13 a dying pool frees blocks that live arrays
  still use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.devices.cuda.arena import Arena, OrderedDiscards
    from umem.devices.cuda.captures import follow_captures, is_any_captured, is_captured
    from umem.devices.cuda.device import CudaDevice
    from umem.devices.cuda.driver import Driver, Malloc, count_problem
    from umem.devices.cuda.gpus import cuda_reason, open_cuda
    from umem.devices.cuda.install import add_callback, remove_callback
    from umem.devices.cuda.large_arrays import LargeArrays
    from umem.devices.cuda.out_of_memory import CudaLimitError, CudaOutOfMemoryError
    from umem.devices.cuda.pool_meter import PoolMeter
    from umem.devices.cuda.ranges import CoreHints
    from umem.devices.cuda.retrying import Retrying
    from umem.devices.cuda.streams import stream_order
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        arena="Arena OrderedDiscards",
        captures="follow_captures is_any_captured is_captured",
        device="CudaDevice",
        driver="Driver Malloc count_problem",
        gpus="cuda_reason open_cuda",
        install="remove_callback add_callback",
        large_arrays="LargeArrays",
        out_of_memory="CudaLimitError CudaOutOfMemoryError",
        pool_meter="PoolMeter",
        ranges="CoreHints",
        retrying="Retrying",
        streams="stream_order",
    )
