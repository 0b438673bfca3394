"""Installs allocators in CuPy: the process's, and a thread's while blocks are open.

CuPy has one allocator for each thread, and a thread runs many asyncio tasks with their own blocks.
So the installed allocator looks up the calling code's block, and calls the pool's own method.
bench/allocation.py measures the cost for an allocation.

CuPy's context manager for this (``cupy.cuda.using_allocator``) can be interrupted after it has set
an allocator and before it can restore the old one, so this module makes its two calls directly. The
tests check that both functions exist and behave as before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.abc import MetaPathFinder
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import cupy
from cupy.cuda import memory

from umem._common import scopes
from umem._common.scopes import Scope, changed, epoch, view_of_context
from umem.devices.base import Device, Policy, Restore, Served, Watched, policy_here
from umem.devices.cuda import retrying as retry
from umem.devices.cuda.driver import CupyPool, Malloc, own_pool
from umem.devices.cuda.retrying import Callback, bare, retrying
from umem.devices.cuda.watching import watched
from umem.errors import StateError
from umem.trace import FOLDERS


@dataclass(eq=False)
class _Installed:
    """An allocator of the process, with its policy and the allocator that it replaced."""

    scope: Scope
    policy: Policy
    malloc: Malloc
    before: Malloc
    may_be_in: bool = True
    alias: PoolAlias = field(default_factory=lambda: PoolAlias())


POOL_NAMES = ("cupy._default_memory_pool", *(folder.pool_name for folder in FOLDERS))
"""Names bound to CuPy's default pool: CuPy's private name, which `cupy.get_default_memory_pool`
returns and which has no public setter, and names that a framework binds once, at its import.
"""


class PoolAlias(MetaPathFinder):
    """Binds `POOL_NAMES` to another pool.

    Otherwise code that frees or measures through these names would use CuPy's own pool. Imports
    nothing: if a framework is not loaded yet, this watches imports, finding no module itself. A
    framework imports more modules after that one, so this is complete when its import is.
    """

    def __init__(self) -> None:
        self._undo: dict[str, Restore] = {}
        self._pool: CupyPool | None = None
        self.before: CupyPool | None = None

    def point_at(self, pool: CupyPool) -> None:
        """Point the names at ``pool``, now or when their framework is imported."""
        self._pool, self.before = pool, cupy.get_default_memory_pool()
        self._follow()
        sys.meta_path.insert(0, self)

    def restore(self) -> None:
        """Restore the names."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._pool = None
        for name in list(self._undo):
            self._undo[name]()
            del self._undo[name]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Notice a framework's import; finds no module itself."""
        self._follow()

    def _follow(self) -> None:
        """Bind the names that exist and are not bound yet, and remember how to restore each."""
        for full in POOL_NAMES:
            module_name, _, name = full.rpartition(".")
            module = sys.modules.get(module_name)
            if full in self._undo or self._pool is None or not hasattr(module, name):
                continue
            before = getattr(module, name)
            if before is self._pool:  # bound while it was in: CuPy's own afterwards
                before = self.before
            self._undo[full] = partial(setattr, module, name, before)
            setattr(module, name, self._pool)


