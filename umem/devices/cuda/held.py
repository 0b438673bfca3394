"""Memory that somebody wants to hear the end of.

CuPy's pooled memory cannot be weakly referenced, so what is handed out owns a `Held`. No code of
Python's runs when that dies: a signal would be looked for there, and what its handler raises
would be dropped.
"""

from __future__ import annotations

import weakref
from typing import Any


class Held:
    """Keeps memory alive as long as something uses it."""

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, memory: Any) -> None:
        self._memory = memory


class HeldRef(weakref.ref[Held]):
    """Is called back with when its `Held` has died, and knows what that was."""

    __slots__ = ("ticket",)
    ticket: Any
