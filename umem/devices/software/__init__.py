"""The software GPU: the real CuPy on host memory, with modelled VRAM, pages and time.

`umem.software_gpu`, ``umem run --software`` and `umem_software_gpu` open it. `umem.host_cuda` puts
host memory under CuPy; this package has the observer that updates a model and notifies recorders.

    opening.py             is `software_gpu`, which opens `umem.host_cuda` with an observer
    recording_observer.py  is the observer without a model: it only notifies recorders
    gpu_model.py           is the observer with a model of VRAM, pages and time, for each device and
                           between them
    copy_streams.py        overlaps copies of pinned memory with operations, in simulated time
    allocation_parts.py    attributes moves of the model's blocks to the program's allocations
    cupy_source.py         is the source of recordings: adds kernels, copies and library calls to
                           CuPy's blocks

- Arithmetic is real, except in a dry run, which skips it. VRAM, pages and time are simulated; the
  device's name says so.
- It is the one exception to "a device never replaces another": the user requests it by name for the
  process, before CuPy is imported. Beside a real GPU it is an error, unless ``force`` is given.
- All of it is in this package, in `umem.host_cuda` and in `umem_software_gpu`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.devices.software.cupy_source import CupySource
    from umem.devices.software.opening import SoftwareGPU, software_gpu
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__, cupy_source="CupySource", opening="SoftwareGPU software_gpu"
    )
