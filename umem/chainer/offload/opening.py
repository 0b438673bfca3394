"""Opens the tier that is below where arrays are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from umem.chainer.offload.tier import Tier
from umem.devices.open import entered_device
from umem.errors import StateError

Where = bool | Path
"""Where what is moved goes: a folder for files; True: pinned host memory; False: nothing moves."""


def checked_place(offload: object) -> Where:
    """Read what a user gives.

    Raises:
        StateError: it is neither a folder nor a truth value.
    """
    if isinstance(offload, bool):
        return offload
    if isinstance(offload, (str, Path)) and str(offload):
        return Path(offload)
    raise StateError(
        "offload is True (CuPy's arrays go to pinned host memory), False, or a folder for the "
        f"files of NumPy's arrays; got {offload!r}"
    )


def open_tier(array: Any, where: Where, limit_bytes: int | None = None) -> Tier:
    """Open the tier below an array.

    Args:
        array: of the kind that goes there.
        where: a folder for NumPy's arrays; nothing for CuPy's and those of a virtual GPU.
        limit_bytes: the most that lies there at a time.

    Raises:
        StateError: arrays of NumPy need a folder, and none is named; or CuPy's were given one.
    """
    if entered_device() is not None:
        from umem.chainer.offload.simulated import SimulatedTier

        return SimulatedTier(limit_bytes)
    if not isinstance(array, np.ndarray):
        from umem.chainer.offload.pinned import PinnedTier

        if isinstance(where, Path):
            raise StateError(
                f"arrays of CuPy move to pinned host memory, not to {str(where)!r}: offload=True"
            )
        return PinnedTier(limit_bytes)
    if not isinstance(where, Path):
        raise StateError(
            "arrays of NumPy are on the host already, and move to files: name a folder for them, "
            'such as offload="scratch"'
        )
    from umem.chainer.offload.file_tier import FileTier

    return FileTier(where, limit_bytes)
