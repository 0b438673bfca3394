"""Techniques that are turned on in an unedited program when its optimizers are set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umem._common.switch import Switch
from umem.chainer.accumulation.accumulating import accumulate
from umem.chainer.function_facts import is_array
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import AccumulationError


class AtSetup(Subscriber, Switch):
    """Calls a function after each ``optimizer.setup``, until `undo`.

    Args:
        convert: called with the optimizer and its link. Its changes remain after `undo`.
    """

    place = -5  # around half precision and accumulation, which these calls turn on

    def __init__(self, convert: Callable[[Any, Any], object]) -> None:
        self._convert = convert
        subscribe(self)

    def _take_back(self) -> None:
        unsubscribe(self)

    def setup(self, proceed: Proceed, method: Any, link: Any) -> Any:
        """Convert an optimizer once it has its link."""
        found = proceed(method, link)
        self._convert(method, link)
        return found


class HalvedBatches(Subscriber, Switch):
    """Accumulates the gradients of two halves of each optimizer's batch, until `undo`.

    The batch is known at the first update, which is then run in halves, too.
    """

    place = -5

    def __init__(self) -> None:
        self._known: list[accumulate] = []
        subscribe(self)

    def _take_back(self) -> None:
        unsubscribe(self)
        while self._known:
            self._known.pop().disable()

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Turn accumulation on at an optimizer's first update.

        Raises:
            AccumulationError: the update gets no loss function and batch of two or more.
        """
        if any(one.optimizer is method for one in self._known):
            proceed(method, *args, **kwargs)
            return
        size = _batch_size(args)
        if size < 2:
            raise AccumulationError(
                "the update gets no loss function and batch, as in optimizer.update(lossfun, x, "
                "t), so that it cannot be halved"
            )
        self._known.append(accumulate(method, micro_batch=(size + 1) // 2).enable())
        method.update(*args, **kwargs)  # this call began before accumulation was on


def _batch_size(args: tuple[Any, ...]) -> int:
    """Return the batch of ``update(lossfun, *arrays)``; 0 for any other arguments."""
    sizes = {len(array) if is_array(array) and array.ndim else 0 for array in args[1:]}
    return sizes.pop() if len(sizes) == 1 and callable(args[0]) else 0
