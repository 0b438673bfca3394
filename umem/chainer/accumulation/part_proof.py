"""The proof: what parts of a few samples give is compared with what those give at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from chainer.functions.noise.dropout import Dropout

from umem.chainer.accumulation.dropout_masks import DropoutMasks
from umem.chainer.accumulation.mixing_search import what_mixes
from umem.chainer.accumulation.part_reports import PartReports
from umem.chainer.accumulation.splitting import Batch, ChosenSamples
from umem.chainer.accumulation.step_state import StepState, numpy_position
from umem.chainer.accumulation.structure import Fact, PartFacts, all_facts, see_that_they_add_up
from umem.chainer.accumulation.whole_gradient import WholeGradient
from umem.chainer.tap import Proceed, Subscriber, is_told, subscribe, unsubscribe
from umem.errors import AccumulationError, AccumulationWarning, warn_at_program

MOST_APART = 1e-5
"""Largest accepted difference, relative to the gradient's norm; with float16, as many roundings of
it if that is more."""
SAVED_APART = 2.0**-7
"""The same where activations are saved in bfloat16: a difference in the last bit of float32 can
round to another bfloat16, and `Recompute` keeps in float32 the arrays that it manages."""
ROUNDINGS = 64
RANDOM = ("Zoneout", "RReLU", "Gaussian", "SimplifiedDropconnect", "GumbelSoftmax")
"""Functions that draw random numbers, for devices whose generator state cannot be read."""
LEAST = 4
"""The fewest samples that have two uneven splits."""


_NOT_COMPARABLE: set[Fact] = set()


class Proof:
    """Compares the gradient in parts with the whole one, at first and where a loss has a new term.

    Args:
        is_on: False: nothing is compared.
    """

    def __init__(self, gradient: WholeGradient, model: Any, *, is_on: bool) -> None:
        self._gradient, self._model, self._is_on = gradient, model, is_on
        self._compared: set[Fact] = set()
        self._has_begun = False

    def serialize(self, serializer: Any) -> None:
        """Save nothing: a resumed run compares again, without side effects."""

    def see(
        self,
        lossfun: Any,
        batch: Batch,
        parts: Sequence[range],
        facts: Sequence[PartFacts],
        most: int,
        before: StepState,
    ) -> None:
        """Compare two uneven splits of some samples with the samples at once, where that is due.

        Leaves no trace. Gradients of the model are held aside meanwhile.

        Args:
            parts: the samples of each part.
            facts: those of each part's loss.
            most: how many samples fit in memory; four are tried where it is fewer.
            before: the state in which they began.

        Raises:
            AccumulationError: they differ; names what mixes samples where it is found.

        Cost: three passes over that many samples, and two more copies of the gradients.
        """
        if not self._is_on or batch.size < 2:
            return
        found = all_facts(facts)
        new = [fact for fact in found if fact not in self._compared]
        if self._has_begun and not new:
            return
        after, made = StepState(self._model), len(self._gradient.made)
        # Chainer notes a gradient's loss scale on its parameter, and has no public name for it.
        gradients = [
            (p, p.grad, p._loss_scale) for p in self._model.params() if p.array is not None
        ]
        try:
            if not self._has_begun:
                self._compare(lossfun, batch, _spread(range(batch.size), batch.size), most, before)
            if not self._has_begun and self._is_on and _norm([grad for _, grad, _ in gradients]):
                self._begin(lossfun, batch, parts, most, before)
            for fact in new:
                if self._has_begun and fact not in self._compared:
                    self._show(
                        fact, lossfun, batch, [parts[at] for at in found[fact]], most, before
                    )
        finally:
            self._model.cleargrads()
            for parameter, gradient, scale in gradients:
                # Chainer's private: the scale that a gradient carries, and an update takes out.
                parameter.grad, parameter._loss_scale = gradient, scale
            after.put_back()
            self._gradient.unmake(made)

    def _begin(
        self, lossfun: Any, batch: Batch, parts: Sequence[range], most: int, before: StepState
    ) -> None:
        """Compare parts with themselves until one has a gradient, as few labelled samples have."""
        for part in parts:
            samples = part if len(part) > 1 else range(part.start - 1, part.stop)
            if samples.start >= 0 and not self._has_begun and self._is_on:
                self._compare(lossfun, batch, samples, most, before)

    def _show(
        self,
        fact: Fact,
        lossfun: Any,
        batch: Batch,
        parts: Sequence[range],
        most: int,
        before: StepState,
    ) -> None:
        """Compare samples that show a new fact: first some of their parts, then all."""
        others = [at for at in range(batch.size) if all(at not in part for part in parts)]
        some = [*parts, others] if len(parts) == 1 and others else parts
        half = [_spread(one, max(most, LEAST) // len(some)) for one in some]
        self._compare(lossfun, batch, [at for one in half for at in one], most, before)
        if fact not in self._compared and self._is_on and len(parts) > 1:
            sizes = [len(part) for part in parts]
            self._compare(
                lossfun, batch, [at for part in parts for at in part], most, before, sizes
            )
        self._compared.add(fact)

    def _compare(
        self,
        lossfun: Any,
        batch: Batch,
        which: Sequence[int],
        most: int,
        before: StepState,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Compare gradients in parts with the whole one, on fewer samples if they do not fit."""
        tried = {min(len(which), max(most, LEAST)), min(len(which), most)}
        for size in sorted(tried if sizes is None else {len(which)}, reverse=True):
            if size < 2:
                break
            chosen = ChosenSamples(batch, _spread(which, size))
            try:
                with PartReports().part(), self._gradient.compared():
                    splits = _splits(size) if sizes is None else [sizes]
                    shown = _compared(self._gradient, self._model, lossfun, chosen, before, splits)
                    self._has_begun |= shown is not None
                    self._compared |= shown or set()
                    self._is_on = shown is not _NOT_COMPARABLE
                    return
            except MemoryError:
                if size <= most:
                    raise
            finally:
                self._gradient.masks = None
                self._model.cleargrads()
        warn_at_program(
            "no two samples fit in memory at once, so parts were not compared with a whole"
            if sizes is None
            else "two parts do not fit in memory at once, so what differs in them was not compared "
            "with a whole",
            AccumulationWarning,
        )
        self._is_on = sizes is not None


