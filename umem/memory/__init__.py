"""Memory modes, limits, hints and counts, as users turn them on."""

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
