"""Sums over the parts of all ranks, in the order of parts, whatever the number of ranks.

Floating-point sums depend on their order, and the order in MPI's Allreduce depends on the number of
ranks. Here rank r receives the sum of all earlier parts, adds its own one by one, and passes it on.
"""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from umem.chainer.parallel.ranks import Ranks


def over_parts(ranks: Ranks, stack: Any) -> Any:
    """Sum all ranks' parts in order, on every rank: (parts, ...) to (...). A collective call.

    float16 is summed in float32. With CuPy the sum is computed on the host.
    """
    xp = cuda.get_array_module(stack)
    values = stack if xp is np else stack.get()
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    total = np.zeros(values.shape[1:], values.dtype)
    if ranks.rank:
        ranks.receive(total, ranks.rank - 1)
    for value in values:
        np.add(total, value, out=total)
    if ranks.rank + 1 < ranks.size:
        ranks.wait(ranks.send(total, ranks.rank + 1, "sums"))
    ranks.broadcast(total, ranks.size - 1)
    return xp.asarray(total.astype(stack.dtype, copy=False))


class OverParts(chainer.FunctionNode):
    """Function of `over_parts`; every rank must continue from its result in the same way."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        (stack,) = inputs
        self._count = len(stack)
        return (over_parts(self._ranks, stack),)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        gradient: tuple[Any, ...] = ToParts(self._ranks, self._count).apply(grad_outputs)
        return gradient


class ToParts(chainer.FunctionNode):
    """Function: a view of an array for each part of this rank; its gradient sums over parts."""

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks, self._count = ranks, count

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        (x,) = inputs
        return (cuda.get_array_module(x).broadcast_to(x, (self._count, *x.shape)),)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        gradient: tuple[Any, ...] = OverParts(self._ranks).apply(grad_outputs)
        return gradient
