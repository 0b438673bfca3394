"""Does a cache that knows the order hit all that can be hit, and does fetching ahead end waiting?

Four tables, all of `umem.data.cached` itself. Items of one size: its hits beside those of
Belady's MIN with the choice not to keep, from a heap over the next uses in the whole sequence, on
100 seeds and sizes of each kind of order, every other one fetching ahead. Items of sizes that
differ: bytes hit on 200 sequences of five epochs of 4 to 12 items, beside the optimum of an integer
program (SciPy's HiGHS: which stretches between two uses of an item are kept) that knows all sizes
and where the sequence ends, as the cache does not; beside lru and cost of the same cache, the fixed
subset that comes first, and the best fixed subset, chosen knowing everything. Time: microseconds of
the processor a request, of items that are nothing to load, where choices are tried (few items of
sizes that differ) and where they are not: 500 requests, once memory is full. Waiting: items of
1 MB, 40% of them in memory, a disk tier that gives at most 200 MB a second (reads are held up to
that), and a program that takes twice the time of an epoch's reads; seconds that requests waited in
the epochs after the first, in turn with and without fetching ahead.
"""

from __future__ import annotations

import heapq
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, Table, counted, duration, figure, quantity, text

import umem.data
from umem.data.codec import RawCodec
from umem.data.items import pack

EPOCHS = 5
RATE, SHARE, ITEM_BYTES = 200e6, 0.4, 1_000_000
MOST_WAITED, LEAST_OF_OPTIMUM = 0.1, 0.95


class Sized:
    """A dataset of bytes, of the sizes given."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = [int(size) for size in sizes]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> bytes:
        return bytes(self.sizes[index])

    def packed(self) -> list[int]:
        return [len(pack(self[i], RawCodec())) for i in range(len(self))]


def two_passes(bits: umem.data.EpochBits, count: int) -> Any:
    """Every stretch of five items twice."""
    parts = np.split(umem.data.shuffle(bits, count), range(5, count, 5))
    return np.concatenate([part for part in parts for _ in range(2)])


def draw(kind: str, count: int) -> Any:
    return {
        "shuffle": umem.data.shuffle,
        "with replacement": umem.data.with_replacement,
        "class-balanced": umem.data.ClassBalanced(np.arange(count) ** 2 % 7 // 3),
        "by 1/rank": umem.data.Weighted(1 / np.arange(1, count + 1)),
        "two passes over a window": two_passes,
    }[kind]


KINDS = ("shuffle", "with replacement", "class-balanced", "by 1/rank", "two passes over a window")


def requests(order: umem.data.KnownOrder, count: int, epochs: int) -> Iterator[int]:
    """Ask a sampler for epoch after epoch, as Chainer's iterators do."""
    now = order(np.arange(count), 0)
    for _ in range(epochs):
        yield from now.tolist()
        now = order(now, len(now))


def hit(sizes: Sequence[int], memory: int, kind: str, seed: int, **how: Any) -> Any:
    """What the cache has done in some epochs, and what it was asked for."""
    source, order = Sized(sizes), umem.data.known_order(seed, draw(kind, len(sizes)))
    given = order if how.get("policy", "next-use") == "next-use" else None
    with umem.data.cached(source, memory, order=given, **how) as data:
        asked = []
        for item in requests(order, len(source), EPOCHS):
            data[item]
            asked.append(item)
        return data.counters, asked


# -- items of one size ---------------------------------------------------------------------------


def most_hits(asked: Sequence[int], room: int) -> int:
    """Hits of Belady's MIN for items of one size, which may be left out."""
    uses, seen = [0.0] * len(asked), dict[int, int]()
    for at in range(len(asked) - 1, -1, -1):
        uses[at] = seen.get(asked[at], inf)
        seen[asked[at]] = at
    inside, heap, hits = dict[int, float](), list[tuple[float, int]](), 0
    for at, item in enumerate(asked):
        hits += item in inside
        inside[item] = uses[at]
        heapq.heappush(heap, (-uses[at], item))
        while len(inside) > room:
            use, last = heapq.heappop(heap)
            if inside.get(last) == -use:
                del inside[last]
    return hits


