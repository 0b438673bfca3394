"""Forked children of the software GPU: they get CUDA's own error.

The child has the memory of its parent, and could continue; on a GPU it could not. Functions that
only free something do nothing there, so that a child that does not use the GPU ends normally.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from umem.devices.software.runtime import HostRuntime

NOT_INITIALISED = 3
"""cudaErrorInitializationError, from driver_types.h."""
_GIVES_BACK = re.compile(r"free|destroy|unload|release", re.IGNORECASE)
Lead = Callable[[Callable[[str], Any]], None]
"""Redirects a CuPy module's functions to those that another function returns for their names."""


def refuse_children(runtime: HostRuntime, leads: Iterable[Lead]) -> None:
    """Make CuPy fail in children that are forked after the first use."""

    def refused(*_: Any, **more: Any) -> None:
        runtime.fail(NOT_INITIALISED)

    def nothing(*_: Any, **more: Any) -> None:
        """Do nothing: the resource is the parent's."""

    def refuse() -> None:
        if runtime.was_used:
            runtime.is_refused = True
            for lead in leads:
                lead(lambda name: nothing if _GIVES_BACK.search(name) else refused)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=refuse)
