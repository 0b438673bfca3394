"""Several calls of an optimizer's update that make one."""

from __future__ import annotations

from typing import Any

from umem.chainer.accumulation.divisors import ASK, leaves, takes_rows, terms_of
from umem.chainer.accumulation.numbers_in_loss import CountLearned
from umem.chainer.accumulation.proof import prove
from umem.chainer.accumulation.shares import Count, Shares
from umem.chainer.accumulation.splitting import Arguments, ArgumentsBatch, Batch
from umem.chainer.accumulation.step_state import StepState
from umem.chainer.accumulation.whole_gradient import Weight, WholeGradient, multiply, weighed
from umem.chainer.parameters_once import parameters
from umem.errors import AccumulationError, SizeError


class Group:
    """Calls of update that make one.

    Between them the gradients lie here, so that ``cleargrads`` does not reach them.
    """

    def __init__(self, model: Any, weight: Weight, steps: int, *, to_prove: bool) -> None:
        self._model, self._steps, self._to_prove = model, steps, to_prove
        self._gradient = WholeGradient(model, weight)
        self.drop()

    def drop(self) -> None:
        """Forget them."""
        self.count = 0
        self._kept: list[tuple[Any, Any]] = []
        self._shares = Shares()
        self._read: list[Count | str] = []

    def serialize(self, serializer: Any) -> None:
        """Save or load a group that is not complete, its gradients too."""
        gradients = {id(parameter): gradient for parameter, gradient in self._kept}
        self.count = serializer("count", self.count)
        self._to_prove = serializer("to_prove", self._to_prove)
        self._shares.serialize(serializer["shares"])
        self._gradient.serialize_learned(serializer["gradient"])
        self._kept = []
        for name, parameter in self._model.namedparams(False):
            found = serializer["kept"](name, gradients.get(id(parameter)))
            if found is not None:
                self._kept.append((parameter, parameter.device.send(found)))

    def take(self, lossfun: Any, given: Arguments, loss_scale: Any) -> None:
        """Add the gradient of one call's samples."""
        batch = _batch(given)
        state = StepState(self._model)
        try:
            self._prove(lossfun, batch)
            with self._gradient.listening():
                self._gradient.add(
                    lossfun, batch, slice(0, batch.size), self._shares, self._steps, loss_scale,
                    self._give_back,
                )  # fmt: skip
        except BaseException as error:
            self.drop()
            self._model.cleargrads()
            state.put_back()
            if isinstance(error, CountLearned):
                raise AccumulationError(
                    "the loss is multiplied by a number that was thought to be the same for each "
                    f"part, and is not: {ASK}"
                ) from None
            raise
        self._keep()

    def _prove(self, lossfun: Any, batch: Batch) -> None:
        is_ready = all(p.array is not None for p in self._model.params())
        if self._to_prove and is_ready and batch.size > 1:
            self._to_prove = not prove(self._gradient, self._model, lossfun, batch, batch.size)

    def _give_back(self) -> None:
        """Put the gradients so far where Chainer adds to them."""
        self._model.cleargrads()
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []

    def _keep(self) -> None:
        self.count += 1
        self._read = []
        self._kept = [(p, p.grad) for p in parameters(self._model) if p.grad is not None]
        self._model.cleargrads()

    def leave_gradient(self) -> None:
        """Leave the gradient of all of their samples on the parameters; the next group begins.

        Raises:
            AccumulationError: the loss divides by several counts that go apart.
        """
        factor, gradients = self._shares.factor(), self._kept
        self.drop()
        if factor is None:
            raise AccumulationError(
                "the loss divides its terms by counts that go apart from part to part, so their "
                f"totals are needed before the first: use micro_batch=, or {ASK}"
            )
        for parameter, gradient in gradients:
            parameter.grad = gradient
        multiply(self._model, factor)

    # -- by hand -----------------------------------------------------------------------------------

    def read(self, outputs: Any) -> None:
        """Read by what a loss was divided, before the program goes backward from it."""
        own = {id(parameter) for parameter in self._model.params()}
        for node, _ in outputs:
            if all(id(leaf.get_variable_or_none()) not in own for leaf in leaves(node)):
                continue
            try:
                self._read.append(_one_count(node, self._model))
            except AccumulationError as error:
                self._read.append(str(error))

    def take_by_hand(self) -> None:
        """Add the gradients that are there.

        Raises:
            AccumulationError: by what they were divided is not known.
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
        kept = {id(parameter): gradient for parameter, gradient in self._kept}
        for parameter in parameters(self._model):
            gradient = None if parameter.array is None else parameter.grad
            before = kept.get(id(parameter))
            if gradient is not None:
                gradient = gradient * share
                if before is not None:
                    gradient += before
                parameter.grad = gradient
            elif before is not None:
                parameter.grad = before
        self._keep()

    def _count(self, weight: Any) -> Count:
        if weight is not None:
            return Count(weighed(weight, Arguments((), {})))
        found = set(self._read)
        if len(found) != 1:
            told = "nothing went backward from a loss" if not found else "several losses differ"
            raise AccumulationError(f"{told}: {ASK.replace('x, t: len(x)', ': count')}")
        (count,) = found
        if isinstance(count, str):
            raise AccumulationError(count)
        return count


def _one_count(node: Any, model: Any) -> Count:
    """By what a loss was divided as a whole."""
    terms = terms_of(node, model)
    if any(term.perhaps_counts for term in terms):
        raise AccumulationError(
            "the loss is multiplied by a number, and umem cannot tell whether that is one over a "
            f"count of this part: give the loss function to optimizer.update, or {ASK}"
        )
    found = {term.divisor for term in terms if not term.is_constant}
    are_constant = any(term.is_constant for term in terms)
    if any(term.is_constant and takes_rows(term.node) for term in terms):
        raise AccumulationError(
            "the loss has a term of rows of a parameter, and umem cannot tell whether they go by "
            f"the samples of this part: give the loss function to optimizer.update, or {ASK}"
        )
    if len(found) != 1 or (are_constant and None in found):
        raise AccumulationError(
            "the loss has terms that were divided by different counts: give the loss function to "
            f"optimizer.update, or {ASK}"
        )
    return Count(found.pop())


class _Uncut:
    """Arguments that cannot be cut: one sample."""

    size = 1

    def __init__(self, given: Arguments) -> None:
        self._given = given

    def take(self, which: slice | list[int]) -> Arguments:
        """All of them."""
        return self._given


def _batch(given: Arguments) -> Batch:
    try:
        return ArgumentsBatch(*given)
    except SizeError:
        return _Uncut(given)
