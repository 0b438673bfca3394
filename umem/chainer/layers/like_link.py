"""A link that resembles a trained one: its type, its device, its bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy as np

from umem.errors import DataError


def on_host(link: Any, name: str) -> np.ndarray[Any, Any]:
    """Return a parameter's array on the host.

    Raises:
        DataError: it is not initialised.
    """
    parameter = getattr(link, name)
    if parameter.array is None:
        raise DataError(
            f"{type(link).__name__} has no {name} yet: run it once on a batch, which gives the "
            "shape, or give it its input size"
        )
    array: np.ndarray[Any, Any] = chainer.get_device("@numpy").send(parameter.array)
    return array


def filled(make: Callable[[], Any], like: Any, weights: Mapping[str, Any]) -> Any:
    """Make a link with given weights, with dtype and device of another link.

    Args:
        make: makes it with weights of 0, so that no random numbers are drawn.
        like: the trained link; if it has a bias, the new link gets a copy of it.
        weights: arrays of any float type, by the new link's parameter names.
    """
    dtype = like.W.dtype
    with chainer.using_config("dtype", dtype):
        made = make()
    made.to_device(like.device)
    bias = getattr(like, "b", None)
    for name, parameter in made.namedparams():
        if name in weights:
            parameter.array[...] = made.device.send(np.asarray(weights[name], dtype))
        elif bias is not None:
            parameter.array[...] = bias.array
    return made


def refuse_array(initial: Any, instead: str) -> None:
    """Raise DataError if an initialiser is an array, because no factor has its shape."""
    if isinstance(initial, chainer.get_array_types()):
        raise DataError(
            f"initialW initialises two arrays, of other shapes than this one's {initial.shape}: "
            f"give a number or an initialiser; for trained weights use {instead}"
        )
