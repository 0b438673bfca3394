"""Devices: a real GPU through CuPy, and a model of one; `GpuSpec` describes a custom GPU.

Memory, chainer, choosing and cli ask this package where arrays live. A device is a folder and a row
of the table in `umem.devices.open`.

    base.py              is the interface of devices; it checks arguments and raises errors, and a
                         device only does the work
    open.py              has the table of devices, and finds the one that the calling code uses
    cuda/                is a real GPU, through CuPy
    virtual/             is the model of one
    software/            is the real CuPy on host memory, with the model's VRAM, pages and time
    cost.py              is the cost of a step, from any source, and the models behind CUDA devices
    blocks_of_memory.py  is the part of the interface that planned paging needs: blocks, places,
                         discards
    page_moves.py        is a move of pages, as a model or the driver's counters report it
    spans.py             finds the address ranges that an array covers
    presets.py           maps ways of using memory to advice
    selftest.py          tests every mode and hint of a device, for ``umem doctor``
    cuda_source.py       follows CuPy's memory in recordings, on a machine with a GPU

- All devices share one contract of tests; each device's tests subclass it.
- Callers use the table, and the device's own attributes where devices differ (``simulated``,
  ``backend``, ``figures``). No code checks a device's class.
- CuPy is imported when a CUDA device is opened. Importing umem opens no device.
- A device never replaces another. `umem.devices.software` is the one exception.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
