"""Devices: a real GPU through CuPy, and the model of one; `GpuSpec` describes a GPU of your own."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem._common.host import (
        CONTEXT_FAULTS,
        HOST_SHARE,
        available_bytes,
        host_view,
        pinned_room,
    )
    from umem._common.specs import GpuSpec
    from umem.devices.base import (
        ADVICE,
        MODES,
        Advice,
        Device,
        Feature,
        Location,
        Mode,
        Place,
        Policy,
        Served,
        Span,
        Watcher,
        common,
        policy_here,
    )
    from umem.devices.cost import Sample, StepCost, cuda_model, is_dry, work_seconds
    from umem.devices.open import current_device, device_kind, entered_device, parse_device
    from umem.devices.page_moves import Now, PageMove
    from umem.devices.presets import PRESETS, Preset, check_preset
    from umem.devices.selftest import Check, run_selftest
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        {
            "umem._common.host": (
                "CONTEXT_FAULTS HOST_SHARE available_bytes host_view pinned_room"
            ),
            "umem._common.specs": "GpuSpec",
        },
        base=(
            "ADVICE Advice Device Feature Location MODES Mode Place Policy Served Span "
            "Watcher common policy_here"
        ),
        cost="Sample StepCost cuda_model is_dry work_seconds",
        open="current_device device_kind entered_device parse_device",
        page_moves="Now PageMove",
        presets="PRESETS Preset check_preset",
        selftest="Check run_selftest",
    )
