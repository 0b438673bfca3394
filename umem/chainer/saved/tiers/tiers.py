"""Opening of the offload target for an array, and its bandwidth."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from umem._common.specs import GpuSpec
from umem.chainer.saved.tiers.tier import SMALLEST_BYTES, Tier
from umem.devices import cuda_model, entered_device
from umem.errors import DeviceError, StateError
from umem.planner import Link
from umem.units import MIB

Where = bool | Path
"""The offload target to use: a folder for files; True: pinned host memory; False: no offloading."""


def only_numpy_moves(where: Where) -> bool:
    """Tell whether at most NumPy's arrays are offloaded, without an array to look at."""
    return entered_device() is None and (isinstance(where, Path) or not cuda.available)


def open_tier(array: Any, where: Where, limit_bytes: int | None = None) -> Tier:
    """Open the offload target for arrays of an array's class.

    Args:
        array: of NumPy or of CuPy.
        where: a folder for NumPy's arrays; True for CuPy's, and on a virtual GPU.
        limit_bytes: the most that is offloaded at a time; None: no limit.

    Raises:
        StateError: no folder for NumPy's arrays, or a folder for CuPy's.
        FileError, UnsupportedError: see `FileTier`.
    """
    if entered_device() is not None:
        from umem.chainer.saved.tiers.simulated import SimulatedTier

        return SimulatedTier(limit_bytes)
    if not isinstance(array, np.ndarray):
        from umem.chainer.saved.tiers.pinned import PinnedTier

        if isinstance(where, Path):
            raise StateError(
                f"arrays of CuPy are offloaded to pinned host memory, not to {str(where)!r}: use "
                "Offload(), or Recompute(budget, offload=True)"
            )
        return PinnedTier(limit_bytes)
    if not isinstance(where, Path):
        raise StateError(
            "arrays of NumPy are on the host already, and are offloaded to files: name a folder on "
            'a disk, as in Offload("scratch") or Recompute(budget, offload="scratch")'
        )
    from umem.chainer.saved.tiers.file_tier import FileTier

    return FileTier(where, limit_bytes)


# -- bandwidth -------------------------------------------------------------------------------------

SAMPLE_BYTES = 16 * MIB
"""Bytes of a transfer to measure, long compared with its latency: a guess, not measured."""
REPEATS = 3
"""Transfers to measure, of which the best counts: the first also allocates, and touches pages."""


def link_of(tier: Tier, array: Any) -> Link:
    """Return the bandwidths of an offload target, measured or specified by a simulated GPU.

    Args:
        tier: the target, which is used for the measurement.
        array: one of the class that is offloaded.

    Cost: 16 MiB sent and fetched three times, unless a GPU is simulated.

    Raises:
        DeviceError: the simulated GPU shares its memory with the host, and has no link.
    """
    device = entered_device() or cuda_model()
    spec = getattr(device, "spec", None)
    if isinstance(spec, GpuSpec):
        if not spec.host_out_bandwidth or not spec.host_in_bandwidth:
            raise DeviceError(
                f"{spec.title} shares its memory with the host: it has no tier below to offload to"
            )
        return Link(spec.host_out_bandwidth, spec.host_in_bandwidth, SMALLEST_BYTES)
    xp = chainer.backend.get_array_module(array)
    found = [_measured(tier, xp) for _ in range(REPEATS)]
    out_rates, in_rates = zip(*found, strict=True)
    return Link(max(out_rates), max(in_rates), SMALLEST_BYTES)


def _measured(tier: Tier, xp: Any) -> tuple[float, float]:
    """Measure bytes a second to the target and back; zeros without room, or if a write fails."""
    sample = xp.arange(SAMPLE_BYTES // 8)
    _wait(xp)
    start = perf_counter()
    sent = tier.send(sample)
    if sent is None:
        return 0.0, 0.0
    sent.release()
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
