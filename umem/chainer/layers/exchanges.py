"""Rules of `slimmer`: the smaller layers, the layers that they apply to, and their refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import chainer
import chainer.links as L

from umem._common.printable import quoted
from umem.chainer.layers.link_paths import LinkPlace, holders, links_by_path
from umem.chainer.layers.low_rank import LowRankEmbedID, LowRankLinear, TwoFactors
from umem.chainer.layers.separable import SeparableConvolution2D, check_groups, in_groups
from umem.chainer.layers.truncation import RankWish, check_factors
from umem.errors import LayerError

__all__ = [
    "Exchange", "Grouped", "LowRank", "Rules", "Separable", "TiedTo", "chosen_layers",
    "split_rules",
]  # fmt: skip


@dataclass(frozen=True)
class LowRank(RankWish):
    """Rule: replace `Linear` and `EmbedID` by their nearest low-rank factors (truncated SVD).

    Args:
        rank: of the weight; or instead
        energy: the least rank that keeps this share of the sum of squares of the weights, at most
            1; or instead
        limit: the largest rank with which a layer's parameters take at most these bytes.

    Raises:
        SizeError: not exactly one of the three is given, or it is out of range.
    """

    takes: ClassVar[tuple[type, ...]] = (L.Linear, L.EmbedID)

    def made_of(self, link: Any) -> Any:
        """Make the new link; raises as `LowRankLinear.from_linear` does."""
        is_linear = isinstance(link, L.Linear)
        make = LowRankLinear.from_linear if is_linear else LowRankEmbedID.from_embed_id
        return make(link, self.rank, energy=self.energy, limit=self.limit)


@dataclass(frozen=True)
class Separable:
    """Rule: replace `Convolution2D` by the nearest `SeparableConvolution2D`.

    Args:
        multiplier: kernels for each input channel. With as many as a kernel has pixels, or as there
            are output channels, the function stays the same.

    Raises:
        SizeError: the multiplier is below 1.
    """

    takes: ClassVar[tuple[type, ...]] = (L.Convolution2D,)
    multiplier: int = 1

    def __post_init__(self) -> None:
        check_factors(self.multiplier, name="multiplier")

    def made_of(self, link: Any) -> Any:
        """Make the new link; raises as `SeparableConvolution2D.from_convolution` does."""
        return SeparableConvolution2D.from_convolution(link, self.multiplier)


@dataclass(frozen=True)
class Grouped:
    """Rule: replace `Convolution2D` by a grouped one with the weights inside the groups.

    Args:
        groups: at least 2; must divide the channels on both sides.

    Raises:
        SizeError: ``groups`` is below 2.
    """

    takes: ClassVar[tuple[type, ...]] = (L.Convolution2D,)
    groups: int

    def __post_init__(self) -> None:
        check_groups(self.groups)

    def made_of(self, link: Any) -> Any:
        """Make the new link; raises as `in_groups` does."""
        return in_groups(link, self.groups)


@dataclass(frozen=True)
class TiedTo:
    """Rule: tie the parameter or layer to the one at the rule's path; see `tie`.

    Args:
        first: the path whose parameters stay.
    """

    first: str


_NAMED = 20
"""At most this many layers are named in a message."""
Exchange = LowRank | Separable | Grouped
Where = str | type
Rules = Mapping[Any, Any] | Sequence[tuple[Any, Any]]


def split_rules(rules: Rules) -> tuple[list[tuple[Where, Exchange]], list[tuple[str, str]]]:
    """Check rules, and separate those that replace layers from those that tie them.

    Raises:
        LayerError: there are no rules, or one is not a rule.
    """
    if isinstance(rules, str) or not isinstance(rules, (Mapping, Iterable)):
        raise LayerError(
            'rules must be a dict or pairs, such as {"/fc*": LowRank(energy=0.9)}; got '
            f"{quoted(rules)}"
        )
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    if not pairs:
        raise LayerError('there is no rule; one is such as {"/fc*": LowRank(energy=0.9)}')
    exchanges: list[tuple[Where, Exchange]] = []
    ties: list[tuple[str, str]] = []
    for pair in pairs:
        where, what = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, pair)
        is_class = isinstance(where, type) and issubclass(where, chainer.Link)
        if isinstance(what, TiedTo) and isinstance(where, str):
            ties.append((what.first, where))
        elif isinstance(what, Exchange) and (is_class or isinstance(where, str)):
            exchanges.append((where, what))
        else:
            raise LayerError(
                "a rule is a path with * and ?, or a class of links, with LowRank, Separable or "
                f"Grouped; or a path with TiedTo(another); got {where!r}: {what!r}"
            )
    return exchanges, ties


def chosen_layers(
    model: Any, exchanges: Sequence[tuple[Where, Exchange]]
) -> list[tuple[LinkPlace, Exchange]]:
    """Choose the layers to replace; the first rule that matches a layer applies.

    A path with * matches layers, not the chains that contain them. A class does not match the parts
    of layers that are small already.

    Raises:
        LayerError: a rule matches no layer, or layers that cannot be replaced; each is named.
    """
    every = links_by_path(model)
    found: dict[str, tuple[LinkPlace, Exchange]] = {}
    for where, what in exchanges:
        those = {path for path, spot in every.items() if _is_meant(where, spot)} - found.keys()
        if not those:
            there = _every_layer(every)
            raise LayerError(f"the rule for {_named(where)} matches no layer; there are {there}")
        found.update({path: (every[path], what) for path in those})
    in_order = [found[path] for path in every if path in found]
    held = holders(model)
    reasons = [why for spot, what in in_order if (why := _why_not(spot, what, held))]
    if reasons:
        raise LayerError(f"these layers cannot be exchanged: {'; '.join(reasons)}")
    return in_order


def _is_meant(where: Where, spot: LinkPlace) -> bool:
    if not isinstance(where, str):
        is_part = isinstance(spot.parent, (TwoFactors, SeparableConvolution2D))
        return isinstance(spot.link, where) and not is_part
    pattern = "/" + where.lstrip("/")
    is_wild = any(letter in pattern for letter in "*?[")
    if is_wild and next(iter(spot.link.children()), None) is not None:
        return False
    return fnmatchcase(spot.path, pattern)


def _named(where: Where) -> str:
    return repr(where) if isinstance(where, str) else where.__name__


def _every_layer(every: Mapping[str, LinkPlace]) -> str:
    named = [f"{path} ({type(spot.link).__name__})" for path, spot in every.items()]
    more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return ", ".join(named[:_NAMED] + more) or "none"


def _why_not(spot: LinkPlace, what: Exchange, held: Mapping[int, list[str]]) -> str | None:
    """Return why a layer cannot be replaced, whatever its weights; None if it can."""
    link = spot.link
    why = next(_reasons(spot, what, held), None)
    return why and f"{spot.path} ({type(link).__name__}): {why}"


def _reasons(spot: LinkPlace, what: Exchange, held: Mapping[int, list[str]]) -> Iterator[str]:
    """Yield the reasons why a rule cannot replace a layer."""
    link = spot.link
    if type(link) not in what.takes:
        names = " and ".join(kind.__name__ for kind in what.takes)
        is_own = isinstance(link, what.takes)
        own = ", and a class made from it may compute something else" if is_own else ""
        yield f"{type(what).__name__} is for {names}{own}"
    if link.W.array is None:
        yield "it has no W yet: run the model once on a batch"
    if len(held[id(link)]) > 1:
        yield f"it is in several places, {' and '.join(held[id(link)])}"
    for name in sorted(vars(link)):
        places = held.get(id(vars(link)[name]), [])
        if len(places) > 1:
            yield f"its {name} is shared, by {' and '.join(places)}"
    if link._local_link_hooks:  # the property would make a dictionary of them
        yield f"it has link hooks, {', '.join(link._local_link_hooks)}"
    if getattr(link, "cudnn_fast", False):
        yield "it is in the layout of cudnn_fast"
    if isinstance(what, (Separable, Grouped)) and link.groups != 1:
        yield f"it has {link.groups} groups already"
