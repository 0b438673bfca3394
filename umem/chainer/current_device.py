"""The Chainer device that belongs to the current umem device."""

from __future__ import annotations

from typing import Any

import chainer

from umem.memory.process import current_device


def device() -> Any:
    """The Chainer device for ``model.to_device`` and ``using_device``.

    On a virtual GPU that is NumPy's, because the arithmetic runs on NumPy; on a CUDA device it
    is CuPy's with the same ordinal.

    Raises:
        DeviceNotFoundError: there is no CUDA device, and no virtual GPU is open.
    """
    current = current_device()
    return chainer.get_device("@numpy" if current.simulated else f"@cupy:{current.ordinal}")
