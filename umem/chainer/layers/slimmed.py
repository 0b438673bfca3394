"""`slimmer`: replace layers of a model with smaller ones, in place, all of them or none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from umem._common.switch import Switch
from umem.chainer.layers.exchange_conflicts import refuse_exchange
from umem.chainer.layers.exchanges import Exchange, Rules, chosen_layers, split_rules
from umem.chainer.layers.layer_costs import (
    ForwardCosts,
    LayerRow,
    Totals,
    forward_costs,
    samples_of,
    table,
)
from umem.chainer.layers.link_paths import LinkPlace, holders
from umem.chainer.layers.tying import tie
from umem.chainer.parameters_once import parameter_bytes
from umem.errors import DataError, LayerError, SizeError, StateError

__all__ = ["Slimmed", "slimmer"]


def slimmer(model: Any, rules: Rules, example: Any = None, *, quiet: bool = False) -> Slimmed:
    """Replace layers of a model with smaller ones in place, and print bytes and operations.

    ::

        from umem.chainer.layers import Grouped, LowRank, Separable, TiedTo

        slim = umem.chainer.slimmer(
            model,
            {"/conv2": Separable(), "/fc*": LowRank(energy=0.9), "/score/W": TiedTo("/embed/W")},
            x[:1],
        )

    Each new layer is made from the old weights: the nearest of its kind. Results change, and so
    does training: train further, and check the accuracy. The new layers take the old ones' places
    in a Chain, ChainList or Sequential. A layer that would not get smaller stays, and its row says
    so.

    An optimizer that is set up still works. New parameters get the layer's rules, hyper-parameters
    and hooks, with fresh state and update counts. All other state stays. ``undo()`` restores the
    old layers with their weights and their state.

    Cost: a singular value decomposition a layer, on the host; with an example two forward passes.

    Args:
        model: a link with links in it, whose arrays are initialised.
        rules: a dict or pairs: a path with * and ?, as in ``namedlinks``, or a class, and the rule
            for such layers. The first that matches a layer applies. `TiedTo` needs a whole path.
        example: arrays to call the model with, one or a tuple: a batch of samples along the first
            axis. With it a traced forward pass counts operations. The exchange is undone if the
            model then does not call the new layers as often, fails, or returns another shape.
        quiet: print nothing.

    Returns:
        The exchanged layers; ``undo()`` restores the old ones, and its text is the report.

    Raises:
        LayerError: a rule matches no layer; layers that cannot be replaced, each with the reason;
            or the model does not work with the new layers.
        SizeError: a rule's numbers are out of range.
        StateError: half precision, states in bfloat16 or an optimizer in shards is on, or an
            incomplete group of `umem.chainer.accumulate` has calls of update.

    After any of them the model is as before.
    """
    exchanges, ties = split_rules(rules)
    links_by_path = chosen_layers(model, exchanges)
    refuse_exchange(model, "slim")
    slim = Slimmed(model, _exchanged(links_by_path), ties, example)
    if not quiet:
        print(slim)
    return slim


class Slimmed(Switch):
    """The layers that `slimmer` replaced; as text, a table with a row a layer and totals.

    Attributes:
        rows: a row for each layer that a rule matched.
        totals: bytes and operations of the whole model, before and after.
    """

    def __init__(
        self,
        model: Any,
        made: list[tuple[LinkPlace, Any]],
        ties: list[tuple[str, str]],
        example: Any,
    ) -> None:
        self._model = model
        self._inputs = example if isinstance(example, tuple) else (example,)
        self._undone: list[Any] = []
        self._put_in: list[tuple[LinkPlace, list[int]]] = []
        self._places: dict[int, int] = {}
        self.rows: list[LayerRow] = []
        bytes_before = parameter_bytes(model)
        old = {spot.path: spot.link for spot, _ in made}
        before = None if example is None else self._costs(old, "with the example")
        try:
            for spot, link in made:
                self._put(spot, link)
            for first, other in ties:
                self._tie(first, other)
            after = None if before is None else self._checked(before, made)
        except BaseException:
            self._take_back()
            raise
        self._places = {key: len(found) for key, found in holders(model).items()}
        samples = samples_of(self._inputs)
        self.rows = [_row(spot, link, before, after, samples) for spot, link in made]
        self.rows += [
            LayerRow(other, "own parameters", f"tied to {first}") for first, other in ties
        ]
        self.totals = Totals(
            bytes_before,
            parameter_bytes(model),
            None if before is None else before.operations / samples,
            None if after is None else after.operations / samples,
        )

    def _put(self, spot: LinkPlace, link: Any) -> None:
        if link is spot.link:
            return
        place = spot.moved_to(link)
        self._undone.append(lambda: place.put(spot.link))
        spot.put(link)
        self._put_in.append((place, [id(one) for one in link.links()]))

    def _tie(self, first: str, other: str) -> None:
        self._undone.append(tie(self._model, first, other).undo)

    def _costs(self, layers: dict[str, Any], when: str) -> ForwardCosts:
        try:
            return forward_costs(self._model, layers, self._inputs)
        except Exception as error:
            raise LayerError(
                f"the model fails {when} ({type(error).__name__}: {error}); it is unchanged"
            ) from error

    def _checked(self, before: ForwardCosts, made: list[tuple[LinkPlace, Any]]) -> ForwardCosts:
        """Trace the model with new layers, and compare the shape and dtype of its outputs with the
        old.
        """
        new = {spot.path: link for spot, link in made}
        after = self._costs(new, "with the new layers, which have no W of their own")
        lost = [path for path in new if after.calls[path] != before.calls[path]]
        if lost:
            raise LayerError(
                f"the model does not call the new layers at {', '.join(lost)}: it has another "
                "reference to the old ones"
            )
        if after.outputs != before.outputs:
            raise LayerError(
                f"the model returns {', '.join(after.outputs)} with the new layers, and "
                f"{', '.join(before.outputs)} before"
            )
        return after

    def _refuse(self) -> None:
        """Refuse to undo if something would be lost.

        Raises:
            StateError: a new layer is missing, or was tied or slimmed since, or `slimmer` would
                refuse the model.
        """
        if self._put_in:
            refuse_exchange(self._model, "undo slimmer")
        for place, inside in self._put_in:
            self._refuse_to_lose(place, inside)

    def _take_back(self) -> None:
        """Restore the old layers with their weights; other layers keep their training."""
        while self._undone:
            self._undone.pop()()

    def _refuse_to_lose(self, place: LinkPlace, inside: list[int]) -> None:
        """Raise StateError if undoing would lose a later exchange or tie of a new layer."""
        held = holders(self._model)
        if id(place.link) not in held:
            raise StateError(f"slimmer's layer at {place.path} is no longer in the model")
        if [id(one) for one in place.link.links()] != inside:
            raise StateError(f"layers in {place.path} were exchanged since: undo that first")
        shared = {id(one): name for name, one in place.link.namedparams()}
        for key, name in shared.items():
            if len(held.get(key, [])) > self._places.get(key, 0):
                raise StateError(
                    f"{place.path}{name} was tied since, {' and '.join(held[key])}: undo that first"
                )

    def __str__(self) -> str:
        return table(self.rows, self.totals)


def _exchanged(links_by_path: Sequence[tuple[LinkPlace, Exchange]]) -> list[tuple[LinkPlace, Any]]:
    """Make the new links; a layer that would not get smaller keeps its link.

    Raises:
        LayerError: some cannot be made, each named with the reason.
    """
    made, reasons = [], []
    for spot, what in links_by_path:
        try:
            link = what.made_of(spot.link)
        except (SizeError, DataError) as error:
            reasons.append(f"{spot.path} ({type(spot.link).__name__}): {error}")
            continue
        is_smaller = parameter_bytes(link) < parameter_bytes(spot.link)
        made.append((spot, link if is_smaller else spot.link))
        _give_rules(spot.link, link)
    if reasons:
        raise LayerError(f"these layers cannot be exchanged: {'; '.join(reasons)}")
    return made


def _give_rules(old: Any, new: Any) -> None:
    """Give new parameters the old ones' rules, without state."""
    for name, parameter in new.namedparams():
        its = getattr(old, name.rpartition("/")[2], None)
        if its is not None and its.update_rule is not None:
            parameter.update_rule = _without_state(its.update_rule)


