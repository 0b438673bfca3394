"""Input ranges of layers, recorded while a model runs on examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np

from umem.chainer.quantization.exchanging import own_names
from umem.chainer.step_state import restore_attributes
from umem.errors import QuantizationError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call of the model."""


@dataclass
class SeenRange:
    """The smallest and largest input of a layer, over a number of calls."""

    low: float = 0.0
    high: float = 0.0
    calls: int = 0

    def take(self, low: float, high: float) -> None:
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.calls += 1


class RangeHook(chainer.LinkHook):
    """Link hook that records the range of each layer's input.

    Args:
        paths: the links to record, and their names in errors.
    """

    name = "umem.chainer.quantize"

    def __init__(self, paths: Mapping[Any, str]) -> None:
        self._paths = paths
        self.seen = {link: SeenRange() for link in paths}

    def forward_preprocess(self, args: Any) -> None:
        """Record the range of one call's input; a layer without float input counts the call only.

        Raises:
            QuantizationError: the input has NaN or infinity.
        """
        if args.link not in self._paths:
            return
        x = chainer.as_array(args.args[0] if args.args else args.kwargs["x"])
        if x.dtype.kind != "f" or not x.size:  # of an EmbedID; an empty batch has no range
            self.seen[args.link].calls += 1
            return
        low, high = float(x.min()), float(x.max())
        if not np.isfinite([low, high]).all():
            raise QuantizationError(f"the input of {self._paths[args.link]} has NaN or infinity")
        self.seen[args.link].take(low, high)


def calibrate(model: Any, calibration: Any, paths: Mapping[Any, str]) -> tuple[Any, Call]:
    """Run a model once over examples, without a graph, and record its layers' input ranges.

    Args:
        model: it runs in test mode (``chainer.config.train`` is False) and is unchanged, including
            the states of recurrent links.
        calibration: see `umem.chainer.quantize`.
        paths: the layers, and their names in errors.

    Returns:
        The range of each layer, and the first call.

    Raises:
        QuantizationError: there is no example, the model cannot run one, or an input of a layer is
            not finite.
    """
    hook, first = RangeHook(paths), None
    with attributes_restored(model):
        for number, (args, kwargs) in enumerate(_calls(calibration)):
            first = first or (args, kwargs)
            try:
                with hook:
                    run(model, (args, kwargs))
            except QuantizationError as error:
                raise QuantizationError(f"batch {number} of the calibration: {error}") from None
            except Exception as error:
                raise QuantizationError(
                    f"batch {number} of the calibration, {_described(args, kwargs)}, cannot run "
                    f"through the model: {type(error).__name__}: {error}"
                ) from error
    if first is None:
        raise QuantizationError(
            "the calibration has no batch: give an array, or batches in a list; a generator or an "
            "iterator that was read before has none left"
        )
    return hook.seen, first


@contextmanager
def attributes_restored(model: Any) -> Iterator[None]:
    """Restore the links' attributes after the block, whatever a call sets.

    These are, for example, the state of a recurrent link, and a Classifier's loss. A link whose
    parameters are initialised in the block keeps the attributes that belong to them.
    """
    was = [
        (link, dict(vars(link)))
        for link in model.links()
        if all(getattr(link, name).is_initialized for name in own_names(link))
    ]
    try:
        yield
    finally:
        for link, attributes in was:
            restore_attributes(link, attributes)


def run(model: Any, call: Call) -> Any:
    """Call a model in test mode."""
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        return model(*call[0], **call[1])


def _calls(calibration: Any) -> Iterator[Call]:
    """Yield the arguments of each batch."""
    arrays = (*chainer.get_array_types(), chainer.Variable)
    batches = (calibration,) if isinstance(calibration, (*arrays, dict)) else calibration
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes)):
        raise QuantizationError(
            f"calibration must be an array or batches of arrays, not {type(calibration).__name__}"
        )
    for number, batch in enumerate(batches):
        if isinstance(batch, dict):
            args, kwargs = (), batch
        else:
            args, kwargs = (batch if isinstance(batch, tuple) else (batch,)), {}
        given = [*args, *kwargs.values()]
        if isinstance(batch, list):
            raise QuantizationError(
                f"batch {number} of the calibration is a list: give an array, a tuple of arguments "
                "or a dictionary of them; chainer.dataset.concat_examples makes arrays, "
                "and (the list,) passes a list to the model"
            )
        if any(isinstance(each, arrays) and not each.size for each in given):
            raise QuantizationError(f"batch {number} of the calibration is empty")
        yield args, kwargs


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [*args, *kwargs.values()]
    return " and ".join(
        f"{each.dtype} of shape {each.shape}" if hasattr(each, "dtype") else type(each).__name__
        for each in given
    )
