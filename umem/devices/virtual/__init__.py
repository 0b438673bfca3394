"""The virtual GPU: a model of pages and time that follows a run, or replays a trace.

`umem.virtual_gpu`, predict and onnx use it, and the software GPU keeps its VRAM, pages and time by
the same model. docs/reference/virtual-gpu.md lists what it models and what it does not.

    device.py          is the device: it answers hints and modes, and follows recorders
    arrays.py          is ``memory.xp``: NumPy arrays that the device follows
    model.py           follows events with pages and time
    driver.py          hands out addresses, pinned VRAM and managed memory, as the driver does
    residency.py       keeps which blocks are in VRAM, and evicts
    runs.py            finds runs of equal values in the tables of blocks
    advice.py          keeps advice, one bit a kind and place
    pool.py            caches memory as CuPy's pool does
    repeating_pool.py  gives each step the addresses of the one before
    free_blocks.py     discards blocks that no array has, and makes them ready again
    clock.py           counts simulated time and the running totals
    clocks.py          runs several clocks on the same calls, for several costs or GPUs
    copies.py          orders copies to pinned memory and back beside the operations
    watching.py        tells a watcher of allocations, from events
    features.py        words what the model can do, for `umem.status` and the doctor

- The model is of pages and time, never of contents. The arithmetic beside it is real and runs on
  NumPy.
- Whatever it prints carries the word *simulated*.
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
