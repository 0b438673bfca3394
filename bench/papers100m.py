"""What would ogbn-papers100M take on 64 GPUs, as far as a model can say before they are rented?

The graph has 111,059,956 nodes, 1,615,685,872 directed edges, 128 features and 172 classes (Hu et
al., "Open Graph Benchmark", NeurIPS 2020). A graph network of 3 layers of 128, with Adam, takes
each edge in both directions. Its step is recorded on a small graph and taken to a rank's share;
parts are taken to be equal. What nobody knows before the graph is cut is its halo, the rows that a
rank gets for each of its own: it is given as a range, between a graph of communities with 2% of
ties across and R-MAT, both with as many neighbours a node, cut into 64 parts here. All times,
peaks and bytes are simulated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import umem.chainer  # isort: skip
import chainer
import click
import common
import numpy as np
from report_tables import Row, counted, figure, quantity, text

import umem
from umem.graphs import Graph, PlannedCut, communities, cut, rmat

NODES, EDGES = 111_059_956, 1_615_685_872
FEATURES, CLASSES, HIDDEN = 128, 172, 128
PARTS = 64
PLACES = (
    ("v100-16gb", "100gbe"),
    ("v100-32gb", "100gbe"),
    ("a100-40gb", "100gbe"),
    ("h100-sxm", "100gbe"),
)
RANKS = (32, 64, 128)
"""On the first of the places; on the others 64."""


@dataclass(frozen=True)
class EvenRows:
    """Every rank needs as many rows of every other part."""

    rows: np.ndarray
    ranks: tuple[range, ...]


class EvenParts:
    """A graph in equal parts, one a rank, of which a rank gets so many rows for each of its own."""

    def __init__(self, parts: int, halo: float) -> None:
        self._halo = halo
        self.nodes = (-(-NODES // parts),) * parts
        self.entries = (-(-(2 * EDGES + NODES) // parts),) * parts

    def plan(self, ranks: int) -> EvenRows:
        """Only for as many ranks as parts."""
        assert ranks == len(self.nodes)
        rows = np.full((ranks, ranks), round(self._halo * self.nodes[0] / (ranks - 1)))
        np.fill_diagonal(rows, 0)
        return EvenRows(rows, tuple(range(rank, rank + 1) for rank in range(ranks)))


def graphs(quick: bool) -> dict[str, Callable[[], Graph]]:
    """What makes the graphs between whose halos that of the large one is taken to be."""
    nodes = 4_000 if quick else 200_000
    ties = nodes * EDGES // NODES
    return {
        "communities": lambda: communities(nodes, PARTS, ties, 0.02, features=1),
        "R-MAT": lambda: rmat(nodes, ties, 1, 2),
    }


def halo(graph: Graph) -> float:
    """Rows that ranks get, over the rows that they have."""
    with tempfile.TemporaryDirectory() as place:
        cut(graph, PARTS, Path(place, "cut"))
        planned = PlannedCut(Path(place, "cut"))
        return int(planned.plan(PARTS).rows.sum()) / sum(planned.nodes)


def recorded(folder: Path) -> umem.Trace:
    """Record a step in one process, with its workspace."""
    graph = umem.chainer.ParallelGraph(folder)
    np.random.seed(0)
    model = umem.chainer.ParallelGCN(None, graph.feature_count, HIDDEN, graph.class_count)
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


def simulated(halos: dict[str, float]) -> list[Row]:
    """A row for each GPU, link and halo."""
    small = communities(6_000, 12, 87_000, 0.02, features=FEATURES, classes=CLASSES)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "cut")
        cut(small, 12, folder)
        trace, of = recorded(folder), PlannedCut(folder)
        return [
            _row(trace, of, place, ranks, like, found)
            for place in PLACES
            for ranks in (RANKS if place == PLACES[0] else (PARTS,))
            for like, found in halos.items()
        ]


def _row(
    trace: umem.Trace, of: PlannedCut, place: tuple[str, str], ranks: int, like: str, halo: float
) -> Row:
    graph = EvenParts(ranks, halo)
    choice = umem.choose_ranks(trace, (ranks,), *place, cut=graph, recorded=of)
    step = choice.steps[0]
    return {
        "gpu": choice.title,
        "link": place[1],
        "ranks": ranks,
        "like": like,
        "halo": halo,
        "peak_gib": step.peak_bytes / 2**30,
        "fits": "yes" if step.fits else "no",
        "sent_gib": max(step.sent_bytes) / 2**30,
        "compute_seconds": step.compute_seconds,
        "exchange_seconds": step.exchange_seconds,
        "sum_seconds": step.sum_seconds,
        "seconds": step.seconds,
    }


def answer(result: common.Result) -> str:
    gpu = result["rows"][0]["gpu"]
    rows = [row for row in result["rows"] if row["gpu"] == gpu]
    numbers = sorted({row["ranks"] for row in rows})
    ranks = numbers[len(numbers) // 2]
    own = [row for row in rows if row["ranks"] == ranks]
    low, high = min(own, key=lambda r: r["seconds"]), max(own, key=lambda r: r["seconds"])
    fit = "fits" if all(row["fits"] == "yes" for row in own) else "does not fit"
    return (
        f"On {ranks} x {gpu} a rank needs {figure(low['peak_gib'])} to "
        f"{figure(high['peak_gib'])} GiB, which {fit}, sends {figure(low['sent_gib'])} to "
        f"{figure(high['sent_gib'])} GiB a step and takes {figure(low['seconds'])} to "
        f"{figure(high['seconds'])} s for it, of which {figure(low['compute_seconds'])} to "
        f"{figure(high['compute_seconds'])} s are computing."
    )


def page_lines(result: common.Result) -> list[str]:
    """The table of docs/scale.md."""
    lines = [
        "| GPU, 100 Gb/s Ethernet | ranks | halo as of | rows a row | peak a rank | sent a step "
        "| computing | halo | a step |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        fits = "" if row["fits"] == "yes" else ", does not fit"
        cells = [row["gpu"], str(row["ranks"]), row["like"], f"{row['halo']:.1f}"]
        cells += [f"{row['peak_gib']:.1f} GiB{fits}", f"{row['sent_gib']:.1f} GiB"]
        times = (row["compute_seconds"], row["exchange_seconds"], row["seconds"])
        lines.append(f"| {' | '.join([*cells, *(f'{seconds:.2f} s' for seconds in times)])} |")
    return lines


COLUMNS = (
    text("GPU", "gpu"),
    text("link", "link"),
    counted("ranks", "ranks"),
    text("halo as of", "like"),
    quantity("rows a row", "halo"),
    quantity("peak", "peak_gib", "GiB"),
    text("fits", "fits"),
    quantity("sent", "sent_gib", "GiB"),
    quantity("computing", "compute_seconds", "s"),
    quantity("halo", "exchange_seconds", "s"),
    quantity("sums", "sum_seconds", "s"),
    quantity("a step", "seconds", "s"),
)
BENCH = common.Bench("papers100m", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="The halo of graphs of a fiftieth of the size.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    halos = {name: halo(make()) for name, make in graphs(quick).items()}
    BENCH.finish(simulated(halos), path, simulated=True, options={"quick": quick, "parts": PARTS})


if __name__ == "__main__":
    main()
