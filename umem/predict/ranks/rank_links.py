"""Links between ranks, each with its source, and the time of collectives over a link.

Computing is left out: sums are bound by memory, which is quicker than links.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any

from umem.devices.specs import GB, GpuSpec
from umem.errors import DataError, SizeError
from umem.files import open_regular, reason
from umem.printable import quoted, short


@dataclass(frozen=True)
class RankLink:
    """The link of a rank to the others, its own, used in both directions at once.

    Models: Hockney's time of a message, latency + bytes / bandwidth ("The communication challenge
    for MPP", Parallel Computing 20, 1994). Does not model: contention, topology, protocols that
    change with a message's size.

    Attributes:
        name: the name or text that the link was asked for by.
        bandwidth: bytes a second, each way.
        latency_seconds: latency of a message.
        source: the source of both figures.
    """

    name: str
    bandwidth: float
    latency_seconds: float
    source: str

    def seconds(self, nbytes: float, messages: float = 1) -> float:
        """Return the time of messages one after the other; ``nbytes`` is of all together."""
        return messages * self.latency_seconds + nbytes / self.bandwidth


NVLINK_SHARE = 0.8
"""The share of NVLink's raw rate that its protocol leaves: "overhead ~20%", NVIDIA's maintainer of
NCCL in nccl-tests issue 212 (370 of 450 GB/s on H100). Measured: 143.7 of 150 GB/s by plain copies
of a V100 (Dell, with p2pBandwidthLatencyTest), 208 of 300 by NCCL on two A100 (issue 178)."""
_NVLINK_LATENCY = 6e-6
"""An all-reduce of 32 KiB between two GPUs, which is two messages, took 13.4 us of which 1.5 are
bandwidth (nccl-tests issue 44, RTX 2080 Ti)."""
_FIXED = {
    "pcie4": RankLink(
        "pcie4",
        25 * GB,
        3e-6,
        "planning value for PCIe 4.0 x16 (32 GB/s raw); an all-reduce of 8 bytes among 8 GPUs, 14 "
        "messages in turn, took 42 us (nccl issue 1530)",
    ),
    "100gbe": RankLink(
        "100gbe",
        11.8 * GB,
        16e-6,
        "100 Gb/s Ethernet, of which TCP in frames of 1,500 bytes leaves 94%; 16 us between "
        "machines by Open MPI's own protocol (ompi issue 7861)",
    ),
}
NAMES = ("nvlink", *_FIXED)


def rank_link(text: str, gpu: GpuSpec) -> RankLink:
    """Return the link that a text names.

    Args:
        text: ``nvlink`` (at the GPU's rate), ``pcie4``, ``100gbe``; GB/s and microseconds, as
            ``"11.8,16"``; or a file that ``umem doctor --mpi --json`` has written.
        gpu: the GPU of the ranks.

    Raises:
        SizeError: the text is none of these, or the GPU has no NVLink.
        DataError: the file cannot be read, or has no link.
    """
    name = str(text).strip().lower()
    if name == "nvlink":
        return _nvlink(gpu)
    if name in _FIXED:
        return _FIXED[name]
    if "," in name:
        return _told(text)
    if Path(text).is_file():
        return _from_file(Path(text))
    raise SizeError(
        f"no link named {quoted(text)}: --link is {', '.join(NAMES)}, GB/s and microseconds such "
        "as 11.8,16, or a file that umem doctor --mpi --json has written"
    )


def _nvlink(gpu: GpuSpec) -> RankLink:
    """Return the NVLink of a GPU, at NVIDIA's rate times `NVLINK_SHARE`."""
    if gpu.nvlink_bandwidth is None:
        raise SizeError(
            f"{gpu.title} has no NVLink: take pcie4 or 100gbe, or give GB/s and microseconds"
        )
    source = (
        f"{gpu.nvlink_bandwidth / GB:g} GB/s each way (NVIDIA), of which NCCL leaves 80% "
        "(nccl-tests issue 212); latency from nccl-tests issue 44"
    )
    return RankLink("nvlink", NVLINK_SHARE * gpu.nvlink_bandwidth, _NVLINK_LATENCY, source)


def _told(text: str) -> RankLink:
    """Return a link given as GB/s and microseconds; raise SizeError for any other text."""
    try:
        rate, latency = map(float, text.split(","))
    except ValueError:
        rate = latency = -1.0
    if not (0 < rate < 1e6 and 0 <= latency < 1e9):
        raise SizeError(
            "a link of one's own is GB/s above 0 and microseconds from 0, such as 11.8,16; got "
            f"{quoted(text)}"
        )
    return RankLink(text.strip(), rate * GB, latency * 1e-6, "as given")


def _from_file(path: Path) -> RankLink:
    """Return the link that umem doctor has written to a file; raise DataError without one."""
    try:
        with open_regular(path) as file:
            found: Any = json.loads(file.read(1 << 20))
        link = found["link"]
        rate, latency = float(link["bandwidth"]), float(link["latency_seconds"])
    except OSError as error:
        raise DataError(f"cannot read the link {short(path)}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{short(path)} has no link; umem doctor --mpi --json writes a file that has"
        ) from error
    if not (0 < rate < 1e15 and 0 <= latency < 1e3):
        raise DataError(f"{short(path)}: a link of {rate:g} bytes/s and {latency:g} s is none")
    return RankLink(short(path), rate, latency, "measured by umem doctor --mpi")


def all_reduce_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """Return the time of a ring all-reduce: 2 (N - 1) messages, each 1 / N of the bytes.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009). NCCL's documentation calls
    2 (N - 1) / N the factor between what a program sees and the link's ("busbw").
    """
    return 2 * shared_seconds(link, ranks, nbytes)


def shared_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """Return the time of a ring's reduce-scatter or all-gather: (N - 1) messages, each 1 / N.

    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH", International Journal of High Performance Computing Applications 19 (2005).
    """
    return link.seconds((ranks - 1) * nbytes / ranks, ranks - 1)


def broadcast_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """Return the time of a broadcast: the less of a binomial tree's, and of scatter and all-gather.

    Thakur, Rabenseifner and Gropp, as in `shared_seconds`; the latter is less for long messages.
    """
    depth = ceil(log2(ranks))
    tree = link.seconds(depth * nbytes, depth)
    long = link.seconds(2 * (ranks - 1) * nbytes / ranks, depth + ranks - 1)
    return min(tree, long)


def ordered_sum_seconds(link: RankLink, ranks: int, nbytes: int) -> float:
    """Return the time of a sum in the order of parts: N - 1 messages and a broadcast.

    Each rank adds its part to the message of the rank before, so that the result has the same bits
    on any number of ranks; the whole message waits at every rank.
    """
    return link.seconds((ranks - 1) * nbytes, ranks - 1) + broadcast_seconds(link, ranks, nbytes)
