"""How many bytes come from the disk for some rows of a graph's features in a file?

Measured on a file that the system was told to forget (Linux; a disk, no tmpfs), by what the kernel
counts for this process (``read_bytes`` of ``/proc/self/io``): `umem.graphs.open_features`, beside
``numpy.load(mmap_mode="r")``, both opened and asked for the same rows. ``pages`` is what no reader
can do with less: the pages in which the rows lie, and that of the header.
"""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import counted, figure, quantity, text, verdict

from umem.graphs import open_features
from umem.units import KIB, MIB

COLUMNS = 128
NODES, QUICK_NODES = 1 << 20, 1 << 15
COUNTS, QUICK_COUNTS = (10, 1000, 100_000), (10, 100)
HEADER_BYTES = 128
LIMIT = 1.02
"""How many times the bytes of the pages may be read."""


def read_bytes() -> int:
    """What the kernel has fetched from disks for this process."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def forget(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_umem(path: Path, rows: Any) -> Any:
    with open_features(path) as features:
        return features[rows]


def by_numpy(path: Path, rows: Any) -> Any:
    return np.array(np.load(path, mmap_mode="r")[rows])


def fetched(read: Callable[[Path, Any], Any], path: Path, rows: Any, expected: Any) -> int:
    """The bytes that come from the disk for rows, which have to be the right ones."""
    gc.collect()
    forget(path)
    before = read_bytes()
    found = read(path, rows)
    after = read_bytes()
    if not np.array_equal(found[:, 0], expected):
        raise click.ClickException(f"{read.__name__} gave other rows")
    return after - before


def pages_bytes(rows: Any) -> int:
    """The bytes of the pages that rows and the header lie in."""
    starts = HEADER_BYTES + rows * 4 * COLUMNS
    ends = (starts + 4 * COLUMNS - 1) // mmap.PAGESIZE
    return len({0, *(starts // mmap.PAGESIZE).tolist(), *ends.tolist()}) * mmap.PAGESIZE


def written(path: Path, nodes: int) -> None:
    """Features of which the first of each row is the number of the row."""
    found = np.lib.format.open_memmap(path, "w+", np.float32, (nodes, COLUMNS))
    for start in range(0, nodes, 4096):
        found[start : start + 4096] = np.arange(start, start + 4096, dtype=np.float32)[:, None]
    found.flush()


def measure(path: Path, name: str, rows: Any) -> dict[str, Any]:
    expected = rows.astype(np.float32)
    umem_bytes = fetched(by_umem, path, rows, expected)
    return {
        "rows": name,
        "count": len(rows),
        "row_bytes": len(np.unique(rows)) * 4 * COLUMNS,
        "pages_bytes": pages_bytes(rows),
        "umem_bytes": umem_bytes,
        "numpy_bytes": fetched(by_numpy, path, rows, expected),
        "file_bytes": path.stat().st_size,
        "passed": 0 < umem_bytes <= LIMIT * pages_bytes(rows),
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    worst = max(row["umem_bytes"] / row["pages_bytes"] for row in rows)
    most = max(row["numpy_bytes"] / row["umem_bytes"] for row in rows)
    passed = sum(row["passed"] for row in rows)
    largest = max(rows, key=lambda row: row["umem_bytes"])
    return (
        f"{figure(largest['umem_bytes'] / MIB, 1)} MiB for {figure(largest['row_bytes'] / MIB, 1)} "
        f"MiB of rows {largest['rows']}, and never more than {figure(worst, 2)} times the pages "
        f"that they lie in ({passed} of {len(rows)} within the limit); a plain memory map reads up "
        f"to {figure(most, 1)} times as much."
    )


BENCH = common.Bench(
    "feature_rows",
    __doc__,
    answer,
    (
        text("rows", "rows"),
        counted("asked for", "count"),
        quantity("their bytes", "row_bytes", "KiB", per=KIB),
        quantity("their pages", "pages_bytes", "KiB", per=KIB),
        quantity("umem reads", "umem_bytes", "KiB", per=KIB),
        quantity("numpy's map reads", "numpy_bytes", "KiB", per=KIB),
        quantity("file", "file_bytes", "MiB", per=MIB),
        verdict(),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small file.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the file is written.")
@common.json_option
def main(quick: bool, folder: Path | None, path: Path | None) -> None:
    nodes, counts = (QUICK_NODES, QUICK_COUNTS) if quick else (NODES, COUNTS)
    random = np.random.default_rng(0)
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = Path(place) / "features.npy"
        written(file, nodes)
        for count in counts:
            picked = random.integers(0, nodes, count)
            rows.append(measure(file, "at random", picked))
            rows.append(measure(file, "a run", np.arange(nodes // 3, nodes // 3 + count)))
    BENCH.finish(rows, path, simulated=False, options={"quick": quick, "nodes": nodes})


if __name__ == "__main__":
    main()
