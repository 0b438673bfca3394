"""umem: CuPy and Chainer programs that use more memory than the GPU has."""

from umem.errors import DeviceNotFoundError, OutOfMemoryError, UmemError

__all__ = ["DeviceNotFoundError", "OutOfMemoryError", "UmemError", "__version__"]
__version__ = "0.1.0"
