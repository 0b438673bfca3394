"""A function of Chainer for traces and running passes: its owner, and how it may run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from chainer.function import FunctionAdapter

from umem.planner import NOT_AGAIN
from umem.trace.recording import root_of

_KEEP_THEIR_PLACE = ("Forget", "Checkpoint", "PartAggregation", "ToParts")
"""Functions whose backward runs another backward, or exchanges gradients with other ranks, so that
their order must not change."""
_LEAVE_GRADIENTS_OUT = frozenset((
    "ArgMax", "ArgMin", "PolyGamma", "ROIAverageAlign2D", "ROIAveragePooling2D", "ROIMaxAlign2D",
    "ROIMaxPooling2D", "ROIPooling2D",
))  # fmt: skip
"""Functions that give no gradient for an input of floats."""
_FILL_IN = frozenset(("FFT", "LSTM", "SLSTM", "Separate", "SplitAxis", "TreeLSTM"))
"""Functions that give all gradients when some of their outputs have none."""


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of NumPy or CuPy."""
    return isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__")


def owner_of(func: Any) -> Any:
    """Return the object that has a function's state: for an old-style function, not its node."""
    return func.function if isinstance(func, FunctionAdapter) else func


@cache
def rules_of(kind: Any) -> tuple[bool, bool]:
    """Tell whether a function may be recomputed, and whether its backward must keep its order.

    A user's function may have side effects: it may be recomputed, and in another order, only if its
    class says so by ``umem_recomputable``.

    Args:
        kind: the class that holds its state, see `owner_of`.
    """
    if _is_known(kind):
        return kind.__name__ not in NOT_AGAIN, kind.__name__ in _KEEP_THEIR_PLACE
    is_pure = bool(getattr(kind, "umem_recomputable", False))
    return is_pure and kind.__name__ not in NOT_AGAIN, not is_pure


def _is_known(kind: Any) -> bool:
    return bool(kind.__module__.startswith(("chainer.", "umem.")))


def gives_all_gradients(func: Any, reached: Sequence[bool]) -> bool:
    """Tell whether a function's backward is known to give a gradient for each input with a graph.

    Args:
        func: its node. For a class that is not of Chainer or umem the answer is False.
        reached: for each output, whether it has a gradient.
    """
    kind = owner_of(func).__class__
    if not _is_known(kind) or rules_of(kind)[1] or kind.__name__ in _LEAVE_GRADIENTS_OUT:
        return False
    if not all(reached) and kind.__name__ not in _FILL_IN:
        return False
    return all(
        np.dtype(x.dtype).kind == "f" for x in func.inputs if x.requires_grad and x.creator_node
    )


def output_gradient_bytes(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return the bytes of the gradients of a call's outputs.

    The gradient of a view of all of one input is a view of that input's gradient.
    """
    size = 0
    for y in outputs:
        size += y.nbytes
    if len(outputs) == 1 == len(inputs) and outputs[0].base is not None:
        x = inputs[0]
        if x.nbytes == size and root_of(outputs[0]) is root_of(x):
            return 0
    return size
