"""How small do arrays get in a cache, how fast are they decoded, and what does a single row cost?

Five kinds of float32 data, made here: random normals, the same after relu (features of a network),
pixels / 255, counts of words divided by the sum of their row, and 256 clusters' centres (features
that repeat). In chunks: bytes kept by `umem.data.BloscCodec`, and the speed of decoding into new
arrays, by one thread and by two that share the chunks, in the time of the processors that they
had, so that other work on the machine slows it less; for two threads that leaves out waiting, and
the wall's time stands beside it. In rows: `umem.data.CompressedRows`, each row by itself or in
blocks, read one by one in random order and 128 at once; bytes decoded are counted, not timed. And,
for the choice of what is tried, the share that ways of Blosc2 leave of these and of other data.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Column, Row, Table, figure, listed, quantity, span, text

from umem.data import BloscCodec, CompressedRows
from umem.data.compression import WAYS, Squeeze, squeezed
from umem.units import KIB, MIB, format_bytes

WANTED_RATIO, WANTED_GB = 0.6, 1.0
CHUNKS = (256 * KIB, MIB, 4 * MIB)
WIDTHS = (64, 256, 1024)
BLOCKS = (1, 4 * KIB, 16 * KIB, 256 * KIB)
"""Bytes of a block of rows; 1: each row by itself."""
BATCH = 128
WANTED_KINDS = ("features", "pixels / 255", "counts")
LEFT_OUT = (
    Squeeze("BLOSCLZ", 5, ("SHUFFLE",)),
    Squeeze("BLOSCLZ", 5, ("BITSHUFFLE",)),
    Squeeze("ZSTD", 1, ("DELTA", "SHUFFLE")),
    Squeeze("ZSTD", 1, ("DELTA", "BITSHUFFLE")),
    Squeeze("ZSTD", 3, ("SHUFFLE",)),
    Squeeze("ZSTD", 3, ("BITSHUFFLE",)),
    Squeeze("ZSTD", 3, ()),
)
"""Ways that a codec does not try."""


# -- the data ------------------------------------------------------------------------------------


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


def others(random: Any) -> Iterator[tuple[str, Any]]:
    """Some data of other types, for the choice of ways."""
    y, x = np.mgrid[:512, :512]
    photo = (np.sin(x / 40) + np.cos(y / 30) + 2) * 63 + random.normal(0, 2, (512, 512))
    yield "photograph, uint8", photo.clip(0, 255).astype("u1")
    yield "photograph, float32", photo.clip(0, 255).astype("u1").astype("f")
    yield "digits / 255", np.where(random.random((512, 784)) < 0.8, 0, pixels(random, (512, 784)))
    yield "columns of a sparse matrix", np.sort(random.integers(0, 20_000, (1000, 200), "i4"))
    yield "words, int32", random.zipf(1.3, 1 << 18).clip(0, 30_000).astype("i4")
    yield "labels, int32", random.integers(0, 10, 1 << 18).astype("i4")
    yield "a mask", photo > 120
    yield "a signal, float32", np.sin(np.arange(1 << 18) / 50).astype("f")
    yield "two decimals, float64", random.normal(0, 1, 1 << 17).round(2)


# -- measuring -----------------------------------------------------------------------------------


def raw(array: Any) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def processor_seconds(codec: BloscCodec, stored: Sequence[Any], nbytes: int) -> float:
    """Seconds of its processor that a thread takes to decode chunks."""
    start = time.thread_time()
    for each in stored:
        codec.decompress(each, nbytes)
    return time.thread_time() - start


def one(codec: BloscCodec, stored: Sequence[Any], nbytes: int) -> dict[str, float]:
    """Seconds a GB that one thread decodes."""
    return {"one": processor_seconds(codec, stored, nbytes) / (len(stored) * nbytes / 1e9)}


def two(codec: BloscCodec, stored: Sequence[Any], nbytes: int) -> dict[str, float]:
    """Seconds a GB that two threads decode at once: at their rates together, and on the wall."""
    rates: list[float] = []

    def work(half: Sequence[Any]) -> None:
        rates.append(len(half) * nbytes / 1e9 / processor_seconds(codec, half, nbytes))

    halves = (stored[::2], stored[1::2])
    started = [threading.Thread(target=work, args=(half,)) for half in halves]
    start = time.perf_counter()
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    wall = (time.perf_counter() - start) / (len(stored) * nbytes / 1e9)
    return {"two": 1 / sum(rates), "wall": wall}


def chunk_row(kind: str, nbytes: int, total: int, repeats: int) -> Row:
    array = KINDS[kind](np.random.default_rng(0), (total // 4096, 1024))
    data, codec = raw(array), BloscCodec()
    chunks = [data[start : start + nbytes] for start in range(0, data.nbytes, nbytes)]
    start = time.thread_time()
    stored = [codec.compress(chunk, "<f4") for chunk in chunks]
    taken = time.thread_time() - start
    seconds: dict[str, list[float]] = {"one": [], "two": [], "wall": []}
    smaller = [each for each in stored if each is not None]
    for repeat in range(-1, repeats if smaller else -1):  # the first is forgotten
        measured = one(codec, smaller, nbytes) | two(codec, smaller, nbytes)
        if repeat >= 0:
            for name, found in measured.items():
                seconds[name].append(found)
    return {
        "table": "chunks",
        "kind": kind,
        "chunk_bytes": nbytes,
        "way": codec.report().kinds[0].way,
        "ratio": codec.report().kinds[0].ratio,
        "compress_gb_a_second": data.nbytes / 1e9 / taken,
        "decode_seconds_a_gb": seconds,
        "decode_gb_a_second": {
            name: 1 / common.summary(found).median if found else None
            for name, found in seconds.items()
        },
    }


def rows_row(kind: str, width: int, block: int, count: int) -> Row:
    random = np.random.default_rng(1)
    array = KINDS[kind](random, (count, width))
    found: dict[str, Any] = {}
    for how, size in (("single", 1), ("batch", BATCH)):
        rows = CompressedRows(array, block)
        order = random.permutation(count)
        for start in range(0, count, size):
            places = order[start : start + size]
            assert (rows[places] == array[places]).all()
        found[how] = rows.report().decoded_for_used
    report = rows.report()
    return {
        "table": "rows",
        "kind": kind,
        "row_bytes": 4 * width,
        "block_bytes": report.block_bytes,
        "rows_a_block": report.block_bytes // (4 * width),
        "ratio": report.ratio,
        "decoded_for_used": found,
    }


def way_row(name: str, array: Any) -> Row:
    data = raw(array)[:MIB]
    sizes = {named(way): len(squeezed(data, way, array.itemsize)) for way in (*WAYS, *LEFT_OUT)}
    least, left_out = min((sizes[named(way)], named(way)) for way in LEFT_OUT)
    return {
        "table": "ways",
        "kind": name,
        "ratios": {way: size / data.nbytes for way, size in sizes.items()},
        "least_left_out": least / data.nbytes,
        "left_out": left_out,
    }


def named(way: Squeeze) -> str:
    """A way with its level, by which some differ."""
    return str(way) if way in WAYS else f"{way} {way.level}"


# -- all of it -----------------------------------------------------------------------------------


def rows_of(result: common.Result, table: str) -> list[Row]:
    return [row for row in result["rows"] if row["table"] == table]


def decoded(row: Row, name: str) -> float | None:
    return row["decode_gb_a_second"][name]


def answer(result: common.Result) -> str:
    chunks = rows_of(result, "chunks")
    wanted = [row for row in chunks if row["kind"] in WANTED_KINDS]
    speeds = {n: [decoded(row, n) or 0 for row in wanted] for n in ("one", "two")}
    plain = [row["ratio"] for row in chunks if row["kind"] == "normals"]
    small = [row for row in rows_of(result, "rows") if row["kind"] == "counts"][: len(BLOCKS)]
    alone, most = small[0], small[-1]
    return (
        f"{listed(WANTED_KINDS)} shrink to {span(row['ratio'] for row in wanted)} of their bytes "
        f"and random normals to {span(plain)}; chunks of these three are decoded at "
        f"{span(speeds['one'])} GB/s by one thread and at {span(speeds['two'])} GB/s by two, in "
        f"their processors' time; a row of {format_bytes(alone['row_bytes'])} of counts takes "
        f"{figure(alone['ratio'])} of its bytes by itself and {figure(most['ratio'])} in blocks of "
        f"{format_bytes(most['block_bytes'])}, where it costs "
        f"{figure(most['decoded_for_used']['single'])} bytes decoded for each byte used."
    )


def tables(result: common.Result) -> Iterator[Table]:
    yield Table(
        (
            text("data", "kind"),
            quantity("chunk", "chunk_bytes", "KiB", per=KIB),
            text("way", "way"),
            quantity("of its bytes", "ratio"),
            quantity("compressed at", "compress_gb_a_second", "GB/s"),
            quantity("decoded by one thread", lambda row: decoded(row, "one"), "GB/s"),
            quantity("by two", lambda row: decoded(row, "two"), "GB/s"),
            quantity("on the wall", lambda row: decoded(row, "wall"), "GB/s"),
        ),
        rows_of(result, "chunks"),
    )
    yield Table(
        (
            text("data", "kind"),
            quantity("row", "row_bytes", "B"),
            quantity("of its bytes", lambda row: row["blocks"][0]["ratio"]),
            *(column for place in (1, 2, 3) for column in block_columns(place)),
        ),
        list(by_width(rows_of(result, "rows"))),
    )
    yield Table(
        (
            text("data", "kind"),
            *(ratio_column(str(way)) for way in WAYS),
            quantity("least not tried", lambda row: row["least_left_out"], places=3),
            text("which is", "left_out"),
        ),
        rows_of(result, "ways"),
    )


def by_width(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each kind and width, with those of its blocks."""
    for start in range(0, len(rows), len(BLOCKS)):
        blocks = rows[start : start + len(BLOCKS)]
        yield {"kind": blocks[0]["kind"], "row_bytes": blocks[0]["row_bytes"], "blocks": blocks}


