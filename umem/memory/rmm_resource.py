"""Memory of umem for libraries that allocate through RMM: cuDF, Numba, PyTorch.

By the interface of RMM 26.10 (``rmm.mr.CallbackMemoryResource``, streams with NVIDIA's stream
protocol). Never run with RMM, which does not start without a GPU.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from umem.devices import current_device
from umem.devices.cuda import stream_order
from umem.errors import DeviceError, MissingDependencyError, StateError


def memory_resource() -> Any:
    """Return an RMM memory resource that allocates as CuPy does, in the mode of umem.

    ``rmm.mr.set_current_device_resource(umem.memory_resource())`` after `umem.enable` gives cuDF
    and what else uses RMM the memory of the mode. With ``rmm.allocators.numba.RMMNumbaManager``
    and ``rmm.allocators.torch.rmm_torch_allocator`` Numba and PyTorch follow. RMM keeps the
    resource, and with it CuPy's pools, for as long as memory of it is in use. Blocks of umem apply
    to the thread that allocates. Cost: Python's code for each allocation of RMM.

    Returns:
        an ``rmm.mr.CallbackMemoryResource``. An allocation that fails raises MemoryError there.

    Raises:
        MissingDependencyError: RMM is not installed, or its streams have no stream protocol.
        DeviceError: a virtual GPU is current.
        DeviceNotFoundError: there is no CUDA device.

    In an allocation: StateError if CuPy itself allocates from RMM, which would ask RMM for ever.
    Never run with RMM yet.
    """
    device: Any = current_device()
    if device.backend != "cupy":
        raise DeviceError("memory_resource is for CUDA's memory, and a virtual GPU is current")
    try:
        resources: Any = importlib.import_module("rmm.mr")
        stream: Any = importlib.import_module("rmm.pylibrmm.stream").Stream
    except ImportError as error:
        raise MissingDependencyError(
            f"memory_resource needs RMM: pip install rmm-cu12 or rmm-cu13 ({error})"
        ) from None
    if not hasattr(stream, "__cuda_stream__"):
        raise MissingDependencyError(
            "memory_resource needs an RMM whose streams have __cuda_stream__, to order memory by "
            "stream: 26.10 has it"
        )
    lent = LentMemory(device.xp)
    return resources.CallbackMemoryResource(lent.allocate, lent.deallocate)


class LentMemory:
    """Memory of CuPy's current allocator by address, as RMM's callbacks take and return it.

    Thread-safety: any thread.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._allocations: dict[int, tuple[Any, Any]] = {}  # with the stream of the allocation
        self._in_allocation = threading.local()

    def allocate(self, nbytes: int, stream: Any) -> int:
        """Allocate in the order of a stream; returns the address, 0 of no bytes."""
        if getattr(self._in_allocation, "now", False):
            raise StateError(
                "CuPy allocates from RMM, and RMM from umem, which asks CuPy: leave out "
                "cupy.cuda.set_allocator(rmm_cupy_allocator), or this resource"
            )
        self._in_allocation.now = True
        try:
            with self._stream(stream) as order:
                pointer = self._xp.cuda.alloc(nbytes)
        finally:
            self._in_allocation.now = False
        if pointer.ptr:
            self._allocations[pointer.ptr] = pointer, stream_order(order.ptr)
        return int(pointer.ptr)

    def deallocate(self, address: int, nbytes: int, stream: Any) -> None:
        """Free memory behind the work of a stream.

        CuPy's pool hands it out again in the order of the stream of its allocation, so that the
        host waits for another one.
        """
        if not address:
            return
        pointer, order = self._allocations.pop(address)
        last = self._stream(stream)
        if stream_order(last.ptr) != order:
            last.synchronize()
        del pointer

    def _stream(self, stream: Any) -> Any:
        """Return CuPy's stream for one with NVIDIA's stream protocol."""
        return self._xp.cuda.ExternalStream(stream.__cuda_stream__()[1])
