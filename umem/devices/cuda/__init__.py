"""A real GPU, through CuPy and cuda.core: the only package that imports them for allocation.

Importing it imports neither; opening a device imports CuPy, and the first hint cuda.core.
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
