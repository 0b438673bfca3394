"""Opens the tier that is below where arrays are, and finds how fast it is."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from umem.chainer.saved.tiers.tier import SMALLEST_BYTES, Tier
from umem.devices.cost import cuda_model
from umem.devices.open import entered_device
from umem.devices.specs import GpuSpec
from umem.errors import DeviceError, StateError
from umem.planner.link import Link
from umem.units import MIB

Where = bool | Path
"""Where what is moved goes: a folder for files; True: pinned host memory; False: nothing moves."""


def only_numpy_moves(where: Where) -> bool:
    """Tell whether it is known before there is an array that NumPy's go, or nobody's."""
    return entered_device() is None and (isinstance(where, Path) or not cuda.available)


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
        from umem.chainer.saved.tiers.simulated import SimulatedTier

        return SimulatedTier(limit_bytes)
    if not isinstance(array, np.ndarray):
        from umem.chainer.saved.tiers.pinned import PinnedTier

        if isinstance(where, Path):
            raise StateError(
                f"arrays of CuPy move to pinned host memory, not to {str(where)!r}: Offload(), or "
                "Recompute(budget, offload=True)"
            )
        return PinnedTier(limit_bytes)
    if not isinstance(where, Path):
        raise StateError(
            "arrays of NumPy are on the host already, and move to files: name a folder on a disk "
            'for them, as in Offload("scratch") or Recompute(budget, offload="scratch")'
        )
    from umem.chainer.saved.tiers.file_tier import FileTier

    return FileTier(where, limit_bytes)


# -- how fast it is --------------------------------------------------------------------------------

SAMPLE_BYTES = 16 * MIB
REPEATS = 3
"""The first is slow: room is made for it below, and files or pages are touched first."""


def link_of(tier: Tier, array: Any) -> Link:
    """The link to a tier for arrays of this kind, in bytes a second; a simulated GPU has its own.

    Cost: three ways down and back of 16 MiB, unless a model says it.

    Raises:
        DeviceError: the simulated GPU shares its memory with the host, and has no link.
    """
    device = entered_device() or cuda_model()
    spec = getattr(device, "spec", None)
    if isinstance(spec, GpuSpec):
        if not spec.host_out_bandwidth or not spec.host_in_bandwidth:
            raise DeviceError(
                f"{spec.title} shares its memory with the host: there is no tier below to move to"
            )
        return Link(spec.host_out_bandwidth, spec.host_in_bandwidth, SMALLEST_BYTES)
    xp = chainer.backend.get_array_module(array)
    found = [_measured(tier, xp) for _ in range(REPEATS)]
    out_rates, in_rates = zip(*found, strict=True)
    return Link(max(out_rates), max(in_rates), SMALLEST_BYTES)


def _measured(tier: Tier, xp: Any) -> tuple[float, float]:
    """Bytes a second, down and back; none where there is no room, or it is refused."""
    sample = xp.arange(SAMPLE_BYTES // 8)
    _wait(xp)
    start = perf_counter()
    sent = tier.send(sample)
    if sent is None:
        return 0.0, 0.0
    sent.let_go()
    if not sent.is_gone():
        return 0.0, 0.0
    _wait(xp)
    below = perf_counter()
    sent.fetch()
    sent.array()
    _wait(xp)
    end = perf_counter()
    sent.forget()
    return SAMPLE_BYTES / (below - start), SAMPLE_BYTES / (end - below)


def _wait(xp: Any) -> None:
    if xp is not np:
        xp.cuda.Device().synchronize()
