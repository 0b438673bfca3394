"""Memory modes, limits, hints and counts, as users turn them on.

Most names of `umem` itself come from here. Chainer, reports, choosing, cli and `umem.dask` build on
it.

    process.py         has `enable`, `disable` and `virtual_gpu`
    mode_blocks.py     has `managed`, `hybrid` and `unmanaged`
    environment.py     reads the variables that are the defaults of `enable` and ``umem run``
    limits.py          parses a limit, and resolves it on a device
    hints.py           has `prefetch`, `advise`, `preset`, `location` and `as_numpy`
    declared_order.py  has `lookahead`: a loop declares its order, and arrays move before their use
    pager.py           carries out planned moves, for `lookahead` and for chainer's
                       `LookaheadPrefetch`
    host_blocks.py     has `blocks`: a host array passes through two buffers on the GPU
    counts.py          has `statistics`: how many bytes were allocated, and the most at once
    tracking.py        has `track`: which line holds memory, and whether it leaks
    current_status.py  has `status`
    explaining.py      has `explain`: who holds the memory that ran out, and which changes would fit
    held_graphs.py     finds Chainer's graphs that are never cut, for `explain`
    running_out.py     has `on_out_of_memory`
    rmm_resource.py    has `memory_resource`, an RMM resource over the current mode; never run with
                       RMM

- Without a GPU, a mode outside of `virtual_gpu` raises `DeviceNotFoundError`, which names the ways
  out. It never silently does nothing.
- `enable` installs the pool's method in CuPy directly. A block adds a look-up before it, because
  the block may belong to one of several asyncio tasks in the thread (bench/allocation.py).
- Limits and host memory are checked when a pool grows (`Growth` in devices/cuda/pools.py). Features
  that must see every allocation, such as `statistics` and `track`, are opt-in.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.memory.counts import WatchingBlock, statistics
    from umem.memory.current_status import Status, columns, status
    from umem.memory.declared_order import Lookahead, lookahead
    from umem.memory.environment import (
        MEMORY_VARIABLES,
        limit_of_environment,
        mode_of_environment,
        prefetch_of_environment,
    )
    from umem.memory.explaining import Explanation, explain
    from umem.memory.hints import advise, arrays_in, as_numpy, is_array, location, prefetch, preset
    from umem.memory.host_blocks import blocks
    from umem.memory.limits import Size
    from umem.memory.mode_blocks import (
        Block,
        Decorator,
        checked_request,
        hybrid,
        managed,
        unmanaged,
    )
    from umem.memory.pager import CudaSideStream, Pager, is_on, room, side_stream
    from umem.memory.process import DeviceBlock, Handle, disable, enable, enabled, virtual_gpu
    from umem.memory.rmm_resource import memory_resource
    from umem.memory.running_out import on_out_of_memory
    from umem.memory.tracking import track
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        counts="WatchingBlock statistics",
        current_status="Status columns status",
        environment=(
            "MEMORY_VARIABLES limit_of_environment mode_of_environment prefetch_of_environment"
        ),
        explaining="Explanation explain",
        hints="advise arrays_in as_numpy is_array location prefetch preset",
        host_blocks="blocks",
        limits="Size",
        mode_blocks="Block Decorator checked_request hybrid managed unmanaged",
        pager="CudaSideStream Pager is_on room side_stream",
        process="DeviceBlock Handle disable enable enabled virtual_gpu",
        rmm_resource="memory_resource",
        running_out="on_out_of_memory",
        declared_order="Lookahead lookahead",
        tracking="track",
    )
