"""The software GPU: the real CuPy on host memory. Arithmetic is real; VRAM, pages and time are not.

The one exception to "a device is never swapped in": what CuPy calls of NVIDIA's is pointed here
before CuPy is imported, for the process.
"""

from umem.devices.software.opening import SoftwareGPU, software_gpu

__all__ = ["SoftwareGPU", "software_gpu"]
