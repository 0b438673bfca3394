"""The comparison of a few samples in parts with the same samples at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

from umem.chainer.accumulation.loss_weight import weight_of
from umem.chainer.accumulation.part_facts import (
    PartFacts,
    adds_up,
    check_alike,
    check_sums,
    check_weights,
    uneven,
)
from umem.chainer.accumulation.part_reports import PartReports
from umem.chainer.accumulation.splitting import Batch, ChosenSamples
from umem.chainer.accumulation.whole_gradient import WholeGradient
from umem.chainer.step_state import StepState
from umem.chainer.tap import is_subscribed
from umem.devices import is_dry
from umem.errors import AccumulationError, AccumulationWarning, warn_at_program

MOST_APART = {"float64": 1e-10, "float32": 1e-5}
"""Largest accepted difference, relative to the gradient's norm, by its coarsest type; with float16
as many roundings of it. Guesses: far above the roundings of sums in these types, and far below the
effect of a function that mixes samples; the losses of tests/support/loss_families.py meet them."""
SAVED_APART = 2.0**-7
"""The same for activations saved in bfloat16: a difference in the last bit of float32 can round to
another bfloat16, and `Recompute` keeps its arrays in float32."""
ROUNDINGS = 64
"""Roundings that a sum of few gradients may be off by: a guess, not measured."""
SAMPLES = 3
"""Samples compared at once: the fewest that have parts of two sizes."""
SPLITS = ((2, 1), (1, 1, 1), (1, 2))
"""The parts in which they are compared, in turn."""
MOST_OTHERS = 8
"""Other triples that are tried if one shows nothing: a guess, not measured."""
NOT_FINITE = "not finite"
SHOWN = 3
"""Triples that must agree, all the first time: one may show a difference that another hides, such
as saturated attention. As many as there are `SPLITS`."""


class Compared(NamedTuple):
    """A batch whose parts have been run, and how they were run, for the comparison.

    Attributes:
        lossfun: the loss function.
        batch: its samples.
        parts: the samples of each part.
        facts: the facts of each part's loss.
        state: the state in which the first part began.
        loss_scale: the parts' loss scale.
        is_finite: whether the parts' gradient is finite.
    """

    lossfun: Any
    batch: Batch
    parts: Sequence[range]
    facts: Sequence[PartFacts]
    state: StepState
    loss_scale: Any
    is_finite: bool = False


class PartComparison:
    """Compares the gradient in parts with the whole's, whenever a list of terms is new.

    Args:
        is_on: False: compare nothing.
    """

    def __init__(self, gradient: WholeGradient, model: Any, *, is_on: bool) -> None:
        self._gradient, self._model, self.is_on = gradient, model, is_on
        self._compared: set[Any] = set()
        self._weighted: list[Counter[str]] = []
        """Compared terms whose divisor is given by ``weight=``, as many in every part."""
        self._varied: list[set[str]] = []
        """The same, more of them in larger parts."""
        self._functions: set[str] = set()
        self._numbers: set[float] = set()
        self._adding_up: set[Any] = set()
        """Lists of terms with ``weight=`` whose divisors on the tape add up."""

    def is_due(self, facts: Sequence[PartFacts]) -> bool:
        """Tell whether parts have a list of terms that was not compared."""
        found: set[Any] = {f"uneven {term.entry}" for term in uneven(facts)}
        found |= {"ragged" for part in facts if part.is_ragged}
        found |= {part.key for part in facts} - {()}
        is_new = not self._compared.issuperset(found) or any(map(self._is_weighted_new, facts))
        return self.is_on and is_new

    def _is_weighted_new(self, part: PartFacts) -> bool:
        kinds = Counter(part.weighted_key)
        is_known = any(kinds <= one for one in self._weighted)
        return bool(kinds) and not is_known and not any(kinds.keys() <= one for one in self._varied)

    def turn_off(self, why: str) -> None:
        """Stop comparing, and warn."""
        if self.is_on:
            self.is_on = False
            warn_at_program(
                f"{why}, so the gradient in parts was not compared with that of the whole batch",
                AccumulationWarning,
            )

    def compare_if_due(self, one: Compared, *, again: bool = False) -> None:
        """Compare three samples at once with two and one of them, if that is due.

        Args:
            again: also if the list of terms was compared, because these are other samples.

        Leaves no trace: the model's gradients are set aside meanwhile.

        Raises:
            AccumulationError: they differ, or parts do not add up by the rules.

        Cost: two passes over three samples, nine times at first and three times later, and two more
        copies of the gradients.
        """
        counting = [part for part in one.facts if part.weighted_key]
        if counting and counting[0].weighted_key in self._adding_up:
            check_weights(counting)
        if not self.is_on or one.batch.size < 2:
            return
        numbers = set(one.facts[0].numbers)
        terms = chain.from_iterable(part.terms for part in one.facts)
        is_due = again or self.is_due(one.facts) or any(t.is_weighted and t.value for t in terms)
        is_due |= any(not part.functions <= self._functions for part in one.facts)
        if not is_due and self._numbers.issuperset(numbers):
            return
        after, made = StepState(self._model), len(self._gradient.made)
        # Chainer notes a gradient's loss scale on its parameter, and has no public name for it.
        gradients = [
            (p, p.grad, p._loss_scale) for p in self._model.params() if p.array is not None
        ]
        try:
            if is_due:
                norm = _norm([gradient for _, gradient, _ in gradients])
                self._compare_all(one._replace(is_finite=math.isfinite(norm)), again)
            else:
                self._compare_numbers(one)
            self._numbers |= numbers
        finally:
            self._model.cleargrads()
            for parameter, gradient, scale in gradients:
                # Chainer's private: the scale in a gradient, which an update divides by.
                parameter.grad, parameter._loss_scale = gradient, scale
            after.restore()
            self._gradient.uninitialize(made)

    def _compare_numbers(self, one: Compared) -> None:
        """Check numbers that are new in parts of another size, and may depend on that size.

        Raises:
            AccumulationError: they depend on it.
        """
        one.state.restore()
        size = 1 if len(one.parts[0]) > 1 else 2
        with self._gradient.listening(), self._gradient.compared():
            (found,) = self._gradient.forward_facts(one.lossfun, one.batch, [slice(0, size)])
        if found.key == one.facts[0].key:
            check_alike(found, one.facts[0])

    def _compare_all(self, one: Compared, again: bool) -> None:
        """Compare triples until all lists of terms are shown.

        Raises:
            AccumulationError: one differs, or none shows them.
        """
        triples = list(islice(_triples(one, self._gradient.weight), 1 + MOST_OTHERS))
        wanted = SHOWN if self._compared and not again else len(triples)
        seen = tried = 0
        are_finite, waits = False, bool(_not_counted(one.facts))
        for triple, sizes in zip(triples, cycle(SPLITS), strict=False):
            shown = self._compare(
                one, ChosenSamples(one.batch, triple), sizes if len(triple) == SAMPLES else [1, 1]
            )
            if shown is None:
                return
            are_finite = are_finite or NOT_FINITE not in shown
            self._compared |= shown - {NOT_FINITE}
            seen += bool(shown - {NOT_FINITE})
            tried += 1
            if seen:
                self._functions.update(*(part.functions for part in one.facts))
            if seen >= min(wanted, len(triples)) and not self.is_due(one.facts):
                return
            if waits and tried >= SHOWN:
                return  # for a batch in which each term counts
        if waits or not self.is_due(one.facts):
            return
        if one.is_finite and not are_finite and any(p.dtype == "e" for p in self._model.params()):
            # A mean over more samples has smaller gradients, and the loss scale is chosen for it.
            self.turn_off(f"gradients of {SAMPLES} samples overflow in half precision")
        elif are_finite or one.is_finite:
            raise AccumulationError(
                f"{len(triples)} times up to {SAMPLES} samples of the batch show no gradient, "
                "one that is not finite, or not all terms of the loss: umem cannot tell whether "
                "samples mix. Pass check=False to continue without a comparison, or weight= if "
                "some terms depend on some samples only"
            )

    def _compare(
        self, one: Compared, chosen: ChosenSamples, sizes: Sequence[int]
    ) -> set[Any] | None:
        """Compare some samples; returns the lists of terms that they show.

        None is returned if it cannot be compared now, or at all.

        Raises:
            AccumulationError: parts and the whole differ.
        """
        try:
            with PartReports().part(), self._gradient.compared():
                whole, (of_whole,) = self._run(one, chosen, [chosen.size])
                has_drawn = one.state.has_drawn() or self._gradient.has_drawn
                check_alike(of_whole, one.facts[0])
                parts, of_parts = self._run(one, chosen, sizes)
                check_alike(of_whole, of_parts[0])
                check_sums(of_whole, of_parts)
                if has_drawn:
                    self.turn_off("a function other than dropout draws random numbers")
                    return None
                norm = _norm(whole)
                apart = _apart(whole, parts)
                if math.isfinite(norm) > math.isfinite(apart) and _coarsest(whole) < 1e-5:
                    raise AccumulationError(
                        "single samples have a gradient that is not finite, but all together one "
                        "that is: let weight= give 0 for samples that do not count"
                    )
                if not (math.isfinite(norm) and math.isfinite(apart)):
                    return {NOT_FINITE}
                if is_dry():
                    return self._shown(of_whole, of_parts)
                if not (norm or apart):
                    return set()
                if apart > _allowed(whole, of_whole) * norm and not self._is_rounding(
                    one, chosen, whole, apart, of_whole
                ):
                    raise _refusal(apart / (norm or apart), sizes, self._gradient.weight)
        except MemoryError:
            self.turn_off(f"{chosen.size} samples do not fit in memory at once")
            return None
        except (AccumulationError, AccumulationWarning):
            raise
        except Exception as error:
            kind = type(error).__name__
            self.turn_off(f"the loss function raised {kind} for {chosen.size} samples ({error})")
            return None
        finally:
            self._model.cleargrads()
        return self._shown(of_whole, of_parts)

    def _run(
        self, one: Compared, samples: Batch, sizes: Sequence[int]
    ) -> tuple[list[Any], list[PartFacts]]:
        """Run some samples in parts; returns their gradients, and the facts of each part."""
        one.state.restore()
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow here is not finite
            facts = self._gradient.gradient_in_parts(one.lossfun, samples, sizes, one.loss_scale)
        found = [p.grad for p in self._model.params()]
        self._model.cleargrads()
        return found, facts

    def _is_rounding(
        self,
        one: Compared,
        chosen: ChosenSamples,
        whole: Sequence[Any],
        apart: float,
        facts: PartFacts,
    ) -> bool:
        """Tell whether a difference is only rounding, because the norm is near zero.

        Then the same samples in another order differ as much; or the gradient consists of roundings
        of the loss, because that depends on no parameter.
        """
        scale = 1.0 if one.loss_scale is None else one.loss_scale
        norm_of_parameters = _norm([p.array for p in self._model.params()])
        if apart * norm_of_parameters <= ROUNDINGS * _coarsest(whole) * facts.loss * scale:
            return True
        at_once = [ChosenSamples(chosen, [at]) for at in range(chosen.size)]
        alone = max(_norm(self._run(one, sample, [1])[0]) for sample in at_once)
        backwards = ChosenSamples(chosen, range(chosen.size)[::-1])
        other_order = _apart(whole, self._run(one, backwards, [chosen.size])[0])
        return apart <= min(3 * other_order, _allowed(whole, facts) * alone)

    def _shown(self, whole: PartFacts, parts: Sequence[PartFacts]) -> set[Any]:
        """Return the lists of terms of compared samples in which each kind of term counts."""
        if adds_up(whole, parts):
            self._adding_up.add(whole.weighted_key)
            check_weights([whole, *parts])
        if _not_counted([whole]):
            return set()
        kinds = Counter(whole.weighted_key)
        if all(kinds[kind] == n for p in parts for kind, n in Counter(p.weighted_key).items()):
            self._weighted.append(kinds)
        else:
            self._varied.append(set(kinds))
        shown = {whole.key, *(f"uneven {term.entry}" for term in uneven(parts))}
        return shown | ({"ragged"} if whole.is_ragged else set())


def _refusal(apart: float, sizes: Sequence[int], weight: Any) -> AccumulationError:
    return AccumulationError(
        f"the gradient of {sum(sizes)} samples in parts of {' and '.join(map(str, sizes))} differs "
        f"by {apart:.1e} of its norm from the gradient of all at once. "
        + ("A" if weight is None else "Either weight= does not give the loss's divisor, or a")
        + " function mixes samples, such as a softmax over the batch axis; a link carries its "
        "state from part to part; or a number depends on the samples: if the loss is divided "
        "by it, pass weight=. Or use umem.chainer.Recompute on the whole batch: it is exact"
    )


# -- the choice of samples -------------------------------------------------------------------------


def _not_counted(facts: Sequence[PartFacts]) -> set[Any]:
    """Return the kinds of terms that count nothing in any part."""
    counts: Counter[Any] = Counter()
    for term in chain.from_iterable(part.terms for part in facts):
        if not term.is_once and term.count is not None:
            # The divisor of a term with weight= is such a number, a different one in each part.
            numbers = () if term.is_weighted else term.numbers
            counts[term.entry, term.kind, numbers] += int(term.count > 0)
    return {kind for kind, count in counts.items() if not count}


def _triples(one: Compared, weight: Any) -> Iterator[list[int]]:
    """Yield samples to compare: spread over the batch, different in their counts, then others."""
    size = one.batch.size
    found: list[list[int]] = []
    counting = [
        part
        for part, facts in zip(one.parts, one.facts, strict=True)
        if any(term.count for term in facts.terms)
    ]
    candidates = chain(
        [_spread(size)],
        _of_equal_values(one.batch),
        _of_other_weights(one.batch, weight),
        *(list(_groups(part))[:2] for part in counting[:MOST_OTHERS]),
        *(_groups(range(size), seed) for seed in range(32)),
    )
    for triple in candidates:
        if triple not in found and len(set(triple)) == min(SAMPLES, size):
            found.append(triple)
            yield triple


def _spread(size: int, count: int = SAMPLES) -> list[int]:
    return sorted({int(at) for at in np.linspace(0, size - 1, count)})


def _groups(which: Sequence[int], seed: int = 0) -> Iterator[list[int]]:
    """Yield groups of samples in an order without a pattern, the same each time."""
    order = np.random.RandomState(seed).permutation(len(which)).tolist()
    for at in range(0, len(order), SAMPLES):
        yield [which[i] for i in order[at : at + SAMPLES]]


def _of_equal_values(batch: Batch) -> Iterator[list[int]]:
    """Yield samples of which two have the same label or identifier, two values an argument.

    They reveal losses that count classes, or identifiers once each. Negative values come first:
    such samples are often left out of a count.
    """
    given = batch.take(slice(0, batch.size))
    found: list[list[list[int]]] = []
    for x in (*given.args, *given.kwargs.values()):
        array = getattr(x, "array", x)
        if getattr(array, "ndim", 0) == 1 and array.dtype.kind in "iu":
            places: dict[int, list[int]] = {}
            for at, value in enumerate(array.tolist()):
                places.setdefault(value, []).append(at)
            found.append([at for _, at in sorted(places.items()) if len(at) > 1][:2])
    for pairs in zip_longest(*found, fillvalue=[]):
        for first, last in ((at[0], at[-1]) for at in pairs if at):
            other = next((i for i in range(batch.size) if i not in (first, last)), first)
            yield [first, other, last]


def _of_other_weights(batch: Batch, weight: Any) -> Iterator[list[int]]:
    """Yield samples for which the weight functions give different numbers, if there are any."""
    for one in weight.values() if isinstance(weight, Mapping) else [weight]:
        if callable(one):
            found = [(weight_of(one, batch.take([at])), at) for at in _spread(batch.size, 64)]
            order = [at for _, at in sorted(found)]
            yield [order[0], order[len(order) // 2], order[-1]]
            yield [order[-1], order[-2], order[0]]


# -- their difference ------------------------------------------------------------------------------


def _allowed(gradients: Sequence[Any], facts: PartFacts) -> float:
    coarsest = max(_coarsest(gradients), facts.rounding)
    kind = "float64" if coarsest < 1e-15 else "float32"
    least = SAVED_APART if is_subscribed("SavedIn") else MOST_APART[kind]
    return max(least, ROUNDINGS * coarsest if coarsest > 1e-5 else 0.0)


def _coarsest(gradients: Sequence[Any]) -> float:
    """Return the largest relative rounding error of the arrays' dtypes."""
    return max((float(np.finfo(g.dtype).eps) for g in gradients if g is not None), default=0.0)


def _norm(gradients: Sequence[Any]) -> float:
    return math.sqrt(sum(_square(g) for g in gradients if g is not None))


def _apart(whole: Sequence[Any], parts: Sequence[Any]) -> float:
    """Return the norm of the difference of two gradients."""
    total = 0.0
    for a, b in zip(whole, parts, strict=True):
        if a is None or b is None:
            total += sum(_square(g) for g in (a, b) if g is not None)
        else:
            with np.errstate(invalid="ignore", over="ignore"):  # the norm then shows it
                total += _square(a - b)
    return math.sqrt(total)


def _square(array: Any) -> float:
    flat = array.ravel().astype("d")
    return float(flat @ flat)