def _without_state(rule: Any) -> Any:
    """Copy an update rule with its hooks and hyper-parameters, without state."""
    made = copy.copy(rule)
    # A shallow copy shares these; a rule has no public way to reset them.
    made._state, made._fp32_param, made.t = None, None, 0
    made.hyperparam = copy.copy(rule.hyperparam)
    # The hooks are in a private object, which the copy would also share.
    made._hookable = copy.copy(rule._hookable)
    for hooks in ("_pre_update_hooks", "_post_update_hooks"):
        setattr(made._hookable, hooks, copy.copy(getattr(rule._hookable, hooks)))
    return made


def _row(
    spot: LinkPlace,
    link: Any,
    before: ForwardCosts | None,
    after: ForwardCosts | None,
    samples: int,
) -> LayerRow:
    """Make a layer's row of the report; operations are for each sample."""
    is_same = link is spot.link
    return LayerRow(
        spot.path,
        _kind(spot.link),
        "unchanged: it would get no smaller" if is_same else _kind(link),
        parameter_bytes(spot.link),
        parameter_bytes(link),
        None if before is None else before.of_layer[spot.path] / samples,
        None if after is None else after.of_layer[spot.path] / samples,
    )


def _kind(link: Any) -> str:
    numbers = ", ".join(_options(link))
    return type(link).__name__ + (f"({numbers})" if numbers else "")


def _options(link: Any) -> Iterator[str]:
    for name, value in link.printable_specs:
        if name in ("rank", "groups", "multiplier") and value != 1:
            yield f"{name}={value}"
