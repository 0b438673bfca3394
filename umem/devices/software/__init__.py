"""The software GPU: the real CuPy on host memory, with VRAM, pages and time of the model.

`umem.host_cuda` puts host memory under CuPy; here is the observer that has a model follow it and
that tells recorders. It is the one exception to "a device is never swapped in": it is put under
CuPy before that is imported, for the process.
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
