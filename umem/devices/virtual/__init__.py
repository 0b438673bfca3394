"""The virtual GPU: a model of pages and time that follows a run, or replays a trace.

`umem.virtual_gpu`, predict and onnx use it, and the software GPU has the same model of VRAM, pages
and time. docs/reference/virtual-gpu.md lists what it models and what it does not.

    device.py          is the device: it handles hints and modes, and follows recorders
    arrays.py          is ``memory.xp``: NumPy arrays whose operations the device records
    model.py           updates pages and time with events
    driver.py          allocates addresses, pinned VRAM and managed memory, as the driver does
    residency.py       tracks the blocks in VRAM, and evicts
    runs.py            finds runs of equal values in the tables of blocks
    advice.py          stores advice, one bit for each kind and place
    pool.py            caches memory as CuPy's pool does
    repeating_pool.py  repeats the addresses of the previous step
    free_blocks.py     discards unused blocks, and makes them resident again
    clock.py           counts simulated time and the running totals
    clocks.py          runs several clocks with the same calls, for several costs or GPUs
    copies.py          orders copies to pinned memory and back, concurrent with operations
    watching.py        notifies a watcher of allocations, from events
    features.py        describes the model's features, for `umem.status` and the doctor

- It models pages and time, never contents. Arithmetic is real and runs on NumPy.
- All its output carries the word *simulated*.
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
