"""Listeners to the marks of a program, `umem.mark`, beside recorders."""

from __future__ import annotations

from collections.abc import Callable

from umem.trace.events import Mark

listeners: list[Callable[[Mark], None]] = []
"""Called with each mark of the process, after the recorders."""
