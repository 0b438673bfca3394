"""The gradient of a whole batch, part by part: Chainer's gradients add up, weighted by share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import chainer
import numpy as np
from chainer import _backprop
from chainer.functions.noise.dropout import Dropout

from umem.chainer.accumulation.kept_gradients import multiply
from umem.chainer.accumulation.loss_shares import WEIGHTED, LossShares
from umem.chainer.accumulation.loss_terms import TermPlaces
from umem.chainer.accumulation.loss_weight import Weight, checked_weight, entries_of, weight_of
from umem.chainer.accumulation.mixing import Mixing
from umem.chainer.accumulation.part_facts import NEAR, PartFacts, check_alike, read
from umem.chainer.accumulation.part_reports import PartReports
from umem.chainer.accumulation.splitting import Batch, slices
from umem.chainer.step_state import StepState, restore_attributes
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import AccumulationError

RANDOM = ("Zoneout", "RReLU", "Gaussian", "SimplifiedDropconnect", "GumbelSoftmax")
"""Functions that draw random numbers, for devices whose generator state cannot be read."""


class WholeGradient(Subscriber):
    """Computes the gradient of a whole batch by backward passes over its parts.

    Attributes:
        weight: the user's divisor of the loss; see `umem.chainer.accumulate`.
        made: parameters of any model that got their arrays since this list was emptied.
        has_drawn: in the last comparison a function of `RANDOM` was called.
    """

    place = -1

    def __init__(self, model: Any, weight: Weight) -> None:
        self.weight = checked_weight(weight)
        self._model = model
        self._mixing = Mixing(model)
        self._places: TermPlaces | None = None
        self._of_outside: list[Any] = []
        """Nodes that the loss function was given or has kept: alive until the step is over, so
        that the state of links is restored with its graph."""
        self._pass_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """For each node of a tape: the number of the forward pass that made it."""
        self._pass = 0
        self._counts_first = self._is_comparing = self.has_drawn = False
        self._thread = 0
        self.made: list[tuple[Any, dict[str, Any]]] = []

    # -- the parts -----------------------------------------------------------------------------

    def gradient_in_parts(
        self, lossfun: Any, batch: Batch, sizes: Sequence[int], loss_scale: Any
    ) -> list[PartFacts]:
        """Clear the parameters' gradients, and replace them by the batch's.

        Returns the facts of each part's loss; none for a batch in one part, which is not read. The
        loss function may run on each part again, with its state restored.

        Raises:
            AccumulationError: the gradient cannot be computed in parts; the message gives the
                reason.
            The loss function's errors. Gradients are then those of some parts.
        """
        parts, totals = slices(sizes), None
        state, made = StepState(self._model, holds_graphs=False), len(self.made)
        with self.listening():
            if self._counts_first and len(parts) > 1:
                counted = LossShares()
                for found in self.forward_facts(lossfun, batch, parts):
                    counted.of(found.terms, 1.0)
                totals = counted.totals
            shares, facts = self._run(lossfun, batch, parts, loss_scale, totals)
            if shares.factor() is None:  # the counts' ratios differ, and their totals are known now
                self._counts_first = True
                self._again(state, made)
                shares, facts = self._run(lossfun, batch, parts, loss_scale, shares.totals)
        shares.check()
        self.check_weight(batch, shares)
        factor = shares.factor()
        multiply(self._model, 1.0 if factor is None else factor)
        return facts

    def check_weight(self, batch: Batch, shares: LossShares) -> None:
        """Check that the weights of the parts add up to the weight of the whole.

        Raises:
            AccumulationError: they do not, as ``max(1, count)`` does not if a part has none.
        """
        weights = self.weight if isinstance(self.weight, Mapping) else {"": self.weight}
        for name, weight in weights.items():
            total = shares.totals.get(f"{name}{WEIGHTED}")
            if total is None or not callable(weight):
                continue
            whole = weight_of(weight, batch.take(slice(0, batch.size)))
            if not math.isclose(whole, total, rel_tol=NEAR):
                raise AccumulationError(
                    f"weight= gives {whole:.6g} for the batch, and {total:.6g} for its parts "
                    "together: let it give a count that adds up, such as the samples that count, "
                    "and 0 if there are none"
                )

    @contextmanager
    def undone_by_errors(self) -> Iterator[StepState]:
        """Yield the state at the beginning of a step; an error in the block restores it.

        Gradients are then cleared, and parameters that got their arrays lose them again.
        """
        state = StepState(self._model, holds_graphs=False)
        self.made.clear()
        try:
            yield state
        except BaseException:
            self._model.cleargrads()
            self._again(state, 0)
            raise
        finally:
            self._of_outside.clear()

    def _again(self, state: StepState, made: int) -> None:
        """Restore the state, to run the parts once more."""
        state.restore()
        self.uninitialize(made)

    def uninitialize(self, first: int = 0) -> None:
        """Uninitialise all but the ``first`` parameters that were initialised in this step.

        After the generators are restored, they are initialised with the same numbers again.
        """
        while len(self.made) > first:
            parameter, attributes = self.made.pop()
            # Chainer has no public way back; its node knows the shape, too.
            parameter._set_array(None, layout_check=False)
            restore_attributes(parameter, attributes)

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Mark the block as a comparison of few samples: dropout passes its input through.

        Their counts do not apply to other batches.
        """
        before, self._is_comparing, self.has_drawn = self._counts_first, True, False
        try:
            yield
        finally:
            self._counts_first, self._is_comparing = before, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Refuse functions that mix samples, in the calling thread."""
        self._thread = threading.get_ident()
        subscribe(self)
        try:
            yield
        finally:
            unsubscribe(self)

    def _run(
        self,
        lossfun: Any,
        batch: Batch,
        parts: Sequence[slice],
        loss_scale: Any,
        totals: dict[str, float] | None,
    ) -> tuple[LossShares, list[PartFacts]]:
        """Clear gradients, run all parts forward and backward, and report their combined values.

        Nothing is reported if the parts have no common factor yet, and must run again.

        Returns:
            The shares of the loss, and the facts of each part.
        """
        shares, reports = LossShares(totals), PartReports()
        facts: list[PartFacts] = []
        # In a comparison all totals are guessed too large, to reveal a backward that is not linear
        # in its gradient, such as one that takes the sign.
        guess = 2 if self._is_comparing and len(parts) > 1 else 1
        self._model.cleargrads()
        for part in parts:
            count = part.stop - part.start
            is_read = len(parts) > 1 or self._is_comparing
            with reports.part() as seen:
                added = self.add(
                    lossfun, batch, part, shares if is_read else None, guess * batch.size / count,
                    loss_scale, facts[0] if facts else None,
                )  # fmt: skip
            if added.facts is not None:
                facts.append(added.facts)
            seen.weigh(count / batch.size, added.losses)
            del added
        if (factor := shares.factor()) is not None:
            reports.report(factor)
        return shares, facts

    def add(
        self,
        lossfun: Any,
        batch: Batch,
        part: slice,
        shares: LossShares | None,
        scale: float,
        loss_scale: Any,
        first: PartFacts | None = None,
        before_backward: Callable[[], None] = lambda: None,
        *,
        is_cut: bool = True,
    ) -> AddedPart:
        """Add the gradient of some samples to the parameters' gradients.

        Args:
            shares: computes their share; None: they are the whole batch.
            scale: the assumed number of such parts in the whole.
            first: the facts of the first part of the whole, if this is another.
            before_backward: called between forward and backward.
            is_cut: the batch has samples.
        """
        given = batch.take(part)
        with self._forward() as places:
            loss = lossfun(*given.args, **given.kwargs)
            entries = entries_of(loss, self.weight)
            seeds = [(entry.loss.node, 1.0) for entry in entries]
            facts = None
            shares_of: dict[str, float | None] = {}
            if shares is not None:
                samples = part.stop - part.start if is_cut else None
                found = read(entries, given, samples, places, lossfun)
                mine = shares.of(found.terms, scale)
                seeds = _seeds(found, seeds, mine)
                for entry in entries:
                    of = {
                        s for s, t in zip(mine, found.terms, strict=True) if t.entry == entry.name
                    }
                    shares_of[entry.name] = of.pop() if len(of) == 1 else None
                losses = [entry.loss.array for entry in entries]
                facts = found.without_tape()._replace(
                    loss=sum(abs(float(loss.sum())) for loss in losses),
                    rounding=max(float(np.finfo(loss.dtype).eps) for loss in losses),
                )
                if first is not None:
                    check_alike(first, facts)
        before_backward()
        _go_backward(seeds, entries[0].loss.device, loss_scale)
        losses = [(entry.loss.array, shares_of.get(entry.name)) for entry in entries]
        return AddedPart(losses, facts)

    @contextmanager
    def _forward(self) -> Iterator[TermPlaces]:
        """Record where scalars are computed in the block."""
        before, self._places = self._places, TermPlaces()
        self._pass += 1
        try:
            yield self._places
        finally:
            self._places = before

    def forward_facts(
        self, lossfun: Any, batch: Batch, parts: Sequence[slice]
    ) -> Iterator[PartFacts]:
        """Yield the facts of a batch's parts from a forward pass.

        At the end generators, links and initialised parameters are restored; not if the loss
        function raises.
        """
        state, made = StepState(self._model), len(self.made)
        for part in parts:
            given = batch.take(part)
            with self._forward() as places, PartReports().part():
                entries = entries_of(lossfun(*given.args, **given.kwargs), self.weight)
                yield read(entries, given, part.stop - part.start, places, lossfun)
        self._again(state, made)

    # -- Chainer's events ------------------------------------------------------------------------

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Refuse a function that mixes samples, and have dropout pass its input in comparisons."""
        if threading.get_ident() != self._thread:
            return proceed(func, inputs)
        self._mixing.refuse(func, inputs)
        if self._is_comparing:
            self.has_drawn |= type(func).__name__ in RANDOM
            if type(func) is Dropout and func.mask is None:
                x = getattr(inputs[0], "array", inputs[0])
                func.mask = chainer.backend.get_array_module(x).ones_like(x)
        outputs = proceed(func, inputs)
        if self._places is not None:
            self._places.note(func, outputs)
            self._check_inputs(func, inputs)
            self._pass_of.update((y.node, self._pass) for y in outputs)
        return outputs

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Refuse a loss function that calls backward itself, since other parts' gradients exist.

        Raises:
            AccumulationError: it calls backward.
        """
        if self._places is not None and threading.get_ident() == self._thread:
            raise AccumulationError(
                "the loss function calls backward, which would add its gradients to those of "
                "other parts: use chainer.grad in it"
            )
        proceed(*args, **kwargs)

    def _check_inputs(self, func: Any, inputs: Any) -> None:
        """Refuse inputs that an earlier part has computed, such as the state of an LSTM.

        Raises:
            AccumulationError: there is one; names the function.
        """
        for x in inputs:
            node = getattr(x, "node", None)
            if node is None or node.creator_node is None:
                continue
            if node not in self._pass_of:
                self._of_outside.append(node)
            elif self._pass_of[node] != self._pass:
                raise AccumulationError(
                    f"'{func.label}' gets a result of the loss function for an earlier part, such "
                    "as the state of an LSTM: reset it at the beginning of the loss function"
                )

    def set_array(self, proceed: Proceed, y: Any, *args: Any, **kwargs: Any) -> None:
        """Set a variable's array; note a parameter that gets its first, in the listening thread."""
        if isinstance(y, chainer.Parameter) and y.array is None:
            if threading.get_ident() == self._thread:
                self.made.append((y, dict(vars(y))))
        proceed(y, *args, **kwargs)


