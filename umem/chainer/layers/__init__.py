"""Smaller layers, as links with Chainer's conventions, and rules that replace a model's layers.

Users make the links, or replace a trained model's layers by `slimmer` and `tie`.

    low_rank.py            has Linear and EmbedID of low rank, made of Chainer's own links
    separable.py           has depthwise-separable convolutions, and splits one into groups
    truncation.py          chooses a rank, and computes the factors
    exchanges.py           has the rules of `slimmer`
    slimmed.py             is `slimmer`: it replaces layers in place, all or none
    exchange_conflicts.py  refuses if a feature holds the parameters
    tying.py               is `tie`: it registers a shared parameter with one link only, and ties
                           copies again
    like_link.py           makes a link with the type, device and bias of another
    link_paths.py          finds links by their paths, and their holders
    layer_costs.py         traces a forward pass, and reports costs before and after
"""

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
