"""The virtual GPU: a model of pages and time that follows a run, or replays a trace.

docs/virtual-gpu.md lists what it models and what it does not. Everything it reports is
*simulated*; the arithmetic beside it is real and runs on NumPy.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.devices.virtual.advice import READ_MOSTLY
    from umem.devices.virtual.clock import Clock
    from umem.devices.virtual.device import VirtualGPU
    from umem.devices.virtual.model import Allocator, Model
    from umem.devices.virtual.residency import Residency
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        advice="READ_MOSTLY",
        clock="Clock",
        device="VirtualGPU",
        model="Allocator Model",
        residency="Residency",
    )
