"""What does a rank of several need of a graph in parts, and are the bits and bytes as planned?

A graph network of 3 layers of 64 and 16 classes trains on whole graphs of 200,000 nodes and
1,000,000 ties with 64 features, cut into 12 parts, with Adam, on NumPy with one BLAS thread a rank.
Peaks are of all arrays of a rank (its parts, features, receive and send buffers, saved arrays,
gradients) above weights and optimizer state, by tracemalloc, of the rank that has most; loading
counts. Losses and weights are compared bit for bit after 20 updates, and the bytes that each rank
gave to MPI in each step with those of the plan. Times are of whole steps, of one rank and of two
in turn in one job; a ratio is of medians, of time that passed and of the processor time of the
rank that took more (waiting for the other is processor time, too, but what others do on the
machine is not).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import common
from mpi_start import ranks_command, ranks_environment
from report_tables import Column, Row, counted, figure, percent, quantity, text

from umem.graphs import Graph, communities, cut, rmat

PARTS = 12
COUNTS, QUICK_COUNTS = (1, 2, 3, 4, 5), (1, 2)
RANK = common.HERE / "parallel_parts" / "rank.py"


def graphs(quick: bool) -> dict[str, Any]:
    """What makes each graph."""
    nodes, ties = (2000, 10_000) if quick else (200_000, 1_000_000)
    return {
        "communities": lambda: communities(nodes, 40, ties, 0.02),
        "R-MAT": lambda: rmat(nodes, ties, 64, 16),
        "half across": lambda: communities(nodes, 40, ties, 0.5),
    }


def ranks(
    counts: tuple[int, ...], folder: Path, out: Path, updates: int, repeats: int
) -> list[dict[str, Any]]:
    """What each rank of a job wrote; the job has as many as the largest count."""
    out.mkdir()
    options = [",".join(map(str, counts)), "64", str(updates), str(repeats)]
    done = subprocess.run(
        [*ranks_command(max(counts)), sys.executable, RANK, folder, out, *options],
        env=ranks_environment(),
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(f"a rank failed: {done.stderr[-2000:]}")
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(max(counts))]


def measure(name: str, graph: Graph, counts: tuple[int, ...], updates: int, repeats: int) -> Any:
    """A row for each number of ranks."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found = cut(graph, PARTS, folder / "cut")
        one_job = max(counts) <= 2
        every = ranks(counts, folder / "cut", folder / "trained", updates, repeats * one_job)
        timed = every if repeats else []
        if repeats and not one_job:
            timed = ranks((1, 2), folder / "cut", folder / "timed", 1, repeats)
    alone = every[0]["trained"]["1"]
    rows = []
    for n in counts:
        these = [each["trained"][str(n)] for each in every[:n]]
        peak = max(one["peak_bytes"] for one in these)
        same = {(tuple(one["losses"]), one["weights"]) for one in [alone, *these]}
        times = _times(timed[:n], str(n)) if timed and n <= 2 else {}
        rows.append(
            {
                "graph": name,
                "ranks": n,
                "across": found.across_count / found.tie_count,
                "peak_mb": peak / 1e6,
                "of_one": peak / alone["peak_bytes"],
                "identical": "yes" if len(same) == 1 else "no",
                "sent_mb": sum(one["sent_bytes"][0] for one in these) / 1e6,
                "as_planned": "yes" if all(_as_planned(one) for one in these) else "no",
                "seconds": times.get("seconds", []),
                "processor_seconds": times.get("processor_seconds", []),
                "updates": updates,
            }
        )
    for row in rows:
        for ratio, name in (("time_ratio", "seconds"), ("processor_ratio", "processor_seconds")):
            row[ratio] = _ratio(row[name], rows[0][name]) if row[name] else None
    return rows


def _times(ranks: list[dict[str, Any]], n: str) -> dict[str, list[float]]:
    """By kind, the time of each step on the rank that took most of it."""
    names = ("seconds", "processor_seconds")
    return {name: list(map(max, *([rank[name][n] for rank in ranks] * 2))) for name in names}


def _as_planned(one: dict[str, Any]) -> bool:
    return set(one["sent_bytes"]) == {one["planned_bytes"]}


def _ratio(several: list[float], one: list[float]) -> float:
    return common.summary(several).median / common.summary(one).median


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    parts = []
    for n in sorted({row["ranks"] for row in rows} & {2, 4}):
        found = ", ".join(
            f"{figure(row['of_one'])} on {row['graph']}" for row in rows if row["ranks"] == n
        )
        start = "with" if parts else "With"
        parts.append(f"{start} {n} ranks the largest takes of one rank's peak {found}")
    same = sum(row["identical"] == "yes" for row in rows)
    planned = sum(row["as_planned"] == "yes" for row in rows)
    paced = [row for row in rows if row["ranks"] == 2 and row["time_ratio"]]
    times = ", ".join(
        f"{figure(row['time_ratio'])} on {row['graph']} (processor time "
        f"{figure(row['processor_ratio'])})"
        for row in paced
    )
    pace = f", and a step of 2 takes of one rank's time {times}"
    updates = rows[0]["updates"]
    return (
        f"{'; '.join(parts)}; losses and weights after {updates} updates are the same bits in "
        f"{same} of {len(rows)} rows, bytes as planned in {planned}{pace if times else ''}."
    )


COLUMNS = (
    text("graph", "graph"),
    counted("ranks", "ranks"),
    Column("ties across", "across", write=percent),
    quantity("peak", "peak_mb", "MB"),
    quantity("of one rank's", "of_one"),
    text("same bits", "identical"),
    quantity("sent a step", "sent_mb", "MB"),
    text("as planned", "as_planned"),
    quantity("of one rank's time", "time_ratio"),
    quantity("processor time", "processor_ratio"),
)
BENCH = common.Bench("parallel_graph", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Small graphs, two ranks at most.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(graphs(True))), help="These graphs only."
)
@click.option("--updates", default=20, help="Updates that are compared.")
@click.option("--repeats", default=9, help="Steps that are timed.")
@common.json_option
def main(quick: bool, only: tuple[str, ...], updates: int, repeats: int, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    common.writable(path)
    counts = QUICK_COUNTS if quick else COUNTS
    if quick:
        updates, repeats = min(updates, 3), min(repeats, 2)
    rows: list[Row] = []
    for name, make in graphs(quick).items():
        if not only or name in only:
            rows += measure(name, make(), counts, updates, repeats)
    options = {"quick": quick, "updates": updates, "repeats": repeats, "parts": PARTS}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