class Installer:
    """The installed allocators of one device: the process's, and those of blocks.

    Thread-safety: any thread; a block affects only code inside it (`umem._common.scopes`).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._everywhere: list[_Installed] = []

    def policy(self) -> Policy | None:
        """Return the policy of the calling code's allocations: its block's, else the process's."""
        return policy_here(self._device) or self._process_policy()

    def _process_policy(self) -> Policy | None:
        return self._everywhere[-1].policy if self._everywhere else None

    def program_allocator(self) -> Malloc | None:
        """Return the allocator that the program had set before umem's; None if it had not set any.

        The calling thread's (``cupy.cuda.using_allocator``) precedes the process's.
        """
        here = memory._get_thread_local_allocator()
        layer = _layer_of(here)
        own = here if layer is None else layer.before
        process = self._everywhere[0].before if self._everywhere else _process_allocator()
        cupys = self._everywhere[0].alias.before if self._everywhere else own_pool()
        for found in (own, process):
            if found is None or self.is_umems(bare(found)):
                continue
            theirs = bare(found)
            is_cupys = isinstance(theirs, BuiltinMethodType) and theirs.__self__ is cupys
            return None if is_cupys else theirs
        return None

    def set_over(self) -> Malloc | None:
        """Return the allocator that the program has set over umem's for the calling code."""
        found = memory._get_thread_local_allocator() or _process_allocator()
        if self.policy() is None or _layer_of(found) or self.is_umems(bare(found)):
            return None
        # Under "unmanaged" without a limit the mode's allocator is CuPy's own pool.
        is_installed = self._everywhere and self._everywhere[-1].malloc == bare(found)
        return None if is_installed else bare(found)

    def is_umems(self, malloc: Malloc) -> bool:
        """Tell whether an allocator belongs to umem."""
        made: Any = self._device
        owner = malloc.__self__ if isinstance(malloc, (MethodType, BuiltinMethodType)) else malloc
        if any(owner is pool for pool in made.pools.made()):
            return True
        kind = owner if isinstance(owner, FunctionType) else type(owner)
        return str(kind.__module__).startswith("umem.")

    def enter(self, scope: Scope) -> None:
        """Install the allocator of the calling thread's scopes, ``scope`` among them."""
        clear()
        layer = _top()
        if layer is not None:
            layer.serve(scope)
        else:
            layer = Layer(self._process_policy)
            layer.serve(scope)
            layer.push()
        changed()

    def serve_all(self, scope: Scope, policy: Policy, malloc: Malloc, pool: CupyPool) -> None:
        """Make ``malloc``, unwrapped, the process's allocator until the scope is closed.

        Raises:
            StateError: inside a block of this thread; nothing has changed.
        """
        clear()
        installed = _Installed(scope, policy, malloc, cupy.cuda.get_allocator())
        scope.at_close(lambda: self._restore(installed))
        try:
            _set_allocator(retrying(malloc))
        except StateError:
            installed.may_be_in = False
            raise
        self._everywhere.append(installed)
        changed()  # for layers of other threads, which lie on it
        installed.alias.point_at(pool)

    def leave_all(self, scope: Scope) -> None:
        """End `serve_all`.

        Raises:
            StateError: inside a block of this thread, or a later allocator of the process is still
                installed; nothing has changed.
        """
        clear()
        # CuPy refuses to set one beside a thread's own, and only this private tells of that.
        if memory._get_thread_local_allocator() is not None:
            raise StateError(_IN_A_BLOCK.format(verb="switched off"))
        for installed in self._everywhere[:-1]:
            if installed.scope is scope:
                raise StateError("first restore the mode that was installed inside this block")
        scope.close()

    def _restore(self, installed: _Installed) -> None:
        """Restore the process's previous allocator."""
        if not installed.may_be_in:
            return
        _replace_allocator(lambda now: retrying(bare(installed.before)))
        if installed in self._everywhere:
            self._everywhere.remove(installed)
        changed()  # for layers of other threads, which lie on it
        installed.alias.restore()
        installed.may_be_in = False  # last: an interrupted call is repeated from the start


def _set_allocator(malloc: Callable[[int], Any]) -> None:
    try:
        with _quietly(malloc):
            cupy.cuda.set_allocator(malloc)
    except ValueError as error:
        raise StateError(_IN_A_BLOCK.format(verb="switched on")) from error


@contextlib.contextmanager
def _without_the_threads_own() -> Iterator[None]:
    """Set the calling thread's allocator aside.

    Uses CuPy's private names: only a thread without its own allocator can get or set the process's,
    and a suspended block may have set one for this thread.
    """
    here = memory._get_thread_local_allocator()
    try:
        memory._set_thread_local_allocator(None)
        yield
    finally:
        memory._set_thread_local_allocator(here)


def _process_allocator() -> Malloc:
    """Return the process's allocator."""
    with _without_the_threads_own():
        found: Malloc = cupy.cuda.get_allocator()
    return found


def _replace_allocator(new: Callable[[Malloc], Malloc]) -> None:
    """Replace the process's allocator by a function's result for it."""
    with _without_the_threads_own():
        _set_allocator(new(cupy.cuda.get_allocator()))


