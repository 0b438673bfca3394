"""`quantization_aware`: train a model for few bits, until undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from umem._common.switch import Switch
from umem.chainer.quantization.aware_links import (
    AWARE,
    AwareLayer,
    become_aware,
    become_plain,
    has_hooks,
)
from umem.chainer.quantization.exchanging import by_path, checked_names
from umem.chainer.quantization.quantized_links import QuantizedLayer
from umem.chainer.quantization.scheme import Scheme
from umem.errors import QuantizationError, StateError

__all__ = ["QuantizationAware", "quantization_aware"]


def quantization_aware(
    model: Any,
    bits: int = 4,
    *,
    activation_bits: int = 8,
    group: int | None = None,
    keep: Iterable[str] = (),
) -> QuantizationAware:
    """Make a model train with quantised weights and inputs, in place, until undone.

    `Linear`, `Convolution2D` and `EmbedID` round weights and inputs to their quantised values,
    and gradients pass straight through (Bengio et al. 2013). Parameters stay floats, with their
    names and their optimizer. Ranges of inputs follow the training batches by an exponential moving
    average (Jacob et al. 2018), and are saved with the model.

    An evaluation (``chainer.config.train`` False, without a graph) computes with integers, to the
    bit the same as ``umem.chainer.quantize(model)`` afterwards. Train a model in floats first, then
    some epochs with this.

    Args:
        model: a link or chain; its quantised layers must be of exactly these classes. Layers with
            link hooks, such as SpectralNormalization, train in floats, as `quantize` leaves them.
        bits: bits of a weight, as in `umem.chainer.quantize`.
        activation_bits: bits of an input, as there.
        group: in 4 bits, how many columns of a row share a multiplier, as there.
        keep: names of links that train in floats, such as "/score".

    Returns:
        A handle; ``undo()``, or the end of its ``with`` block, ends it.

    Cost: each step rounds every weight and input once: see docs/reference/quantization.md.

    Raises:
        QuantizationError: invalid bits, names that do not exist, or no layer to train this way.
        StateError: the model is quantised, or trains this way already. The model is as before.
    """
    scheme = Scheme(bits, activation_bits, group)
    links = by_path(model)
    kept = checked_names(keep, links)
    for path, link in links.items():
        if isinstance(link, QuantizedLayer):
            raise StateError(f"{path} is quantised: train the float model")
        if isinstance(link, AwareLayer):
            raise StateError(f"{path} trains for few bits already: undo() that first")
    chosen = [
        link
        for path, link in links.items()
        if type(link) in AWARE and path not in kept and not has_hooks(link)
    ]
    if not chosen:
        raise QuantizationError(
            "no layer can train so: there is no Linear, Convolution2D, EmbedID without link hooks"
        )
    return QuantizationAware(chosen, scheme)


class QuantizationAware(Switch):
    """The handle of `quantization_aware`.

    Attributes:
        scheme: the numbers of bits.
    """

    undone = "quantization_aware was undone already: the model trains in floats"

    def __init__(self, links: list[Any], scheme: Scheme) -> None:
        self.scheme = scheme
        self._links = links
        for link in links:
            become_aware(link, scheme)

    def _take_back(self) -> None:
        """Make the model train in floats again, without input ranges; call `quantize` before."""
        for link in self._links:
            become_plain(link)
        self._links = []
