"""The error of a kernel's fault, both CuPy's and umem's.

Importing this module imports CuPy's runtime module.
"""

from __future__ import annotations

from typing import Any

from cupy_backends.cuda.api.runtime import CUDARuntimeError

from umem.errors import DeviceError
from umem.host_cuda.faults import Finding


class CudaFault(CUDARuntimeError, DeviceError):
    """A fault of a kernel.

    Args:
        status: a value of cudaError.
        sentence: names the kernel and its fault.
        finding: the finding of a tool of compute-sanitizer, if any.
    """

    def __init__(self, status: int, sentence: str, finding: Finding | None = None) -> None:
        CUDARuntimeError.__init__(self, status)
        self.sentence, self.finding = sentence, finding
        self.args = (f"{self.args[0]}: {sentence}",)

    def __reduce__(self) -> Any:
        return _made_again, (self.status, self.sentence, self.finding)


def _made_again(*given: Any) -> CudaFault:
    return CudaFault(*given)
