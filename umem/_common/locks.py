"""Locks that a fork leaves neither held nor guarding something half done.

A child by fork has only the thread that forked: a lock that another thread held would stay held
for good. So the forking thread takes every lock of this module before, and releases it after, in
the parent and in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

locks: list[weakref.ref[Any]] = []
"""The locks of this module that are referenced, in the order of creation."""
_local = threading.local()


def safe_lock() -> Any:
    """Make a reentrant lock (`threading.RLock`) that is safe across forks.

    A thread may hold several only in the order in which they were made, as the fork takes them. A
    fork waits for its holder.
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