def equal_sizes(kind: str, seeds: int) -> Row:
    """How many of some seeds and sizes have the hits of MIN, exactly."""
    exact, hits, most, asked_for = 0, 0, 0, 0
    for seed in range(seeds):
        count = 5 + seed % 37
        room, sizes = 1 + seed * 13 % count, [1000 + 10 * seed] * count
        memory = room * Sized(sizes[:1]).packed()[0]
        found, asked = hit(sizes, memory, kind, seed, ahead=bool(seed % 2))
        best = most_hits(asked, room)
        exact += found.hit_count == best
        hits, most, asked_for = hits + found.hit_count, most + best, asked_for + len(asked)
    return {
        "part": "equal", "order": kind, "cases": seeds, "exact": exact, "hits": hits,
        "min_hits": most, "requests": asked_for,
    }  # fmt: skip


# -- sizes that differ ---------------------------------------------------------------------------


def sizes_of(seed: int) -> tuple[list[int], float, str]:
    """Sizes of 4 to 12 items, the share of them that memory has, and a kind of order."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(4, 13))
    sizes = (
        rng.integers(5_000, 40_001, count),
        rng.choice([5_000, 40_000], count),
        5_000 * 2 ** rng.integers(0, 4, count),
        2_000 + np.exp(rng.normal(9.3, 0.8, count)).astype(int),
    )[seed % 4]
    return (
        sizes.tolist(),
        rng.uniform(0.15, 0.8),
        ("shuffle", "with replacement", KINDS[3])[seed % 3],
    )


def optimum(sizes: Sequence[int], asked: Sequence[int], room: int) -> float:
    """The most bytes that can be hit, by an integer program."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    last, stretches = dict[int, int](), list[tuple[int, int, int]]()
    for at, item in enumerate(asked):
        if item in last:
            stretches.append((last[item], at, item))
        last[item] = at
    cells = [(t, j, sizes[i]) for j, (a, b, i) in enumerate(stretches) for t in range(a, b)]
    rows, columns, values = zip(*cells, strict=True)
    held = csr_array((values, (rows, columns)), shape=(len(asked), len(stretches)))
    worth = -np.array([float(sizes[i]) for _, _, i in stretches])
    found = milp(
        worth, constraints=LinearConstraint(held, -np.inf, room), integrality=1, bounds=Bounds(0, 1)
    )
    if not found.success:
        raise click.ClickException(f"HiGHS: {found.message}")
    return float(-found.fun)


def first_subset(sizes: Sequence[int], asked: Sequence[int], room: int) -> int:
    kept, hits = set[int](), 0
    for item in asked:
        if item in kept:
            hits += sizes[item]
        elif sum(sizes[i] for i in kept) + sizes[item] <= room:
            kept.add(item)
    return hits


def best_subset(sizes: Sequence[int], asked: Sequence[int], room: int) -> int:
    """By trying all."""
    uses = np.maximum(np.bincount(asked, minlength=len(sizes)) - 1, 0) * np.array(sizes)
    chosen = np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes)) & 1
    return int((chosen @ uses)[chosen @ np.array(sizes) <= room].max())


def other_sizes(seed: int) -> Row:
    """Bytes hit of one sequence by every way."""
    sizes, share, kind = sizes_of(seed)
    packed = Sized(sizes).packed()
    room = int(share * sum(packed))
    row: dict[str, Any] = {"part": "sizes", "seed": seed, "order": kind, "room_bytes": room}
    for policy in ("next-use", "lru", "cost"):
        found, asked = hit(sizes, room, kind, seed, policy=policy, ahead=False)
        row[policy] = found.hit_bytes
    row["first fixed subset"] = first_subset(packed, asked, room)
    row["best fixed subset"] = best_subset(packed, asked, room)
    row["optimum"] = optimum(packed, asked, room)
    return row