def block_columns(place: int) -> Iterator[Column]:
    size = format_bytes(BLOCKS[place])
    yield quantity(f"in {size}", lambda row: row["blocks"][place]["ratio"])
    yield Column(
        "decoded a byte used, singly / 128 at once",
        lambda row: row["blocks"][place]["decoded_for_used"],
        write=lambda found: f"{figure(found['single'])} / {figure(found['batch'])}",
    )


def ratio_column(way: str) -> Column:
    return quantity(way, lambda row: row["ratios"][way], places=3)


BENCH = common.Bench(
    "data_codecs",
    __doc__,
    answer,
    tables=tables,
    notes=lambda result: [
        f"Wanted: {listed(WANTED_KINDS)} at most {WANTED_RATIO:g} of their bytes, decoded at "
        f"{WANTED_GB:g} GB/s or more on two quiet cores. What does not shrink below 0.9 is kept as "
        "it is, and costs no decoding.",
        f"The machine's load average was {figure(result['options']['load_before'])} before and "
        f"{figure(result['options']['load_after'])} after, this program's own included.",
    ],
)


def measure(repeats: int, total: int, row_total: int) -> Iterator[Row]:
    for kind in KINDS:
        for nbytes in CHUNKS:
            yield chunk_row(kind, nbytes, total, repeats)
    for kind in KINDS:
        for width in WIDTHS:
            for block in BLOCKS:
                yield rows_row(kind, width, block, row_total // (4 * width))
    random = np.random.default_rng(2)
    for kind, make in KINDS.items():
        yield way_row(kind, make(random, (256, 1024)))
    for name, array in others(random):
        yield way_row(name, array)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=21, show_default=True)
@click.option("--quick", is_flag=True, help="Less data, two repeats.")
@common.json_option
def main(repeats: int, quick: bool, path: Path | None) -> None:
    common.writable(path)
    repeats, total, row_total = (2, 4 * MIB, MIB) if quick else (repeats, 32 * MIB, 4 * MIB)
    load = os.getloadavg()[0]
    made = list(measure(repeats, total, row_total))
    options = {
        "repeats": repeats,
        "quick": quick,
        "bytes": total,
        "row_bytes": row_total,
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    BENCH.finish(made, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
