"""Several calls of an optimizer's update that make one."""

from __future__ import annotations

from typing import Any

from umem.chainer.accumulation.call_sites import CallSites
from umem.chainer.accumulation.divisor_roles import WEIGHT
from umem.chainer.accumulation.divisors import TapeReader
from umem.chainer.accumulation.kept_gradients import KeptGradients
from umem.chainer.accumulation.loss_shares import Count, LossShares
from umem.chainer.accumulation.loss_weight import Weight, weighed
from umem.chainer.accumulation.node_origins import (
    is_beside_parameters,
    is_of_parameters,
    is_of_single_rows,
    is_put_together,
    leaves,
)
from umem.chainer.accumulation.part_proof import Proof
from umem.chainer.accumulation.seeded_backward import multiply
from umem.chainer.accumulation.splitting import Arguments, ArgumentsBatch, Batch, joined
from umem.chainer.accumulation.step_state import StepState
from umem.chainer.accumulation.structure import PartFacts
from umem.chainer.accumulation.whole_gradient import WholeGradient
from umem.errors import AccumulationError, AccumulationWarning, SizeError, warn_at_program


class Group:
    """Adds up the gradients of several calls of update, for one update by their sum.

    Between the calls the sum lies here and not on the parameters, out of reach of ``cleargrads``.
    """

    def __init__(self, optimizer: Any, weight: Weight, steps: int, *, to_prove: bool) -> None:
        self._model, self._steps = optimizer.target, steps
        self._gradient = WholeGradient(self._model, weight)
        self._proof = Proof(self._gradient, self._model, is_on=to_prove)
        self._to_warn = to_prove
        self.sites = CallSites()
        self.kept = KeptGradients(optimizer)
        self.drop()

    def drop(self) -> None:
        """Drop the calls so far and their gradients."""
        self.count = 0
        self.kept.drop()
        self._shares = LossShares()
        self._read: list[Count | str] = []
        self._first: tuple[Arguments, PartFacts] | None = None

    def serialize(self, serializer: Any) -> None:
        """Save or load an incomplete group with its gradients."""
        self.count = serializer("count", self.count)
        self._shares.serialize(serializer["shares"])
        self._gradient.serialize_learned(serializer["gradient"])
        self.kept.serialize(serializer)

    def take(self, lossfun: Any, given: Arguments, loss_scale: Any) -> None:
        """Run a loss function on one call's samples, and add their gradient to the group's sum.

        Raises:
            AccumulationError: parts cannot be added up. After any error the group and the
                parameters' gradients are dropped, and a `StepState` puts back all else.
        """
        batch = _batch(given)
        state = StepState(self._model, holds_graphs=False)
        is_ready = all(p.array is not None for p in self._model.params())
        self._gradient.made.clear()
        before = None if self._first is None else joined(given, self._first[0])
        around = before if batch.size == 1 else None
        try:
            with self._gradient.listening():
                added = self._gradient.add(
                    lossfun, batch, slice(0, batch.size), self._shares, self._steps, loss_scale,
                    self._first and self._first[1], self.kept.give_back, around,
                )  # fmt: skip
            self.kept.take()
            state_then = state if is_ready else StepState(self._model)
            self._compare(lossfun, batch, before, added.facts, state_then)
        except BaseException:
            self.drop()
            self._model.cleargrads()
            state.put_back()
            self._gradient.unmake()
            raise
        self._first = self._first or (given, added.facts)
        self._called()

    def _compare(
        self, lossfun: Any, batch: Batch, before: Batch | None, facts: PartFacts, state: StepState
    ) -> None:
        """Compare samples of this call, or of this and the group's first, with all at once."""
        if self._first is None:
            if batch.size > 1:
                whole = [range(batch.size)]
                self._proof.see(lossfun, batch, whole, [facts], batch.size, state)
        elif before is not None:
            parts = [range(batch.size), range(batch.size, before.size)]
            most = max(batch.size, before.size - batch.size)
            self._proof.see(lossfun, before, parts, [facts, self._first[1]], most, state)
        elif batch.size == 1 and self._to_warn:
            self._to_warn = False
            warn_at_program(
                "update is given one sample a call, and samples of two calls cannot be put "
                "together: parts were not compared with a whole. Give two samples a call, or use "
                "micro_batch=",
                AccumulationWarning,
            )

    def _called(self) -> None:
        self.count += 1
        self._read, self.sites = [], CallSites(self.sites)

    def leave_gradient(self) -> None:
        """Move the group's gradient to the parameters, and start a new group.

        Raises:
            AccumulationError: the loss divides by several counts that go apart.
        """
        factor = self._shares.factor()
        if factor is None:
            self.drop()
            raise AccumulationError(
                "the loss divides its terms by counts that go apart from part to part, so their "
                "totals are needed before the first: use micro_batch= instead of steps="
            )
        self.kept.give_back()
        self.drop()
        multiply(self._model, factor)

    # -- by hand -----------------------------------------------------------------------------------

    def read(self, outputs: Any) -> None:
        """Read a loss's divisor from its tape, before the program's own backward."""
        own = frozenset(id(parameter) for parameter in self._model.params())
        for node, _ in outputs:
            if all(id(leaf.get_variable_or_none()) not in own for leaf in leaves(node)):
                continue
            try:
                self._read.append(_one_count(node, own, self.sites))
            except AccumulationError as error:
                self._read.append(str(error))

    def take_by_hand(self) -> None:
        """Move the gradients of the program's own backward into the group's sum, as one call's.

        Raises:
            AccumulationError: the count that the loss was divided by is not known; the group and
                the parameters' gradients are dropped.
        """
        try:
            weight = self._gradient.weight
            share = (
                float(weight)
                if isinstance(weight, (int, float))
                else self._shares.of([self._count(weight)], self._steps)[0]
            )
        except BaseException:
            self.drop()
            self._model.cleargrads()
            raise
        self.kept.add(share)
        self._called()

    def _count(self, weight: Any) -> Count:
        """Return the divisor of a call by hand: from ``weight``, or as read from the tape.

        Raises:
            AccumulationError: it is unknown, or several losses differ.
        """
        if weight is not None:
            return Count("", weighed(weight, Arguments((), {})))
        found = set(self._read)
        if len(found) != 1:
            told = "nothing went backward from a loss" if not found else "several losses differ"
            raise AccumulationError(f"{told}: pass weight=, which is called without arguments")
        (count,) = found
        if isinstance(count, str):
            raise AccumulationError(count)
        return count


