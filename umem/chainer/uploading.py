"""Values of the host, written into arrays of NumPy or CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer.backends import cuda


def upload(array: Any, values: np.ndarray[Any, Any]) -> None:
    """Copy values into an array of NumPy or CuPy; the values may be freed once it returns.

    Costs a wait for the current stream: CuPy's ``set`` returns before the copy is over, if the GPU
    reads pinned memory, or (as on Grace Hopper) any memory of the host.
    """
    if isinstance(array, np.ndarray):
        array[...] = values
        return
    array.set(values)
    with array.device:
        cuda.cupy.cuda.get_current_stream().synchronize()