def _go_backward(seeds: Sequence[tuple[Any, float]], device: Any, loss_scale: Any) -> None:
    """Run backward from several scalars' nodes, each with its own initial gradient.

    With one of them it does the same as ``Variable.backward``.
    """
    outputs = []
    with chainer.using_device(device):
        for node, seed in seeds:
            value = seed if loss_scale is None else seed * loss_scale
            gradient = device.xp.full(node.shape, value, node.dtype)
            outputs.append((node, chainer.Variable(gradient)))
    with chainer.using_config("enable_backprop", False):
        # Variable.backward calls this, but does not take several scalars.
        _backprop._backprop_to_all(outputs, False, loss_scale)


def _seeds(
    part: PartFacts, wholes: list[tuple[Any, float]], shares: list[float]
) -> list[tuple[Any, float]]:
    """Return the scalars from which backward starts, each with its gradient."""
    if len(set(shares)) == 1 and shares[0]:
        return [(node, shares[0]) for node, _ in wholes]
    return [
        (term.node, term.factor * share)
        for term, share in zip(part.terms, shares, strict=True)
        if share or math.isfinite(term.value)  # a mean of nothing may be NaN
    ]


class AddedPart(NamedTuple):
    """A part whose gradient was added.

    Attributes:
        losses: the array of each loss, and its share of the whole, if it has one.
        facts: the terms of the loss; None if it was not read.
    """

    losses: list[tuple[Any, float | None]]
    facts: PartFacts | None
