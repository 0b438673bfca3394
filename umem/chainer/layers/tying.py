"""`tie`: one Parameter in several places of a model, which Chainer lists once.

Chainer lists a Parameter once for each link that it is registered with: `params()` would yield it
twice, an optimizer update it twice with the whole gradient, hooks that sum norms count it twice,
and a serializer write it twice. So only one link has it registered, and the others have it as a
plain attribute. A copy of the chain above them is tied, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chainer

from umem._common.printable import quoted
from umem._common.switch import Switch
from umem.chainer.layers.exchange_conflicts import refuse_tie
from umem.chainer.layers.link_paths import counterparts, link_at, parent_path
from umem.errors import LayerError

__all__ = ["Ties", "tie"]


def tie(model: Any, first: str, *others: str) -> Ties:
    """Share the first place's parameters with other places of a model.

    ::

        umem.chainer.tie(model, "/embed/W", "/score/W")
        umem.chainer.tie(model, "/block0", "/block1", "/block2")  # layers shared whole

    From then on ``params()`` and ``namedparams()`` list only the first's: every optimizer, hook and
    serializer counts, updates and saves them once. Gradients of all places are added up. Running
    statistics and other values that are not parameters stay separate. If Chainer shares a Parameter
    already, registered twice, it is now listed once.

    Ties survive `copy` of the model or of a chain above it, `copy.deepcopy`, pickle and
    `to_device`. A file saved before can be loaded: only the first's parameters are read. A copy of
    one of the links alone is not tied.

    Tie before training. An optimizer that is set up continues with the first's state; if its state
    is in shards, tie before its first update.

    Args:
        model: a chain that contains the links.
        first: the path of a parameter or a link, as in ``namedparams`` and ``namedlinks``.
        others: paths of the same shapes and types, and for links with the same names.

    Returns:
        The tie; its ``undo()`` restores the others' own parameters.

    Raises:
        LayerError: no such path, a parameter without an array, other shapes, types or devices, or
            one that is tied already.
        StateError: an optimizer's state is in shards, or an incomplete group of
            `umem.chainer.accumulate` has calls of update. Nothing is tied.

    Source: Press and Wolf, "Using the Output Embedding to Improve Language Models" (EACL 2017).
    """
    for place in (first, *others):
        if not isinstance(place, str):
            raise LayerError(f"a place is a path such as '/embed/W'; got {quoted(place)}")
    if not others:
        raise LayerError("tie needs at least two places of the model")
    firsts = _parameters(model, first)
    pairs: Pairs = []
    for other in others:
        pairs += _pairs(model, first, firsts, other)
    if len({str(other) for _, other in pairs}) < len(pairs):
        raise LayerError(f"a place is named twice in {others}")
    refuse_tie(model, "tie")
    return Ties(model, pairs)


class TiedPlace(NamedTuple):
    """A parameter's name on a link, and the link's path in the model."""

    path: str
    name: str
    link: Any

    def __str__(self) -> str:
        return f"{self.path.rstrip('/')}/{self.name}"


Pairs = list[tuple[TiedPlace, TiedPlace]]


class Ties(Switch):
    """The ties that `tie` made in a model.

    Attributes:
        pairs: the place where the parameter is registered, and a place that shares it.
    """

    def __init__(self, model: Any, pairs: Pairs) -> None:
        self.pairs, self._model = pairs, model
        self._before = [(other, vars(other.link)[other.name]) for _, other in pairs]
        for _, other in pairs:
            # Only the private list: delattr would take the attribute, which forward reads.
            other.link._params.discard(other.name)
        _hold(pairs)
        self._carriers = [(_carrier(model, pair), pair) for pair in pairs]

    def _refuse(self) -> None:
        """Raise StateError as `tie` does."""
        refuse_tie(self._model, "undo the tie")

    def _take_back(self) -> None:
        """Restore the others' own parameters."""
        before, self._before = self._before, []
        for held, parameter in before:
            device = vars(held.link)[held.name].device
            if parameter.device != device:  # the model has been moved since
                parameter.to_device(device)
            vars(held.link)[held.name] = parameter
            held.link._params.add(held.name)
        for carrier, pair in self._carriers:
            carrier.leave_out(pair)
        self._carriers = []


