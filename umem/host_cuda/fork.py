"""Raises CUDA's own error in forked children of a process with a software GPU.

The child has its parent's memory and could continue, but on a real GPU it could not. Functions that
only free something do nothing there, so that a child that does not use the GPU ends normally.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from umem.host_cuda.faults import GIVES_BACK, RedirectedModule
from umem.host_cuda.runtime import HostRuntime

NOT_INITIALISED = 3
"""cudaErrorInitializationError, from driver_types.h."""


def refuse_children(runtime: HostRuntime, redirected: Iterable[RedirectedModule]) -> None:
    """Make CuPy fail in children forked after the first use."""

    def refused(*_: Any, **more: Any) -> None:
        runtime.fail(NOT_INITIALISED)

    def nothing(*_: Any, **more: Any) -> None:
        """Do nothing, because the resource is the parent's."""

    def refuse() -> None:
        if runtime.was_used:
            runtime.is_refused = True
            for each in redirected:
                each.redirect(lambda name: nothing if GIVES_BACK.search(name) else refused)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=refuse)
