"""Roles of a loss's divisors: counts of samples or constant factors, found by comparing samples.

A number in a loss is a factor where it is the same for two samples and for both together: a count
of theirs, which is not 0, would add up. A mean over as many elements for one sample as for two is
no mean over samples. A number that is 1 after a division may be ``max(1, count)``, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isclose
from typing import NamedTuple

from umem.chainer.accumulation.call_sites import Key
from umem.chainer.accumulation.divisors import Scaling, Term
from umem.chainer.accumulation.loss_shares import Count
from umem.chainer.accumulation.node_origins import is_of_parameters, shapes_beside
from umem.errors import AccumulationError

NEAR = 1e-5
"""Relative rounding error of a count in float32."""
MOST_ASKED = 8
"""At most this many samples are run alone to find two that have a given divisor; each takes a
forward pass."""

WEIGHT = (
    "say how much a loss of some samples was divided by: weight= is a function of the loss "
    "function's arguments, as weight=lambda x, t: len(x)"
)


class LossReading(NamedTuple):
    """The terms of a loss of some samples, with the divisors found on the tape.

    Attributes:
        terms: its terms.
        weight: the value of ``weight=`` for these samples; None without it.
        values: of each term, by its key, where it is known.
        beside: the shapes of what a sum was made of beside parameters, by its key.
    """

    terms: tuple[Term, ...]
    weight: float | None
    values: dict[Key, float | None]
    beside: dict[Key, list[tuple[int, ...]]]

    def marks(self) -> dict[Key, Scaling]:
        """Return the divisors and means by key."""
        return {mark.key: mark for term in self.terms for mark in term.marks}


def reading_of(
    terms: tuple[Term, ...], weight: float | None, own: frozenset[int], *, sums: bool = True
) -> LossReading:
    """Make a reading that keeps of the tape only what is needed later.

    Args:
        own: ids of the model's parameters.
        sums: also what shows whether a sum is the same for all samples.
    """
    if not sums:
        return LossReading(terms, weight, {}, {})
    added = [term for term in terms if not term.are_labels]
    return LossReading(
        terms,
        weight,
        {term.key: term.value() for term in added},
        {term.key: shapes_beside(term.node, own) for term in added},
    )


ReadingFor = Callable[[list[int]], LossReading]
"""A function that reads the loss of given samples of the batch by a forward pass without side
effects."""


class DivisorRoles:
    """Decides which divisors of a loss depend on the samples, and which are constant factors.

    A mean or a number is a count if it changes with the samples, and a factor if two samples beside
    the part have the same.

    Attributes:
        own: ids of the model's parameters.
    """

    def __init__(self, own: frozenset[int]) -> None:
        self.own = own
        self._counts: dict[str, bool] = {}
        """For each kind of mean: whether it is over samples, so that parts divide by less than the
        whole."""
        self._divided: dict[Key, float] = {}
        """Numbers that change inversely with ``weight=``: the product of both."""
        self._factors: dict[Key, tuple[float, ...]] = {}
        """Numbers and means that other samples have, too: constant factors."""
        self._constant: dict[str, bool] = {}
        """For each kind of sum: whether its value is the same for all samples."""
        self._assumed: dict[Key, str] = {}
        """Roles assumed for want of a second sample to compare with."""

    def is_count(self, kind: str) -> bool:
        """Tell whether a kind of mean is over samples."""
        return self._counts.get(kind, False)

    # -- learning it ---------------------------------------------------------------------------

    def are_known(self, terms: Sequence[Term]) -> bool:
        """Tell whether all divisors of a loss have a role."""
        marks = {mark.key: mark for term in terms for mark in term.marks}
        return all(map(self._is_known, marks.values())) and all(
            term.site.kind in self._constant for term in terms if self._is_unclear(term)
        )

    def _is_known(self, mark: Scaling) -> bool:
        if mark.key in self._assumed:
            return False
        if mark.key in self._divided or self.is_count(mark.site.kind):
            return True
        return self._factors.get(mark.key) == mark.values

    def _role(self, mark: Scaling) -> str:
        is_count = mark.is_mean and self.is_count(mark.site.kind)
        return "count" if is_count else "divided" if mark.key in self._divided else "factor"

    def _is_unclear(self, term: Term) -> bool:
        """Tell whether a term may be constant, such as a regularizer: no labels, no unknown
        function.
        """
        return not (term.are_labels or term.is_opaque)

    def learn(self, mine: LossReading, part: range, size: int, reading_for: ReadingFor) -> None:
        """Run two samples of a part alone, and assign a role to every divisor of its loss.

        Raises:
            AccumulationError: a number is neither a factor nor, times ``weight=``, the same.
        """
        others = self._others(mine, part, size, reading_for)
        readings = [mine, *others]
        for term in mine.terms:
            if self._is_unclear(term):
                self._constant.setdefault(term.site.kind, self._is_constant(term, readings))
        for key, mark in mine.marks().items():
            if self._is_known(mark):
                continue
            if not others:
                self._assume(mark, mine.weight)
                continue
            assumed = self._assumed.pop(key, "")
            self._counts.pop(mark.site.kind, None)
            self._divided.pop(key, None)
            there = [(r, m) for r in readings if (m := r.marks().get(key)) is not None]
            if mark.is_mean and len(there) == 2 and there[0][1].values == there[1][1].values:
                self._assume(mark, mine.weight)  # nobody else has it
                continue
            self._settle(mark, there)
            if assumed and self._role(mark) != assumed:
                raise AccumulationError(
                    f"the loss is {mark}, which was taken for a {assumed} while one sample had it, "
                    "and it is not one: begin with a call of update in which two samples have it"
                )

    def _assume(self, mark: Scaling, weight: float | None) -> None:
        """Assume that means are counts and numbers are factors, until a second sample can be
        compared.
        """
        if mark.is_mean and mark.of_first:
            self._counts[mark.site.kind] = True
        elif weight is not None and isclose(abs(mark.values[0]) * (weight or 1.0), 1.0):
            self._divided[mark.key] = mark.values[0] * (weight or 1.0)
        elif mark.site.is_division and 1.0 in map(abs, mark.values):
            raise AccumulationError(_refusal(mark, (), is_one=True))
        else:
            self._factors[mark.key] = mark.values
        self._assumed[mark.key] = self._role(mark)

    def _others(
        self, mine: LossReading, part: range, size: int, reading_for: ReadingFor
    ) -> list[LossReading]:
        """Read two samples alone, and both together if the part is one of them."""
        if len(part) == 1:
            at = part[0]
            other = at + 1 if at + 1 < size else at - 1
            if other < 0:
                return []
            try:
                return [reading_for([other]), reading_for([at, other])]
            except MemoryError:
                return []
        found: list[LossReading] = []
        missing = {key for key, mark in mine.marks().items() if not self._is_known(mark)}
        seen: dict[Key, list[int]] = {key: [] for key in missing}

        def read(which: Sequence[int], is_enough: Callable[[list[int]], bool]) -> None:
            step = max(1, len(which) // MOST_ASKED)
            for at in which[::step][:MOST_ASKED]:
                if len(found) > 1 and all(map(is_enough, seen.values())):
                    return
                found.append(reading_for([at]))
                for key in found[-1].marks().keys() & missing:
                    seen[key].append(at)

        read([*part], lambda samples: len(samples) > 1)
        # A mean that one sample of the part has is the same for it alone, whatever it is over.
        alone = {at for (at,) in (v for v in seen.values() if len(v) == 1)}
        if alone:
            read([at for at in range(size) if at not in part], lambda samples: len(samples) != 1)
            pairs = {(a, b) for a, b, *_ in (v for v in seen.values() if len(v) > 1) if a in alone}
            found += [reading_for([*pair]) for pair in sorted(pairs)]
        return found

    def _is_constant(self, term: Term, readings: Sequence[LossReading]) -> bool:
        """Tell whether a sum has one value and one shape for all samples, as a regularizer has."""
        if is_of_parameters(term.node, self.own):
            return True
        there = [r for r in readings if term.key in r.values]
        values = {r.values[term.key] for r in there}
        shapes = [r.beside[term.key] for r in there]
        is_one = len(values) == 1 and None not in values
        return len(there) > 1 and is_one and all(one == shapes[0] for one in shapes)

    def _settle(self, mark: Scaling, there: Sequence[tuple[LossReading, Scaling]]) -> None:
        """Assign a role to one divisor: a count, a constant factor, or the inverse of ``weight=``.

        Raises:
            AccumulationError: none of these fits what the samples show.
        """
        values = [one.values for _, one in there]
        is_same = all(one == mark.values for one in values)
        is_in_loop = mark.key[1] > 0 and (mark.key[0], 0) in self._factors
        if mark.is_mean:
            # A mean that only one reading has: over the first axis, or over all of its elements.
            self._counts[mark.site.kind] = not is_same or len(values) < 2
            if is_same:
                self._factors[mark.key] = mark.values
            return
        is_one = mark.site.is_division and set(map(abs, mark.values)) == {1.0}
        if is_same and (len(values) > 2 or is_in_loop) and not is_one:
            self._factors[mark.key] = mark.values
            return
        weights = [reading.weight for reading, _ in there]
        if len(mark.values) == 1 and None not in weights:
            products = [v * w for (v,), w in zip(values, weights, strict=True) if w] or [
                mark.values[0]
            ]
            if all(isclose(one, products[0], rel_tol=NEAR) for one in products):
                self._divided[mark.key] = products[0]
                return
            raise AccumulationError(
                f"the loss is {mark}, and weight= says {_told(weights)} where that number is "
                f"{_told([1 / v if v else inf for (v,) in values])}: {WEIGHT}"
            )
        raise AccumulationError(_refusal(mark, values, is_one))

    # -- what follows from it --------------------------------------------------------------------

    def counts(self, reading: LossReading, sample_count: int) -> list[Count]:
        """Return what each term was divided by.

        Raises:
            AccumulationError: umem cannot know.
        """
        terms, weight = reading.terms, reading.weight
        by_mark = [any(mark.key in self._divided for mark in term.marks) for term in terms]
        found = [self._count(term, weight) for term in terms]
        if weight is None or any(by_mark):
            return found
        free = [at for at, count in enumerate(found) if count.is_free]
        for at in free:
            found[at] = found[at]._replace(total="weight", value=weight, is_free=False)
        if not free:
            _check_needless(terms, found, weight, sample_count)
        return found

    def _count(self, term: Term, weight: float | None) -> Count:
        """Return the count behind a term of one part.

        Raises:
            AccumulationError: ``weight=`` contradicts the tape, or an unknown function stands
                before
                the sum and ``weight=`` was not given.
        """
        value, total = term.counted, f"{term.key[0]}:{term.key[1]}"
        for mark in term.marks:
            if mark.key in self._divided and weight is not None:
                divided = self._divided[mark.key] / mark.values[0]
                # Where nothing was counted programs divide by 1, or by next to nothing.
                is_so = (
                    divided <= 1 + NEAR if not weight else isclose(divided, weight, rel_tol=NEAR)
                )
                if not is_so:
                    raise AccumulationError(
                        f"the loss is {mark}, and weight= says {weight:.6g}: {WEIGHT}"
                    )
                return Count("weight", weight, divided)
            if self.is_count(mark.site.kind) and mark.is_mean:
                value = (1.0 if value is None else value) / mark.values[0]
        if self._constant.get(term.site.kind) or is_of_parameters(term.node, self.own):
            return Count("", None, is_constant=True)
        if term.is_opaque and weight is None:
            raise AccumulationError(
                f"{term} stands between the loss and its sum or mean, and umem does not know by "
                f"what it divides: pass weight= to {WEIGHT}"
            )
        return Count("" if value is None else total, value, is_free=value is None)

    def factors(self, terms: Sequence[Term]) -> dict[Key, Scaling]:
        """Return the constant factors of a part, which every part of the batch must share."""
        return {
            mark.key: mark
            for term in terms
            for mark in term.marks
            if mark.key not in self._divided and not self.is_count(mark.site.kind)
        }


def _check_needless(
    terms: Sequence[Term], found: Sequence[Count], weight: float, sample_count: int
) -> None:
    """Check ``weight=`` against the tape where the tape alone gives every divisor.

    Raises:
        AccumulationError: it says something else.
    """
    for term, count in zip(terms, found, strict=True):
        if count.value is not None and not isclose(count.value, weight, rel_tol=NEAR):
            raise AccumulationError(
                f"{term} was divided by {count.value:.6g}, and weight= says {weight:.6g}: leave it "
                "out, the count is known"
            )


def _told(numbers: Sequence[float | None]) -> str:
    return " and ".join(f"{number:.6g}" for number in numbers if number is not None)


def _refusal(mark: Scaling, values: Sequence[tuple[float, ...]], is_one: bool) -> str:
    """Word the error for a divisor that may depend on the samples."""
    if is_one:
        return (
            f"the loss is {mark}: umem cannot tell whether that is max(1, count) of a part in "
            f"which nothing was counted. Leave the division out, or {WEIGHT}"
        )
    if len(values) < 3:
        return (
            f"the loss is {mark}, and umem saw too few samples for which it is, to tell a factor "
            f"from one over a count of this part: {WEIGHT}"
        )
    return (
        f"the loss is {mark}, and for other samples by another number, so that it depends on "
        f"them: {WEIGHT}. Where the loss is a sum over samples, weight=1; a mean is better "
        "written as F.mean or F.average"
    )
