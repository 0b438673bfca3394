"""Links that train as if they were quantised: gradients pass straight through the rounding.

In training, and whenever a graph is made, products are of floats: of the values of the weight's and
the input's codes. Otherwise, as in an evaluation, such a link computes the same as its link after
`quantize`, with integers, to the bit.
"""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import function_node
from chainer.backend import get_array_module
from chainer.utils import size_of_shape

from umem.chainer.quantization.quantized_links import KINDS
from umem.chainer.quantization.quantized_weight import QuantizedWeight
from umem.chainer.quantization.scheme import (
    Scheme,
    decode_rows,
    encode_input,
    encode_rows,
    input_step,
    row_chunks,
)

_DECAY = 0.95
"""Decay of the moving average of an input's range: about the last 20 training steps count. Jacob et
al. average over thousands; so few are a guess for short trainings, not measured."""


class StraightWeight(function_node.FunctionNode):
    """Function: round a weight to its quantised value; the gradient passes straight through.

    Source: Bengio et al. 2013 (arXiv:1308.3432), the straight-through estimator. No weight is
    clipped, since the largest of a row has the largest code.
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def forward(self, inputs: Any) -> Any:
        (weight,) = inputs
        rounded = get_array_module(weight).empty(weight.shape, weight.dtype)
        rows, into = weight.reshape(len(weight), -1), rounded.reshape(len(weight), -1)
        for chunk in row_chunks(*rows.shape):
            into[chunk] = decode_rows(*encode_rows(rows[chunk], self._scheme), self._scheme)
        return (rounded,)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        return gradients


class StraightInput(function_node.FunctionNode):
    """Function: round an input to its quantised value; the gradient is 0 outside of the range."""

    def __init__(self, step: Any, scheme: Scheme) -> None:
        self._step, self._scheme = step, scheme

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        (x,) = inputs
        xp, scale = get_array_module(x), self._step[0]
        with np.errstate(all="ignore"):  # a scale of zero: no range is known yet
            rounded = encode_input(x, self._step, self._scheme) * scale
            return (xp.where(scale > 0, rounded, x).astype(x.dtype, copy=False),)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        x = self.get_retained_inputs()[0].array
        scale, zero = self._step[0], self._step[1]
        low, high = -(zero + 0.5) * scale, (self._scheme.levels - zero + 0.5) * scale
        is_inside = ((x >= low) & (x <= high)) | (scale == 0)
        return (gradients[0] * is_inside.astype(x.dtype),)


class AwareLayer:
    """Mixin of links that train quantised; `become_aware` turns a link into one.

    Attributes:
        scheme: the numbers of bits.
        input_range: float32 (2,), a persistent: low and high of its inputs, the exponential moving
            average of training batches (Jacob et al. 2018, section 3.1); zeros before the first.
    """

    scheme: Scheme
    input_range: Any

    def _trains(self: Any) -> bool:
        """Tell whether to compute with rounded floats; otherwise the link computes as after
        `quantize`.
        """
        return not has_hooks(self) and bool(chainer.config.train or chainer.config.enable_backprop)

    def _as_quantized(self: Any, plain: Any) -> Any:
        """Return the quantised link that `quantize` would make; ``plain`` if there is no input
        range.

        Also ``plain`` if it has link hooks, since `quantize` then leaves it in floats.
        """
        if has_hooks(self):
            return plain
        kind = next(KINDS[known] for known in KINDS if isinstance(self, known))
        step = aware_step(self) if kind.has_input else None
        if kind.has_input and step is None:
            return plain
        return kind.of(self, QuantizedWeight.of(self.W.array, self.scheme), step)

    def _rounded_weight(self: Any) -> Any:
        return StraightWeight(self.scheme).apply((self.W,))[0]

    def _rounded_input(self: Any, x: Any) -> Any:
        x = chainer.as_variable(x)
        if chainer.config.train and not chainer.config.in_recomputing and x.size:
            self._widen(x.array)
        step = input_step(self.input_range[0], self.input_range[1], self.scheme)
        return StraightInput(step, self.scheme).apply((x,))[0]

    def _widen(self: Any, x: Any) -> None:
        """Update the input range by a batch; a batch with NaN or infinity is ignored."""
        xp, was = get_array_module(x), self.input_range
        seen = xp.stack([xp.minimum(x.min(), 0), xp.maximum(x.max(), 0)]).astype(np.float32)
        followed = xp.where((was == 0).all(), seen, was * _DECAY + seen * (1 - _DECAY))
        is_finite = xp.isfinite(seen).all()
        was[...] = xp.where(is_finite, followed, was).astype(np.float32)


class AwareLinear(AwareLayer, L.Linear):
    """A `chainer.links.Linear` that trains quantised."""

    def forward(self, x: Any, n_batch_axes: int = 1) -> Any:
        if not self._trains():
            return self._as_quantized(super().forward)(x, n_batch_axes=n_batch_axes)
        if not self.W.is_initialized:
            # As in Chainer's forward, if in_size was not given.
            self._initialize_params(size_of_shape(x.shape[n_batch_axes:]))
        x, weight = self._rounded_input(x), self._rounded_weight()
        return F.linear(x, weight, self.b, n_batch_axes=n_batch_axes)


class AwareConvolution2D(AwareLayer, L.Convolution2D):
    """A `chainer.links.Convolution2D` that trains quantised."""

    def forward(self, x: Any) -> Any:
        if not self._trains():
            return self._as_quantized(super().forward)(x)
        if not self.W.is_initialized:
            # As in Chainer's forward, if in_channels was not given.
            self._initialize_params(x.shape[1])
        x, weight = self._rounded_input(x), self._rounded_weight()
        how = {"dilate": self.dilate, "groups": self.groups}
        return F.convolution_2d(x, weight, self.b, self.stride, self.pad, **how)


class AwareEmbedID(AwareLayer, L.EmbedID):
    """A `chainer.links.EmbedID` that trains quantised."""

    def forward(self, x: Any) -> Any:
        if not self._trains():
            return self._as_quantized(super().forward)(x)
        return F.embed_id(x, self._rounded_weight(), ignore_label=self.ignore_label)


def has_hooks(link: Any) -> bool:
    """Tell whether a link has its own hooks, which may replace its W."""
    return bool(link._local_link_hooks)  # the property would make a dictionary of them


AWARE = {kind.__mro__[2]: kind for kind in (AwareLinear, AwareConvolution2D, AwareEmbedID)}
"""For each supported link class, the class that trains quantised."""


def become_aware(link: Any, scheme: Scheme) -> None:
    """Change a link's class in place to the one that trains quantised.

    Only the class changes, so that the link keeps its parameters, its names in files, its optimizer
    and other references to it.
    """
    link.__class__ = AWARE[type(link)]
    link.scheme = scheme
    link.add_persistent("input_range", link.device.send(np.zeros(2, np.float32)))


def become_plain(link: Any) -> None:
    """Change a link's class back in place, and drop its input range."""
    link.__class__ = next(plain for plain, aware in AWARE.items() if aware is type(link))
    del link.input_range, link.scheme


def aware_step(link: Any) -> Any:
    """Return scale and zero point of an aware link's input; None before the first training
    batch.
    """
    step = input_step(link.input_range[0], link.input_range[1], link.scheme)
    return step if float(step[0]) > 0 else None