def _spread(which: Sequence[int], size: int) -> list[int]:
    """Choose ``size`` samples evenly spread over some."""
    size = min(len(which), max(size, 1))
    return [which[at] for at in np.linspace(0, len(which) - 1, size).astype(int).tolist()]


def _compared(
    gradient: WholeGradient,
    model: Any,
    lossfun: Any,
    chosen: ChosenSamples,
    state: StepState,
    splits: Sequence[Sequence[int]],
) -> set[Fact] | None:
    """Compare splits with the whole; returns the facts they showed, None if they had no
    gradient.
    """
    masks = DropoutMasks(chosen.size, stay=True)  # CuPy's generator cannot be put back
    shown: set[Fact] = set()
    facts: list[PartFacts] = []

    def gradients(sizes: Sequence[int], samples: Batch = chosen) -> list[Any]:
        state.put_back()
        gradient.masks = masks
        facts[:] = gradient.leave(lossfun, samples, sizes, None)
        shown.update(all_facts(facts))
        found = [p.grad for p in model.params()]
        model.cleargrads()
        return found

    state.put_back()
    with random_functions() as others:
        whole = gradients([chosen.size])
    (of_whole,) = facts
    norm, norm_of_parameters = _norm(whole), _norm([p.array for p in model.params()])
    if others:
        warn_at_program(
            f"{', '.join(others)}: draws random numbers of its own, so that parts and the whole "
            "draw others, and the gradient of parts was not compared with the whole's",
            AccumulationWarning,
        )
        return _NOT_COMPARABLE
    if not math.isfinite(norm) or not norm:  # zeros show nothing
        return None
    for sizes in splits:
        parts = gradients(sizes)
        see_that_they_add_up(of_whole, facts)
        if _are_half(parts) and not math.isfinite(_norm(parts)):
            return None
        apart = _apart(whole, parts)
        del parts
        if apart <= _allowed(whole) * norm:
            continue
        if not masks.are_used:  # a norm near zero: other orders of the same samples are as far
            backwards = ChosenSamples(chosen, range(chosen.size)[::-1])
            alone = max(_norm(gradients([1], ChosenSamples(chosen, [at]))) for at in (0, -1))
            another_order = _apart(whole, gradients([chosen.size], backwards))
            if apart <= min(3 * another_order, _allowed(whole) * alone):
                continue
        if apart * norm_of_parameters <= ROUNDINGS * _coarsest(whole) * of_whole.loss:
            return None  # no gradient but roundings of the loss, as where it hangs on nothing
        _refuse(apart / norm if norm else math.inf, sizes, chosen, lossfun, state, gradient)
    return shown


