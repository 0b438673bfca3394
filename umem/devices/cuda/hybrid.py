"""Unmanaged memory until it is full, then managed: the allocator of the ``hybrid`` mode."""

from __future__ import annotations

import sys
from typing import Any

from cupy.cuda.memory import OutOfMemoryError

from umem.devices.cuda import driver as cuda_driver
from umem.devices.cuda.driver import Driver, Malloc, Pool

LARGE_BYTES = 1 << 20
"""From this size on, requests go straight to managed memory while the pressure lasts. Smaller
ones are tried first: many fit into what the cache has left, and they are dear to page."""

PROBE_EVERY = 64
"""Under pressure one large request in so many is tried unmanaged after all: other programs may
have freed VRAM, which our own counts cannot show."""


class Hybrid:
    """Tries ``fast``, and falls back on ``spill`` when it is out of memory.

    The first failure gives back the fast pool's free blocks, then collects garbage, as CuPy
    does. That is too dear to repeat, so the level at which VRAM was full is remembered: while
    more is in use, large requests go straight to ``spill``; when enough has been freed they go
    to ``fast`` again.

    Cost: one comparison and one call before pressure; under pressure a large request counts
    what the fast pool has in use (a pass over its live blocks). Thread-safety: any thread; two
    threads may both find the pressure out for themselves.
    """

    def __init__(self, driver: Driver, fast: Malloc, spill: Malloc, fast_pool: Pool) -> None:
        self._driver, self._fast, self._spill, self._pool = driver, fast, spill, fast_pool
        self._direct_from = sys.maxsize
        self._full_at_bytes = 0
        self._countdown = PROBE_EVERY

    @property
    def under_pressure(self) -> bool:
        """Whether a request has spilled, so that large ones are no longer tried blindly."""
        return self._direct_from < sys.maxsize

    def malloc(self, nbytes: int) -> Any:
        """CuPy's allocator interface.

        Raises:
            CudaOutOfMemoryError: host memory cannot take the spill; nothing was allocated.
        """
        if nbytes >= self._direct_from:
            return self._malloc_under_pressure(nbytes)
        try:
            return self._fast(nbytes)
        except OutOfMemoryError:
            pass  # outside the handler, so that a failing spill reports itself alone
        return self._spill(nbytes) if self.under_pressure else self._first_overflow(nbytes)

    def _first_overflow(self, nbytes: int) -> Any:
        for reclaim in (self._give_back, self._collect):
            reclaim()
            pointer = self._try_fast(nbytes)
            if pointer is not None:
                return pointer
        self._full_at_bytes = self._used_bytes()
        self._direct_from = LARGE_BYTES
        return self._spill(nbytes)

    def _malloc_under_pressure(self, nbytes: int) -> Any:
        room = self._used_bytes() + nbytes <= self._full_at_bytes
        if not (room or self._probe_is_due()):
            return self._spill(nbytes)
        pointer = self._try_fast(nbytes)
        if pointer is None and room:
            self._give_back()  # room by count, yet no block of that shape
            pointer = self._try_fast(nbytes)
        self._learn(pointer is not None)
        return self._spill(nbytes) if pointer is None else pointer

    def _learn(self, succeeded: bool) -> None:
        used = self._used_bytes()
        self._full_at_bytes = max(self._full_at_bytes, used) if succeeded else used

    def _probe_is_due(self) -> bool:
        self._countdown -= 1
        if self._countdown > 0:
            return False
        self._countdown = PROBE_EVERY
        return True

    def _try_fast(self, nbytes: int) -> Any:
        try:
            return self._fast(nbytes)
        except OutOfMemoryError:
            return None

    def _used_bytes(self) -> int:
        with self._driver.current():
            return int(self._pool.used_bytes())

    def _give_back(self) -> None:
        with self._driver.current():
            self._pool.free_all_blocks()

    def _collect(self) -> None:
        cuda_driver.collect_garbage()
        self._give_back()
