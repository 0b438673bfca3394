"""What does `import umem` cost above NumPy's import?

``numpy``: ``import numpy``. ``umem``: ``import umem``, which imports NumPy first. Each in a process
of its own, by turns, byte code cached; only the statement is timed, so the start of Python does not
count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import common
from report_tables import duration, quantity, text, verdict

LIMIT_SECONDS = 0.100
ROOT = Path(__file__).resolve().parent.parent
_TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
CONDITIONS = ("numpy", "umem")


def import_seconds(module: str) -> float:
    """Seconds that a fresh process takes to import a module."""
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(module)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return float(done.stdout)


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat, by turns; the first of each fills the caches and does not count."""
    seconds: dict[str, list[float]] = {module: [] for module in CONDITIONS}
    for _ in range(repeats + 1):
        for module in CONDITIONS:
            seconds[module].append(import_seconds(module))
    return {module: values[1:] for module, values in seconds.items()}


def rows(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each module: its repeats, their median and spread, and what it adds to NumPy's."""
    base = common.summary(seconds["numpy"]).median
    found = []
    for module, values in seconds.items():
        middle, low, high = common.summary(values)
        found.append(
            {
                "import": module,
                "seconds": values,
                "median_seconds": middle,
                "lowest_seconds": low,
                "highest_seconds": high,
                "added_seconds": middle - base,
                "passed": middle - base <= LIMIT_SECONDS,
            }
        )
    return found


def answer(result: common.Result) -> str:
    numpy, umem = result["rows"]
    return (
        f"{duration(umem['added_seconds'])}: {duration(umem['median_seconds'])}, of which NumPy's "
        f"import takes {duration(numpy['median_seconds'])}, where {duration(LIMIT_SECONDS)} are "
        "allowed."
    )


BENCH = common.Bench(
    "import_time",
    __doc__,
    answer,
    (
        text("import", "import"),
        quantity("median", "median_seconds", "ms", per=1e-3),
        quantity("least", "lowest_seconds", "ms", per=1e-3),
        quantity("most", "highest_seconds", "ms", per=1e-3),
        quantity("added", "added_seconds", "ms", per=1e-3),
        verdict(lambda row: row["passed"] if row["import"] == "umem" else None),
    ),
)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=25, show_default=True)
@click.option("--quick", is_flag=True, help="Three repeats.")
@common.json_option
def main(repeats: int, quick: bool, path: Path | None) -> None:
    repeats = 3 if quick else repeats
    BENCH.finish(
        rows(measure(repeats)),
        path,
        simulated=False,
        options={"repeats": repeats, "quick": quick},
        limit_seconds=LIMIT_SECONDS,
    )


if __name__ == "__main__":
    main()
