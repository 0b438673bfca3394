"""How much of the whole loss each part of a batch is, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from umem.chainer.accumulation.divisors import ASK, Term
from umem.errors import AccumulationError

APART = 1e-9
"""Two ratios of counts that differ by less are one: counts are whole numbers far below 1e9."""


class Count(NamedTuple):
    """By what a term was divided: None for a sum; ``is_constant``: it depends on no batch."""

    value: float | None
    is_constant: bool = False


def counts(terms: Sequence[Term], are_counts: Sequence[bool]) -> list[Count]:
    """What each term was divided by, where it is known which of all their numbers are counts."""
    told = iter(are_counts)
    found = []
    for term in terms:
        value = term.divisor
        for number in term.perhaps_counts:
            if next(told):
                value = (1.0 if value is None else value) / abs(number)
        found.append(Count(value, term.is_constant))
    return found


class Shares:
    """The shares of one step's parts, while they come in.

    A total is known when the last part was seen. Until then shares go by a guess, that of the first
    part times ``scale``; `factor` is what the gradient is to be multiplied by in the end.

    Attributes:
        totals: by what the whole is divided, as far as parts were seen, of each term.
        numbers: those in the loss of the last part.
    """

    def __init__(self, totals: Sequence[float] | None = None) -> None:
        self._guesses: list[float] = list(totals or ())
        self._kinds: list[tuple[bool, bool]] | None = None
        self.totals: list[float] = []
        self.numbers: list[float] = []

    def of(self, found: Sequence[Count], scale: float) -> list[float]:
        """The share of a part, of each term.

        Args:
            found: what each of its terms was divided by.
            scale: how many such parts the whole is thought to be.

        Raises:
            AccumulationError: the terms are not those of the parts before.
        """
        kinds = [(count.value is None, count.is_constant) for count in found]
        is_first = self._kinds is None
        if is_first:
            self._kinds, self.totals = kinds, [0.0] * len(found)
            self._guesses = self._guesses or [(c.value or 1.0) * scale for c in found]
        elif self._kinds != kinds:
            raise AccumulationError(
                f"the loss has {len(kinds)} terms of which umem read other divisors than in the "
                f"part before, with {len(self._kinds or ())}: {ASK}"
            )
        shares = []
        for at, count in enumerate(found):
            self.totals[at] += 1.0 if count.value is None else count.value
            shares.append(1.0 if count.value is None else count.value / self._guesses[at])
        lead = self._lead()
        for at, count in enumerate(found):
            if count.is_constant:
                shares[at] = float(is_first) if lead is None else shares[lead]
        return shares

    def serialize(self, serializer: Any) -> None:
        """Save or load what came in so far, by a serializer that takes lists."""
        self._guesses = serializer("guesses", self._guesses)
        self._kinds = serializer("kinds", self._kinds)
        self.totals = serializer("totals", self.totals)
        self.numbers = serializer("numbers", self.numbers)

    def _lead(self) -> int | None:
        """The first mean over the batch: what depends on no batch is shared out as that is."""
        kinds = enumerate(self._kinds or ())
        return next((at for at, kind in kinds if kind == (False, False)), None)

    def factor(self) -> float | None:
        """What the sum of the parts is to be multiplied by; None: there is no one such number."""
        factors = [
            guess / (total or 1.0)
            for guess, total, (is_sum, is_constant) in zip(
                self._guesses, self.totals, self._kinds or (), strict=True
            )
            if not is_sum and not is_constant
        ]
        if not all(is_constant for _, is_constant in self._kinds or ()):
            factors += [
                1.0 for is_sum, is_constant in self._kinds or () if is_sum and not is_constant
            ]
        if not factors:
            return 1.0
        if max(factors) - min(factors) > APART * max(factors):
            return None
        return 1.0 if abs(factors[0] - 1.0) <= APART else factors[0]
