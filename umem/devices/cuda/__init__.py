"""A real GPU, through CuPy and cuda.core: the only package that imports them for allocation.

Importing it imports neither; opening a device imports CuPy, and the first hint cuda.core.
devices/open.py opens it; chainer, memory, choosing and cli use its meters, hooks and streams.

    gpus.py           opens each GPU of the machine once, or says why there is none
    device.py         is the device: modes, hints, and what is known of its memory
    driver.py         makes all calls to CuPy and the driver, and decides nothing
    modes.py          gives the allocator of each mode
    install.py        puts allocators in CuPy's place: the process's, and a thread's while blocks
                      are open
    pools.py          has the pools of a GPU, and the growth beneath them, where limits are checked
    pool_in_use.py    is CuPy's default pool, as programs ask for it while `umem.enable` is in force
    bounds.py         bounds what pools reserve: the user's limit, the host's memory
    ledger.py         counts what pools have reserved
    arena.py          gives each step the managed addresses of the one before, and discards free
                      blocks
    ranges.py         prefetches, advises and asks for attributes, by cuda.core
    streams.py        tells streams apart
    captures.py       tells whether a stream, or any, is captured
    fork.py           refuses CUDA in a child by fork of a process that used it
    out_of_memory.py  has the errors that are ours and CuPy's at once
    retrying.py       asks callbacks for memory when it runs out, and tries again
    address_hook.py   watches allocations by CuPy's memory hooks
    watching.py       watches the allocations of one allocator
    pool_meter.py     is `PoolMeter`, which measures a GPU's memory, and `GpuPools`, which reserves
                      a pass's memory in one piece
    cupy_blocks.py    is the source of recordings: the blocks that CuPy's pools hand out
    large_arrays.py   follows the large arrays of a program, for `umem.choosing`
    cupti.py          reports moves of pages by CUPTI's counters; never run on a GPU
    features.py       words what the GPU, its driver and its libraries can do

- Without its profiler, CUDA does not tell faults, migrated or resident bytes. These figures are
  None, and the status says that they are unknown; no number is made up.
- An allocation from a pool's cache costs what it costs in CuPy. Limits and checks wrap the
  allocator that a pool calls when it grows.
- A pool lives as long as the process: up to CuPy 13 a pool that dies frees blocks that live arrays
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
