"""What is asked of a model and its optimizer before its numbers get fewer bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import chainer
import chainerx
import numpy as np

from umem.chainer.precision.floats import HALF, SINGLE
from umem.errors import StateError, UnsupportedError

_NO_BFLOAT16 = (
    "bfloat16 is no type to compute in: Chainer's functions ask for a float by dtype.kind, which "
    "is 'V' for it, NumPy has no arithmetic of it, and a saved array of it loads as bytes. Take "
    '"float16"; to store in bfloat16 take umem.chainer.saved_in("bfloat16") for what backward '
    "needs and umem.chainer.bfloat16_states for an optimizer's state"
)


def check(model: Any, optimizer: Any, dtype: Any, scale: float, interval: int) -> None:
    """Raise what `half_precision` says it raises."""
    _check_type(dtype)
    if not scale >= 1 or scale == float("inf"):
        raise StateError(f"a loss scale is a finite number of at least 1, not {scale!r}")
    if interval < 1:
        raise StateError(f"the scale doubles after one good step at least, not {interval!r}")
    check_optimizer(optimizer, "half precision")
    if optimizer._loss_scale is not None:
        raise StateError(
            "the optimizer has a loss scale of Chainer's: half precision brings its own, so leave "
            "out loss_scaling() and set_loss_scale()"
        )
    updated = {id(one) for one in optimizer.target.params()}
    if not any(id(one) in updated for one in model.params()):
        raise StateError(
            "the optimizer is set up with another model: none of its parameters are the model's"
        )
    _check_parameters(model)


def check_optimizer(optimizer: Any, what: str) -> None:
    """Raise where an optimizer has no update rules, or no model yet."""
    if not isinstance(optimizer, chainer.GradientMethod):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is no chainer.GradientMethod: {what} goes by its update "
            "rules, one a parameter"
        )
    if optimizer.target is None:
        raise StateError("the optimizer is not set up: call optimizer.setup(model) first")


def _check_type(dtype: Any) -> None:
    if str(dtype) == "bfloat16":
        raise UnsupportedError(_NO_BFLOAT16)
    try:
        is_half = np.dtype(dtype) == HALF
    except TypeError:
        is_half = False
    if not is_half:
        raise UnsupportedError(f'half precision computes in "float16", not in {dtype!r}')


def _check_parameters(model: Any) -> None:
    devices: dict[Any, str] = {}
    for name, parameter in model.namedparams():
        if parameter.device.xp is chainerx:
            raise UnsupportedError(f"{name} is a ChainerX array: move the model to NumPy or CuPy")
        devices.setdefault(parameter.device, name)
        if parameter.array is not None and parameter.dtype == HALF:
            raise StateError(
                f"{name} is float16 already: half precision starts from a model in float32, whose "
                "parameters become the masters; undo() the one before, or make the model under "
                "chainer.config.dtype = float32"
            )
    if len(devices) > 1:
        shown = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise StateError(
            f"the model is on several devices ({shown}): gradients are checked on one. Move it by "
            "model.to_device first"
        )


def chosen(model: Any, keep: Iterable[str]) -> list[Any]:
    """The parameters to become halves, each once: float32, none of a normalisation's, none kept.

    Raises:
        StateError: a name in ``keep`` is of no parameter and no link.
    """
    kept = {id(one) for one in _kept(model, keep)}
    found = {}
    for link in model.links():
        if not _normalises(link):
            found.update({id(one): one for one in _own(link)})
    for link in model.links():
        if _normalises(link):
            kept.update(id(one) for one in _own(link))
    return [
        one
        for key, one in found.items()
        if key not in kept and (one.array is None or one.dtype == SINGLE)
    ]


def _own(link: Any) -> list[Any]:
    return [getattr(link, name) for name in sorted(link._params)]


def _normalises(link: Any) -> bool:
    """Whether it is one of Chainer's normalising links, or of a class made from one."""
    return any(
        kind.__module__.startswith(("chainer.links.normalization.", "chainermn.links."))
        for kind in type(link).__mro__
    )


def _kept(model: Any, keep: Iterable[str]) -> list[Any]:
    parameters = list(model.namedparams())
    found = []
    for name in [keep] if isinstance(keep, str) else keep:
        path = "/" + name.strip("/")
        of_name = [one for at, one in parameters if at == path or at.startswith(path + "/")]
        if not of_name:
            raise StateError(
                f"keep names {name!r}, and the model has no such parameter or link: names are as "
                f"in model.namedparams(), such as {parameters[0][0]!r}"
            )
        found += of_name
    return found
