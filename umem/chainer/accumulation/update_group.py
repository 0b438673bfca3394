"""Several calls of an optimizer's update that make one."""

from __future__ import annotations

from math import isclose
from typing import Any

import chainer

from umem.chainer.accumulation.kept_gradients import KeptGradients, multiply
from umem.chainer.accumulation.loss_shares import LossShares
from umem.chainer.accumulation.loss_terms import Term, TermPlaces, below
from umem.chainer.accumulation.loss_weight import Entry, Weight, line_to_type, whole_weight
from umem.chainer.accumulation.mixing import Mixing
from umem.chainer.accumulation.part_comparison import Compared, PartComparison
from umem.chainer.accumulation.part_facts import PartFacts, check_alike, read, uneven
from umem.chainer.accumulation.splitting import Arguments, ArgumentsBatch, Batch, joined
from umem.chainer.accumulation.whole_gradient import WholeGradient
from umem.chainer.step_state import StepState
from umem.chainer.tap import Proceed
from umem.errors import AccumulationError, SizeError


class Group:
    """Adds up the gradients of several calls of update, for one update by their sum.

    Between the calls the sum is stored here and not on the parameters, so that ``cleargrads`` does
    not clear it.
    """

    def __init__(self, optimizer: Any, weight: Weight, steps: int, *, check: bool) -> None:
        self._model, self._steps = optimizer.target, steps
        self._gradient = WholeGradient(self._model, weight)
        self._comparison = PartComparison(self._gradient, self._model, is_on=check)
        self._mixing = Mixing(self._model)
        self._are_compared = False
        """Samples of all calls of a group have been compared, or cannot be."""
        self._together: Arguments | None = None
        self.kept = KeptGradients(optimizer)
        self.drop()

    def drop(self) -> None:
        """Drop the calls so far and their gradients."""
        self.count = 0
        self.kept.drop()
        self._shares = LossShares()
        self._first: PartFacts | None = None
        self._forget_backward()

    def serialize(self, serializer: Any) -> None:
        """Save or load an incomplete group with its gradients."""
        self.count = serializer("count", self.count)
        self._shares.serialize(serializer["shares"])
        self.kept.serialize(serializer)

    def take(self, lossfun: Any, given: Arguments, loss_scale: Any) -> None:
        """Run a loss function on one call's samples, and add their gradient to the group's sum.

        Raises:
            AccumulationError: parts cannot be added up. After any error the group and the
                parameters' gradients are dropped, and a `StepState` restores everything else.
        """
        batch = _batch(given)
        is_ready = all(p.array is not None for p in self._model.params())
        try:
            with self._gradient.undone_by_errors() as state:
                with self._gradient.listening():
                    added = self._gradient.add(
                        lossfun, batch, slice(0, batch.size), self._shares, self._steps, loss_scale,
                        self._first, self.kept.restore, is_cut=isinstance(batch, ArgumentsBatch),
                    )  # fmt: skip
                facts = [one for one in (added.facts, self._first) if one is not None]
                self._check_even(facts)
                state_then = state if is_ready else StepState(self._model)
                self._compare(lossfun, given, facts[0], state_then, loss_scale)
                self.kept.take()
                if self.count + 1 == self._steps:
                    self._factor()
        except BaseException:
            self.drop()
            raise
        self._first = facts[-1]
        self._called()

    def _check_even(self, facts: list[Any]) -> None:
        """Check that a loss's count per sample is the same in each call.

        Raises:
            AccumulationError: it is not. Whether such counts add up would need samples of both run
                together, but the first call's are no longer available.
        """
        for term in uneven(facts):
            raise AccumulationError(
                f"{term.text} has other elements per sample in one call of update than in another, "
                "as with sequences padded to other lengths: pass weight=, or use micro_batch="
            )

    def _compare(
        self, lossfun: Any, given: Arguments, facts: PartFacts, state: StepState, loss_scale: Any
    ) -> None:
        """Compare samples of this call, and at the end of the first group samples of all calls."""

        def compare_if_due(samples: ArgumentsBatch, *, again: bool = False) -> None:
            whole = [range(samples.size)]
            compared = Compared(lossfun, samples, whole, [facts], state, loss_scale)
            self._comparison.compare_if_due(compared, again=again)

        is_last = self.count + 1 == self._steps
        if facts.samples is not None:
            compare_if_due(ArgumentsBatch(*given))
        has_weight = self._gradient.weight not in (None, 1)
        if not has_weight and (self._are_compared or not self._comparison.is_on):
            return
        before = self._together  # None if it is of a resumed group, too
        self._together = given if not self.count else before and joined(before, given)
        if self._together is None or facts.samples is None:
            self._are_compared = True
            if (facts.samples or 1) < 2:
                self._comparison.turn_off(
                    "update is given one sample a call, and samples of two calls cannot be joined"
                )
        elif is_last:
            samples = ArgumentsBatch(*self._together)
            self._gradient.check_weight(samples, self._shares)
            if not self._are_compared:
                self._are_compared = True
                compare_if_due(samples, again=True)

    def _called(self) -> None:
        self.count += 1
        self._forget_backward()

    def restore_gradient(self) -> None:
        """Move the group's gradient to the parameters, and start a new group.

        Raises:
            AccumulationError: the loss divides by several counts with different ratios; or calls
                with a count of 0 have a loss.
        """
        try:
            factor = self._factor()
        except AccumulationError:
            self.drop()
            raise
        self.kept.restore()
        self.drop()
        multiply(self._model, factor)

    def _factor(self) -> float:
        """Return the factor from the sum of the calls' gradients to the gradient of all samples.

        Raises:
            AccumulationError: see `restore_gradient`.
        """
        self._shares.check()
        if (factor := self._shares.factor()) is None:
            raise AccumulationError(
                "the loss divides its terms by counts whose ratio differs between parts, so their "
                "totals are needed before the first: use micro_batch= instead of steps="
            )
        return factor

    # -- backward called by the program ------------------------------------------------------------

    def _forget_backward(self) -> None:
        self._places = TermPlaces(holds=False)
        self._read: list[PartFacts] = []
        self._refusal: AccumulationError | None = None

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Refuse functions that mix samples, and note where scalars are computed."""
        self._mixing.refuse(func, inputs)
        outputs = proceed(func, inputs)
        if chainer.config.enable_backprop:
            self._places.note(func, outputs)
        return outputs

    def read(self, outputs: Any) -> None:
        """Read a loss from its tape, before the program's own backward."""
        for node, _ in outputs:
            if not _reaches(node, self._model):
                continue
            try:
                name = str(len(self._read) or "")
                entry = Entry(name, node, whole_weight(self._gradient.weight))
                found = read([entry], Arguments((), {}), None, self._places, None)
                self._read.append(found.without_tape())
            except AccumulationError as error:
                self._refusal = error

    def add_call_by_hand(self) -> None:
        """Move the gradients of the program's own backward into the group's sum, as one call's.

        Raises:
            AccumulationError: the loss's divisor is not known; the group and the parameters'
                gradients are dropped.
        """
        try:
            share = self._share_by_hand()
            self._comparison.turn_off(
                "backward is called by hand, and umem cannot run the loss function on other "
                "samples (give it to optimizer.update instead)"
            )
        except BaseException:
            self.drop()
            self._model.cleargrads()
            raise
        if not share:  # 0 times a gradient that is not finite is not 0
            self._model.cleargrads()
        self.kept.add(share)
        self._called()

    def _share_by_hand(self) -> float:
        """Return the share of a call whose backward the program ran itself.

        Raises:
            AccumulationError: it is not known, or its terms have different ones.
        """
        if self._refusal is not None:
            raise self._refusal
        if not self._read:
            raise AccumulationError(
                "no backward of this optimizer's model has run since the last call of update"
            )
        terms = tuple(term for part in self._read for term in part.terms)
        facts = self._read[0]._replace(terms=terms)
        self._check_by_hand(facts.matched)
        if self._first is not None:
            check_alike(facts, self._first)
            self._check_even([facts, self._first])
        self._first = self._first or facts
        shares = self._shares.of(terms, self._steps)
        if any(not isclose(share, shares[0], rel_tol=1e-9) for share in shares):
            raise AccumulationError(
                "the loss has terms that were divided by counts whose ratio differs between parts: "
                "give the loss function to optimizer.update and use micro_batch=, or pass "
                f"{line_to_type(None)}"
            )
        return shares[0]

    def _check_by_hand(self, matched: list[Term]) -> None:
        """Refuse terms that seem known only because nothing can be compared.

        Raises:
            AccumulationError: the loss is divided by the number of calls, as in PyTorch's loops; or
                it has terms of single rows, which may be samples or time steps.
        """
        habits = {1 / self._steps, 1 / len(self._read)} - {1.0}
        if matched and all(habits.intersection(term.numbers) for term in matched):
            raise AccumulationError(
                f"{matched[0].text} is multiplied by {matched[0].numbers[0]:.6g}, as in PyTorch's "
                "loops with loss / steps: umem divides by itself, so call backward on the "
                f"undivided loss, or pass {line_to_type(None)}"
            )
        rows = [term for term in matched if not term.shape or term.shape[0] == 1]
        if len({(term.kind, term.numbers, term.shape) for term in rows}) < len(rows):
            raise AccumulationError(
                f"{rows[0].text} has a single row, and so has another term: umem cannot tell "
                f"whether these are samples. Pass {line_to_type(None)}, or give the loss function "
                "to optimizer.update"
            )


def _reaches(node: Any, model: Any) -> bool:
    """Tell whether a graph has a parameter of a model."""
    own = {id(parameter) for parameter in model.params()}
    return any(id(one.get_variable_or_none()) in own for one in below(node))


class _WholeBatch:
    """Arguments that cannot be split, treated as one sample."""

    size = 1

    def __init__(self, given: Arguments) -> None:
        self._given = given

    def take(self, which: slice | list[int]) -> Arguments:
        """Return all arguments."""
        return self._given


def _batch(given: Arguments) -> Batch:
    try:
        return ArgumentsBatch(*given)
    except SizeError:
        return _WholeBatch(given)
