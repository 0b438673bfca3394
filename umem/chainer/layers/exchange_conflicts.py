"""Features that hold an optimizer's parameters, and so prevent their exchange."""

from __future__ import annotations

from typing import Any

from umem.chainer.accumulation.accumulating import refuse_inside_of_group
from umem.chainer.agreement import refuse_in_shards
from umem.chainer.tap import subscribers_named
from umem.errors import StateError

_HOLD_PARAMETERS = {
    "HalfPrecision": "half precision",
    "Sharding": "an optimizer whose state is in shards",
}


def refuse_exchange(model: Any, what: str) -> None:
    """Raise StateError if an active feature holds parameters of layers that would be replaced.

    Raises:
        StateError: half precision or states in shards are on, or a group of calls is incomplete;
            nothing has changed.
    """
    refuse_inside_of_group(model, what)
    for name, holder in _HOLD_PARAMETERS.items():
        if next(_optimizers(name, model), None) is not None:
            raise StateError(f"{holder} is on, and holds the parameters as they are: {what} before")


def refuse_tie(model: Any, what: str) -> None:
    """Raise StateError if an active feature holds parameters that would be tied or untied.

    Raises:
        StateError: a state is in shards, or a group of calls is incomplete; nothing has changed.
    """
    refuse_inside_of_group(model, what)
    for optimizer in _optimizers("Sharding", model):
        refuse_in_shards(optimizer, what)


def _optimizers(name: str, model: Any) -> Any:
    own = {id(one) for one in model.params()}
    for one in subscribers_named(name):
        optimizer: Any = getattr(one, "optimizer", None)
        if optimizer is not None and optimizer.target is not None:
            if any(id(p) in own for p in optimizer.target.params()):
                yield optimizer
