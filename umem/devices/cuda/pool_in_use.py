"""Stands in for CuPy's default pool while a mode of umem serves the process.

CuPy programs measure, empty and limit their memory through ``cupy.get_default_memory_pool()``.
While `umem.enable` is in force it returns this, so that they act on the memory in use. A pool that
the program got earlier stays CuPy's own.

Importing this module imports CuPy.
"""

from __future__ import annotations

from typing import Any

import cupy

from umem.devices.cuda.driver import CupyPool, Malloc
from umem.devices.cuda.ledger import Kind
from umem.devices.cuda.pools import Pools


class PoolInUse(cupy.cuda.MemoryPool):  # type: ignore[misc, unused-ignore]
    """The pools of umem and CuPy's own as one, with the interface of CuPy's memory pool.

    CuPy's own pool is counted and emptied too. A limit applies to all ``managed`` memory, or to the
    plain part of ``hybrid``, whose rest spills; it ends with the mode. Of this and a limit of
    `umem.enable` the lower one applies.

    Args:
        pools: umem's pools.
        kind: the kind of memory that a limit applies to.
        malloc: the mode's allocator.
        own: CuPy's default pool.

    Attributes:
        serve: the allocator that serves requests: the mode's, and after the mode ``own``'s.
    """

    # The base class is an extension type with an allocator of its own, which is never asked here;
    # its limit is that of `set_limit`, which it checks.
    def __init__(self, pools: Pools, kind: Kind, malloc: Malloc, own: CupyPool) -> None:
        super().__init__()
        self._pools, self.serve, self.own = pools, malloc, own
        self._kind: Kind | None = kind

    def __repr__(self) -> str:
        return f"<CuPy's memory in use, {self._kind or 'unmanaged'} by umem>"

    def end(self) -> None:
        """End the mode: allocate from CuPy's own pool from now on, and apply limits to it."""
        self._pools.bounds.program_limit = None
        self._kind, self.serve = None, self.own.malloc

    def malloc(self, size: int) -> Any:
        """Allocate in the process's mode."""
        return self.serve(size)

    def used_bytes(self) -> int:
        """Return the bytes that arrays use."""
        return self._pools.all_used_bytes()

    def total_bytes(self) -> int:
        """Return the bytes that are reserved."""
        return int(self.own.total_bytes()) + sum(self._pools.ledger.reserved().values())

    def free_bytes(self) -> int:
        """Return the reserved bytes that no array uses."""
        return self.total_bytes() - self.used_bytes()

    def n_free_blocks(self) -> int:
        """Return the number of free blocks, without those in umem's own caches."""
        pools = [pool for pool in self._pools.made() if hasattr(pool, "n_free_blocks")]
        return sum(int(pool.n_free_blocks()) for pool in (self.own, *pools))

    def free_all_blocks(self, stream: Any = None) -> None:
        """Free the free blocks; with a stream, only in CuPy's own pool on that stream."""
        if stream is not None:
            self.own.free_all_blocks(stream)  # type: ignore[call-arg]
            return
        self._pools.give_back_all()
        self.own.free_all_blocks()

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Limit the memory that the mode reserves, as CuPy's ``set_limit`` does."""
        if self._kind is None:
            self.own.set_limit(size=size, fraction=fraction)  # type: ignore[call-arg, arg-type]
            return
        super().set_limit(size=size, fraction=fraction)
        limit = int(super().get_limit())
        self._pools.bounds.program_limit = (self._kind, limit) if limit else None

    def get_limit(self) -> int:
        """Return that limit; 0 means no limit."""
        if self._kind is None:
            return int(self.own.get_limit())  # type: ignore[attr-defined]
        limit = self._pools.bounds.program_limit
        return 0 if limit is None else limit[1]
