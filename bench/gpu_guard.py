"""Keeps GPU tests and benchmarks small: the machine may be somebody else's too.

The rule, in code: all managed memory together stays under 4 GiB and under half of what is free,
on the GPU and on the host, at the start and again at each request to the driver; it is never
oversubscribed. Pressure is made by a pool's limit, or by moving pages to the host first.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

from umem.devices.cuda import CudaDevice
from umem.errors import LimitError
from umem.units import GIB, format_bytes

CEILING_BYTES = 4 * GIB
CONTEXT_BYTES = 3 * GIB // 2
"""VRAM in use beside ours above which it is taken to be somebody's. A context takes 0.3 to 1 GB,
and a process in another container is seen by nothing else."""


class Guard:
    """The budget of managed memory on one device, for as long as the process lives.

    Pools are held to it where they grow. `raw` is for memory beside the pools; while that is
    alive, the pools get less.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.budget_bytes = self._budget()
        self._raw_bytes = 0
        device.cap_managed(self.budget_bytes)
        driver: Any = device.driver
        self._free = driver.free_bytes  # a test may say otherwise later
        self._allocate = driver.allocate_managed
        driver.allocate_managed = self._allocate_checked

    def _budget(self) -> int:
        host = self.device.host_available_bytes()
        free = [self.device.free_bytes, *([] if host is None else [host])]
        # What is there already counts too, so take it off; one byte less keeps it "under".
        return max(0, min(CEILING_BYTES, min(free) // 2) - 1 - self.device.usage().managed_bytes)

    def _allocate_checked(self, nbytes: int) -> Any:
        """Allocate for a pool, which has counted it, unless others have taken the room."""
        self._check_free(self.device.usage().managed_bytes + self._raw_bytes)
        return self._allocate(nbytes)

    def _check_free(self, nbytes: int) -> None:
        free = self._free()
        if 2 * nbytes >= free:
            raise LimitError(
                f"{format_bytes(nbytes)} of managed memory, where {format_bytes(free)} of VRAM are "
                "free: a test or a benchmark takes less than half"
            )

    def check(self, nbytes: int) -> int:
        """``nbytes``, if that much managed memory in all may be used.

        Raises:
            LimitError: it may not.
        """
        if nbytes > self.budget_bytes:
            raise LimitError(
                f"{format_bytes(nbytes)} of managed memory; this machine allows a test or a "
                f"benchmark {format_bytes(self.budget_bytes)}"
            )
        return nbytes

    @contextlib.contextmanager
    def raw(self, nbytes: int) -> Iterator[Any]:
        """Managed memory straight from the driver, freed at the end: for first touches.

        Raises:
            LimitError: with what the pools have reserved it would pass the budget.
        """
        import cupy

        total = self.check(nbytes + self._raw_bytes + self.device.usage().managed_bytes)
        self._check_free(total)
        self._hold(nbytes)
        try:
            yield cupy.cuda.malloc_managed(nbytes)
        finally:
            self._hold(-nbytes)

    def _hold(self, nbytes: int) -> None:
        self._raw_bytes += nbytes
        self.device.cap_managed(self.budget_bytes - self._raw_bytes)


_guards: dict[int, Guard] = {}


def guard(device: CudaDevice) -> Guard:
    """The guard of a device: one, made at the first call, so that the budget is taken once."""
    if device.ordinal not in _guards:
        _guards[device.ordinal] = Guard(device)
    return _guards[device.ordinal]


def others(device: CudaDevice) -> str | None:
    """Say who else holds memory of the card; None where nobody does, as far as can be seen."""
    if not device.simulated:
        command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"nvidia-smi, which would say so, does not answer ({error})"
        # In a container our own process has another number there: one line is taken to be ours.
        lines = [line for line in output.splitlines() if line.strip()]
        if len(lines) > 1:
            return f"nvidia-smi lists {len(lines)} processes: {'; '.join(lines)}"
    held = device.vram_bytes - device.free_bytes - device.usage().reserved_bytes
    if held > CONTEXT_BYTES:
        return f"{format_bytes(held)} of VRAM are in use, more than a context of CUDA takes"
    return None
