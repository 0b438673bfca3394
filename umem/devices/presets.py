"""Presets: the advice for each way of using memory."""

from __future__ import annotations

from typing import Literal

from umem.devices.base import Advice
from umem.errors import HintError

Preset = Literal["streaming", "random", "read_mostly", "optimizer_state"]

PRESETS: dict[str, tuple[tuple[Advice, Literal["gpu", "cpu"] | None], ...]] = {
    "streaming": (("preferred_location", "cpu"), ("accessed_by", "gpu")),
    "random": (("preferred_location", "gpu"),),
    "read_mostly": (("read_mostly", None),),
    "optimizer_state": (("preferred_location", "cpu"), ("accessed_by", "gpu")),
}
"""The advice of each preset. ``streaming`` and ``optimizer_state`` keep the data on the host and
map it for the GPU. The GPU reads it once a step, so moving it would only evict other data.
"""


def check_preset(name: str) -> None:
    """Raise HintError for an unknown preset.

    Raises:
        HintError: there is no such preset.
    """
    if name not in tuple(PRESETS):  # whatever it is, also what cannot be hashed
        raise HintError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
