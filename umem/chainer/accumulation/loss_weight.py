"""The argument ``weight=``: the user's divisor of a loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chainer
import numpy as np

from umem.chainer.accumulation.splitting import Arguments
from umem.errors import AccumulationError, UnsupportedError

OneWeight = Callable[..., Any] | int | None
Weight = OneWeight | Mapping[str, OneWeight]


class Entry(NamedTuple):
    """A loss, or one of a dictionary of losses, with the weight that the user gave for it."""

    name: str
    loss: Any
    weight: OneWeight


def checked_weight(weight: Weight) -> Weight:
    """Check and return the argument ``weight=``.

    Raises:
        UnsupportedError: it is neither a function nor 1, nor a dictionary of these.
    """
    for one in weight.values() if isinstance(weight, Mapping) else [weight]:
        is_number = isinstance(one, (int, float, np.number)) and not isinstance(one, bool)
        is_missing = one is None and not isinstance(weight, Mapping)
        if not (callable(one) or is_missing or (is_number and one == 1)):
            raise UnsupportedError(
                "weight= must be a function that returns the divisor of a part's loss, or 1 if "
                f"losses of parts add up, or a dictionary of these, not {weight!r}"
            )
    return weight


def entries_of(loss: Any, weight: Weight) -> list[Entry]:
    """Return the result of a loss function as losses that are added up, each with its weight.

    Raises:
        AccumulationError: it is neither a scalar Variable nor a dictionary of such, or ``weight=``
            has another form.
    """
    if not isinstance(loss, Mapping):
        return [Entry("", _scalar(loss, "a scalar Variable"), whole_weight(weight))]
    weights = {} if weight is None else weight
    if not isinstance(weights, Mapping) or not weights.keys() <= loss.keys() or not loss:
        raise AccumulationError(
            f"the loss function returns a dictionary of the terms {', '.join(map(repr, loss))}: "
            f"weight= must be a dictionary of some of these names, not {weight!r}"
        )
    what = "a dictionary of scalar Variables"
    return [Entry(str(name), _scalar(y, what), weights.get(name)) for name, y in loss.items()]


def whole_weight(weight: Weight) -> OneWeight:
    """Return the weight of a loss that is one Variable.

    Raises:
        AccumulationError: it is a dictionary.
    """
    if isinstance(weight, Mapping):
        raise AccumulationError(
            "weight= is a dictionary, but the loss is not: let the loss "
            'function return {"name": term, ...}, or give one function'
        )
    return weight


def _scalar(loss: Any, wanted: str) -> Any:
    if not isinstance(loss, chainer.Variable) or loss.size != 1:
        shown = f"shape {loss.shape}" if hasattr(loss, "shape") else type(loss).__name__
        raise AccumulationError(f"the loss function must return {wanted}, not {shown}")
    return loss


def weight_of(weight: Callable[..., Any], given: Arguments) -> float:
    """Return the divisor of a part's loss from a weight function.

    Raises:
        AccumulationError: it is not one number, negative, or not finite.
        The function's errors.
    """
    value = weight(*given.args, **given.kwargs)
    array = getattr(value, "array", value)
    is_number = getattr(array, "ndim", 0) == 0 and hasattr(array, "__float__")
    count = float(array) if is_number else math.nan
    if not (math.isfinite(count) and count >= 0):
        raise AccumulationError(f"weight= must give one number of 0 or more, not {value!r}")
    return count


def line_to_type(lossfun: Any, name: str = "") -> str:
    """Return the ``weight=`` that a user might type for a loss function, or for one of its terms.

    Args:
        lossfun: the function; None if the program calls backward itself.
    """
    is_forward = isinstance(lossfun, chainer.Link) and "__call__" not in vars(type(lossfun))
    try:
        call = lossfun.forward if is_forward else lossfun
        given = [] if lossfun is None else [*inspect.signature(call).parameters.values()]
    except (TypeError, ValueError):
        given = []
    names = [str(one.replace(annotation=one.empty, default=one.empty)) for one in given]
    of = f"{names[0][1:]}[0]" if names and names[0].startswith("*") else "".join(names[:1]) or "x"
    function = f"lambda {', '.join(names)}: len({of})" if names else f"lambda: len({of})"
    return f'weight={{"{name}": {function}}}' if name else f"weight={function}"
