"""Each part's share of the whole loss, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from umem.errors import AccumulationError

APART = 1e-9
"""Two ratios of counts that differ by less are equal: counts are integers far below 1e9."""


class Count(NamedTuple):
    """The part's contribution to a term's divisor.

    Attributes:
        total: names what the whole is divided by, alike in every part.
        value: None for a sum.
        divided: by what the part was divided, where that is not ``value``: programs divide by 1
            where they have counted nothing.
        is_constant: it depends on no batch.
        is_free: it is a sum, or unknown, which ``weight=`` may speak of.
    """

    total: str
    value: float | None
    divided: float | None = None
    is_constant: bool = False
    is_free: bool = False


class LossShares:
    """Computes each part's share of the whole loss, term by term, as parts arrive.

    A total is known after the last part. Until then shares use a guess, the first part's count
    times ``scale``; `factor` corrects the gradient in the end.

    Attributes:
        totals: by what the whole is divided, as far as parts were seen, by name.
    """

    def __init__(self, totals: dict[str, float] | None = None) -> None:
        self._are_known = totals is not None
        self._guesses = dict(totals or {})
        self.totals: dict[str, float] = {}
        self._lead = ""
        self._has_begun = self._has_sums = self._has_constants = False

    def of(self, found: Sequence[Count], scale: float) -> list[float]:
        """Return a part's share of each term.

        Args:
            found: the divisor of each of its terms.
            scale: how many such parts the whole is thought to be.

        Raises:
            AccumulationError: a term was not there when terms were counted.
        """
        is_first, self._has_begun = not self._has_begun, True
        counted = {c.total: c.value for c in found if c.value is not None and not c.is_constant}
        divided = {count.total: count.divided for count in found}
        for name, value in counted.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
            if name not in self._guesses:
                if self._are_known:
                    raise AccumulationError("the loss has other terms each time it is asked")
                self._guesses[name] = value * scale or divided.get(name) or scale
        if is_first:
            told = self._guesses if self._are_known else counted
            self._lead = next((name for name in told if told[name]), "")
        shares = []
        for count in found:
            if count.is_constant:
                self._has_constants = True
                shares.append(self._of_lead(counted, is_first))
            elif count.value is None:
                self._has_sums = True
                shares.append(1.0)
            else:
                part = count.value if count.divided is None else count.divided
                guess = self._guesses[count.total]
                shares.append(part / guess if guess else 1.0)
        return shares

    def _of_lead(self, counted: dict[str, float], is_first: bool) -> float:
        """Return the share of terms that no batch divides: the first mean's, or all for the first
        part.
        """
        if not self._lead:
            return float(is_first)
        return counted.get(self._lead, 0.0) / self._guesses[self._lead]

    def factor(self) -> float | None:
        """Return the factor that corrects the summed gradient; None if terms need different
        ones.
        """
        if self._are_known:
            return 1.0
        factors = {self._guesses[name] / total for name, total in self.totals.items() if total}
        if not self.totals.get("weight", 1.0):  # the whole divides by what each part divided by
            factors.add(1.0)
        if self._has_sums or (self._has_constants and not self._lead):
            factors.add(1.0)
        if not factors:
            return 1.0
        if max(factors) - min(factors) > APART * max(factors):
            return None
        factor = max(factors)
        return 1.0 if abs(factor - 1.0) <= APART else factor

    def serialize(self, serializer: Any) -> None:
        """Save or load the counts so far, by a serializer that takes lists."""
        self._guesses = _dictionary(serializer, "guesses", self._guesses)
        self.totals = _dictionary(serializer, "totals", self.totals)
        self._lead = serializer("lead", self._lead)
        self._has_begun = serializer("has_begun", self._has_begun)
        self._has_sums = serializer("has_sums", self._has_sums)
        self._has_constants = serializer("has_constants", self._has_constants)


def _dictionary(serializer: Any, name: str, values: dict[str, float]) -> dict[str, float]:
    names = serializer(f"{name} of", [*values])
    return dict(zip(names, serializer(name, [*values.values()]), strict=True))
