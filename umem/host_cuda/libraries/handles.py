"""Base of the libraries: handles, streams, and memory viewed as vectors and matrices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umem._common.arithmetic import FLOAT32, FLOAT64, of_dtype
from umem.errors import MissingDependencyError
from umem.host_cuda.memory_ranges import MemoryRange
from umem.host_cuda.observer import Launch
from umem.host_cuda.runtime import HostRuntime

Array = NDArray[Any]
TYPES: dict[str, Any] = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}
"""Dtypes by the first letter of a function's name."""
DATA_TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 3: np.int8, 4: np.complex64,
              5: np.complex128, 10: np.int32}  # fmt: skip
"""Dtypes by cudaDataType, from library_types.h."""


class HostLibrary:
    """Base of libraries whose functions take addresses.

    Args:
        runtime: owns the memory, and is notified of the reads and writes of each function.
    """

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime
        self._pointer_mode = self._stream = 0
        self._made: dict[int, Any] = {}

    def create(self) -> int:
        return self._runtime.new_handle()

    def destroy(self, handle: int) -> None:
        return None

    def getPointerMode(self, handle: int) -> int:
        return self._pointer_mode

    def setPointerMode(self, handle: int, mode: int) -> None:
        self._pointer_mode = mode

    def getStream(self, handle: int) -> int:
        return self._stream

    def setStream(self, handle: int, stream: int) -> None:
        self._stream = stream

    def no_buffer(self, *_: Any) -> int:
        """Return 0, because no workspace is needed."""
        return 0

    def nothing(self, *_: Any) -> None:
        """Do nothing, because this setting has no effect here."""

    def _keep(self, found: Any) -> int:
        """Store an object for `_made`, and return its handle."""
        handle = self._runtime.new_handle()
        self._made[handle] = found
        return handle

    def _drop(self, handle: int) -> None:
        self._made.pop(handle, None)

    # -- memory ----------------------------------------------------------------------------

    def _vector(self, dtype: Any, address: int, count: int, step: int = 1) -> Array:
        kind = np.dtype(dtype)
        first = address if step >= 0 else address - (count - 1) * step * kind.itemsize
        return self._runtime.view(first, kind, (count,), (step * kind.itemsize,))

    def _matrix(self, dtype: Any, address: int, rows: int, columns: int, ld: int) -> Array:
        """Return a column-major matrix whose columns are ``ld`` elements apart."""
        kind = np.dtype(dtype)
        strides = kind.itemsize, ld * kind.itemsize
        return self._runtime.view(address, kind, (rows, columns), strides)

    def _stack(
        self, dtype: Any, address: int, rows: int, columns: int, ld: int, step: int, count: int
    ) -> Array:
        """Return column-major matrices that are ``step`` elements apart."""
        kind = np.dtype(dtype)
        strides = step * kind.itemsize, kind.itemsize, ld * kind.itemsize
        return self._runtime.view(address, kind, (count, rows, columns), strides)

    def _pointed_at(self, addresses: int, count: int, nbytes: int) -> list[MemoryRange]:
        """Return the accesses to memory given by an array of addresses, one for each allocation."""
        found: list[MemoryRange] = []
        rest = np.sort(self._vector("u8", addresses, count))
        while len(rest):
            first = int(rest[0])
            memory = self._runtime.allocation_of(first)
            end = first + 1 if memory is None else memory.address + memory.nbytes
            inside = int(np.searchsorted(rest, end))
            found += self._runtime.access(first, int(rest[inside - 1]) + nbytes - first)
            rest = rest[inside:]
        return found

    def _tell(
        self,
        name: str,
        reads: Sequence[Array | list[MemoryRange]],
        writes: Sequence[Array | list[MemoryRange]],
        flops: float = 0,
        gathered_bytes: int = 0,
        arithmetic: str | None = None,
        decisive: Sequence[Array] | None = None,
    ) -> None:
        """Report an operation's reads, writes and operations to the observer.

        Args:
            name: the operation's name.
            reads, writes: arrays, or accesses to one array.
            flops: floating-point operations.
            gathered_bytes: bytes that it reads more than once.
            arithmetic: the kind of its flops; None if it is not a matrix product, for the arrays'
                dtypes.
            decisive: the arrays that a dry run must know to compute it, by default all of
                ``reads``: those that determine the structure of a sparse result.

        Raises:
            LeftOut: in a dry run that does not compute it.
        """
        accesses = [
            [a for x in each for a in (x if isinstance(x, list) else self._runtime.access_of(x))]
            for each in (reads, writes, decisive or ())
        ]
        is_whole = bool(writes) and all(
            not isinstance(x, list) and x.dtype.kind in "biu" for x in writes
        )
        if arithmetic is None:
            arrays = [x for x in (*writes, *reads) if not isinstance(x, list)]
            is_double = any(of_dtype(x.dtype) == FLOAT64 for x in arrays)
            arithmetic = FLOAT64 if is_double else FLOAT32
        launch = Launch(
            name, self._runtime.device_here, accesses[0], accesses[1], flops=int(flops),
            gathered_bytes=gathered_bytes, arithmetic=arithmetic,
        )  # fmt: skip
        self._runtime.operation(
            launch, None if decisive is None else accesses[2], is_whole or decisive is not None
        )


def scipy_module(name: str) -> Any:
    """Import a submodule of SciPy, such as "linalg".

    Raises:
        MissingDependencyError: SciPy is not installed.
    """
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError:
        raise MissingDependencyError(
            "the software GPU computes this with SciPy: pip install scipy"
        ) from None