def _one_count(node: Any, own: frozenset[int], sites: CallSites) -> Count:
    """Return the divisor of a loss as a whole.

    Raises:
        AccumulationError: it is unknown, or terms have different ones; names the place.
    """
    give = f"give the loss function to optimizer.update, or {WEIGHT}"
    found: set[float | None] = set()
    are_constant = False
    for term in TapeReader(sites).terms(node):
        value = term.counted
        if term.is_opaque:
            raise AccumulationError(
                f"{term} stands between the loss and its sum or mean, and umem does not know by "
                f"what it divides: {WEIGHT}"
            )
        if is_of_single_rows(term.node):
            raise AccumulationError(
                f"{term} is of single rows, and umem cannot tell whether a loop goes over the "
                f"samples of this part: {give}"
            )
        for mark in term.marks:
            is_whole = mark.site == term.site and len(term.marks) == 1
            if not mark.is_mean or not (is_whole or not is_put_together(term.node)):
                raise AccumulationError(
                    f"the loss is {mark}, and umem cannot tell whether that is one over a count "
                    f"of this part: {give}"
                )
            if mark.of_first:
                value = (1.0 if value is None else value) / mark.values[0]
        if is_of_parameters(term.node, own):
            are_constant = True
        elif is_beside_parameters(term.node, own) or all(
            id(leaf.get_variable_or_none()) in own for leaf in leaves(term.node)
        ):
            raise AccumulationError(
                f"{term} is of rows of a parameter, or of arrays of its shape, and umem cannot "
                f"tell whether they depend on the samples of this part: {give}"
            )
        else:
            found.add(value)
    if are_constant and not found:
        return Count("", None, is_constant=True)
    if len(found) != 1 or (are_constant and None in found):
        raise AccumulationError(f"the loss has terms that were divided by different counts: {give}")
    value = found.pop()
    return Count("" if value is None else "by hand", value)


class _Uncut:
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
        return _Uncut(given)
