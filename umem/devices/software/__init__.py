"""The software GPU: the real CuPy on host memory, with VRAM, pages and time of the model.

`umem.software_gpu`, ``umem run --software`` and `umem_software_gpu` open it. `umem.host_cuda` puts
host memory under CuPy; here is the observer that has a model follow it and that tells recorders.

    opening.py             is `software_gpu`, which opens `umem.host_cuda` with an observer
    recording_observer.py  is the observer without a model: it tells recorders what happens
    gpu_model.py           has the model's VRAM, pages and time follow, too, for each device and
                           between them
    copy_streams.py        overlaps copies of pinned memory with operations, in simulated time
    allocation_parts.py    divides moves of the model's blocks among the program's allocations
    cupy_source.py         is the source of recordings: it adds kernels, copies and library calls to
                           CuPy's blocks

- Arithmetic is real, and left out in a dry run. VRAM, pages and time are simulated; the device's
  name says so.
- It is the one exception to "a device is never swapped in": the user asks for it by name, before
  CuPy is imported, for the process. Beside a real GPU it is refused, unless ``force`` is given.
- All of it is in this room, in `umem.host_cuda` and in `umem_software_gpu`.
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
