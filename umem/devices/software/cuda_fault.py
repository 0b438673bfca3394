"""The error of a kernel's fault: CuPy's and umem's at once.

Importing this module imports CuPy's.
"""

from __future__ import annotations

from typing import Any

from cupy_backends.cuda.api.runtime import CUDARuntimeError

from umem.errors import DeviceError


class CudaFault(CUDARuntimeError, DeviceError):
    """A fault of a kernel.

    Args:
        status: of cudaError.
        sentence: names the kernel, and what it did.
    """

    def __init__(self, status: int, sentence: str) -> None:
        CUDARuntimeError.__init__(self, status)
        self.sentence = sentence
        self.args = (f"{self.args[0]}: {sentence}",)

    def __reduce__(self) -> Any:
        return _made_again, (self.status, self.sentence)


def _made_again(status: int, sentence: str) -> CudaFault:
    return CudaFault(status, sentence)
