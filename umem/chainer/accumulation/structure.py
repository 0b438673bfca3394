"""Facts about the losses of a batch's parts, to find where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose

from umem.chainer.accumulation.call_sites import Key
from umem.chainer.accumulation.divisors import Scaling, Term
from umem.chainer.accumulation.loss_shares import Count
from umem.errors import AccumulationError

Fact = tuple[str, str]
"""A kind of term with one property of it, as the proof covers them."""


@dataclass
class PartFacts:
    """Facts about the terms of a part's loss.

    Attributes:
        facts: kinds of terms, and of which nothing was counted.
        counted: for each term with a count its place among the calls, and the count per sample;
            None for labels, which add up whatever they are.
        lags: for each term with a count what `Term.lag` says, and the term.
        numbers: constant factors, equal in every part.
        totals: by what terms were divided, by the names of what the whole is divided by.
        loss: its absolute value, where it is compared with others.
    """

    facts: set[Fact] = field(default_factory=set)
    counted: dict[Key, tuple[int, float | None]] = field(default_factory=dict)
    lags: dict[Key, tuple[int | None, str]] = field(default_factory=dict)
    numbers: Mapping[Key, Scaling] = field(default_factory=dict)
    totals: dict[str, tuple[float, str]] = field(default_factory=dict)
    loss: float = 0.0

    @classmethod
    def of(
        cls,
        terms: Sequence[Term],
        counts: Sequence[Count],
        numbers: Mapping[Key, Scaling],
        sample_count: int,
    ) -> PartFacts:
        """Collect the facts about a part's loss."""
        found = cls(numbers=numbers)
        for term, count in zip(terms, counts, strict=True):
            kind = term.site.kind
            what = "nothing" if count.value == 0 else "sum" if count.value is None else "counted"
            found.facts.add((kind, "once" if count.is_constant else what))
            if count.value is not None and not count.is_constant:
                found.totals[count.total] = count.value, str(term)
            if count.value is not None and count.total != "weight":
                rate = None if term.are_labels else count.value / sample_count
                found.counted[term.key] = term.site.order, rate
                found.lags[term.key] = term.lag, str(term)
        return found

    def see_that_it_is_like(self, first: PartFacts | None) -> None:
        """Check that constant factors and time steps equal those of another part.

        Raises:
            AccumulationError: one differs.
        """
        if first is None:
            return
        mine, theirs = self.kinds(), first.kinds()
        for key in self.lags.keys() & first.lags.keys():
            is_loop = max(mine[key[0]], theirs[key[0]]) > 1
            if is_loop and self.lags[key][0] != first.lags[key][0]:
                raise AccumulationError(
                    f"{self.lags[key][1]} is in a loop that runs backwards or leaves steps out, "
                    "other ones in one part than in another, so umem does not know which steps "
                    "belong together: loop over all steps from the first on, and leave out by "
                    "ignore_label= or a mask"
                )
        for key, mark in first.numbers.items():
            other = self.numbers.get(key)
            if other is not None and other.values != mark.values:
                raise AccumulationError(
                    f"the loss of one part is {mark}, and that of another is {other}: parts of it "
                    "do not add up. Multiply by what is the same for every part, or pass weight=, "
                    "where the number is one over a count of samples"
                )

    def kinds(self) -> Counter[str]:
        """Count the terms with a divisor by kind: the time steps of a loop."""
        return Counter(kind for kind, _ in self.counted)


def uneven(one: PartFacts, other: PartFacts) -> set[Fact]:
    """Return the kinds of terms in which two parts differ: in time steps or in counts."""
    mine, theirs = one.kinds(), other.kinds()
    found = {kind for kind in mine | theirs if mine[kind] != theirs[kind]}
    for key in one.counted.keys() & other.counted.keys():
        (order, rate), (other_order, other_rate) = one.counted[key], other.counted[key]
        is_same = rate is None or other_rate is None or isclose(rate, other_rate, rel_tol=1e-9)
        if order != other_order or not is_same:
            found.add(key[0])
    return {(kind, "uneven") for kind in found}


def all_facts(parts: Sequence[PartFacts]) -> dict[Fact, tuple[int, ...]]:
    """Collect the facts of all parts, each with the parts that show it."""
    found: dict[Fact, tuple[int, ...]] = {}
    for at, part in enumerate(parts):
        for fact in part.facts:
            found.setdefault(fact, (at,))
        for fact in uneven(parts[0], part):
            found.setdefault(fact, (0, at))
    return found


def see_that_they_add_up(whole: PartFacts, parts: Sequence[PartFacts]) -> None:
    """Check that the divisors counted in the parts sum to those of the whole batch.

    Raises:
        AccumulationError: they do not; the message names the term.
    """
    for name, (value, term) in whole.totals.items():
        told = [part.totals.get(name, (0.0, ""))[0] for part in parts]
        if not isclose(sum(told), value, rel_tol=1e-5):
            by_weight = ", as weight= says" if name == "weight" else ""
            raise AccumulationError(
                f"{term} was divided by {' and '.join(f'{count:.6g}' for count in told)} in parts "
                f"and by {value:.6g} in all of their samples at once{by_weight}: such counts do "
                "not add up. Pad sequences before they are given to the loss function, divide by "
                "what adds up, or pass weight=: 1 where losses of single samples are added up"
            )
