"""What ranks do together takes: the time by the algorithm, of messages of latency and bandwidth.

Computing is left out: adding goes as fast as memory, which is quicker than links.
"""

from __future__ import annotations

from math import ceil, log2

from umem.predict.ranks.rank_links import RankLink


def all_reduce_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """A ring's: 2 (N - 1) messages of a share each, which is 2 (N - 1) / N of the bytes.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009). NCCL's documentation calls
    2 (N - 1) / N the factor between what a program sees and the link's ("busbw").
    """
    return 2 * shared_seconds(link, ranks, nbytes)


def shared_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """A reduce-scatter's or an all-gather's, each half of the ring: (N - 1) / N of the bytes.

    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH", International Journal of High Performance Computing Applications 19 (2005).
    """
    return link.seconds((ranks - 1) * nbytes / ranks, ranks - 1)


def broadcast_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """A binomial tree's, or for long messages scatter and all-gather, as the same paper has it."""
    depth = ceil(log2(ranks))
    tree = link.seconds(depth * nbytes, depth)
    long = link.seconds(2 * (ranks - 1) * nbytes / ranks, depth + ranks - 1)
    return min(tree, long)


def ordered_sum_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """A sum in the order of parts: from rank to rank, N - 1 messages, and back by broadcast.

    The whole message waits at every rank, which is the price of the same bits on any number.
    """
    return link.seconds((ranks - 1) * nbytes, ranks - 1) + broadcast_seconds(link, ranks, nbytes)