WAYS = ("next-use", "lru", "cost", "first fixed subset", "best fixed subset", "optimum")


def beside_optimum(rows: Sequence[Row]) -> list[Row]:
    """What the table shows of the sequences."""
    found = []
    for way in WAYS if rows else ():
        shares = [row[way] / row["optimum"] for row in rows if row["optimum"]]
        found.append(
            {
                "way": way,
                "total": sum(row[way] for row in rows) / sum(row["optimum"] for row in rows),
                "median": statistics.median(shares),
                "least": min(shares),
                "above": sum(row["next-use"] < row[way] for row in rows),
            }
        )
    return found


# -- time ----------------------------------------------------------------------------------------


def request_time(count: int, kept: int, *, is_one_size: bool) -> Row:
    """Microseconds that requests take, once memory is full."""
    rng = np.random.default_rng(0)
    sizes = [6000] * count if is_one_size else rng.integers(4000, 8001, count).tolist()
    source, order = Sized(sizes), umem.data.known_order(0)
    memory = sum(Sized(sizes[:kept]).packed())
    seconds = []
    with umem.data.cached(source, memory, order=order, ahead=False) as data:
        for item in itertools.islice(requests(order, count, 5000), max(3 * count, 500)):
            begun = time.thread_time()
            data[item]
            seconds.append(time.thread_time() - begun)
            if len(seconds) >= 3 * kept + 500:
                break
    last = [1e6 * each for each in seconds[-500:]]
    return {
        "part": "time", "items": count, "kept": kept,
        "sizes": "one" if is_one_size else "differ",
        "mean_us": statistics.mean(last), "most_us": max(last),
    }  # fmt: skip


TIMED = ((12, 6, True), (12, 6, False), (40, 20, True), (40, 20, False), (1000, 500, False))
LARGE = (1_000_000, 500, False)


# -- waiting -------------------------------------------------------------------------------------


def throttled(handle: int, count: int, at: int) -> bytes:
    """`os.pread` from a disk of so many bytes a second."""
    begun = time.perf_counter()
    data = _pread(handle, count, at)
    time.sleep(max(0.0, count / RATE - (time.perf_counter() - begun)))
    return data


_pread = os.pread


def waited(count: int, folder: str, epochs: int, *, ahead: bool) -> dict[str, float]:
    """Seconds that requests waited in epochs after the first, and in all."""
    source, order = Sized([ITEM_BYTES] * count), umem.data.known_order(0)
    pause = 2 * (1 - SHARE) * ITEM_BYTES / RATE
    memory, disk = int(SHARE * count * ITEM_BYTES * 1.0001), 2 * count * ITEM_BYTES
    with umem.data.cached(source, memory, disk, order=order, folder=folder, ahead=ahead) as data:
        for at, item in enumerate(requests(order, count, epochs)):
            if at == count:
                first, begun = data.counters, time.perf_counter()
            data[item]
            time.sleep(pause)
        seconds, last = time.perf_counter() - begun, data.counters
    return {
        "waited": last.waited_seconds - first.waited_seconds,
        "seconds": seconds,
        "read": last.disk_count - first.disk_count,
        "hits": last.hit_count - first.hit_count,
    }


def waiting(count: int, folder: str, epochs: int, repeats: int) -> list[Row]:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    os.pread = throttled
    try:
        for _ in range(repeats):
            for ahead in found:
                found[ahead].append(waited(count, folder, epochs, ahead=ahead))
    finally:
        os.pread = _pread
    without = statistics.median(each["waited"] for each in found[False])
    return [
        {
            "part": "waiting",
            "way": "ahead" if ahead else "when asked for",
            "waited_s": statistics.median(each["waited"] for each in runs),
            "of_without": statistics.median(each["waited"] for each in runs) / without,
            "seconds": statistics.median(each["seconds"] for each in runs),
            "read": runs[0]["read"],
            "hits": runs[0]["hits"],
            "repeats": runs,
        }
        for ahead, runs in found.items()
    ]


