"""Convolutions that mix less: depthwise-separable ones, and a trained one cut into groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import chainer.links as L
import numpy as np

from umem.chainer.layers.like_link import filled, on_host, refuse_array
from umem.chainer.layers.truncation import check_factors, decomposed, factors, refuse_nan
from umem.errors import SizeError

__all__ = ["SeparableConvolution2D", "in_groups"]


class SeparableConvolution2D(chainer.Chain):
    """A depthwise-separable convolution: one a channel, then a 1 x 1 convolution across channels.

    Parameters have ``multiplier * in_channels * (kh * kw + out_channels)`` elements instead of
    ``in_channels * kh * kw * out_channels``, and a pixel of the result takes as many multiply-adds;
    the bias is extra. Both parts are `chainer.links.Convolution2D`, the first with as many groups
    as channels, since Chainer's `DepthwiseConvolution2D` has no dilation.

    On NumPy a convolution in many groups computes more, smaller products, so that fewer operations
    may not take less time.

    Args:
        in_channels: channels of x; None: taken from the first batch.
        out_channels: channels of the result.
        ksize: size of the kernels, an int or a pair; as in `Convolution2D` the first of these three
            may be omitted.
        stride: of the first part, as in Chainer.
        pad: of the first part, as in Chainer.
        nobias: whether the second part has no bias; the first never has one.
        initialW: initialiser of both parts, by default Chainer's. To start from existing weights,
            use `from_convolution`.
        initial_bias: as in Chainer.
        dilate: of the first part.
        multiplier: kernels for each channel.

    Attributes:
        depthwise: the first part.
        pointwise: the second.

    Raises:
        SizeError: a multiplier below 1.
        DataError: ``initialW`` is an array.

    Source: Chollet, "Xception" (CVPR 2017), without a nonlinearity between the parts.
    """

    def __init__(
        self,
        in_channels: int | None,
        out_channels: int | None,
        ksize: Any = None,
        stride: Any = 1,
        pad: Any = 0,
        nobias: bool = False,
        initialW: Any = None,
        initial_bias: Any = None,
        *,
        dilate: Any = 1,
        multiplier: int = 1,
    ) -> None:
        super().__init__()
        if ksize is None:
            out_channels, ksize, in_channels = in_channels, out_channels, None
        check_factors(multiplier, name="multiplier")
        refuse_array(initialW, "SeparableConvolution2D.from_convolution")
        self.in_channels, self.multiplier = in_channels, int(multiplier)
        channels = None if in_channels is None else in_channels * self.multiplier
        with self.init_scope():
            self.depthwise = L.Convolution2D(
                in_channels,
                channels or self.multiplier,
                ksize,
                stride,
                pad,
                True,
                initialW,
                dilate=dilate,
                groups=in_channels or 1,
            )
            self.pointwise = L.Convolution2D(
                channels, out_channels, 1, 1, 0, nobias, initialW, initial_bias
            )

    @classmethod
    def from_convolution(cls, link: Any, multiplier: int = 1) -> SeparableConvolution2D:
        """Approximate a trained `Convolution2D`, which is not changed, by the nearest separable
        one.

        For each input channel, its kernels for all output channels form a matrix. The two parts
        represent the best approximation of rank ``multiplier`` of that matrix, and no separable
        convolution has weights nearer in the sum of squares (Guo et al., "Network Decoupling", BMVC
        2018, for the two as one).

        Raises:
            SizeError: a multiplier below 1, or above the output channels or the kernel's size; or
                the link has groups.
            DataError: the weight has NaN or infinity, or no shape yet.
        """
        weight = on_host(link, "W")
        outs, ins, height, width = weight.shape
        _refuse_groups(link)
        check_factors(multiplier, outs, height * width, name="multiplier")
        by_input = weight.transpose(1, 0, 2, 3).reshape(ins, outs, height * width)
        across, kernels = factors(*decomposed(by_input, "the weight"), multiplier)
        made: SeparableConvolution2D = filled(
            lambda: cls(
                ins,
                outs,
                (height, width),
                link.stride,
                link.pad,
                link.b is None,
                0,
                dilate=link.dilate,
                multiplier=multiplier,
            ),
            link,
            {
                "/depthwise/W": kernels.reshape(-1, 1, height, width),
                "/pointwise/W": across.transpose(1, 0, 2).reshape(outs, -1, 1, 1),
            },
        )
        return made

    def __str__(self) -> str:
        return str(chainer.Link.__str__(self))

    @property
    def printable_specs(self) -> Iterator[tuple[str, Any]]:
        """Return the constructor's arguments."""
        first, second = self.depthwise, self.pointwise
        yield "in_channels", self.in_channels
        yield "out_channels", second.out_channels
        yield from ((name, getattr(first, name)) for name in ("ksize", "stride", "pad"))
        yield "nobias", second.b is None
        yield "dilate", first.dilate
        yield "multiplier", self.multiplier

    def forward(self, x: Any) -> Any:
        """Apply both parts; x has shape (n, in_channels, h, w)."""
        if self.in_channels is None:
            # The number of groups is known only now, also if weights were loaded.
            self.in_channels = self.depthwise.groups = int(x.shape[1])
            self.depthwise.out_channels = self.in_channels * self.multiplier
        return self.pointwise(self.depthwise(x))


def in_groups(link: Any, groups: int) -> Any:
    """Make a grouped convolution from a trained `Convolution2D`, which is not changed.

    The weights inside the groups are kept, in the present order of channels: no grouped convolution
    with these groups has weights nearer in the sum of squares. The other weights are lost; further
    training compensates.

    Args:
        link: has a weight, and no groups.
        groups: above 1; divides the channels on both sides.

    Raises:
        SizeError: the groups do not divide the channels, or the link has groups already.
        DataError: the weight has NaN or infinity, or no shape yet.
    """
    weight = on_host(link, "W")
    outs, ins, height, width = weight.shape
    _refuse_groups(link)
    check_groups(groups)
    if outs % groups or ins % groups:
        raise SizeError(f"{groups} groups do not divide its {ins} input and {outs} output channels")
    refuse_nan(weight, "the weight")
    blocks = weight.reshape(groups, outs // groups, groups, ins // groups, height, width)
    kept = np.concatenate([blocks[one, :, one] for one in range(groups)])
    return filled(
        lambda: L.Convolution2D(
            ins, outs, (height, width), link.stride, link.pad, link.b is None, 0,
            dilate=link.dilate, groups=groups,
        ),
        link,
        {"/W": kept},
    )  # fmt: skip


def check_groups(groups: Any) -> None:
    """Raise SizeError unless groups is an integer above 1."""
    if isinstance(groups, bool) or not isinstance(groups, (int, np.integer)) or groups < 2:
        raise SizeError(f"groups must be an int of at least 2; got {groups!r}")


def _refuse_groups(link: Any) -> None:
    if link.groups != 1:
        raise SizeError(f"the convolution has {link.groups} groups already")
