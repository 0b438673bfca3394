"""The Chainer device that belongs to the current umem device."""

from __future__ import annotations

from typing import Any

import chainer

from umem.devices import current_device


def device() -> Any:
    """Return the Chainer device for ``model.to_device`` and ``using_device``.

    If NumPy does the arithmetic, as on a virtual GPU, this is NumPy's device; elsewhere it is
    CuPy's with the same ordinal.

    Raises:
        DeviceNotFoundError: there is no CUDA device, and no virtual GPU is open.
    """
    current = current_device()
    return chainer.get_device(
        "@numpy" if current.backend == "numpy" else f"@cupy:{current.ordinal}"
    )
