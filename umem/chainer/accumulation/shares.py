"""How much of the whole loss each part of a batch is, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from umem.chainer.accumulation.divisors import ASK, Term
from umem.errors import AccumulationError

APART = 1e-9
"""Two ratios of counts that differ by less are one: counts are whole numbers far below 1e9."""


class Count(NamedTuple):
    """How much of what a term is divided by was counted in a part.

    Attributes:
        value: None for a sum.
        is_constant: it depends on no batch.
        divided: by what the part was divided, where that is not ``value``: programs divide by 1
            where they have counted nothing.
    """

    value: float | None
    is_constant: bool = False
    divided: float | None = None


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
        has_trusted: a count of 1 was taken for one.
    """

    def __init__(self, totals: Sequence[float] | None = None) -> None:
        self._guesses: list[float] = list(totals or ())
        self._kinds: list[tuple[bool, bool]] | None = None
        self.totals: list[float] = []
        self.numbers: list[float] = []
        self.has_trusted = False

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
        lead = self._lead()
        counted = [1.0 if count.value is None else count.value for count in found]
        self.totals = [total + value for total, value in zip(self.totals, counted, strict=True)]
        shares = []
        for at, count in enumerate(found):
            if count.is_constant:
                shares.append(
                    float(is_first) if lead is None else counted[lead] / self._guesses[lead]
                )
            elif count.value is None:
                shares.append(1.0)
            else:
                divided = count.value if count.divided is None else count.divided
                shares.append(divided / self._guesses[at])
        return shares

    def serialize(self, serializer: Any) -> None:
        """Save or load what came in so far, by a serializer that takes lists."""
        self._guesses = serializer("guesses", self._guesses)
        self._kinds = serializer("kinds", self._kinds)
        self.totals = serializer("totals", self.totals)
        self.numbers = serializer("numbers", self.numbers)
        self.has_trusted = serializer("has_trusted", self.has_trusted)

    def _lead(self) -> int | None:
        """The first mean over the batch: what depends on no batch is shared out as that is."""
        kinds = enumerate(self._kinds or ())
        return next((at for at, kind in kinds if kind == (False, False)), None)

    def factor(self) -> float | None:
        """What the sum of the parts is to be multiplied by; None: there is no one such number."""
        factors = set()
        for at, (is_sum, is_constant) in enumerate(self._kinds or ()):
            if not is_constant:
                factors.add(1.0 if is_sum else self._guesses[at] / (self.totals[at] or 1.0))
        if not factors:
            return 1.0
        if max(factors) - min(factors) > APART * max(factors):
            return None
        factor = max(factors)
        return 1.0 if abs(factor - 1.0) <= APART else factor
