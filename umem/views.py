"""NumPy views of managed memory: the host reads and writes it in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.errors import HintError
from umem.hints import is_array
from umem.memory import current_device


def as_numpy(a: Any) -> np.ndarray[Any, Any]:
    """The managed array ``a`` as a NumPy array of the same memory: nothing is copied.

    Waits until the GPU has done everything that was asked of it, so what it wrote is there.
    Writes are seen on both sides. The view keeps the memory alive, also after ``a`` is gone.

    What to mind:
        - After this call nobody waits: before the host looks again at what the GPU has written
          since, or the GPU at what the host has, synchronise, or take a new view. While a
          kernel writes the array, the host sees some of it.
        - The pages that the host touches migrate to it, and fault on their way back. To see a
          few values of much memory that is fine; to read all of it, prefetch it to ``"cpu"``
          first, and back afterwards.
        - On a virtual GPU the view is a host array to ``memory.xp``, as NumPy's arrays are to
          CuPy; what the host does through it is not followed.

    Args:
        a: an array of the current device; of a Chainer Variable, its ``.array``.

    Returns:
        A writable array of the same shape, strides and type.

    Raises:
        HintError: it is no array, or not managed memory: copy it instead, with ``a.get()``.
        DeviceError: it is on another device; the device lacks concurrent managed access; or a
            stream is being captured, which waiting would end.
        DeviceNotFoundError: there is no device at all.

    >>> import umem
    >>> with umem.virtual_gpu("v100-16gb"), umem.managed() as memory:
    ...     a = memory.xp.zeros(3)
    ...     umem.as_numpy(a)[1] = 7
    ...     a.get().tolist()
    [0.0, 7.0, 0.0]
    """
    if not is_array(a):
        hint = "; pass its .array" if hasattr(a, "array") else ""
        raise HintError(f"as_numpy takes one array; got {type(a).__name__}{hint}")
    return current_device().host_view(a)
