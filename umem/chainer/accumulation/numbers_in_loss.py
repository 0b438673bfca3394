"""Which numbers in a loss are one over a count of the batch: learned by asking of other samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from umem.chainer.accumulation.divisors import ASK, Term
from umem.chainer.accumulation.shares import Count, Shares, counts
from umem.errors import AccumulationError

TermsFor = Callable[[list[int]], Sequence[Term]]
"""The terms of the loss of some samples of the batch; leaves no trace."""


class CountLearned(Exception):
    """A number proved to be one over a count: parts that went before were weighed wrongly."""


class DivisorReader:
    """Reads by what the terms of a loss were divided, for one loss function.

    ``loss / 4`` may divide by the samples of this part, by its labels, or by a number that has
    nothing to do with the batch. What differs for other samples is a count.
    """

    def __init__(self) -> None:
        self._are_counts: list[bool] = []
        self._witness: tuple[int, float] | None = None

    def begin(self) -> None:
        """A batch begins."""
        self._witness = None

    def serialize(self, serializer: Any) -> None:
        """Save or load what was learned of the loss, by a serializer that takes lists."""
        self._are_counts = serializer("are_counts", self._are_counts)

    def read(
        self, terms: Sequence[Term], shares: Shares, part: range, size: int, terms_for: TermsFor
    ) -> list[Count]:
        """By what the terms of a part were divided.

        Args:
            shares: those of the parts before.
            part: its samples, of the ``size`` of the batch.

        Raises:
            AccumulationError: it cannot be told.
            CountLearned: it is known now, and was not for the parts before.
        """
        numbers = _numbers(terms)
        if len(numbers) != len(self._are_counts):
            others = _numbers(terms_for(_others(part, size))) if size > 1 else []
            if len(others) != len(numbers):
                raise AccumulationError(
                    f"the loss is multiplied by {numbers[0]:.6g}, and umem cannot tell whether "
                    f"that is one over a count of this part: {ASK}"
                )
            self._are_counts = [a != b for a, b in zip(numbers, others, strict=True)]
        self._compare(numbers, shares)
        found = counts(terms, self._are_counts)
        for at, term in enumerate(terms):
            # Programs divide by max(1, count), and so do Chainer's functions.
            if term.divisor is None and found[at].value == 1.0 and term.is_zero():
                found[at] = Count(self._settled(at, part, size, terms_for))
        return found

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

    def _settled(self, at: int, part: range, size: int, terms_for: TermsFor) -> float:
        """Tell 0 from 1, where a term is zero: by how much another sample's count grows with it."""
        others = [i for i in range(size) if i not in part]
        if not others:
            raise AccumulationError(
                "a part's loss is 0, and was divided by 1: umem cannot tell whether anything was "
                f"counted in it. Use micro_batch= instead of steps=, or {ASK}"
            )
        if self._witness is None:
            for one in others:
                terms = terms_for([one])
                if not terms[at].is_zero():
                    self._witness = one, self._count(terms, at)
                    break
            else:
                return 1.0
        one, count = self._witness
        return self._count(terms_for([*part, one]), at) - count

    def _count(self, terms: Sequence[Term], at: int) -> float:
        return counts(terms, self._are_counts)[at].value or 0.0


def _numbers(terms: Sequence[Term]) -> list[float]:
    return [number for term in terms for number in term.perhaps_counts]


def _others(part: range, size: int) -> list[int]:
    """Samples to compare with: another count of them."""
    if len(part) > 1:
        return [part[0]]
    return [*part, part[0] + 1 if part[0] + 1 < size else part[0] - 1]
