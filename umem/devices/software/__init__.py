"""The software GPU: the real CuPy on host memory. Arithmetic is real; VRAM, pages and time are not.

The one exception to "a device is never swapped in": what CuPy calls of NVIDIA's is pointed here
before CuPy is imported, for the process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.devices.software.common_kernels import DTYPES
    from umem.devices.software.faults import revive
    from umem.devices.software.kernel_archive import MANIFEST
    from umem.devices.software.kernels import KernelCompiler
    from umem.devices.software.opening import SoftwareGPU, software_gpu
    from umem.devices.software.processors import VARIABLE, Processors
    from umem.devices.software.toolchain import Toolchain
    from umem.devices.software.versions import known_cupy
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        common_kernels="DTYPES",
        faults="revive",
        kernel_archive="MANIFEST",
        kernels="KernelCompiler",
        opening="SoftwareGPU software_gpu",
        processors="Processors VARIABLE",
        toolchain="Toolchain",
        versions="known_cupy",
    )
