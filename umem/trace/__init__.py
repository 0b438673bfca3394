"""Traces of steps: what each allocated, freed, read and wrote.

Everything else that umem says is a function of a trace.
"""

from umem.trace.events import Access, Alloc, Checker, Event, Free, Hint, Mark, Op
from umem.trace.trace import Lifetime, Trace

__all__ = [
    "Access", "Alloc", "Checker", "Event", "Free", "Hint", "Lifetime", "Mark", "Op", "Trace",
]  # fmt: skip
