"""`accumulate`: several calls of an optimizer's update make one, or one call runs in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from umem.chainer.accumulation.batch_parts import MicroBatches, loss_scale_of, model_of
from umem.chainer.accumulation.loss_weight import Weight
from umem.chainer.accumulation.splitting import Arguments, ArgumentsBatch, positive_count
from umem.chainer.accumulation.update_group import Group
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import SizeError, StateError

__all__ = ["accumulate"]
_on: list[accumulate] = []


class accumulate(Subscriber):
    """Accumulate an optimizer's gradient over micro-batches or calls of update, then update once.

    With ``umem.chainer.accumulate(optimizer, steps=16)`` 16 calls of ``optimizer.update`` make one
    update; call it with a loss function, or after your own ``cleargrads`` and ``backward``. With
    ``accumulate(optimizer, micro_batch=4)`` each ``optimizer.update(lossfun, *args)`` runs in parts
    of 4 samples. Use either in a with statement, or from `enable` to `disable`.

    The gradient equals the whole batch's, not a mean of means: each part is weighted by its share
    of the divisor, separately for each term of the loss. umem knows the divisor of Chainer's
    averaging losses and of `F.mean`; give any other divisor by ``weight=``, or the loss is
    refused. In the first update, and when a loss has other terms, umem compares three samples at
    once with two and one.

    Args:
        optimizer: a `chainer.GradientMethod` that is set up.
        steps: this many calls of update make one. Calls left over at the end of the block also make
            one, with the gradient of exactly their samples. An exception that leaves the block, or
            a call of update, drops the calls of that group.
        micro_batch: samples of a part; the last may be shorter. If it exceeds the batch, the part
            is the whole batch.
        weight: the divisor of a part's loss, as a function of the loss function's arguments
            (without arguments, if you call backward yourself); or 1, if the losses of parts add up.
            If the loss function returns a dictionary of terms, which are summed: a dictionary with
            these for the unknown terms, by the same names.
        check: compare three samples at once with two and one.
        survive: when memory runs out, halve ``micro_batch``, and repeat the step with the same
            random numbers of NumPy and Python.

    Hooks, clipping, weight decay, the loss scale and the optimizer's ``t`` run once an update.

    Raises:
        SizeError: on construction, not exactly one of ``steps`` and ``micro_batch`` is given, or it
            is not a whole number above zero. In update: an empty batch, arguments of differing
            lengths.
        StateError: the optimizer has no model, or is accumulated already.
        AccumulationError: in update, if the divisor of a term is unknown, or the parts do not give
            the gradient of the whole; names the term and its line. Parameters, links and the
            optimizer are as before, gradients are cleared.

    Cost: no copy of gradients beside Chainer's own; one, if you call backward yourself. The
    comparison makes two more copies, and takes two passes over three samples, nine times at first
    and three times later. Thread-safety: for the optimizer's thread.
    """

    place = -2

    def __init__(
        self,
        optimizer: Any,
        steps: int | None = None,
        *,
        micro_batch: int | None = None,
        weight: Weight = None,
        check: bool = True,
        survive: bool = False,
    ) -> None:
        if (steps is None) == (micro_batch is None):
            raise SizeError("give one of steps= and micro_batch=")
        if steps is not None and survive:
            raise StateError("survive=True needs micro_batch=, not steps=")
        self.optimizer = optimizer
        model_of(optimizer)
        self._micro = self._steps = None
        if micro_batch is not None:
            self._micro = MicroBatches(optimizer, micro_batch, weight, check=check, survive=survive)
        else:
            self._steps = positive_count(steps, "steps")
        self._group = Group(optimizer, weight, self._steps or 1, check=check)
        self._is_inside = False

    @property
    def micro_batch(self) -> int | None:
        """Return the samples of a micro-batch, after any halving; None with ``steps``."""
        return None if self._micro is None else self._micro.size

    @property
    def count(self) -> int:
        """Return how many calls of update the open group has taken."""
        return self._group.count

    def serialize_group(self, serializer: Any) -> None:
        """Save or load the gradients of an open group, for `umem.chainer.Snapshot`."""
        self._group.serialize(serializer["group"])
        if self._micro is not None:
            self._micro.serialize(serializer["micro_batches"])

    # -- on and off ------------------------------------------------------------------------------

    def enable(self) -> accumulate:
        """Turn accumulation on until `disable`.

        Raises:
            StateError: the optimizer is accumulated already, by this or another, which stays on.
        """
        if any(one.optimizer is self.optimizer for one in _on):
            raise StateError("this optimizer is accumulated already: disable that first")
        subscribe(self)
        _on.append(self)
        return self

    def disable(self) -> None:
        """Turn accumulation off; an incomplete group makes one update.

        Raises:
            StateError: it is not on; nothing has changed.
        """
        self._off()
        if self.count:
            self._update(self.optimizer.update)

    def _off(self) -> None:
        if self not in _on:
            raise StateError("this accumulation is not on")
        _on.remove(self)
        unsubscribe(self)

    def __enter__(self) -> accumulate:
        return self.enable()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Turn accumulation off; an exception drops the open group without an update."""
        if kind is None:
            self.disable()
        else:
            self._off()
            self._group.drop()

    # -- Chainer's events ------------------------------------------------------------------------

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Handle a call of ``optimizer.update``."""
        if method is not self.optimizer or self._is_inside:
            proceed(method, *args, **kwargs)
            return
        lossfun, *rest = args or (kwargs.pop("lossfun", None),)
        self._is_inside = True
        try:
            self._step(lossfun, Arguments(tuple(rest), kwargs), lambda: proceed(method))
        finally:
            self._is_inside = False

    def _step(self, lossfun: Any, given: Arguments, update: Callable[[], None]) -> None:
        """Handle one call of ``optimizer.update``: split it, or add it to the group and update when
        full.

        Raises:
            StateError: with ``micro_batch`` the call has no loss function.
        """
        if self._micro is not None:
            if lossfun is None:
                raise StateError(
                    "micro_batch= splits optimizer.update(lossfun, *args) into parts: if you "
                    "compute the gradients yourself, use steps="
                )
            self._micro.compute_gradient(lossfun, ArgumentsBatch(*given))
            update()
            return
        if lossfun is None:
            self._group.add_call_by_hand()
        else:
            self._group.take(lossfun, given, loss_scale_of(self.optimizer))
        if self._group.count == self._steps:
            self._update(update)

    def _update(self, update: Callable[[], None]) -> None:
        self._group.restore_gradient()
        update()

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Read a loss's tape before the program calls backward on it itself."""
        if self._steps is not None and not self._is_inside:
            self._group.read(args[0])
        proceed(*args, **kwargs)

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Watch functions that the program calls before its own backward."""
        if self._steps is None or self._is_inside:
            return proceed(func, inputs)
        return self._group.apply(proceed, func, inputs)


def accumulations(optimizer: Any) -> list[accumulate]:
    """List the accumulations that are on for an optimizer."""
    return [one for one in _on if one.optimizer is optimizer]


def refuse_inside_of_group(model: Any, what: str) -> None:
    """Refuse to replace parameters whose gradients an incomplete group has accumulated.

    Args:
        what: the call that would replace the model's parameters, for the message.

    Raises:
        StateError: the group holds their gradients, which would be lost.
    """
    own = {id(parameter) for parameter in model.params()}
    for one in _on:
        if one.count and any(id(p) in own for p in one.optimizer.target.params()):
            raise StateError(
                f"{one.count} calls of update wait in an incomplete group of "
                f"umem.chainer.accumulate: {what} before its first call, or outside of the block"
            )
