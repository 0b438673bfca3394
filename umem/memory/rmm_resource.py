"""Memory of umem for libraries that allocate through RMM: cuDF, Numba, PyTorch.

Written for RMM 26.10 (``rmm.mr.CallbackMemoryResource``, streams with NVIDIA's stream protocol).
Never run with RMM, which does not start without a GPU.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from umem.devices import current_device
from umem.devices.cuda import stream_order
from umem.errors import DeviceError, MissingDependencyError, StateError


def memory_resource() -> Any:
    """Return an RMM memory resource that allocates as CuPy does, in umem's current mode.

    Call ``rmm.mr.set_current_device_resource(umem.memory_resource())`` after `umem.enable`: cuDF
    and other users of RMM then allocate in that mode. For Numba and PyTorch, set
    ``rmm.allocators.numba.RMMNumbaManager`` and ``rmm.allocators.torch.rmm_torch_allocator`` too.
    RMM keeps the resource, and so CuPy's pools, alive while its memory is in use. Blocks of umem
    apply to the thread that allocates. Cost: Python code for each allocation of RMM. Never run
    with RMM yet.

    Returns:
        an ``rmm.mr.CallbackMemoryResource``. A failed allocation raises MemoryError in RMM, or
        StateError if CuPy itself allocates from RMM, which would recurse for ever.

    Raises:
        MissingDependencyError: RMM is not installed, or its streams have no stream protocol.
        DeviceError: a virtual GPU is current.
        DeviceNotFoundError: there is no CUDA device.
    """
    device: Any = current_device()
    if device.backend != "cupy":
        raise DeviceError("memory_resource needs a CUDA device, but a virtual GPU is current")
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
            "stream: install RMM 26.10"
        )
    lent = LentMemory(device.xp)
    return resources.CallbackMemoryResource(lent.allocate, lent.deallocate)


class LentMemory:
    """Memory of CuPy's current allocator, by address as RMM's callbacks need it.

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
                "CuPy allocates from RMM, and RMM from umem, which uses CuPy: remove either "
                "cupy.cuda.set_allocator(rmm_cupy_allocator) or this resource"
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
        """Free memory after the queued work of a stream.

        CuPy's pool reuses it in the order of the stream that allocated it. If ``stream`` is another
        one, the host waits for it.
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
