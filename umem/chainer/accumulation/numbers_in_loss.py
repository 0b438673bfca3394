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
    far was the same for each sample, as ``len(x)`` is, and the term is not 0.
    """

    def __init__(self) -> None:
        self._term_count = -1
        self._are_counts: list[bool] = []
        self._are_samples = False
        self._common_count = 0
        self._by_sample: list[float] = []
        self._vary: list[bool] = []
        self._witnesses: dict[int, tuple[list[int], float]] = {}

    def begin(self) -> None:
        """A batch begins."""
        self._witnesses = {}

    def serialize(self, serializer: Any) -> None:
        """Save or load what was learned of the loss, by a serializer that takes lists."""
        self._term_count = serializer("term_count", self._term_count)
        self._are_counts = serializer("are_counts", self._are_counts)
        self._are_samples = serializer("are_samples", self._are_samples)
        self._common_count = serializer("common_count", self._common_count)
        self._by_sample = serializer("by_sample", self._by_sample)
        self._vary = serializer("vary", self._vary)

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
        found = counts(merged, self._are_counts)
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
        if numbers or len(terms) > 1 or len(part) == 1:
            others = _more_or_fewer(part, size, terms_for)
        other_size = len(part) if others is None else 1 if len(part) > 1 else 2
        if others is None:
            if numbers:
                raise AccumulationError(
                    f"the loss is multiplied by {numbers[0]:.6g}, and umem cannot tell whether "
                    f"that is one over a count of this part: {ASK}"
                )
            others = terms
        self._term_count = len(terms)
        self._are_samples = len(others) != len(terms)
        if self._are_samples:
            most = max(terms, others, key=len)
            self._common_count = _common([t.numbers for t in most if not t.is_constant])
        mine, theirs = (_numbers(self._merged(one)) for one in (terms, others))
        self._are_counts = [a != b for a, b in zip(mine, theirs, strict=True)]
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
            return terms
        constants = [term for term in terms if term.is_constant]
        ours = [term for term in terms if not term.is_constant]
        numbers = ours[0].numbers[: self._common_count] if ours else ()
        is_zero = all(term.is_zero() for term in ours)
        return [Term(None, 1.0, numbers, None, False, is_zero), *constants]

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
            raise CountLearned

    def _settled(
        self, at: int, part: range, size: int, terms_for: TermsFor, *, is_zero: bool
    ) -> float:
        """Tell 0 from 1: by how much the count of other samples grows with the part."""
        witness, count = self._witnesses.get(at, ([], 0.0))
        if not count or not set(part).isdisjoint(witness):
            others = [i for i in range(size) if i not in part]
            if not others:
                raise AccumulationError(
                    "a part's loss was divided by 1: umem cannot tell whether anything was counted "
                    f"in it. Use micro_batch= instead of steps=, or {ASK}"
                )
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
