"""Swapping CuPy's allocator for a thread or for the process, and putting it back."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from typing import Any

import cupy

from umem.devices.base import Policy, Restore, Watcher
from umem.devices.cuda.driver import Malloc, Pool
from umem.devices.cuda.watching import watched
from umem.errors import StateError


@dataclass(eq=False)
class _Installed:
    """One allocator that was put in: with which policy, and how to undo it.

    One that is there for a watcher belongs to no pool, and has the policy of what it wraps.
    """

    policy: Policy | None
    pool: Pool | None
    undo: Restore
    watcher: Watcher | None = None
    alias: ChainerAlias = field(default_factory=lambda: ChainerAlias())


class ChainerAlias(MetaPathFinder):
    """``chainer.backends.cuda.memory_pool``: a name that Chainer binds once, at its import.

    Code that frees or measures through it would go on asking CuPy's default pool. Nothing is
    imported: where Chainer is not loaded yet, this watches the imports, finding nothing itself.
    Chainer imports more modules after that one, so when ``import chainer`` is done, so is this.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._undo: Restore | None = None

    def point_at(self, pool: Pool) -> None:
        """Make the alias name ``pool``, now or when Chainer is imported."""
        self._pool = pool
        if not self.follow():
            sys.meta_path.insert(0, self)

    def restore(self) -> None:
        """Make the alias name what it named before."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._undo is not None:
            self._undo()
        self._undo = self._pool = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Look whether Chainer is there by now; the list of finders stays as it is meanwhile."""
        self.follow()

    def follow(self) -> bool:
        """Whether the alias names the pool now."""
        module: Any = sys.modules.get("chainer.backends.cuda")
        if self._undo is None and self._pool is not None and hasattr(module, "memory_pool"):
            before = module.memory_pool
            module.memory_pool = self._pool
            self._undo = lambda: setattr(module, "memory_pool", before)
        return self._undo is not None


class Installer:
    """The allocators that are in, innermost last, for each thread and for the process.

    Thread-safety: any thread; what is installed for a thread concerns that thread only.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._everywhere: list[_Installed] = []

    def policy(self) -> Policy | None:
        """The policy that the calling thread allocates by: its own, else the process's."""
        stack = self._thread_stack() or self._everywhere
        return stack[-1].policy if stack else None

    def install(self, policy: Policy, malloc: Malloc, pool: Pool, everywhere: bool) -> Restore:
        """Make CuPy allocate with ``malloc``, bare unless this thread is watched; returns what
        undoes it.

        Raises:
            StateError: process-wide, inside a block of this thread; nothing has changed. The
                undo raises it when called twice, in another thread, or before what was
                installed inside it is undone; everything stays installed then.
        """
        swap = _for_process if everywhere else _for_thread
        stack = self._everywhere if everywhere else self._thread_stack()
        for watcher in () if everywhere else self._watchers():
            malloc = watched(malloc, watcher, policy)
        installed = _Installed(policy, pool, swap(malloc))
        stack.append(installed)
        if everywhere:
            installed.alias.point_at(pool)
        return lambda: self._restore(installed, everywhere)

    def watch(self, watcher: Watcher) -> Restore:
        """Wrap the allocator of this thread so that ``watcher`` is told; returns what undoes it.

        What is installed for the thread until then is wrapped too. The undo raises as that of
        `install` does.
        """
        policy = self.policy()
        malloc = watched(cupy.cuda.get_allocator(), watcher, policy)
        installed = _Installed(policy, None, _for_thread(malloc), watcher)
        self._thread_stack().append(installed)
        return lambda: self._restore(installed, False)

    def _watchers(self) -> list[Watcher]:
        stack = self._thread_stack()
        return [entry.watcher for entry in stack if entry.watcher is not None]

    def follow_chainer(self) -> None:
        """Point Chainer's alias at the process-wide pool; for after Chainer's import."""
        pool = self._everywhere[-1].pool if self._everywhere else None
        if pool is not None:
            self._everywhere[-1].alias.point_at(pool)

    def _restore(self, installed: _Installed, everywhere: bool) -> None:
        stack = self._everywhere if everywhere else self._thread_stack()
        if installed not in stack:
            raise StateError(
                "this allocator is not installed here: it was restored before, or it was "
                "installed in another thread, where alone it can be restored"
            )
        if stack[-1] is not installed:
            raise StateError("restore what was installed inside this block first")
        installed.undo()
        stack.pop()
        installed.alias.restore()

    def _thread_stack(self) -> list[_Installed]:
        stack: list[_Installed] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack


def _for_thread(malloc: Malloc) -> Restore:
    # CuPy's context manager is the only public way to a thread's allocator. Entered by hand it
    # must be kept: collecting it would put the old allocator back at any moment.
    block: contextlib.AbstractContextManager[None] = cupy.cuda.using_allocator(malloc)
    block.__enter__()
    return lambda: _leave(block)


def _leave(block: contextlib.AbstractContextManager[None]) -> None:
    block.__exit__(None, None, None)


def _for_process(malloc: Malloc) -> Restore:
    before = cupy.cuda.get_allocator()
    _set_allocator(malloc, "switched on")
    return lambda: _set_allocator(before, "switched off")


def _set_allocator(malloc: Callable[[int], Any], verb: str) -> None:
    try:
        with _quietly(malloc):
            cupy.cuda.set_allocator(malloc)
    except ValueError as error:
        raise StateError(
            f"a mode for the whole process cannot be {verb} inside a block that sets this "
            f"thread's allocator (a umem block, or cupy.cuda.using_allocator): {error}. "
            "Leave the block first."
        ) from error


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
