"""Locks that are safe across forks: the child finds none held, and no guarded change half done.

A forked child has only the thread that forked: a lock held by another thread would stay held for
ever. So the forking thread takes every lock of this module before the fork, and releases it
afterwards in the parent and in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

locks: list[weakref.ref[Any]] = []
"""The live locks of this module, in the order of creation."""
_local = threading.local()


def safe_lock() -> Any:
    """Make a reentrant lock (`threading.RLock`) that is safe across forks.

    A thread must take several of these locks in the order in which they were made, as a fork does.
    A fork waits for the holder.
    """
    lock = threading.RLock()
    locks.append(weakref.ref(lock, locks.remove))
    return lock


def _hold() -> None:
    _local.held = [lock for ref in [*locks] if (lock := ref()) is not None]
    for lock in _local.held:
        lock.acquire()


def _release() -> None:
    for lock in reversed(_local.__dict__.pop("held", ())):
        lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
