"""The gradient of a whole batch, part by part: Chainer's gradients add up, weighted by share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
from chainer import _backprop
from chainer.functions.noise.dropout import Dropout

from umem.chainer.accumulation.divisors import ASK, Term, terms_of
from umem.chainer.accumulation.dropout_masks import DropoutMasks
from umem.chainer.accumulation.mixing import Mixing
from umem.chainer.accumulation.numbers_in_loss import CountLearned, DivisorReader, DivisorsRead
from umem.chainer.accumulation.part_reports import PartReports
from umem.chainer.accumulation.shares import Count, Shares
from umem.chainer.accumulation.splitting import Arguments, Batch, slices
from umem.chainer.accumulation.step_state import StepState
from umem.chainer.parameters_once import parameters
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import AccumulationError, UnsupportedError

Weight = Callable[..., Any] | float | None


class WholeGradient(Subscriber):
    """Computes an optimizer's gradient of a batch in parts.

    Attributes:
        weight: what the user says of the loss's divisor; see `umem.chainer.accumulate`.
        masks: dropout masks of the whole batch, while it is gone through with them.
    """

    place = -1

    def __init__(self, model: Any, weight: Weight) -> None:
        self.weight = _checked_weight(weight)
        self.masks: DropoutMasks | None = None
        self._model = model
        self._mixing = Mixing(model)
        self._reader = DivisorReader()
        self._scalars: list[Any] = []
        self._counts_first = False
        self._thread = 0

    def serialize_learned(self, serializer: Any) -> None:
        """Save or load what was learned of the loss: sums are rounded by it."""
        self._counts_first = serializer("counts_first", self._counts_first)
        self._mixing.has_instances = serializer("has_instances", self._mixing.has_instances)
        self._reader.serialize(serializer)

    @contextmanager
    def compared(self) -> Iterator[None]:
        """While it is on, parts are compared with a whole."""
        self._reader.to_check = False
        try:
            yield
        finally:
            self._reader.to_check = True

    # -- the parts -----------------------------------------------------------------------------

    def leave(self, lossfun: Any, batch: Batch, sizes: Sequence[int], loss_scale: Any) -> None:
        """Leave the gradient of a batch on the parameters; what was there is cleared.

        Raises:
            AccumulationError: it cannot be had in parts; says why. Gradients are of some parts.
            whatever the loss function raises.
        """
        parts, totals = slices(sizes), None
        state = StepState(self._model)
        with self.listening():
            while True:
                self._reader.begin()
                try:
                    if self._counts_first and totals is None and len(parts) > 1:
                        totals = self._totals(lossfun, batch, parts)
                    shares = self._gone_through(lossfun, batch, parts, loss_scale, totals)
                except CountLearned:
                    self._again(state)
                    continue
                if shares.factor() is not None or totals is not None:
                    break
                self._counts_first, totals = True, shares.totals  # they go apart, and are known now
                self._again(state)
        factor = shares.factor()
        if factor is None:
            raise AccumulationError(
                f"the loss divides by other counts each time it is asked: {ASK}"
            )
        multiply(self._model, factor)

    def _again(self, state: StepState) -> None:
        state.put_back()
        if self.masks is not None:
            self.masks.again()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Refuse what mixes samples, and have the masks of the whole, for the calling thread."""
        self._thread = threading.get_ident()
        subscribe(self)
        try:
            yield
        finally:
            unsubscribe(self)

    def _gone_through(
        self,
        lossfun: Any,
        batch: Batch,
        parts: Sequence[slice],
        loss_scale: Any,
        totals: Sequence[float] | None,
    ) -> Shares:
        shares, observed = Shares(totals), PartReports()
        self._model.cleargrads()
        for part in parts:
            if self.masks is not None:
                self.masks.begin(part)
            with observed.part() as seen:
                loss = self._add(lossfun, batch, part, shares, loss_scale)
            seen.weigh((part.stop - part.start) / batch.size, *loss)
            del loss
        if (factor := shares.factor()) is not None:
            observed.report(factor)
        return shares

    def _add(
        self, lossfun: Any, batch: Batch, part: slice, shares: Shares, loss_scale: Any
    ) -> tuple[Any, float | None]:
        """Add one part's gradient; returns the loss's array, and its share where it has one."""
        count = part.stop - part.start
        is_whole = count == batch.size and not isinstance(self.weight, (int, float))
        return self.add(
            lossfun, batch, part, None if is_whole else shares, batch.size / count, loss_scale
        )

    def add(
        self,
        lossfun: Any,
        batch: Batch,
        part: slice,
        shares: Shares | None,
        scale: float,
        loss_scale: Any,
        before_backward: Callable[[], None] = lambda: None,
    ) -> tuple[Any, float | None]:
        """Add the gradient of some samples to what is on the parameters.

        Args:
            shares: what their share of the whole is to be found from; None: they are the whole.
            scale: how many such parts the whole is thought to be.
            before_backward: called between forward and backward.
        """
        given = batch.take(part)
        self._scalars = []
        loss = checked(lossfun(*given.args, **given.kwargs))
        seeds = [(loss.node, 1.0)]
        if shares is not None:
            samples = range(part.start, part.stop)
            seeds = self._seeds(
                loss,
                given,
                shares,
                scale,
                partial(
                    self._reader.read,
                    part=samples,
                    size=batch.size,
                    terms_for=partial(self._terms_for, lossfun, batch),
                ),
            )
        self._scalars = []
        before_backward()
        go_backward(seeds, loss.device, loss_scale)
        alone = seeds[0][1] if len(seeds) == 1 and seeds[0][0] is loss.node else None
        return loss.array, alone

    def _totals(self, lossfun: Any, batch: Batch, parts: Sequence[slice]) -> list[float]:
        """Count by what the whole loss is divided, by going forward only; leaves no trace."""
        state, shares = StepState(self._model), Shares()
        try:
            for part in parts:
                samples = range(part.start, part.stop)
                terms_for = partial(self._terms_for, lossfun, batch)
                terms = terms_for(list(samples))
                found = self._reader.read(terms, shares, samples, batch.size, terms_for)
                shares.of(found.counts, 1.0)
        finally:
            state.put_back()
        return shares.totals

    def _terms_for(self, lossfun: Any, batch: Batch, which: list[int]) -> Sequence[Term]:
        """The terms of the loss of some samples, by going forward only; leaves no trace."""
        state, masks, scalars = StepState(self._model), self.masks, self._scalars
        self.masks, self._scalars = None, []
        given = batch.take(which)
        try:
            with PartReports().part():
                loss = checked(lossfun(*given.args, **given.kwargs))
            return [term.without_tape() for term in terms_of(loss, self._model)]
        finally:
            self.masks, self._scalars = masks, scalars
            state.put_back()

    # -- how much of the whole a part is ---------------------------------------------------------

    def _seeds(
        self,
        loss: Any,
        given: Arguments,
        shares: Shares,
        scale: float,
        read: Callable[..., DivisorsRead],
    ) -> list[tuple[Any, float]]:
        """Where backward begins, and with what gradient."""
        if isinstance(self.weight, (int, float)):
            return [(loss.node, float(self.weight))]
        if self.weight is not None:
            count = weighed(self.weight, given)
            return [(loss.node, shares.of([Count(count)], scale)[0])]
        terms = terms_of(loss, self._model)
        counts, groups = read(terms, shares)
        found = shares.of(counts, scale)
        if len(set(found)) == 1:
            return [(loss.node, found[0])]
        return [(t.node, t.factor * found[at]) for t, at in zip(terms, groups, strict=True)]

    # -- what Chainer tells ----------------------------------------------------------------------

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Refuse what mixes samples, and give dropout the masks of the whole batch."""
        if threading.get_ident() == self._thread:
            self._mixing.refuse(func, inputs)
            if self.masks is not None and type(func) is Dropout and func.mask is None:
                if chainer.config.in_recomputing:
                    raise UnsupportedError(
                        'dropout="batch" cannot give a region of checkpoint or forget its masks a '
                        "second time: use umem.chainer.Recompute instead of them"
                    )
                x = getattr(inputs[0], "array", inputs[0])
                func.mask = self.masks.mask(func.dropout_ratio, x, func.label)
        outputs = proceed(func, inputs)
        if threading.get_ident() == self._thread:
            # Alive until backward, so that a term can be seen to be 0.
            self._scalars += [y for y in outputs if y.size == 1]
        return outputs


def _checked_weight(weight: Weight) -> Weight:
    """What was given as ``weight=``.

    Raises:
        UnsupportedError: it is neither a function nor a finite number.
    """
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if weight is None or callable(weight) or (is_number and math.isfinite(weight)):
        return weight
    raise UnsupportedError(f"weight= is a function or a finite number, not {weight!r}")


def checked(loss: Any) -> Any:
    """A loss function's result.

    Raises:
        AccumulationError: it is no scalar variable.
    """
    if not isinstance(loss, chainer.Variable) or loss.size != 1:
        shown = f"shape {loss.shape}" if hasattr(loss, "shape") else type(loss).__name__
        raise AccumulationError(f"the loss function must return a scalar Variable, not {shown}")
    return loss


def weighed(weight: Any, given: Arguments) -> float:
    """By how much a part's loss was divided, as ``weight=`` says.

    Raises:
        AccumulationError: that is no number, negative, or not finite.
    """
    value = weight(*given.args, **given.kwargs)
    try:
        count = math.nan if isinstance(value, str) else float(getattr(value, "array", value))
    except (TypeError, ValueError):
        count = math.nan
    if not (math.isfinite(count) and count >= 0):
        raise AccumulationError(f"weight= must give a number of 0 or more, not {value!r}")
    return count


def go_backward(seeds: Sequence[tuple[Any, float]], device: Any, loss_scale: Any) -> None:
    """Go backward from scalars' nodes, each with a gradient of its own.

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
    """Multiply the gradients of a link's parameters, one after the other."""
    if factor == 1.0:
        return
    for parameter in parameters(model):
        if parameter.array is not None and parameter.grad is not None:
            parameter.grad = parameter.grad * factor
