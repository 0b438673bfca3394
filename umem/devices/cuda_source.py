"""Follows CuPy's memory in recordings, on a machine with a GPU."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from umem.errors import UmemError
from umem.trace.recording import add_source

if TYPE_CHECKING:
    from umem.devices.cuda.cupy_blocks import CupyBlocks


class CudaSource:
    """Starts the source of CuPy's blocks where there is a GPU that CuPy can use.

    On a software GPU, which has a source of its own, and without a GPU it does nothing. On a
    machine with one the first recording imports CuPy, where it is installed.
    """

    def __init__(self) -> None:
        self._blocks: CupyBlocks | None = None

    def start(self) -> None:
        """Find the GPU, and start."""
        software = sys.modules.get("umem.host_cuda.installing")
        if software is not None and software.is_open():
            return
        if import_module("umem._common.host").has_real_gpu():
            with suppress(UmemError):  # CuPy cannot use it, or this is a forked child
                import_module("umem.devices.cuda").open_cuda()
                self._blocks = import_module("umem.devices.cuda.cupy_blocks").CupyBlocks()
                self._blocks.start()

    def stop(self) -> None:
        """Stop, if it has started."""
        if self._blocks is not None:
            self._blocks.stop()
            self._blocks = None


add_source(CudaSource())
