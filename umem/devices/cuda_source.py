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
    """Starts the source of CuPy's blocks, if CuPy can use a GPU.

    Does nothing without a GPU, and on a software GPU, which has its own source. On a machine with a
    GPU the first recording imports CuPy, if it is installed.
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
        """Stop, if started."""
        if self._blocks is not None:
            self._blocks.stop()
            self._blocks = None


add_source(CudaSource())
