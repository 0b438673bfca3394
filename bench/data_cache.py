"""Does fetching ahead end waiting for data, and what does a request to the cache cost?

Both of `umem.data.cached` itself, which knows the order. Waiting: items of 1 MB, 40% of them in
memory, a disk tier that gives at most 200 MB a second (reads are held up to that), and a program
that takes twice the time of an epoch's reads; seconds that requests waited in the epochs after the
first, in turn with and without fetching ahead. Time: microseconds of the processor a request, of
items that are nothing to load, where choices are tried (few items of sizes that differ) and where
they are not: 500 requests, once memory is full.

``--codecs`` asks another question: how small do arrays get in a cache, and how fast are they
decoded? Five kinds of float32 data, made here: random normals, the same after relu (features of a
network), pixels / 255, counts of words divided by the sum of their row, and 256 clusters' centres
(features that repeat). In chunks: bytes kept by `umem.data.BloscCodec`, and the speed of decoding
into new arrays, in the time of the processor that the thread had.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, Table, counted, duration, figure, listed, quantity, span, text

import umem.data
from umem.data import RawCodec, pack
from umem.units import KIB, MIB

RATE, SHARE, ITEM_BYTES = 200e6, 0.4, 1_000_000
MOST_WAITED = 0.1
WANTED_RATIO, WANTED_GB = 0.6, 1.0
CHUNKS = (256 * KIB, MIB, 4 * MIB)
WANTED_KINDS = ("features", "pixels / 255", "counts")


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


def requests(order: umem.data.KnownOrder, count: int, epochs: int) -> Iterator[int]:
    """Ask a sampler for epoch after epoch, as Chainer's iterators do."""
    now = order(np.arange(count), 0)
    for _ in range(epochs):
        yield from now.tolist()
        now = order(now, len(now))


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
    """Measure how long an epoch waits for its items, with and without reading ahead."""
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
    share = next(row["of_without"] for row in of(result, "waiting") if row["way"] == "ahead")
    slowest = max(row["most_us"] for row in of(result, "time")) / 1000
    return (
        f"With fetching ahead requests wait {figure(share)} of the time without (target: at most "
        f"{figure(MOST_WAITED)}, {'met' if share <= MOST_WAITED else 'missed'}); a request takes "
        f"at most {figure(slowest)} ms."
    )


def tables(result: common.Result) -> list[Table]:
    """Make the tables of a result."""
    return [
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
    ]


BENCH = common.Bench("data_cache", __doc__, answer, tables=tables)


# -- codecs --------------------------------------------------------------------------------------


def normals(random: Any, shape: tuple[int, int]) -> Any:
    return random.standard_normal(shape, dtype="f")


def features(random: Any, shape: tuple[int, int]) -> Any:
    return np.maximum(normals(random, shape), 0)


def pixels(random: Any, shape: tuple[int, int]) -> Any:
    return random.integers(0, 256, shape).astype("f") / np.float32(255)


def counts(random: Any, shape: tuple[int, int]) -> Any:
    found = random.poisson(0.3, shape).astype("f")
    return found / np.maximum(found.sum(1, keepdims=True), 1)


def centres(random: Any, shape: tuple[int, int]) -> Any:
    return normals(random, (256, shape[1]))[random.integers(0, 256, shape[0])]


KINDS: dict[str, Callable[[Any, tuple[int, int]], Any]] = {
    "normals": normals,
    "features": features,
    "pixels / 255": pixels,
    "counts": counts,
    "clusters' centres": centres,
}


def chunk_row(kind: str, nbytes: int, total: int, repeats: int) -> Row:
    """Compress data in chunks, and decode them one after another."""
    array = KINDS[kind](np.random.default_rng(0), (total // 4096, 1024))
    data, codec = array.reshape(-1).view(np.uint8).data, umem.data.BloscCodec()
    chunks = [data[start : start + nbytes] for start in range(0, data.nbytes, nbytes)]
    start = time.thread_time()
    stored = [codec.compress(chunk, "<f4") for chunk in chunks]
    taken = time.thread_time() - start
    smaller = [each for each in stored if each is not None]
    seconds: list[float] = []
    for repeat in range(-1, repeats if smaller else -1):  # the first is forgotten
        start = time.thread_time()
        for each in smaller:
            codec.decompress(each, nbytes)
        if repeat >= 0:
            seconds.append((time.thread_time() - start) / (len(smaller) * nbytes / 1e9))
    kept = codec.report().kinds[0]
    return {
        "kind": kind, "chunk_bytes": nbytes, "ratio": kept.ratio,
        "compress_gb_a_second": data.nbytes / 1e9 / taken,
        "decode_seconds_a_gb": seconds,
        "decode_gb_a_second": 1 / common.summary(seconds).median if seconds else None,
    }  # fmt: skip


def codecs_answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    wanted = [row for row in result["rows"] if row["kind"] in WANTED_KINDS]
    plain = [row["ratio"] for row in result["rows"] if row["kind"] == "normals"]
    speeds = (row["decode_gb_a_second"] or 0 for row in wanted)
    return (
        f"{listed(WANTED_KINDS)} shrink to {span(row['ratio'] for row in wanted)} of their bytes "
        f"(at most {WANTED_RATIO:g} is wanted) and random normals to {span(plain)}; one thread "
        f"decodes chunks of these three at {span(speeds)} GB/s of its processor's time "
        f"({WANTED_GB:g} is wanted)."
    )


CODECS = common.Bench(
    "data_cache-codecs",
    "How small do arrays get in a cache, and how fast are they decoded?",
    codecs_answer,
    (
        text("data", "kind"),
        quantity("chunk", "chunk_bytes", "KiB", per=KIB),
        quantity("of its bytes", "ratio"),
        quantity("compressed at", "compress_gb_a_second", "GB/s"),
        quantity("decoded at", "decode_gb_a_second", "GB/s"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Few items or little data, and few repeats.")
@click.option("--codecs", "is_codecs", is_flag=True, help="What compression does to arrays.")
@click.option("--folder", help="On a disk; a temporary one unless given.")
@common.json_option
def main(quick: bool, is_codecs: bool, folder: str | None, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    common.writable(path)
    if is_codecs:
        total, repeats = (4 * MIB, 2) if quick else (32 * MIB, 21)
        rows = [chunk_row(kind, size, total, repeats) for kind in KINDS for size in CHUNKS]
        options = {"quick": quick, "repeats": repeats, "bytes": total}
        CODECS.finish(rows, path, simulated=False, options=options)
        return
    count, repeats = (40, 1) if quick else (200, 3)
    rows = [
        request_time(items, kept, is_one_size=is_one_size)
        for items, kept, is_one_size in (TIMED if quick else (*TIMED, LARGE))
    ]
    with tempfile.TemporaryDirectory() as temporary:
        rows += waiting(count, folder or temporary, 3 if quick else 4, repeats)
    BENCH.finish(rows, path, simulated=False, options={"quick": quick})


if __name__ == "__main__":
    main()
