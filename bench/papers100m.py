"""How much of ogbn-papers100M would a rank send the others in a step?

The graph has 111,059,956 nodes, 1,615,685,872 directed edges, 128 features and 172 classes (Hu et
al., "Open Graph Benchmark", NeurIPS 2020). A graph network of 3 layers of 128 takes each edge in
both directions. What nobody knows before the graph is cut is its halo, the rows that a rank gets
for each of its own: it is given as a range, between a graph of communities with 2% of ties across
and R-MAT, both with as many neighbours a node, cut into 128 parts here. The bytes are those of the
rank that sends most, taken to the nodes of the large graph, and so simulated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import umem.chainer  # isort: skip
import click
import common
import numpy as np
from report_tables import Row, counted, listed, quantity, span, text

from umem.graphs import Graph, HaloPlan, communities, cut, halo_plan, open_cut, rmat

NODES, EDGES = 111_059_956, 1_615_685_872
FEATURES, CLASSES, HIDDEN = 128, 172, 128
PARTS = 128
RANKS = (32, 64, 128)


def graphs(quick: bool) -> dict[str, Callable[[], Graph]]:
    """What makes the graphs between whose halos that of the large one is taken to be."""
    nodes = 4_000 if quick else 200_000
    ties = nodes * EDGES // NODES
    return {
        "communities": lambda: communities(nodes, PARTS, ties, 0.02, features=1),
        "R-MAT": lambda: rmat(nodes, ties, 1, 2),
    }


def widths() -> list[int]:
    """The columns of each exchange of a step, with the features in memory."""
    model = umem.chainer.ParallelGCN(None, FEATURES, HIDDEN, CLASSES)
    return model.exchanged_widths(np.empty((0, FEATURES), np.float32))


def rows_of(like: str, graph: Graph) -> list[Row]:
    """A row for each number of ranks."""
    with tempfile.TemporaryDirectory() as place:
        cut(graph, PARTS, Path(place, "cut"))
        opened = open_cut(Path(place, "cut"))
        return [_row(like, halo_plan(opened, ranks), sum(opened.nodes)) for ranks in RANKS]


def _row(like: str, plan: HaloPlan, nodes: int) -> Row:
    ranks, columns = len(plan.ranks), widths()
    most = max(plan.sent_bytes(rank, columns) for rank in range(ranks))
    return {
        "like": like,
        "ranks": ranks,
        "halo": int(plan.rows.sum()) / nodes,
        "sent_gib": most * NODES / nodes / 2**30,
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    found = [
        f"{span(row['sent_gib'] for row in rows if row['ranks'] == ranks)} GiB on {ranks} ranks"
        for ranks in sorted({row["ranks"] for row in rows})
    ]
    return f"The rank that sends most sends {listed(found)}, by the halo of one graph or the other."


COLUMNS = (
    text("halo as of", "like"),
    counted("ranks", "ranks"),
    quantity("rows a row", "halo"),
    quantity("most sent a step", "sent_gib", "GiB"),
)
BENCH = common.Bench("papers100m", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Graphs of a fiftieth of the size.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    rows = [row for like, make in graphs(quick).items() for row in rows_of(like, make())]
    BENCH.finish(rows, path, simulated=True, options={"quick": quick, "parts": PARTS})


if __name__ == "__main__":
    main()