# -- the answer ----------------------------------------------------------------------------------


def of(result: common.Result, part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def answer(result: common.Result) -> str:
    equal, sizes, wait = (of(result, part) for part in ("equal", "sizes", "waiting"))
    exact, cases = (sum(row[key] for row in equal) for key in ("exact", "cases"))
    ways = {row["way"]: row for row in beside_optimum(sizes)}
    share = next(row["of_without"] for row in wait if row["way"] == "ahead")
    total = ways["next-use"]["total"]
    slowest = max(row["most_us"] for row in of(result, "time")) / 1000
    return (
        f"On {exact} of {cases} sequences of items of one size hits are those of Belady's MIN to "
        f"the hit; where sizes differ next-use hits {figure(total)} of the optimum's bytes "
        f"(aim: {figure(LEAST_OF_OPTIMUM)}, {'met' if total >= LEAST_OF_OPTIMUM else 'missed'}), "
        f"and fewer than lru on {ways['lru']['above']}, than cost on {ways['cost']['above']} "
        f"(target: 0), than the subset that comes first on {ways['first fixed subset']['above']} "
        f"and than the best one on {ways['best fixed subset']['above']} of {len(sizes)} sequences; "
        f"a request takes at most {figure(slowest)} ms; with fetching ahead requests wait "
        f"{figure(share)} of the time without (target: at most "
        f"{figure(MOST_WAITED)}, {'met' if share <= MOST_WAITED else 'missed'})."
    )


def tables(result: common.Result) -> list[Table]:
    return [
        Table(
            (
                text("order, items of one size", "order"),
                counted("sequences", "cases"),
                counted("hits as MIN's", "exact"),
                counted("hits", "hits"),
                counted("MIN's", "min_hits"),
                counted("requests", "requests"),
            ),
            of(result, "equal"),
        ),
        Table(
            (
                text("way, sizes that differ", "way"),
                quantity("bytes of the optimum's", "total"),
                quantity("median", "median"),
                quantity("least", "least"),
                counted("sequences on which it is above next-use", "above"),
            ),
            beside_optimum(of(result, "sizes")),
        ),
        Table(
            (
                counted("items, time a request", "items"),
                counted("in memory", "kept"),
                text("sizes", "sizes"),
                quantity("mean, microseconds", "mean_us"),
                quantity("most", "most_us"),
            ),
            of(result, "time"),
        ),
        Table(
            (
                text("fetched", "way"),
                text("waited", lambda row: duration(row["waited_s"])),
                quantity("of that without", "of_without"),
                text("in all", lambda row: duration(row["seconds"])),
                counted("read", "read"),
                counted("hits", "hits"),
            ),
            of(result, "waiting"),
        ),
    ]


BENCH = common.Bench("data_cache", __doc__, answer, tables=tables)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Few sequences, and one repeat.")
@click.option("--folder", help="On a disk; a temporary one unless given.")
@common.json_option
def main(quick: bool, folder: str | None, path: Path | None) -> None:
    common.writable(path)
    seeds, sequences, count, repeats = (4, 6, 40, 1) if quick else (100, 200, 200, 3)
    rows: list[Row] = [equal_sizes(kind, seeds) for kind in KINDS]
    rows += [other_sizes(seed) for seed in range(sequences)]
    for count_, kept, is_one_size in TIMED if quick else (*TIMED, LARGE):
        rows.append(request_time(count_, kept, is_one_size=is_one_size))
    with tempfile.TemporaryDirectory() as temporary:
        rows += waiting(count, folder or temporary, 3 if quick else 4, repeats)
    BENCH.finish(rows, path, simulated=False, options={"quick": quick})


if __name__ == "__main__":
    main()