class CopyWithTies:
    """Replaces a chain's method `copy`, so that tied parameters are tied in the copy too.

    It is an attribute of the lowest chain that contains a whole tie. It knows links, not paths:
    copying may change the order in which a Sequential lists its links.

    Attributes:
        pairs: see `Ties`.
    """

    def __init__(self, chain: Any, pairs: Pairs) -> None:
        self._chain, self.pairs = chain, pairs

    def leave_out(self, pair: tuple[TiedPlace, TiedPlace]) -> None:
        """Drop a tie; after the last one the chain gets its own method back."""
        self.pairs = [one for one in self.pairs if one is not pair]
        if not self.pairs:
            del self._chain.copy

    def __call__(self, mode: str = "share") -> Any:
        """Copy the chain, and tie the same parameters in the copy."""
        made = type(self._chain).copy(self._chain, mode)
        new = {id(old): copied for old, copied in counterparts(self._chain, made)}
        pairs = [
            (first._replace(link=new[id(first.link)]), other._replace(link=new[id(other.link)]))
            for first, other in self.pairs
            if id(first.link) in new and id(other.link) in new  # not replaced since
        ]
        made.copy = CopyWithTies(made, pairs)
        _hold(pairs)
        return made


def _hold(pairs: Pairs) -> None:
    for first, other in pairs:
        vars(other.link)[other.name] = vars(first.link)[first.name]


def _carrier(model: Any, pair: tuple[TiedPlace, TiedPlace]) -> CopyWithTies:
    """Register a tie with the lowest chain that contains both places; returns its
    `CopyWithTies`.
    """
    first, other = pair
    chain = link_at(model, parent_path(first.path, other.path))
    carrier = vars(chain).get("copy")
    if not isinstance(carrier, CopyWithTies):
        carrier = chain.copy = CopyWithTies(chain, [])
    carrier.pairs.append(pair)
    return carrier


# -- which parameters may be tied ----------------------------------------------------------------

_NAMED = 20
"""At most this many parameters are named in a message."""


def _parameters(model: Any, path: str) -> dict[str, tuple[TiedPlace, Any]]:
    """Return the parameters at a path by relative name: "" for a parameter, or a link's names."""
    links = dict(model.namedlinks()) if isinstance(model, chainer.Link) else {}
    path = "/" + path.strip("/")
    found = {}
    for at, link in links.items():
        for name, value in vars(link).items():
            held = TiedPlace(at, name, link)
            is_there = f"{held}/".startswith(path.rstrip("/") + "/")
            if is_there and isinstance(value, chainer.Parameter):
                found[str(held)[len(path.rstrip("/")) :]] = held, value
    if not found:
        every = [name for name, _ in model.namedparams()] if links else []
        more = [f"and {len(every) - _NAMED} more"] if len(every) > _NAMED else []
        named = ", ".join(every[:_NAMED] + more) or "none"
        raise LayerError(f"no parameter is at {path!r} in the model; there are {named}")
    return found


def _pairs(model: Any, first: str, firsts: dict[str, tuple[TiedPlace, Any]], other: str) -> Pairs:
    """Pair the parameters of two paths, and check that each pair can be tied.

    Raises:
        LayerError: the links have different parameters, or a pair cannot be tied.
    """
    others = _parameters(model, other)
    if firsts.keys() != others.keys():
        raise LayerError(
            f"{first} and {other} have different parameters: {sorted(firsts)} and {sorted(others)}"
        )
    pairs = []
    for key, (held, parameter) in firsts.items():
        mine, its = others[key]
        _check_pair(held, parameter, mine, its)
        if its is not parameter:
            _check_free(model, mine, its)
        pairs.append((held, mine))
    return pairs


def _check_free(model: Any, place: TiedPlace, parameter: Any) -> None:
    """Raise LayerError if another place is tied to a parameter that would be replaced."""
    for path, link in model.namedlinks():
        for name, value in vars(link).items():
            if value is parameter and name not in link._params:
                raise LayerError(
                    f"{path.rstrip('/')}/{name} is tied to {place}, which would be replaced: name "
                    f"{place} first, or undo that tie before"
                )


def _check_pair(first: TiedPlace, parameter: Any, other: TiedPlace, its: Any) -> None:
    """Raise LayerError unless two parameters differ in place, and agree in shape, dtype and
    device.
    """
    if first.name == other.name and first.link is other.link:
        raise LayerError(
            f"{first} and {other} are one link: to use a layer twice, register it once and "
            "call it twice"
        )
    for held in (first, other):
        if held.name not in held.link._params:
            raise LayerError(f"{held} is tied with another already: tie that one instead")
    for held, one in ((first, parameter), (other, its)):
        if one.array is None:
            raise LayerError(f"{held} has no array yet: run the model once on a batch")
    for what in ("shape", "dtype", "device"):
        mine, theirs = getattr(parameter, what), getattr(its, what)
        if mine != theirs:
            raise LayerError(f"{first} has the {what} {mine}, and {other} has {theirs}")
