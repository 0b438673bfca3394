"""Owners of pooled memory that can be weakly referenced, to learn when the memory is freed.

CuPy's pooled memory cannot be weakly referenced, so each allocation that is handed out owns a
`MemoryOwner`. It has no ``__del__``: Python would check for signals in it, and drop an exception
that a signal handler raises there.
"""

from __future__ import annotations

import weakref
from typing import Any


class MemoryOwner:
    """Keeps an allocation alive for as long as an array over it is."""

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, memory: Any) -> None:
        self._memory = memory


class MemoryOwnerRef(weakref.ref[MemoryOwner]):
    """A weak reference to a `MemoryOwner`; its callback reads from ``ticket`` what was freed."""

    __slots__ = ("ticket",)
    ticket: Any
