"""How fast a tier takes arrays and gives them back: measured, or what the model says."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import chainer
import numpy as np

from umem.chainer.offload.tier import SMALLEST_BYTES, Tier
from umem.devices.cost import cuda_model
from umem.devices.open import entered_device
from umem.devices.specs import GpuSpec
from umem.errors import DeviceError
from umem.planner.link import Link
from umem.units import MIB

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
    """Bytes a second, down and back; none where there is no room."""
    sample = xp.arange(SAMPLE_BYTES // 8)
    _wait(xp)
    start = perf_counter()
    sent = tier.send(sample)
    if sent is None:
        return 0.0, 0.0
    sent.let_go()
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