def _splits(size: int) -> list[list[int]]:
    """Return two uneven splits, or fewer for few samples.

    The same sizes are used again at once, so that `umem.chainer.Recompute` recognises the graphs.
    """
    if size < LEAST:
        return [[1] * size]
    part = size // 4
    return [[part, part, size - 2 * part], [size - 2 * part, part, part]]


def _refuse(
    apart: float,
    sizes: Sequence[int],
    chosen: ChosenSamples,
    lossfun: Any,
    state: StepState,
    gradient: WholeGradient,
) -> None:
    """Raise AccumulationError for a gradient that differs, naming the function that mixes
    samples.
    """
    found = what_mixes(lossfun, chosen, state, gradient)
    why = (
        f"{found} mixes samples. umem.chainer.Recompute saves memory on the whole batch, exactly"
        if found
        else "no function was seen to mix samples: the loss is divided by something else than "
        f"{'weight= says' if gradient.weight is not None else 'umem read from its tape'}, or what "
        "a link keeps from call to call is carried from part to part"
    )
    raise AccumulationError(
        f"the gradient of {chosen.size} samples in parts of {' and '.join(map(str, sizes))} is "
        f"{apart:.1e} of its norm away from that of all at once (allowed: {MOST_APART:.0e}): {why}"
    )


def _allowed(gradients: Sequence[Any]) -> float:
    coarsest = _coarsest(gradients)
    least = SAVED_APART if is_told("SavedIn") else MOST_APART
    return max(least, ROUNDINGS * coarsest if coarsest > 1e-5 else 0.0)


def _coarsest(gradients: Sequence[Any]) -> float:
    """Return the largest relative rounding error of the arrays' dtypes."""
    return max(float(np.finfo(g.dtype).eps) for g in gradients if g is not None)


def _are_half(gradients: Sequence[Any]) -> bool:
    """Tell whether some are float16, which a sum over parts leaves before the whole's mean does."""
    return any(g is not None and g.dtype == np.float16 for g in gradients)


def _norm(gradients: Sequence[Any]) -> float:
    return math.sqrt(sum(_square(g) for g in gradients if g is not None))


def _apart(whole: Sequence[Any], parts: Sequence[Any]) -> float:
    """Return the norm of the difference of two gradients."""
    total = 0.0
    for a, b in zip(whole, parts, strict=True):
        if a is None or b is None:
            total += sum(_square(g) for g in (a, b) if g is not None)
        else:
            total += _square(a - b)
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _square(array: Any) -> float:
    flat = array.ravel().astype("d")
    return float(flat @ flat)


# -- what draws random numbers --------------------------------------------------------------------


class _Draws(Subscriber):
    """Records functions that draw random numbers, except dropout, whose masks are known."""

    place = -2

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._thread, self._last = threading.get_ident(), numpy_position()

    def outside(self) -> None:
        """Record a draw outside of functions since the last call."""
        if (now := numpy_position()) != self._last:
            self.names["code outside of Chainer's functions"] = None
            self._last = now

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Record whether a function draws."""
        if threading.get_ident() != self._thread:
            return proceed(func, inputs)
        self.outside()
        outputs = proceed(func, inputs)
        now = numpy_position()
        if type(func) is not Dropout and (now != self._last or type(func).__name__ in RANDOM):
            self.names[f"'{func.label}'"] = None
        self._last = now
        return outputs


@contextmanager
def random_functions() -> Iterator[dict[str, None]]:
    """Yield a set that collects the names of functions that draw random numbers in this thread."""
    draws = _Draws()
    subscribe(draws)
    try:
        yield draws.names
        draws.outside()
    finally:
        unsubscribe(draws)
