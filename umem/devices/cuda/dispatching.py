"""The allocator that umem gives to a thread while blocks are open there.

CuPy's allocator is one for each thread, and a thread runs many asyncio tasks, which have blocks of
their own. So what is given to the thread looks at what the calling code is inside of, and calls
the pool's own method. bench/allocation.py measures what that costs an allocation.

CuPy's context manager for this (``cupy.cuda.using_allocator``) can be interrupted after it has set
an allocator and before it knows how to put the old one back; so what it calls is called here. The
tests look whether those two functions are there and do what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
from cupy.cuda import memory

from umem import scopes
from umem.devices.base import Policy, Served, Watched
from umem.devices.cuda.driver import Malloc
from umem.devices.cuda.watching import watched
from umem.scopes import Scope, epoch, view_of_context


class Layer:
    """An allocator of one thread, on top of the one that was there, for the scopes given to it.

    Code that is inside of none of them allocates by what was there. A block of the program's own
    (``cupy.cuda.using_allocator``) between two of umem's makes two layers.
    """

    def __init__(self, process_policy: Callable[[], Policy | None]) -> None:
        self.scopes: tuple[Scope, ...] = ()
        self._process_policy = process_policy
        self._before: Malloc | None = memory._get_thread_local_allocator()
        self._malloc, self.forget = _dispatcher(self)

    @property
    def is_needed(self) -> bool:
        """True while one of its scopes is open."""
        return any([scope.is_open for scope in self.scopes])

    def serve(self, scope: Scope) -> None:
        """Serve this scope too."""
        self.scopes = (*(other for other in self.scopes if other.is_open), scope)

    def put_in(self) -> None:
        """Have the calling thread allocate by it."""
        memory._set_thread_local_allocator(self._malloc)

    def take_out(self) -> None:
        """Put back what was there; only where the calling thread allocates by it."""
        memory._set_thread_local_allocator(self._before)

    def resolved(self) -> Malloc:
        """Find what the calling code allocates by now."""
        if not self.is_needed:
            clear()
            return self._below()
        policy, malloc = self._process_policy(), None
        watches: list[tuple[Watched, bool]] = []
        for scope in scopes.inside():
            for part in scope.payload:
                mine = scope in self.scopes
                if isinstance(part, Watched) and part.device.backend == "cupy":
                    watches.append((part, mine))
                elif isinstance(part, Served) and part.device.backend == "cupy" and mine:
                    policy, malloc = part.policy, part.how[0]
        found = self._below() if malloc is None else malloc
        for watch, mine in watches:
            if mine or malloc is not None:
                found = watched(found, watch.how, policy)
        return found

    def _below(self) -> Malloc:
        if self._before is not None:
            return self._before
        # CuPy tells of the process's allocator only to a thread that has none of its own.
        now = memory._get_thread_local_allocator()
        try:
            memory._set_thread_local_allocator(None)
            found: Malloc = cupy.cuda.get_allocator()  # the process's
        finally:
            memory._set_thread_local_allocator(now)
        return found


def _dispatcher(layer: Layer) -> tuple[Malloc, Callable[[], None]]:
    """CuPy's allocator interface, which asks again whenever the answer may be another; and what
    has it forget the last one."""
    view: Any = None
    then: Any = None
    found: Any = None

    def malloc(nbytes: int) -> Any:
        nonlocal view, then, found
        if view_of_context() is view and epoch.now is then:
            return found(nbytes)
        view, now = None, epoch.now
        found = layer.resolved()
        then, view = now, view_of_context()
        return found(nbytes)

    def forget() -> None:
        nonlocal view, found
        view = found = None

    malloc.layer = layer  # type: ignore[attr-defined]
    return malloc, forget


def enter(scope: Scope, process_policy: Callable[[], Policy | None]) -> None:
    """Have the calling thread allocate by what it is inside of, which ``scope`` is part of."""
    clear()
    layer = _top()
    if layer is not None:
        layer.serve(scope)
    else:
        layer = Layer(process_policy)
        layer.serve(scope)
        layer.put_in()
    scopes.changed()


def clear() -> None:
    """Take out of the calling thread what no open scope needs any more.

    What something of the program's own lies on top of goes at a later call.
    """
    while (layer := _top()) is not None:
        layer.forget()
        if layer.is_needed:
            return
        layer.take_out()


def in_force() -> Malloc:
    """Find what the calling code allocates by: a pool's own method, where nothing watches it."""
    layer = _top()
    found: Malloc = cupy.cuda.get_allocator()
    return found if layer is None else layer.resolved()


def _top() -> Layer | None:
    """The layer by which the calling thread allocates; None where it is not one of umem's."""
    found: Layer | None = getattr(cupy.cuda.get_allocator(), "layer", None)
    return found if isinstance(found, Layer) else None
