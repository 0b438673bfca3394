"""Facts about the losses of a batch's parts, and the rules by which they add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isclose, isnan, prod
from typing import Any, NamedTuple

from umem.chainer.accumulation.loss_shares import WEIGHTED
from umem.chainer.accumulation.loss_terms import Term, TermPlaces, terms_of
from umem.chainer.accumulation.loss_weight import Entry, line_to_type, weight_of
from umem.chainer.accumulation.splitting import Arguments, is_ragged
from umem.errors import AccumulationError

NEAR = 1e-6
"""Relative rounding error of a sum of weights, which may be a float32: some roundings of 1.2e-7."""


class PartFacts(NamedTuple):
    """Facts about a part's loss.

    Attributes:
        samples: their number; None if that is not known.
        terms: the terms of the loss.
        weights: the weight of each of its losses, by name; None if it is 1, or there is none.
        is_ragged: it was given sequences of different lengths.
        numbers: all numbers that the program gave to Chainer's functions, in their order.
        functions: the names of these functions.
        loss: its absolute value.
        rounding: the relative rounding error of its type.
    """

    samples: int | None
    terms: tuple[Term, ...]
    weights: dict[str, float | None]
    is_ragged: bool
    numbers: tuple[float, ...]
    functions: frozenset[str]
    loss: float = 0.0
    rounding: float = 0.0

    @property
    def matched(self) -> list[Term]:
        """Return the terms that have their own count."""
        return [term for term in self.terms if term.is_matched]

    @property
    def weighted(self) -> list[Term]:
        """Return the terms whose divisor is given by ``weight=``."""
        return [term for term in self.terms if term.is_weighted]

    @property
    def key(self) -> tuple[str, ...]:
        """Return the list of terms that are the same in every part."""
        terms = [term for term in self.terms if not term.is_weighted]
        return tuple(f"{t.entry}#{t.kind}#{t.is_once}#{len(t.numbers)}" for t in terms)

    @property
    def weighted_key(self) -> tuple[str, ...]:
        """Return the list of terms for which ``weight=`` gives a number other than 0."""
        counting = [term for term in self.weighted if term.count != 0]
        return tuple(f"{term.entry}{WEIGHTED}#{term.kind}" for term in counting)

    def without_tape(self) -> PartFacts:
        """Return the facts alone."""
        return self._replace(terms=tuple(term._replace(node=None) for term in self.terms))


def read(
    entries: Sequence[Entry],
    given: Arguments,
    samples: int | None,
    places: TermPlaces,
    lossfun: Any,
) -> PartFacts:
    """Read the terms of a part's losses.

    ``weight=`` applies to the terms whose divisor is not known. If all divisors of a loss are
    known, it applies to all of its terms.

    Args:
        entries: the losses.
        given: the arguments of the part, for weight functions.
        places: the program's lines.
        lossfun: the loss function, for messages.

    Raises:
        AccumulationError: a term is not known, and has no weight; names its line.
    """
    found: list[Term] = []
    weights: dict[str, float | None] = {}
    for name, loss, weight in entries:
        weights[name] = count = weight_of(weight, given) if callable(weight) else None
        terms = [one._replace(entry=name, text=places.of(one)) for one in terms_of(loss)]
        is_about_all = all(one.is_known for one in terms)
        at = 0
        for one in terms:
            if weight is None and not one.is_known:
                raise AccumulationError(
                    f"umem does not know the divisor of the loss: its term {one.text} does not "
                    f"end in a mean. Pass {line_to_type(lossfun, name)}, a function of the loss "
                    "function's arguments that returns the divisor of these samples' loss; "
                    "or weight=1, if the losses of parts add up"
                )
            if one.kind == "Hinge" and one.divisor is not None and len(terms) > 1:
                raise AccumulationError(
                    f"{one.text} is one of several terms, and Chainer's backward of it also "
                    'divides their gradient in place. Use F.hinge(..., reduce="no") with F.mean or '
                    f"{line_to_type(lossfun, name)}"
                )
            if one.is_once:
                found.append(one)
            elif weight is not None and (is_about_all or one.divisor is None):
                found.append(one.counted(f"{name}{WEIGHTED}", count, is_weighted=True))
            else:
                found.append(one.counted(f"{name}#{at}", one.divisor, is_weighted=False))
                at += 1
        if not terms and count != 0:
            raise AccumulationError(
                "the loss has no terms: it depends on no parameter. If samples have no loss, "
                f"let {line_to_type(lossfun, name)} give 0 for them"
            )
    return PartFacts(
        samples, tuple(found), weights, is_ragged(given), tuple(places.numbers),
        frozenset(places.functions),
    )  # fmt: skip


# -- the rules -------------------------------------------------------------------------------------


def check_alike(mine: PartFacts, other: PartFacts) -> None:
    """Check that two parts have the same terms at the same places, with the same numbers.

    If there are several terms, they must also have the same elements per sample: a term may belong
    to a group of samples or to a time step, which no tape shows.

    Raises:
        AccumulationError: they do not.
    """
    if mine.key != other.key or mine.weights.keys() != other.weights.keys():
        raise AccumulationError(
            f"the loss has the terms {_listed(mine)} in one part and {_listed(other)} in another, "
            "so umem does not know which belong together: compute the same terms for all samples, "
            "or pass weight= for the loss as a whole"
        )
    if not (mine.weighted or other.weighted) and len(mine.numbers) == len(other.numbers):
        for one_number, other_number in zip(mine.numbers, other.numbers, strict=True):
            if one_number != other_number and not (isnan(one_number) and isnan(other_number)):
                raise AccumulationError(
                    f"the loss function computes with {one_number:.9g} in one part and with "
                    f"{other_number:.9g} in another: use a number that is the same for every "
                    "part, or pass weight=, if the number is one over a count of samples"
                )
    beside = Counter(term.entry for term in mine.matched)
    parts = (mine, other)
    # If samples are not known, terms must be in proportion to the first.
    ratio = [part.samples or prod(part.matched[0].shape if beside else ()) for part in parts]
    alike = [[term for term in part.terms if not term.is_weighted] for part in parts]
    for one, two in zip(*alike, strict=True):
        if one.numbers != two.numbers:
            numbers = [" and ".join(map("{:.9g}".format, t.numbers)) or "1" for t in (one, two)]
            raise AccumulationError(
                f"{one.text} is multiplied by {numbers[0]} in one part and by {numbers[1]} in "
                "another: multiply by a number that is the same for every part, or pass weight=, "
                "if the number is one over a count of samples"
            )
        a, b = prod(one.shape), prod(two.shape)
        if one.is_matched and beside[one.entry] > 1 and a * ratio[1] != b * ratio[0]:
            raise AccumulationError(
                f"{one.text} is one of several terms, and has other elements per sample in one "
                "part than in another, so umem does not know which terms belong together, such as "
                "time steps or groups of samples. Pad sequences before they are given to the loss "
                "function, or pass weight="
            )


def _listed(part: PartFacts) -> str:
    terms = [term for term in part.terms if not term.is_weighted]
    kinds = [f"{term.entry!r}: {term.kind}" if term.entry else term.kind for term in terms]
    return f"{', '.join(kinds[:4]) or 'none'}{', ...' if len(kinds) > 4 else ''} ({len(kinds)})"


def uneven(parts: Sequence[PartFacts]) -> list[Term]:
    """Return the only terms of their losses whose divisor per sample differs between parts.

    This is so if parts are padded to different lengths, whose counts do not add up, and if
    sequences of different lengths are joined, whose counts do.
    """
    beside = Counter(term.entry for term in parts[0].matched)
    return [
        term
        for at, term in enumerate(parts[0].matched)
        if beside[term.entry] == 1 and not term.has_labels
        and len({_rate(part.matched[at], part.samples) for part in parts}) > 1
    ]  # fmt: skip


def _rate(term: Term, samples: int | None) -> float:
    """Return the divisor per sample; if the samples are not known, per row of the input."""
    return (term.divisor or 0.0) / (samples or (term.shape[0] if term.shape else 1) or 1)


def check_sums(whole: PartFacts, parts: Sequence[PartFacts]) -> None:
    """Check that the counts of the parts add up to the count of all their samples.

    Raises:
        AccumulationError: they do not; names the term.
    """
    sums = [
        (term.text, term.divisor, [part.matched[at].divisor or 0.0 for part in parts])
        for at, term in enumerate(whole.matched)
    ]
    sums += [
        ("the loss, by weight=,", weight, [part.weights[name] or 0.0 for part in parts])
        for name, weight in whole.weights.items()
    ]
    for text, total, counts in sums:
        if total is not None and not isclose(sum(counts), total, rel_tol=NEAR):
            raise AccumulationError(
                f"{text} was divided by {' and '.join(map('{:.6g}'.format, counts))} in parts and "
                f"by {total:.6g} in all of their samples at once, and such counts do not add up: "
                "average over samples last, pad sequences before they are given to the loss "
                "function, or pass a weight= that adds up; weight=1, if losses of parts add up"
            )


def adds_up(whole: PartFacts, parts: Sequence[PartFacts]) -> bool:
    """Tell whether the divisors on the tape of terms with ``weight=`` also add up."""
    if not whole.weighted or any(part.weighted_key != whole.weighted_key for part in parts):
        return False
    for at, term in enumerate(whole.weighted):
        total = sum(part.weighted[at].divisor or 0.0 for part in parts)
        if term.divisor is None or not isclose(total, term.divisor, rel_tol=NEAR):
            return False
    return True


def check_weights(parts: Sequence[PartFacts]) -> None:
    """Check that ``weight=`` is in proportion to the tape's divisors, and that they add up.

    Raises:
        AccumulationError: it is not.
    """
    for part in parts[1:]:
        if part.weighted_key != parts[0].weighted_key:
            continue
        for a, b in zip(parts[0].weighted, part.weighted, strict=True):
            mine, others = (1.0 if term.count is None else term.count for term in (a, b))
            if not isclose((a.divisor or 0) * others, (b.divisor or 0) * mine, rel_tol=NEAR):
                raise AccumulationError(
                    f"{a.text} was divided by {a.divisor:.6g} and {b.divisor:.6g}; weight= gives "
                    f"{mine:.6g} and {others:.6g}: leave it out, the divisor is known"
                )
