"""The allocator that umem gives to a thread while blocks are open there.

CuPy's allocator is one for each thread, and a thread runs many asyncio tasks, which have blocks of
their own. So what is given to the thread looks at what the calling code is inside of, and calls
the pool's own method. bench/allocation.py measures what that costs an allocation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import cupy

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
        self._below: Malloc = cupy.cuda.get_allocator()
        self._as_of = _process.now
        self.malloc, self.forget = _dispatcher(self.resolved)
        self._block: contextlib.AbstractContextManager[None] | None = None

    @property
    def is_in_force(self) -> bool:
        """Whether the calling thread allocates by it."""
        return cupy.cuda.get_allocator() is self.malloc

    @property
    def is_needed(self) -> bool:
        """Whether one of its scopes is open."""
        return any(scope.is_open for scope in self.scopes)

    def serve(self, scope: Scope) -> None:
        """Be for this scope too."""
        self.scopes = (*(other for other in self.scopes if other.is_open), scope)

    def put_in(self) -> None:
        """Have the calling thread allocate by it."""
        # CuPy's context manager is the only public way to a thread's allocator. Collecting it
        # would put the old one back in whichever thread that happens.
        self._block = block = cupy.cuda.using_allocator(self.malloc)
        _kept.add(self)
        block.__enter__()

    def take_out(self) -> bool:
        """Put back what was there; False where something of the program's own lies on top."""
        if self._block is None or not self.is_in_force:
            return False
        self._block.__exit__(None, None, None)
        _kept.discard(self)
        return True

    def resolved(self) -> Malloc:
        """What the calling code allocates by now."""
        if not self.is_needed:
            clear()
            return self._what_is_below()
        policy, malloc = self._process_policy(), None
        watches: list[tuple[Watched, bool]] = []
        for scope in scopes.inside():
            for part in scope.payload:
                mine = scope in self.scopes
                if isinstance(part, Watched) and part.device.kind == "cuda":
                    watches.append((part, mine))
                elif isinstance(part, Served) and part.device.kind == "cuda" and mine:
                    policy, malloc = part.policy, part.how
        found = self._what_is_below() if malloc is None else malloc
        for watch, mine in watches:
            if mine or malloc is not None:
                found = watched(found, watch.how, policy)
        return found

    def _what_is_below(self) -> Malloc:
        now = _process.now
        if self._as_of is not now and self.take_out():
            self._below, self._as_of = cupy.cuda.get_allocator(), now
            if self.is_needed:
                self.put_in()
        return self._below


def _dispatcher(resolved: Callable[[], Malloc]) -> tuple[Malloc, Callable[[], None]]:
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
        found = resolved()
        then, view = now, view_of_context()
        return found(nbytes)

    def forget() -> None:
        nonlocal view, found
        view = found = None

    return malloc, forget


class _Process:
    """Another object in ``now`` whenever umem has set the allocator of the process."""

    def __init__(self) -> None:
        self.now = object()


class _Here(threading.local):
    def __init__(self) -> None:
        self.layers: list[Layer] = []


_process = _Process()
_here = _Here()
_kept: set[Layer] = set()


def process_changed() -> None:
    """The allocator of the process is another: every layer looks again what lies below."""
    _process.now = object()
    scopes.changed()


def enter(scope: Scope, process_policy: Callable[[], Policy | None]) -> None:
    """Have the calling thread allocate by what it is inside of, which ``scope`` is part of."""
    clear()
    top = _here.layers[-1] if _here.layers else None
    if top is not None and top.is_in_force:
        top.serve(scope)
    else:
        layer = Layer(process_policy)
        layer.serve(scope)
        _here.layers.append(layer)
        layer.put_in()
    scopes.changed()


def clear() -> None:
    """Take out of the calling thread what no open scope needs any more.

    What something of the program's own lies on top of goes at a later call.
    """
    for layer in reversed([*_here.layers]):
        layer.forget()
        if not layer.is_needed and layer.take_out():
            _here.layers.remove(layer)


def in_force() -> Malloc:
    """What the calling code allocates by: a pool's own method, where nothing watches it."""
    found: Malloc = cupy.cuda.get_allocator()
    for layer in _here.layers:
        if layer.malloc is found:
            return layer.resolved()
    return found
