"""Smaller layers, as links with Chainer's conventions, and rules by which a model gets them."""

from umem.chainer.layers.exchanges import Grouped, LowRank, Separable, TiedTo
from umem.chainer.layers.low_rank import LowRankEmbedID, LowRankLinear
from umem.chainer.layers.separable import SeparableConvolution2D, in_groups

__all__ = [
    "Grouped",
    "LowRank",
    "LowRankEmbedID",
    "LowRankLinear",
    "Separable",
    "SeparableConvolution2D",
    "TiedTo",
    "in_groups",
]
