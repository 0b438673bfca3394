"""The memory and time of a recorded step on several ranks; all figures are simulated."""

from umem.predict.ranks.choosing_ranks import choose_ranks
from umem.predict.ranks.found_ranks import RankChoice, RankStep
from umem.predict.ranks.graph_step import GraphStep
from umem.predict.ranks.rank_links import (
    NAMES,
    RankLink,
    all_reduce_seconds,
    ordered_sum_seconds,
    rank_link,
)
from umem.predict.ranks.rank_shares import GraphInParts, RankShare, shares_of
from umem.predict.ranks.rank_traces import RankedTraces, RankRow, rank_files, ranked
from umem.predict.ranks.scaled_events import scaled

__all__ = [
    "NAMES",
    "GraphInParts",
    "GraphStep",
    "RankChoice",
    "RankLink",
    "RankRow",
    "RankShare",
    "RankStep",
    "RankedTraces",
    "all_reduce_seconds",
    "choose_ranks",
    "ordered_sum_seconds",
    "rank_files",
    "rank_link",
    "ranked",
    "scaled",
    "shares_of",
]
