"""Hooks on shards, and norms of gradients spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from chainer import optimizer_hooks
from chainer.backends import cuda

from umem.chainer.agreement import Gather
from umem.chainer.tap import Proceed, Subscriber

BY_ELEMENT = (
    optimizer_hooks.WeightDecay,
    optimizer_hooks.Lasso,
    optimizer_hooks.GradientHardClipping,
)
"""Chainer's hooks that work on each element by itself, and so also on shards."""
BY_NORM = (optimizer_hooks.GradientClipping, optimizer_hooks.GradientLARS)
"""Chainer's hooks that need a norm, which is summed over ranks."""
_CHUNK = 1 << 16


class NormsOfAll(Subscriber):
    """Gives hooks that need a norm the norm over all ranks' shards.

    Args:
        gather: gives every rank the values of all ranks.
        sees_shards: tells whether an optimizer sees shards now.
    """

    place = 4  # inside half precision, which shows hooks its float32 gradients

    def __init__(self, gather: Gather, sees_shards: Callable[[Any], bool]) -> None:
        self._gather, self._sees_shards = gather, sees_shards

    def call_hook(self, proceed: Proceed, method: Any, hook: Any) -> None:
        """Apply a hook to shards with the result that it has on whole parameters."""
        if not self._sees_shards(method) or type(hook) not in BY_NORM:
            proceed(method, hook)
        elif isinstance(hook, optimizer_hooks.GradientClipping):
            self._clip(hook, [one.grad for one in _updated(method.target)])
        else:
            self._scale_by_layer(hook, list(_updated(method.target)))
        method.reallocate_cleared_grads()

    def _clip(self, hook: Any, gradients: list[Any]) -> None:
        (norm,) = self._norms([gradients])
        if norm > hook.threshold:
            for gradient in gradients:
                gradient *= hook.threshold / norm

    def _scale_by_layer(self, hook: Any, parameters: list[Any]) -> None:
        """Scale each gradient by its parameter's norm (LARS, You et al., arXiv 1708.03888)."""
        arrays = [[one.array] for one in parameters] + [[one.grad] for one in parameters]
        norms = self._norms(arrays)
        of_values, of_gradients = norms[: len(parameters)], norms[len(parameters) :]
        for one, value, gradient in zip(parameters, of_values, of_gradients, strict=True):
            one.grad += hook.weight_decay * one.array
            if value > hook.threshold:
                one.grad *= value / (hook.eps + gradient + hook.weight_decay * value)

    def _norms(self, groups: list[list[Any]]) -> list[float]:
        """Return the norm of each group of sharded arrays, summed in the order of ranks."""
        mine = [sum(_square(array) for array in group) for group in groups]
        every = self._gather(mine)
        return [math.sqrt(sum(theirs)) for theirs in zip(*every, strict=True)]


def _updated(target: Any) -> Iterator[Any]:
    """Yield the parameters that are updated, as the optimizer sees them."""
    for one in target.params(False):
        if one.update_rule is not None and one.update_rule.enabled:
            yield one


def _square(array: Any) -> float:
    """Return the sum of squares in float64, in which squares of float32 are exact."""
    flat, xp = array.reshape(-1), cuda.get_array_module(array)
    if xp is not np:
        return float(xp.square(flat, dtype=np.float64).sum())
    chunks = (flat[at : at + _CHUNK].astype(np.float64) for at in range(0, len(flat), _CHUNK))
    return float(sum(np.dot(chunk, chunk) for chunk in chunks))
