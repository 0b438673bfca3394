"""How long does a plan of recomputation take, by the number of calls?

Processor time on a chain of calls of several sizes and costs: the first plan, which makes the
table of steps; a plan within half of what the step takes as it is, of the same graph; and
`pareto`, of up to 2,000 calls. Under both models; each plan is carried out by the referee.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common

from umem.planner import Graph, Node, pareto, plan, simulate

QUESTION = (__doc__ or "").splitlines()[0]
COUNTS = (1_000, 2_000, 10_000)
PARETO = 2_000
"""The most calls of which the front is asked for."""
MODELS = ("paper", "saved")


def chain(count: int) -> Graph:
    """Calls one after another; the same each time."""
    source = random.Random(0)
    nodes = [
        Node(
            f"call{v}",
            source.randrange(1 << 16, 1 << 24),
            source.random(),
            saved=source.random() < 0.7,
            workspace_bytes=source.randrange(1 << 20),
        )
        for v in range(count)
    ]
    return Graph(nodes, [(f"call{v - 1}", f"call{v}") for v in range(1, count)])


def measure(count: int, model: Any) -> dict[str, Any]:
    graph = chain(count)
    first, least = timed(lambda: plan(graph, None, model=model))
    whole = plan(graph, None, "store_all", model=model)
    budget = whole.peak_bytes // 2
    second, half = timed(lambda: plan(graph, budget, model=model))
    for found in (least, half):
        simulate(graph, found, budget_bytes=found.budget_bytes)
    front, points = None, None
    if count <= PARETO:
        front, points = timed(lambda: len(pareto(graph, model=model)))
    return {
        "calls": count,
        "model": model,
        "first_cpu_seconds": first,
        "half_cpu_seconds": second,
        "pareto_cpu_seconds": front,
        "points": points,
        "least_share_percent": round(100 * least.peak_bytes / whole.peak_bytes, 2),
    }


def timed(ask: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = ask()
    return time.process_time() - start, found


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A short chain.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here.")
def main(quick: bool, path: Path | None) -> None:
    counts = (120,) if quick else COUNTS
    rows = [measure(count, model) for count in counts for model in MODELS]
    common.show(
        "planning a chain of calls, processor time",
        ("calls", "model", "first plan s", "another s", "pareto s", "points", "least"),
        [
            (
                row["calls"],
                row["model"],
                f"{row['first_cpu_seconds']:.2f}",
                f"{row['half_cpu_seconds']:.2f}",
                None if row["points"] is None else f"{row['pareto_cpu_seconds']:.2f}",
                row["points"],
                f"{row['least_share_percent']:.1f} %",
            )
            for row in rows
        ],
    )
    if path is not None:
        content = common.report(
            "planner_speed", QUESTION, rows, simulated=False, options={"quick": quick}
        )
        common.write_json(path, content)


if __name__ == "__main__":
    main()