def add_callback(callback: Callback, give_back: Callable[[], Any]) -> None:
    """Call a callback when any allocator of the process is out of memory, until `remove_callback`.

    ``give_back`` first frees the free blocks of umem's pools.
    """
    with _callbacks_lock:
        retry.give_back = give_back
        retry.callbacks = (*retry.callbacks, callback)
        _replace_allocator(retrying)
    changed()  # for layers of other threads


def remove_callback(callback: Callback) -> None:
    """End `add_callback`; has no effect if the callback is not registered."""
    with _callbacks_lock:
        retry.callbacks = tuple(each for each in retry.callbacks if each != callback)
        if not retry.callbacks:
            _replace_allocator(bare)
    changed()


_callbacks_lock = threading.Lock()
_IN_A_BLOCK = (
    "a mode for the whole process cannot be {verb} inside a block that sets this thread's "
    "allocator (a umem block, or cupy.cuda.using_allocator). Leave the block first."
)


@contextlib.contextmanager
def _quietly(malloc: Callable[[int], Any]) -> Iterator[None]:
    """Set an allocator without CuPy 13's warning that ``malloc_async`` is experimental.

    Restoring the user's own choice is no reason to warn again. Can be removed with CuPy 13; CuPy 14
    does not warn.
    """
    if malloc is not cupy.cuda.malloc_async:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


# -- blocks of a thread ---------------------------------------------------------------------------


class Layer:
    """An allocator of one thread above the previous one, for some scopes.

    Code outside these scopes uses the previous allocator. The program's own block
    (``cupy.cuda.using_allocator``) between two of umem's makes two layers.
    """

    def __init__(self, process_policy: Callable[[], Policy | None]) -> None:
        self.scopes: tuple[Scope, ...] = ()
        self._process_policy = process_policy
        # CuPy's privates, also below: its `using_allocator` nests, and scopes may overlap.
        self.before: Malloc | None = memory._get_thread_local_allocator()
        self._malloc, self.forget = _dispatcher(self)

    @property
    def is_needed(self) -> bool:
        """Tell whether one of its scopes is open."""
        return any([scope.is_open for scope in self.scopes])

    def serve(self, scope: Scope) -> None:
        """Add a scope."""
        self.scopes = (*(other for other in self.scopes if other.is_open), scope)

    def push(self) -> None:
        """Make it the calling thread's allocator."""
        memory._set_thread_local_allocator(self._malloc)

    def pop(self) -> None:
        """Restore the previous allocator, if this one is the calling thread's."""
        memory._set_thread_local_allocator(self.before)

    def resolved(self) -> Malloc:
        """Return the allocator that the calling code's scopes select."""
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
                    policy, malloc = part.policy, part.handle[0]
        found = self._below() if malloc is None else malloc
        for watch, mine in watches:
            if mine or malloc is not None:
                found = watched(found, watch.handle, policy)
        return retrying(found)

    def _below(self) -> Malloc:
        """Return the allocator below: the thread's previous one, or the process's."""
        if self.before is not None:
            return self.before
        found = _process_allocator()
        if _layer_of(found):  # a program has kept that of a block that is over, and set it
            return own_pool().malloc
        return found


def _dispatcher(layer: Layer) -> tuple[Malloc, Callable[[], None]]:
    """Return an allocator with CuPy's interface, which resolves the scopes again when they may have
    changed, and a function that drops the cached result.
    """
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


def clear() -> None:
    """Remove allocators of the calling thread that no open scope needs.

    A later call removes layers below the program's own allocator.
    """
    while (layer := _top()) is not None:
        layer.forget()
        if layer.is_needed:
            return
        layer.pop()


def _top() -> Layer | None:
    """Return the layer that is the calling thread's allocator; None if it is not umem's."""
    return _layer_of(memory._get_thread_local_allocator())


def _layer_of(malloc: Malloc | None) -> Layer | None:
    """Return the layer whose `_dispatcher` made an allocator; None for other allocators."""
    return vars(malloc).get("layer") if isinstance(malloc, FunctionType) else None
