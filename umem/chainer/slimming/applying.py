"""Techniques turned on for a program, from its model and optimizer alone, and off again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from umem.chainer.accumulation.accumulating import accumulate
from umem.chainer.chunking.capped import workspace
from umem.chainer.optimizers import dequantize_states, quantize_states
from umem.chainer.precision.half_precision import half_precision
from umem.chainer.recompute.recompute import Recompute
from umem.predict.dieting import Combination


def turn_on(stack: ExitStack, chosen: Combination, model: Any, optimizer: Any) -> Recompute | None:
    """Turn a combination on until the stack is left; what converts goes first.

    Returns the `Recompute` that is on, if any. Raises what its parts raise; what was on by then
    the stack takes off.
    """
    change = chosen.change
    if change.half:
        stack.callback(half_precision(model, optimizer).undo)
    if change.small_states:
        quantize_states(optimizer)
        stack.callback(dequantize_states, optimizer)
    if change.cap_bytes is not None:
        stack.callback(workspace(change.cap_bytes).enable().disable)
    if change.micro_batch is not None:
        stack.callback(accumulate(optimizer, micro_batch=change.micro_batch).enable().disable)
    if chosen.budget is None:
        return None
    return stack.enter_context(Recompute(chosen.budget))
