"""A real GPU, through CuPy and cuda.core: the only package that imports them for allocation.

Importing it imports neither; opening a device imports CuPy, and the first hint cuda.core.
"""

from umem.devices.cuda.device import CudaDevice
from umem.devices.cuda.gpus import cuda_reason, open_cuda

__all__ = ["CudaDevice", "cuda_reason", "open_cuda"]
