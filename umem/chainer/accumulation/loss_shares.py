"""Each part's share of the whole loss, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from umem.chainer.accumulation.loss_terms import Term
from umem.errors import AccumulationError

WEIGHTED = "#said"
"""The name of the total that ``weight=`` gives, after the name of its loss."""
APART = 1e-9
"""Two ratios of counts that differ by less are equal: counts are integers far below 1e9."""


class LossShares:
    """Computes each part's share of the whole loss, term by term, as parts arrive.

    The total is known only after the last part. Until then shares use a guess, the first part's
    count times ``scale``; `factor` corrects the gradient at the end.

    Attributes:
        totals: the divisors of the whole, from the parts so far, by name.
    """

    def __init__(self, totals: dict[str, float] | None = None) -> None:
        self._are_known = totals is not None
        self._guesses = dict(totals or {})
        self.totals: dict[str, float] = {}
        self._lead = ""
        self._has_begun = self._has_sums = self._has_constants = False
        self._not_counted: dict[str, float] = {}
        """By the name of a total: a loss that is not 0 although ``weight=`` gives 0."""

    def of(self, terms: Sequence[Term], scale: float) -> list[float]:
        """Return a part's share of each term.

        Args:
            terms: the terms of the part's loss.
            scale: the assumed number of such parts in the whole.

        Raises:
            AccumulationError: a term was missing when terms were counted.
        """
        is_first, self._has_begun = not self._has_begun, True
        counted = {term.total: term.count for term in terms if term.count is not None}
        for name, count in counted.items():
            self.totals[name] = self.totals.get(name, 0.0) + count
            if name not in self._guesses:
                if self._are_known:
                    raise AccumulationError("the loss has other terms each time it is computed")
                self._guesses[name] = count * scale or scale
        if is_first:
            of = self._guesses if self._are_known else counted
            self._lead = next((name for name in of if of[name]), "")
        return [self._share(term, counted, is_first) for term in terms]

    def _share(self, term: Term, counted: dict[str, float], is_first: bool) -> float:
        """Return the share of a part in a term of the loss."""
        if term.is_once:
            self._has_constants = True
            if not self._lead:
                return float(is_first)
            return counted.get(self._lead, 0.0) / self._guesses[self._lead]
        if term.count is None:
            self._has_sums = True
            return 1.0
        if term.is_weighted and not term.count:
            return self._of_zero_weight(term)
        return term.count / self._guesses[term.total] if self._guesses[term.total] else 1.0

    def _of_zero_weight(self, term: Term) -> float:
        """Return the share of a part for which the user's weight is 0.

        If it is 0 in all parts, the program has divided by something else, such as 1, and the loss
        counts as it is. If it is 0 in some, the loss must be 0 there.
        """
        if math.isfinite(term.value) and term.value:
            self._not_counted.setdefault(term.total, term.value)
        return float(math.isfinite(term.value))  # 0 / 0 adds nothing

    def check(self) -> None:
        """Check that parts with a count of 0 have no loss.

        Raises:
            AccumulationError: ``weight=`` gives 0 for some parts, and one of them has a loss.
        """
        for name, value in self._not_counted.items():
            if self.totals[name]:
                raise AccumulationError(
                    f"weight= gives 0 for some samples, whose loss is {value:.6g}: umem does not "
                    "know its divisor. Such samples must add 0 to the loss"
                )

    def factor(self) -> float | None:
        """Return the factor that corrects the summed gradient; None if terms need different
        ones.
        """
        if self._are_known:
            return 1.0
        factors = {self._guesses[name] / total for name, total in self.totals.items() if total}
        is_as_it_is = any(not self.totals[name] for name in self._not_counted)
        if self._has_sums or is_as_it_is or (self._has_constants and not self._lead):
            factors.add(1.0)
        factor = max(factors, default=1.0)
        if factor - min(factors, default=1.0) > APART * factor:
            return None
        return 1.0 if abs(factor - 1.0) <= APART else factor

    def serialize(self, serializer: Any) -> None:
        """Save or load the counts so far, by a serializer that takes lists."""
        self._guesses = _dictionary(serializer, "guesses", self._guesses)
        self.totals = _dictionary(serializer, "totals", self.totals)
        lead = serializer("lead", self._lead)
        self._lead = lead if lead in self.totals else next(iter(self.totals), "") if lead else ""
        self._has_begun = serializer("has_begun", self._has_begun)
        self._has_sums = serializer("has_sums", self._has_sums)
        self._has_constants = serializer("has_constants", self._has_constants)


def _dictionary(serializer: Any, name: str, values: dict[str, float]) -> dict[str, float]:
    names = serializer(f"{name} of", [*values])
    # Older snapshots name totals by lines of the program, in the order of the loss's terms.
    old = [one for one in names if "#" not in one and one != "weight"]
    now = {one: f"#{at}" for at, one in enumerate(old)} | {"weight": WEIGHTED}
    names = [now.get(one, one) for one in names]
    return dict(zip(names, serializer(name, [*values.values()]), strict=True))
