"""Setting CuPy's allocator for the process, and putting it back; `dispatching` has blocks."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.abc import MetaPathFinder
from typing import Any

import cupy
from cupy.cuda import memory

from umem.devices.base import Device, Policy, Restore, policy_here
from umem.devices.cuda import dispatching
from umem.devices.cuda.driver import CupyPool, Malloc
from umem.errors import StateError
from umem.scopes import Scope, changed
from umem.trace.frameworks import FOLDERS


@dataclass(eq=False)
class _Installed:
    """One allocator of the process: with which policy, and what was there before."""

    scope: Scope
    policy: Policy
    pool: CupyPool
    before: Malloc
    may_be_in: bool = True
    alias: PoolAlias = field(default_factory=lambda: PoolAlias())


class PoolAlias(MetaPathFinder):
    """Names that a framework binds to CuPy's default pool once, at its import (`FOLDERS`).

    Code that frees or measures through them would go on asking that pool. Nothing is imported:
    where a framework is not loaded yet, this watches the imports, finding nothing itself. A
    framework imports more modules after that one, so when its import is done, so is this.
    """

    def __init__(self) -> None:
        self._undo: dict[str, Restore] = {}
        self._pool: CupyPool | None = None

    def point_at(self, pool: CupyPool) -> None:
        """Make the names mean ``pool``, now or when their framework is imported."""
        self._pool = pool
        self._follow()
        sys.meta_path.insert(0, self)

    def restore(self) -> None:
        """Make the names mean what they meant before."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._pool = None
        while self._undo:
            self._undo.popitem()[1]()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Look whether a framework is there by now; the list of finders stays as it is."""
        self._follow()

    def _follow(self) -> None:
        for folder in FOLDERS:
            module_name, _, name = folder.pool_name.rpartition(".")
            module = sys.modules.get(module_name)
            if folder.package in self._undo or self._pool is None or not hasattr(module, name):
                continue
            self._undo[folder.package] = partial(setattr, module, name, getattr(module, name))
            setattr(module, name, self._pool)


class Installer:
    """The allocators that are in: of the process, innermost last, and of blocks on one device.

    Thread-safety: any thread; a block concerns who is inside of it (`umem.scopes`).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._everywhere: list[_Installed] = []

    def policy(self) -> Policy | None:
        """The policy that the calling code allocates by: that of its block, else the process's."""
        return policy_here(self._device) or self._process_policy()

    def _process_policy(self) -> Policy | None:
        return self._everywhere[-1].policy if self._everywhere else None

    def enter(self, scope: Scope) -> None:
        """Have the calling thread allocate by what it is inside of, which ``scope`` is part of."""
        dispatching.enter(scope, self._process_policy)

    def clear(self) -> None:
        """Take out of the calling thread what no open scope needs any more."""
        dispatching.clear()

    def serve_all(self, scope: Scope, policy: Policy, malloc: Malloc, pool: CupyPool) -> None:
        """Make ``malloc``, bare, the allocator of the process until the scope is closed.

        Raises:
            StateError: inside a block of this thread; nothing has changed.
        """
        dispatching.clear()
        installed = _Installed(scope, policy, pool, cupy.cuda.get_allocator())
        scope.at_close(lambda: self._restore(installed))
        try:
            _set_allocator(malloc)
        except StateError:
            installed.may_be_in = False
            raise
        self._everywhere.append(installed)
        changed()  # for layers of other threads, which lie on it
        installed.alias.point_at(pool)

    def leave_all(self, scope: Scope) -> None:
        """End what `serve_all` began.

        Raises:
            StateError: inside a block of this thread, or something that was installed for the
                process after it is still in; nothing has changed.
        """
        dispatching.clear()
        # CuPy refuses to set one beside a thread's own, and only this private tells of that.
        if memory._get_thread_local_allocator() is not None:
            raise StateError(_IN_A_BLOCK.format(verb="switched off"))
        for installed in self._everywhere[:-1]:
            if installed.scope is scope:
                raise StateError("restore what was installed inside this block first")
        scope.close()

    def _restore(self, installed: _Installed) -> None:
        if not installed.may_be_in:
            return
        # By CuPy's privates, because its public setter refuses while the thread has its own: which
        # it may have here, inside of a block that somebody has suspended.
        here = memory._get_thread_local_allocator()
        try:
            memory._set_thread_local_allocator(None)
            _set_allocator(installed.before)
        finally:
            memory._set_thread_local_allocator(here)
        installed.may_be_in = False
        if installed in self._everywhere:
            self._everywhere.remove(installed)
        changed()  # for layers of other threads, which lie on it
        installed.alias.restore()


def _set_allocator(malloc: Callable[[int], Any]) -> None:
    try:
        with _quietly(malloc):
            cupy.cuda.set_allocator(malloc)
    except ValueError as error:
        raise StateError(_IN_A_BLOCK.format(verb="switched on")) from error


_IN_A_BLOCK = (
    "a mode for the whole process cannot be {verb} inside a block that sets this thread's "
    "allocator (a umem block, or cupy.cuda.using_allocator). Leave the block first."
)


@contextlib.contextmanager
def _quietly(malloc: Callable[[int], Any]) -> Iterator[None]:
    """For CuPy 13, which warns that ``malloc_async`` is experimental whenever it is set.

    Putting back what the user chose is no reason to warn of it again. Can go with CuPy 13; 14
    does not warn.
    """
    if malloc is not cupy.cuda.malloc_async:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
