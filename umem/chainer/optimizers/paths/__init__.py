"""Three implementations of updates with 8-bit states: NumPy, Numba and CuPy; same bits.

`update` chooses one by the parameter's array. All of them do the same operations in the same order,
and give the same bits.

    on_numpy.py  updates in chunks that stay in the cache
    on_numba.py  updates in one compiled loop over the blocks
    on_cuda.py   updates by one kernel a parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from umem.chainer.optimizers.dynamic_map import dynamic_map
from umem.chainer.optimizers.paths import on_cuda
from umem.chainer.optimizers.paths.on_numba import CompiledUpdate, compiled
from umem.chainer.optimizers.paths.on_numpy import NumpyUpdate
from umem.chainer.optimizers.quantized_state import QuantizedState, zeros
from umem.chainer.optimizers.steps import SIGNS, Step
from umem.errors import UnsupportedError

TYPES = ("float16", "float32", "float64")


def update(step: Step, x: Any, grad: Any, states: Sequence[QuantizedState]) -> None:
    """Update a parameter and its 8-bit states in place.

    NumPy arrays that are not contiguous, or are float16, are updated through copies of chunks;
    CuPy arrays that are not contiguous through one copy.

    Raises:
        UnsupportedError: the parameter is not a float of 16, 32 or 64 bits; nothing has changed.
    """
    if x.dtype.name not in TYPES:
        raise UnsupportedError(f"8-bit states are for {', '.join(TYPES)}; got {x.dtype}")
    if isinstance(x, np.ndarray):
        _update_on_host(step, x, grad, states)
    elif x.size:
        on_cuda.update(step, x, grad, states)


def prepare(link: Any, step: type[Step]) -> None:
    """Compile the loops that a NumPy model needs, so that the first update takes no longer."""
    if any(param.device.xp is np for param in link.params()):
        states = [
            QuantizedState(*zeros(np, (1,), signed), dynamic_map(signed))
            for signed in SIGNS[step].values()
        ]
        one = np.ones(1, np.float32)
        _update_on_host(step(*[1.0] * len(step._fields)), one, one.copy(), states)


def _update_on_host(step: Step, x: Any, grad: Any, states: Sequence[QuantizedState]) -> None:
    """Update a NumPy parameter and its states in place, chunk by chunk."""
    loop = compiled(type(step).__name__)
    path = NumpyUpdate(x.size) if loop is None else CompiledUpdate(loop)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    for start in range(0, x.size, path.chunk):
        stop = min(x.size, start + path.chunk)
        part = _chunk(x, start, stop).astype(wide, copy=False)
        slope = _chunk(grad, start, stop).astype(np.float32, copy=False)
        path.run(step, part, slope, [state.part(start, stop) for state in states])
        if not np.may_share_memory(part, x):
            x.flat[start:stop] = part


def _chunk(array: Any, start: int, stop: int) -> Any:
    """Return some elements in C order: a view if they are contiguous, or a copy."""
    if array.flags.c_contiguous:
        return array.reshape(-1)[start:stop]
    return array.flat[start:stop]
