"""The gradient of a whole batch, part by part: Chainer's gradients add up, weighted by share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import chainer
from chainer.functions.noise.dropout import Dropout

from umem.chainer.accumulation.call_sites import CallSites
from umem.chainer.accumulation.divisor_roles import DivisorRoles, LossReading, reading_of
from umem.chainer.accumulation.divisors import TapeReader
from umem.chainer.accumulation.dropout_masks import DropoutMasks
from umem.chainer.accumulation.loss_shares import LossShares
from umem.chainer.accumulation.loss_weight import Weight, checked_weight, weighed
from umem.chainer.accumulation.mixing import Mixing, OneSampleNormalised
from umem.chainer.accumulation.part_reports import PartReports
from umem.chainer.accumulation.seeded_backward import go_backward, multiply
from umem.chainer.accumulation.splitting import Arguments, Batch, slices
from umem.chainer.accumulation.step_state import StepState
from umem.chainer.accumulation.structure import PartFacts
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import AccumulationError, UnsupportedError


class WholeGradient(Subscriber):
    """Computes the gradient of a whole batch by backward passes over its parts.

    Attributes:
        weight: the user's divisor of the loss; see `umem.chainer.accumulate`.
        masks: dropout masks of the whole batch, while it is gone through with them.
        made: parameters of any model that got their arrays since this list was emptied.
    """

    place = -1

    def __init__(self, model: Any, weight: Weight) -> None:
        self.weight = checked_weight(weight)
        self.masks: DropoutMasks | None = None
        self._model = model
        self._mixing = Mixing(model)
        self._sites = CallSites()
        self._roles = DivisorRoles(frozenset())
        self._scalars: list[Any] = []
        self._counts_first = self._is_forward = self._is_comparing = False
        self._thread = 0
        self.made: list[tuple[Any, dict[str, Any]]] = []

    def serialize_learned(self, serializer: Any) -> None:
        """Save or load whether divisors are counted first, and instance normalisation was seen."""
        self._counts_first = serializer("counts_first", self._counts_first)
        self._mixing.has_instances = serializer("has_instances", self._mixing.has_instances)

    # -- the parts -----------------------------------------------------------------------------

    def leave(
        self, lossfun: Any, batch: Batch, sizes: Sequence[int], loss_scale: Any
    ) -> list[PartFacts]:
        """Clear the parameters' gradients, and leave the batch's there.

        Returns what the loss of each part is made of. The loss function may run on each part again,
        with its state restored.

        Raises:
            AccumulationError: the gradient cannot be computed in parts; the message says why.
            UnsupportedError: masks of the whole batch are needed in a region that is recomputed.
            whatever the loss function raises. Gradients then are those of some parts.
        """
        parts, totals = slices(sizes), None
        state, made = StepState(self._model, holds_graphs=False), len(self.made)
        with self.listening():
            if self._counts_first and len(parts) > 1:
                totals = self._totals(lossfun, batch, parts)
            try:
                shares, facts = self._gone_through(lossfun, batch, parts, loss_scale, totals)
            except OneSampleNormalised:
                if batch.size == 1:
                    raise
                self._again(state, made)
                with self._aside():
                    self._read(lossfun, batch, [0, 1])  # two show what it is
                self._again(state, made)
                shares, facts = self._gone_through(lossfun, batch, parts, loss_scale, totals)
            if shares.factor() is None:  # counts go apart, and their totals are known now
                self._counts_first = True
                self._again(state, made)
                totals = shares.totals
                shares, facts = self._gone_through(lossfun, batch, parts, loss_scale, totals)
        factor = shares.factor()
        multiply(self._model, 1.0 if factor is None else factor)
        return facts

    def _again(self, state: StepState, made: int) -> None:
        """Restore the state, to run the parts once more."""
        state.put_back()
        self.unmake(made)
        if self.masks is not None:
            self.masks.again()

    def unmake(self, first: int = 0) -> None:
        """Uninitialise all but the ``first`` parameters that were initialised in this step.

        After the generators are restored, they are initialised with the same numbers again.
        """
        while len(self.made) > first:
            parameter, attributes = self.made.pop()
            # Chainer has no public way back; its node knows the shape, too.
            parameter._set_array(None, layout_check=False)
            vars(parameter).clear()
            vars(parameter).update(attributes)

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Mark the block as a comparison of few samples, whose counts say nothing of other
        batches.
        """
        before, self._is_comparing = self._counts_first, True
        try:
            yield
        finally:
            self._counts_first, self._is_comparing = before, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Refuse functions that mix samples, and provide dropout masks, in the calling thread."""
        self._thread = threading.get_ident()
        self._roles.own = frozenset(id(parameter) for parameter in self._model.params())
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
        totals: dict[str, float] | None,
    ) -> tuple[LossShares, list[PartFacts]]:
        """Clear gradients, run all parts forward and backward, and report their combined values.

        Nothing is reported if the parts have no common factor yet, and so are to be run again.

        Returns:
            the shares of the loss, and the facts of each part.
        """
        shares, observed = LossShares(totals), PartReports()
        facts: list[PartFacts] = []
        self._model.cleargrads()
        for part in parts:
            if self.masks is not None:
                self.masks.begin(part)
            count = part.stop - part.start
            is_whole = count == batch.size and not isinstance(self.weight, (int, float))
            is_whole = is_whole and not self._is_comparing
            with observed.part() as seen:
                added = self.add(
                    lossfun, batch, part, None if is_whole else shares, batch.size / count,
                    loss_scale, facts[0] if facts else None,
                )  # fmt: skip
            facts.append(added.facts)
            seen.weigh(count / batch.size, added.loss, added.share)
            del added
        if (factor := shares.factor()) is not None:
            observed.report(factor)
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
        around: Batch | None = None,
    ) -> AddedPart:
        """Add the gradient of some samples to the parameters' gradients.

        Args:
            shares: from which their share is computed; None: they are the whole batch.
            scale: how many such parts the whole is thought to be.
            first: of the first part of the whole, if this is another.
            before_backward: called between forward and backward.
            around: samples to read beside these, these first; None: those of the batch.
        """
        given = batch.take(part)
        with self._forward():
            loss = checked(lossfun(*given.args, **given.kwargs))
            seeds, facts = [(loss.node, 1.0)], PartFacts()
            if shares is not None:
                where = range(part.start, part.stop)
                if around is None:
                    around = batch
                seeds, facts = self._seeds(loss, given, shares, scale, lossfun, around, where)
                facts.see_that_it_is_like(first)
            if self._is_comparing:
                facts.loss = abs(float(loss.array))
        before_backward()
        go_backward(seeds, loss.device, loss_scale)
        alone = seeds[0][1] if len(seeds) == 1 and seeds[0][0] is loss.node else None
        return AddedPart(loss.array, alone, facts)

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Record functions called in the block as those of one loss."""
        before = self._scalars, self._sites, self._is_forward
        self._scalars, self._sites, self._is_forward = [], CallSites(self._sites), True
        try:
            yield
        finally:
            self._scalars, self._sites, self._is_forward = before

    def _totals(self, lossfun: Any, batch: Batch, parts: Sequence[slice]) -> dict[str, float]:
        """Return by name the divisors of the whole loss, found by forward passes only.

        Generators, links and parameters that were initialised are restored; what was learned of the
        divisors stays. Where the loss function raises, nothing is restored.
        """
        state, made, shares = StepState(self._model), len(self.made), LossShares()
        for part in parts:
            samples = range(part.start, part.stop)
            with self._aside():
                reading = self._read(lossfun, batch, list(samples))
                self._learn(reading, lossfun, batch, samples)
                shares.of(self._roles.counts(reading, len(samples)), 1.0)
        self._again(state, made)
        return shares.totals

    @contextmanager
    def _aside(self) -> Iterator[None]:
        masks, self.masks = self.masks, None
        try:
            with PartReports().part():
                yield
        finally:
            self.masks = masks

    def _read(self, lossfun: Any, batch: Batch, which: list[int]) -> LossReading:
        """Read the loss of some samples, by going forward only."""
        given = batch.take(which)
        with self._forward():
            loss = checked(lossfun(*given.args, **given.kwargs))
            return self._reading(loss, given)

    def _reading(self, loss: Any, given: Arguments) -> LossReading:
        terms = TapeReader(self._sites, self._roles.is_count).terms(loss)
        weight = weighed(self.weight, given) if callable(self.weight) else None
        return reading_of(terms, weight, self._roles.own)

    def _learn(self, mine: LossReading, lossfun: Any, batch: Batch, part: range) -> bool:
        """Learn new divisors of a part's loss from two of its samples; return whether any are new.

        All state but what is learned is restored, also where the loss function raises.
        """
        if self._roles.are_known(mine.terms):
            return False

        def reading_for(which: list[int]) -> LossReading:
            with self._aside():
                found = self._read(lossfun, batch, which)
            state.put_back()
            self.unmake(made)
            return found

        state, made = StepState(self._model), len(self.made)
        try:
            self._roles.learn(mine, part, batch.size, reading_for)
        finally:
            state.put_back()
            self.unmake(made)
        return True

    # -- how much of the whole a part is ---------------------------------------------------------

    def _seeds(
        self,
        loss: Any,
        given: Arguments,
        shares: LossShares,
        scale: float,
        lossfun: Any,
        around: Batch,
        part: range,
    ) -> tuple[list[tuple[Any, float]], PartFacts]:
        """Return the scalars from which backward starts, with their gradients, and a part's facts.

        New divisors are learned first, by running the loss function on samples of the part.
        """
        if isinstance(self.weight, (int, float)):
            return [(loss.node, float(self.weight))], PartFacts()
        reading = self._reading(loss, given)
        if self._learn(reading, lossfun, around, part):
            reading = self._reading(loss, given)  # where terms end may be known now
        counts = self._roles.counts(reading, len(part))
        found = shares.of(counts, scale)
        factors = self._roles.factors(reading.terms)
        facts = PartFacts.of(reading.terms, counts, factors, len(part))
        if len(set(found)) == 1:
            return [(loss.node, found[0])], facts
        seeds = [
            (term.node, term.factor * share)
            for term, share in zip(reading.terms, found, strict=True)
            if share or math.isfinite(term.value() or 0.0)  # a mean of nothing may be NaN
        ]
        return seeds, facts

    # -- what Chainer tells ----------------------------------------------------------------------

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Refuse a function that mixes samples, and give dropout its mask of the whole batch."""
        if threading.get_ident() != self._thread:
            return proceed(func, inputs)
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
        if self._is_forward:
            self._sites.note(func)
            # Alive until backward, so that the value of a term is known.
            self._scalars += [y for y in outputs if y.size == 1]
        return outputs

    def set_array(self, proceed: Proceed, y: Any, *args: Any, **kwargs: Any) -> None:
        """Set a variable's array; note a parameter that gets its first, in the listening thread."""
        if isinstance(y, chainer.Parameter) and y.array is None:
            if threading.get_ident() == self._thread:
                self.made.append((y, dict(vars(y))))
        proceed(y, *args, **kwargs)


class AddedPart(NamedTuple):
    """A part whose gradient was added, its loss and facts.

    Attributes:
        loss: the loss's array.
        share: its share of the whole loss, where there is one.
        facts: the terms of the loss.
    """

    loss: Any
    share: float | None
    facts: PartFacts


def checked(loss: Any) -> Any:
    """Check and return a loss function's result: a scalar Variable.

    Raises:
        AccumulationError: it is no scalar variable.
    """
    if not isinstance(loss, chainer.Variable) or loss.size != 1:
        shown = f"shape {loss.shape}" if hasattr(loss, "shape") else type(loss).__name__
        raise AccumulationError(f"the loss function must return a scalar Variable, not {shown}")
    return loss
