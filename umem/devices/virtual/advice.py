"""The model's representation of advice: one bit for each kind and place."""

from __future__ import annotations

import functools
import operator

from umem.devices.base import Place
from umem.devices.presets import PRESETS
from umem.errors import HintError

READ_MOSTLY, PREFER_HOST, PREFER_GPU, ACCESSED_BY_GPU, ACCESSED_BY_HOST = 1, 2, 4, 8, 16


def advice_flag(action: str, place: Place | str | None) -> int:
    """Return the flag of an advice for a place."""
    if action == "read_mostly":
        return READ_MOSTLY
    if action == "preferred_location":
        return PREFER_HOST if place == "cpu" else PREFER_GPU
    if action == "accessed_by":
        return ACCESSED_BY_HOST if place == "cpu" else ACCESSED_BY_GPU
    raise HintError(f"unknown advice {action!r}")


def preset_flags(name: str) -> int:
    """Return the flags of a preset's advice."""
    return functools.reduce(operator.or_, (advice_flag(*pair) for pair in PRESETS[name]))
