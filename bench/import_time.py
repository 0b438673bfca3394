"""What does `import umem` cost above NumPy's import?

``numpy``: ``import numpy``. ``umem``: ``import umem``, which imports NumPy first. Each in a process
of its own, by turns, byte code cached; only the statement is timed, so the start of Python does not
count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import common

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
    base = statistics.median(seconds["numpy"])
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


def _cells(row: dict[str, Any]) -> list[str]:
    names = ("median_seconds", "lowest_seconds", "highest_seconds", "added_seconds")
    return [row["import"], *(f"{row[name] * 1e3:.0f}" for name in names)]


def main() -> None:
    """Measure, print medians with their spread, and write the JSON file that was asked for."""
    question = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="three repeats")
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else arguments.repeats
    table = rows(measure(repeats))
    common.show(question, ["import", "ms", "lowest", "highest", "added ms"], map(_cells, table))
    print(f"limit: {LIMIT_SECONDS * 1e3:.0f} ms added")
    if arguments.json:
        content = common.report(
            "import_time",
            question,
            table,
            simulated=False,
            options={"repeats": repeats, "quick": arguments.quick},
            limit_seconds=LIMIT_SECONDS,
        )
        common.write_json(arguments.json, content)


if __name__ == "__main__":
    main()
