"""How long do calls of linear algebra on many small matrices take on the software GPU?

16,000 matrices of 2 x 2 and 4,000 of 8 x 8, of float64, with one thread for BLAS and without the
model. CuPy and NumPy take turns in one process, in processor time, with kernels compiled before.
What counts is the median of the ratios of such pairs, and how many times a quarter of the matrices
takes the whole: about 4 where each costs the same, 16 where each costs more the more there are.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported
os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import figure, quantity, text, verdict
from software_gpu_speed import pairs

import umem

SIZES = (16_000, 2), (4_000, 8)
GROWTH_LIMIT = 6.0
"""Times that four times as many may take; caches are missed by more of them."""


def calls(xp: Any, arrays: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """By name, on arrays of this module."""
    a, definite, right = (arrays[name] for name in ("a", "definite", "right"))
    linalg = xp.linalg
    return {
        "solve": lambda: linalg.solve(definite, right),
        "inv": lambda: linalg.inv(definite),
        "det": lambda: linalg.det(a),
        "slogdet": lambda: linalg.slogdet(a),
        "cholesky": lambda: linalg.cholesky(definite),
        "svd": lambda: linalg.svd(a),
        "pinv": lambda: linalg.pinv(a),
        "eigh": lambda: linalg.eigh(definite),
        "qr": lambda: linalg.qr(a),
        "matmul": lambda: a @ definite,
        "matmul, one with all": lambda: a[:1] @ definite,
    }


def inputs(count: int, size: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    a = draw.standard_normal((count, size, size))
    definite = a @ a.swapaxes(1, 2) + size * np.eye(size)
    return {"a": a, "definite": definite, "right": draw.standard_normal((count, size, 1))}


def measure(cupy: Any, count: int, size: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of every call on so many matrices of this size."""

    def both(several: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
        host = inputs(several, size)
        device = {name: cupy.asarray(array) for name, array in host.items()}
        ours, theirs = calls(cupy, device), calls(np, host)
        return {name: (ours[name], theirs[name]) for name in ours}

    all_calls, some_calls = both(count), both(count // 4)
    rows = []
    for name in all_calls:
        all_calls[name][0](), some_calls[name][0]()  # compiles
        found = list(pairs(*all_calls[name], repeats))
        quarter = statistics.median(a for a, _ in pairs(*some_calls[name], repeats))
        ratios = common.summary(a / b for a, b in found)
        seconds = statistics.median(a for a, _ in found)
        rows.append(
            {
                "call": name,
                "count": count,
                "size": size,
                "cupy_ms": 1e3 * seconds,
                "numpy_ms": 1e3 * statistics.median(b for _, b in found),
                "ratio": ratios.median,
                "low": ratios.low,
                "high": ratios.high,
                "growth": seconds / quarter,
                "passed": seconds / quarter <= GROWTH_LIMIT,
                "repeats_ms": [[1e3 * a, 1e3 * b] for a, b in found],
            }
        )
    return rows


def answer(result: common.Result) -> str:
    rows = result["rows"]
    slowest = max(rows, key=lambda row: row["ratio"])
    most = max(rows, key=lambda row: row["growth"])
    return (
        f"{figure(statistics.median(row['ratio'] for row in rows))} times NumPy's time in the "
        f"median, at most {figure(slowest['ratio'])} ({slowest['call']}, {slowest['count']:,} of "
        f"{slowest['size']} x {slowest['size']}); four times as many take at most "
        f"{figure(most['growth'])} times as long ({most['call']}); {figure(GROWTH_LIMIT)} are "
        "allowed."
    )


COLUMNS = (
    text("call", "call"),
    quantity("matrices", "count"),
    quantity("rows", "size"),
    quantity("CuPy", "cupy_ms", "ms"),
    quantity("NumPy", "numpy_ms", "ms"),
    quantity("ratio", "ratio"),
    quantity("least", "low"),
    quantity("most", "high"),
    quantity("four times as many", "growth"),
    verdict(),
)
BENCH = common.Bench("software_gpu_batches", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=11, show_default=True)
@click.option("--quick", is_flag=True, help="Two repeats, of a hundredth of the matrices.")
@common.json_option
def main(repeats: int, quick: bool, path: Path | None) -> None:
    common.writable(path)
    warnings.simplefilter("ignore")  # CuPy's, of what is experimental
    umem.software_gpu("v100-32gb", model=False)
    import cupy

    repeats, part = (2, 100) if quick else (repeats, 1)
    rows = [r for count, size in SIZES for r in measure(cupy, count // part, size, repeats)]
    BENCH.finish(rows, path, simulated=False, options={"repeats": repeats, "quick": quick})


if __name__ == "__main__":
    main()
