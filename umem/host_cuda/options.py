"""Options of the software GPU: their limits, and the environment variable."""

from __future__ import annotations

import math

from umem._common.printable import quoted
from umem.errors import DeviceError, SizeError

VARIABLE = "UMEM_SOFTWARE_GPU"
"""Requests a software GPU; `umem_software_gpu` reads it."""
MOST_DEVICES = 8
"""The largest ``devices=``: the number of GPUs in NVIDIA's own servers."""
LEAST_SECONDS, MOST_SECONDS = 1e-3, 1e6
"""Limits of ``kernel_seconds=``; longer times count as mistakes (a guess)."""


def check_count(devices: object) -> None:
    """Check a number of devices.

    Raises:
        DeviceError: it is not a whole number from 1 to `MOST_DEVICES`.
    """
    is_whole = isinstance(devices, int) and not isinstance(devices, bool)
    if not (is_whole and 1 <= devices <= MOST_DEVICES):  # type: ignore[operator]
        raise DeviceError(
            f"devices must be a whole number from 1 to {MOST_DEVICES}; got {devices!r}"
        )


def check_seed(seed: object) -> None:
    """Check a seed of streams; None is valid.

    Raises:
        SizeError: it is not a whole number of at least 0.
    """
    if seed is not None and not (type(seed) is int and seed >= 0):
        raise SizeError(f"stream_seed must be a whole number of at least 0; got {quoted(seed)}")


def check_seconds(seconds: float | None) -> None:
    """Check a limit of a kernel's processor time.

    Raises:
        SizeError: it is not a number of seconds between the limits.
    """
    if seconds is None:
        return
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not (math.isfinite(seconds) and LEAST_SECONDS <= seconds <= MOST_SECONDS):
        raise SizeError(
            f"kernel_seconds={seconds!r}: the processor time that a kernel may take must be from "
            "0.001 to 1000000 s"
        )
