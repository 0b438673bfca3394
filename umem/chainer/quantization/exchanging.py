"""A copy of a model in which some links are replaced; their old contents are not copied."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import chainer
import chainer.links as L

from umem.chainer.layers.tying import CopyWithTies
from umem.chainer.quantization.quantized_links import QuantizedLayer
from umem.errors import QuantizationError

_READ_INITIALIZED = (L.LSTM, L.StatelessLSTM)
"""Links whose forward only asks whether the array of ``upward.W`` is None (Chainer 7.8)."""


def exchanged(model: Any, instead: Mapping[Any, Any]) -> Any:
    """Copy a model deeply, with some links replaced in every place that refers to them.

    The copy has no states of optimizers and no gradients. The model is unchanged.

    Args:
        instead: the new link of each replaced link.

    Raises:
        QuantizationError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {id(old): new for old, new in instead.items()}
    for parameter in model.params():
        if parameter.update_rule is not None:
            memo[id(parameter.update_rule)] = None
        if parameter.is_initialized and parameter.grad is not None:
            memo[id(parameter.grad)] = None
    try:
        made = _copied(model, memo)
    except Exception as error:  # whatever the program's own objects raise
        raise QuantizationError(
            f"the model cannot be copied, which copy.deepcopy(model) must do: {error}"
        ) from error
    made.cleargrads()
    _end_ties(made)
    for link in made.links():
        if type(link) in _READ_INITIALIZED and isinstance(link.upward, QuantizedLayer):
            link.upward.reports_initialized = True
    return made


def _end_ties(model: Any) -> None:
    """End ties of `umem.chainer.tie` to parameters that a replaced link no longer has.

    Quantised links share a weight by themselves; one that stays in floats lists its own.
    """
    for link in model.links():
        carrier = vars(link).get("copy")
        if not isinstance(carrier, CopyWithTies):
            continue
        for pair in list(carrier.pairs):
            held = [place for place in pair if place.name in vars(place.link)]
            if len(held) < len(pair):
                carrier.leave_out(pair)
                for place in held:
                    # By the private list: the attribute exists already.
                    place.link._params.add(place.name)


def _copied(model: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy a model, including lambdas in a Sequential, which refuses to be pickled with
    them.
    """
    chains = [
        link for link in model.links()
        if isinstance(link, chainer.Sequential) and id(link) not in memo
    ]  # fmt: skip
    chains = list({id(each): each for each in chains}.values())
    for chain in chains:
        memo[id(chain)] = chainer.Sequential.__new__(type(chain))
    for chain in chains:
        vars(memo[id(chain)]).update(copy.deepcopy(vars(chain), memo))
    return copy.deepcopy(model, memo)


def own_names(link: Any) -> list[str]:
    """List the names of a link's own parameters, including those tied to another link's."""
    return sorted(name for name, one in vars(link).items() if isinstance(one, chainer.Parameter))


def by_path(model: Any) -> dict[str, Any]:
    """Map paths to the links of a model, each once; the model itself is ``/``."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for path, link in model.namedlinks():
        if id(link) not in seen:
            seen.add(id(link))
            found[path or "/"] = link
    return found


def checked_names(names: Iterable[str], links: Mapping[str, Any]) -> set[str]:
    """Convert the user's names of layers to paths.

    Raises:
        QuantizationError: there is no such link.
    """
    if isinstance(names, str):
        names = (names,)
    paths = {"/" + name.lstrip("/") for name in names}
    unknown = sorted(paths - links.keys())
    if unknown:
        raise QuantizationError(
            f"keep names {', '.join(unknown)}, which the model has not; it has {', '.join(links)}"
        )
    return paths
