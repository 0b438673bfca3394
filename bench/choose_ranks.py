"""Does `umem ranks` say beforehand what each rank of a graph in parts needs and sends?

A step of a graph network of 3 layers of 64, with Adam, is recorded in one process on a whole graph
that is cut into 12 parts; from that and the files of the cut follow the peak of the largest of 2
and of 4 ranks and the bytes that each sends. Then so many ranks train, on NumPy: peaks are of all
arrays above weights and optimizer state, by tracemalloc, bytes what was given to MPI. Nothing was
fitted to the graph that is held back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import umem.chainer  # isort: skip
import chainer
import click
import common
import numpy as np
from parallel_graph import PARTS, ranks
from report_tables import Column, Row, counted, figure, percent, quantity, text

import umem
from umem.graphs import Graph, PlannedCut, communities, cut, rmat

COUNTS = (2, 4)
WITHIN = 0.05
UPDATES = 2
HIDDEN = 64


def graphs(quick: bool) -> dict[str, Any]:
    """What makes each graph."""
    by = 50 if quick else 1
    nodes, ties = 200_000 // by, 1_000_000 // by
    return {
        "communities": lambda: communities(nodes, 40, ties, 0.02),
        "R-MAT": lambda: rmat(nodes, ties, 64, 16),
        "held back": lambda: communities(
            120_000 // by, 25, 900_000 // by, 0.15, 7, features=48, classes=10
        ),
    }


def recorded(folder: Path, hidden: int = HIDDEN) -> umem.Trace:
    """A step in one process, with its workspace."""
    graph = umem.chainer.ParallelGraph(folder)
    np.random.seed(0)
    model = umem.chainer.ParallelGCN(None, graph.feature_count, hidden, graph.class_count)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    features, labels = graph.load_features(), graph.labels_where(graph.train_mask)

    def step() -> None:
        optimizer.update(lambda: graph.cross_entropy(model(graph, features), labels))

    step()
    with umem.record() as timed:
        step()
    with umem.record(measure="workspace") as calibrated:
        step()
    return timed.trace.with_workspace(calibrated.trace)


def kept_bytes(trace: umem.Trace) -> int:
    """Bytes of weights and of the optimizer's state, which the measured peaks leave out."""
    allocs = [event for event in trace.events if isinstance(event, umem.trace.Alloc)]
    return sum(alloc.nbytes for alloc in allocs if alloc.kind in ("parameter", "state"))


def measure(name: str, graph: Graph) -> list[Row]:
    """A row for each number of ranks."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "cut")
        cut(graph, PARTS, folder)
        trace = recorded(folder)
        planned = PlannedCut(folder)
        choice = umem.choose_ranks(trace, COUNTS, "v100-16gb", "nvlink", cut=planned, correct="off")
        found = ranks((1, *COUNTS), folder, Path(place, "trained"), UPDATES, 0)
    rows = []
    for step in choice.steps:
        these = [each["trained"][str(step.ranks)] for each in found[: step.ranks]]
        peak = max(one["peak_bytes"] for one in these)
        said = step.peak_bytes - kept_bytes(trace)
        sent = [set(one["sent_bytes"]) for one in these]
        rows.append(
            {
                "graph": name,
                "ranks": step.ranks,
                "said_mb": said / 1e6,
                "peak_mb": peak / 1e6,
                "off": said / peak - 1,
                "sent_mb": sum(step.sent_bytes) / 1e6,
                "bytes_exact": "yes" if sent == [{n} for n in step.sent_bytes] else "no",
            }
        )
    return rows


def answer(result: common.Result) -> str:
    rows = result["rows"]
    within = sum(abs(row["off"]) <= WITHIN for row in rows)
    exact = sum(row["bytes_exact"] == "yes" for row in rows)
    worst = max(rows, key=lambda row: abs(row["off"]))
    return (
        f"The peak was within {percent(WITHIN)} in {within} of {len(rows)} runs, at worst "
        f"{percent(worst['off'], signed=True)} ({worst['graph']}, {worst['ranks']} ranks, "
        f"{figure(worst['peak_mb'])} MB), and the bytes sent were exact in {exact}."
    )


COLUMNS = (
    text("graph", "graph"),
    counted("ranks", "ranks"),
    quantity("peak as said", "said_mb", "MB"),
    quantity("measured", "peak_mb", "MB"),
    Column("off by", "off", write=lambda share: percent(share, signed=True)),
    quantity("sent a step", "sent_mb", "MB"),
    text("bytes exact", "bytes_exact"),
)
BENCH = common.Bench("choose_ranks", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Graphs of a fiftieth of the size.")
@click.option("--only", multiple=True, type=click.Choice(list(graphs(True))), help="These only.")
@common.json_option
def main(quick: bool, only: tuple[str, ...], path: Path | None) -> None:
    common.writable(path)
    rows: list[Row] = []
    for name, make in graphs(quick).items():
        if not only or name in only:
            rows += measure(name, make())
    BENCH.finish(rows, path, simulated=False, options={"quick": quick, "parts": PARTS})


if __name__ == "__main__":
    main()
