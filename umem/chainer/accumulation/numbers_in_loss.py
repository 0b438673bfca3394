"""Which numbers in a loss are one over a count of the batch: learned by asking of other samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose
from typing import Any, NamedTuple

from umem.chainer.accumulation.divisors import ASK, Term
from umem.chainer.accumulation.shares import Count, Shares, counts
from umem.errors import AccumulationError

TermsFor = Callable[[list[int]], Sequence[Term]]
"""The terms of the loss of some samples of the batch; leaves no trace."""

ONE = (
    "a part's loss was divided by 1: umem cannot tell whether anything was counted in it. Use "
    "micro_batch= instead of steps=, or"
)
MOST_CHECKS = 3
"""So often counts are seen to add up, where they are the same for all samples looked at."""
NEAR = 1e-5
"""The roundings of a sum of weights in float32, relative to it."""


class CountLearned(Exception):
    """A number proved to be one over a count: parts that went before were weighed wrongly."""


class DivisorsRead(NamedTuple):
    """By what a part's loss was divided.

    Attributes:
        counts: of each group of terms that go by one share.
        groups: for each term the place of its group in ``counts``.
    """

    counts: list[Count]
    groups: list[int]


class DivisorReader:
    """Reads by what the terms of a loss were divided, for one loss function.

    ``loss / 4`` may divide by the samples of this part, by its labels, or by a number that has
    nothing to do with the batch. What differs for other samples is a count. Where even the terms
    are more for more samples, each is a sample's, and they go by one share.

    Programs divide by ``max(1, count)``, so that 1 may be 0. It is taken for 1 where every count so
    far was the same for each sample, as ``len(x)`` is, and the term is not 0. A number that is 1 in
    each part is asked of two samples, of which neither's term is 0.

    A count adds up: that of two samples is what each has alone. The length of the longest sequence
    does not, and is refused.

    Attributes:
        to_check: see whether counts add up; not while parts are compared with a whole, which shows
            more.
    """

    def __init__(self) -> None:
        self.to_check = True
        self._term_count = -1
        self._are_counts: list[bool] = []
        self._are_constant: list[bool] = []
        self._are_samples = False
        self._common_count = 0
        self._by_sample: list[float] = []
        self._vary: list[bool] = []
        self._are_factors: list[bool] = []
        self._rates: list[float] = []
        self._checks_left = MOST_CHECKS
        self.begin()

    def begin(self) -> None:
        """A batch begins."""
        self._witnesses: dict[int, tuple[list[int], float]] = {}
        self._with_one: dict[int, int] = {}

    def serialize(self, serializer: Any) -> None:
        """Save or load what was learned of the loss, by a serializer that takes lists."""
        self._term_count = serializer("term_count", self._term_count)
        self._are_counts = serializer("are_counts", self._are_counts)
        self._are_constant = serializer("are_constant", self._are_constant)
        self._are_samples = serializer("are_samples", self._are_samples)
        self._common_count = serializer("common_count", self._common_count)
        self._by_sample = serializer("by_sample", self._by_sample)
        self._vary = serializer("vary", self._vary)
        self._are_factors = serializer("are_factors", self._are_factors)
        self._rates = serializer("rates", self._rates)
        self._checks_left = serializer("checks_left", self._checks_left)

    def read(
        self, terms: Sequence[Term], shares: Shares, part: range, size: int, terms_for: TermsFor
    ) -> DivisorsRead:
        """By what the terms of a part were divided.

        Args:
            shares: those of the parts before.
            part: its samples, of the ``size`` of the batch.

        Raises:
            AccumulationError: it cannot be told.
            CountLearned: it is known now, and was not for the parts before.
        """
        self._learn(terms, part, size, terms_for)
        merged = self._merged(terms)
        numbers = _numbers(merged)
        self._compare(numbers, shares)
        self._ask_of_ones(merged, part, size, terms_for)
        found = counts(merged, self._are_counts)
        if any(self._are_counts) or not all(t.are_labels or t.is_constant for t in merged):
            self._see_whether_they_add_up(found, len(part), size, terms_for)
        self._see_whether_they_vary(found, len(part), shares)
        for at, term in enumerate(merged):
            if term.divisor is not None or term.is_constant or found[at].value != 1.0:
                continue
            is_zero = term.is_zero()
            if self._vary[at] or is_zero:
                counted = self._settled(at, part, size, terms_for, is_zero=is_zero)
                found[at] = Count(counted, divided=1.0)
            else:
                shares.has_trusted = True
        if not self._are_samples:
            return DivisorsRead(found, [*range(len(terms))])
        constants = iter(range(1, len(found)))
        return DivisorsRead(found, [next(constants) if term.is_constant else 0 for term in terms])

    def _learn(self, terms: Sequence[Term], part: range, size: int, terms_for: TermsFor) -> None:
        """Compare with the loss of another count of samples, once."""
        numbers = _numbers(self._merged(terms))
        is_known = self._are_samples or len(terms) == self._term_count
        if is_known and len(numbers) == len(self._are_counts):
            return
        others: Sequence[Term] | None = None
        are_constant = [term.is_constant for term in terms]
        if numbers or len(terms) > 1 or len(part) == 1 or any(are_constant):
            others = _more_or_fewer(part, size, terms_for)
        other_size = len(part) if others is None else 1 if len(part) > 1 else 2
        if others is None:
            if numbers:
                raise AccumulationError(
                    f"the loss is multiplied by {numbers[0]:.6g}, and umem cannot tell whether "
                    f"that is one over a count of this part: {ASK}"
                )
            others = terms
        elif len(others) == len(terms):
            # W[t] is of parameters alone too, and (W - start) is of more than parameters.
            are_constant = [a.is_like(b) for a, b in zip(terms, others, strict=True)]
        self._term_count, self._are_constant = len(terms), are_constant
        self._are_samples = len(others) != len(terms)
        if self._are_samples:
            most = max(terms, others, key=len)
            self._common_count = _common([t.numbers for t in most if not t.is_constant])
        mine, theirs = (_numbers(self._merged(one)) for one in (terms, others))
        self._are_counts = [a != b for a, b in zip(mine, theirs, strict=True)]
        self._are_factors = [False] * len(mine)
        self._rates, self._checks_left = [], MOST_CHECKS
        found = (counts(self._merged(one), self._are_counts) for one in (terms, others))
        a, b = (
            [(c.value or 0.0) / n for c in one]
            for one, n in zip(found, (len(part), other_size), strict=True)
        )
        self._by_sample, self._vary = a, [not isclose(x, y) for x, y in zip(a, b, strict=True)]

    def _see_whether_they_vary(
        self, found: Sequence[Count], sample_count: int, shares: Shares
    ) -> None:
        """Learn that a count is not the same for each sample."""
        new = [
            not known and not isclose((count.value or 0.0) / sample_count, before)
            for count, before, known in zip(found, self._by_sample, self._vary, strict=True)
        ]
        self._vary = [a or b for a, b in zip(self._vary, new, strict=True)]
        if any(new) and shares.has_trusted:
            raise CountLearned

    def _merged(self, terms: Sequence[Term]) -> Sequence[Term]:
        """The groups of terms that go by one share, each as one term."""
        if not self._are_samples:
            are_constant = self._are_constant
            if len(are_constant) != len(terms):
                return terms
            return [t._replace(is_constant=c) for t, c in zip(terms, are_constant, strict=True)]
        constants = [term for term in terms if term.is_constant]
        ours = [term for term in terms if not term.is_constant]
        numbers = ours[0].numbers[: self._common_count] if ours else ()
        is_zero = all(term.is_zero() for term in ours)
        one = Term(None, 1.0, numbers, None, False, was=0.0 if is_zero else None)
        return [one, *constants]

    def _compare(self, numbers: list[float], shares: Shares) -> None:
        """Compare with the part before: what differs there is a count as well."""
        before = shares.numbers or numbers
        shares.numbers = numbers
        new = [
            not known and a != b
            for known, a, b in zip(self._are_counts, before, numbers, strict=True)
        ]
        if any(new):
            self._are_counts = [a or b for a, b in zip(self._are_counts, new, strict=True)]
            self._rates, self._checks_left = [], MOST_CHECKS
            raise CountLearned

    def _ask_of_ones(
        self, merged: Sequence[Term], part: range, size: int, terms_for: TermsFor
    ) -> None:
        """Learn whether a number that is 1 was ``max(1, count)``, of two samples that count."""
        if len(part) == size:  # samples of calls before are gone
            self._with_one = {}
        places = [at for at, term in enumerate(merged) for _ in term.perhaps_counts]
        for which, (at, number) in enumerate(zip(places, _numbers(merged), strict=True)):
            is_known = self._are_counts[which] or self._are_factors[which]
            if is_known or abs(number) != 1.0 or merged[at].is_zero():
                continue
            for sample in part:
                first = self._with_one.get(at)
                if first == sample or self._merged(terms_for([sample]))[at].is_zero():
                    continue
                if first is None:
                    self._with_one[at] = sample
                    continue
                both = _numbers(self._merged(terms_for([first, sample])))
                self._are_factors[which] = both[which] == number
                if not self._are_factors[which]:
                    self._are_counts[which] = True
                    raise CountLearned
                break
            if not self._are_factors[which] and len(part) == size:
                raise AccumulationError(f"{ONE} {ASK}")

    def _see_whether_they_add_up(
        self, found: Sequence[Count], sample_count: int, size: int, terms_for: TermsFor
    ) -> None:
        """Ask of two samples and of each alone, when counts are not the same for each sample.

        Raises:
            AccumulationError: a number is none that adds up.
        """
        if not self.to_check:
            return
        rates = [(count.value or 0.0) / sample_count for count in found]
        is_new = not self._rates and any(self._are_counts)
        is_other = any(not isclose(a, b) for a, b in zip(rates, self._rates, strict=False))
        self._rates = rates
        if self._checks_left and size > 1 and (is_new or is_other):
            self._checks_left -= 1
            self._add_up(found, size, terms_for)

    def _add_up(self, found: Sequence[Count], size: int, terms_for: TermsFor) -> None:
        samples = sorted({(size - 1) * k // 7 for k in range(8)})
        alone = {i: counts(self._merged(terms_for([i])), self._are_counts) for i in samples}
        for at, count in enumerate(found):
            if count.value is None or count.is_constant:
                continue
            values = sorted((c[at].value or 0.0, i) for i, c in alone.items() if at < len(c))
            told = [value for value in values if value[0] != 1.0]
            if len(values) < 2:
                continue
            (a, i), (b, j) = ((told if len(told) > 1 else values)[end] for end in (0, -1))
            together = self._count(terms_for([i, j]), at)
            least = sum(x for x in (a, b) if x != 1.0)  # 1 may stand for 0
            if together < least * (1 - NEAR) or together > (a + b) * (1 + NEAR):
                raise AccumulationError(
                    f"the loss of one sample was divided by {a:.6g}, of another by {b:.6g}, and "
                    f"of both by {together:.6g}, which is not their sum: parts of such a loss do "
                    f"not add up. Divide by what does, or {ASK}"
                )
            if a != b and len(told) > 1:
                self._checks_left = 0

    def _settled(
        self, at: int, part: range, size: int, terms_for: TermsFor, *, is_zero: bool
    ) -> float:
        """Tell 0 from 1: by how much the count of other samples grows with the part."""
        witness, count = self._witnesses.get(at, ([], 0.0))
        if not count or not set(part).isdisjoint(witness):
            others = [i for i in range(size) if i not in part]
            if not others:
                raise AccumulationError(f"{ONE} {ASK}")
            witness, count = self._some_with_more(at, others, len(part), terms_for)
            self._witnesses[at] = witness, count
        if not witness:
            return 0.0 if is_zero else 1.0
        return self._count(terms_for([*part, *witness]), at) - count

    def _some_with_more(
        self, at: int, others: list[int], most: int, terms_for: TermsFor
    ) -> tuple[list[int], float]:
        """Some samples, as few as possible, in which at least 2 were counted; and how many."""
        few = 1
        while few <= max(4, most):
            for start in range(0, len(others), few):
                some = others[start : start + few]
                if (count := self._count(terms_for(some), at)) >= 2:
                    return some, count
            few *= 2
        return [], 1.0

    def _count(self, terms: Sequence[Term], at: int) -> float:
        return counts(self._merged(terms), self._are_counts)[at].value or 0.0


def _numbers(terms: Sequence[Term]) -> list[float]:
    return [number for term in terms for number in term.perhaps_counts]


def _common(numbers: Sequence[tuple[float, ...]]) -> int:
    """How many numbers they have in common, from the first on."""
    count = 0
    for alike in zip(*numbers, strict=False):
        if len(set(alike)) > 1:
            break
        count += 1
    return count


def _more_or_fewer(part: range, size: int, terms_for: TermsFor) -> Sequence[Term] | None:
    """The terms of another count of samples; None where there is no such, or they do not fit."""
    if len(part) > 1:
        return terms_for([part[0]])
    if size == 1:
        return None
    try:
        return terms_for([*part, part[0] + 1 if part[0] + 1 < size else part[0] - 1])
    except MemoryError:
        return None
