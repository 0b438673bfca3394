"""Backward from several scalars of one loss, each with a gradient of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
from chainer import _backprop

from umem.chainer.accumulation.kept_gradients import times
from umem.chainer.parameters_once import parameters


def go_backward(seeds: Sequence[tuple[Any, float]], device: Any, loss_scale: Any) -> None:
    """Run backward from several scalars' nodes, each with its own initial gradient.

    It is what ``Variable.backward`` does with one of them.
    """
    outputs = []
    with chainer.using_device(device):
        for node, seed in seeds:
            value = seed if loss_scale is None else seed * loss_scale
            gradient = device.xp.full(node.shape, value, node.dtype)
            outputs.append((node, chainer.Variable(gradient)))
    with chainer.using_config("enable_backprop", False):
        # What Variable.backward calls; it takes several scalars, which that does not.
        _backprop._backprop_to_all(outputs, False, loss_scale)


def multiply(model: Any, factor: float) -> None:
    """Multiply the gradients of a link's parameters in place, one by one."""
    if factor == 1.0:
        return
    for parameter in parameters(model):
        if parameter.array is not None and parameter.grad is not None:
            parameter.grad = times(parameter.grad, factor)
