"""How much memory do the planners of recomputation save?

First on the seven networks of the published table (Kusumoto et al., NeurIPS 2019, table 1), beside
it: traced at one image, scaled to the table's batch, parameters included, peaks by the referee
with liveness. Under the paper's model the plans are those of least budget, the better of both
objectives. Then, on graphs of up to 40 nodes, against the optimum of an integer programme
(Checkmate, MLSys 2020) under the same rules.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import common
from checkmate import optimum
from published_networks import NETWORKS, Network, graph_of
from report_tables import Column, Row, Table, counted, percent, quantity, span, text

from umem.errors import GraphError
from umem.planner import Graph, Node, min_budget, plan, simulate

GB = 1e9
MODELS = ("paper", "saved")
METHODS = {"approx": "lower_sets", "exact": "lower_sets_exact", "chen": "chen"}
FAMILIES = {"approx": "approximate family", "exact": "exact algorithm", "chen": "Chen's blocks"}


# -- the published table -----------------------------------------------------------------------


def network_row(network: Network, *, exact_tape: bool) -> dict[str, Any]:
    """One network: peaks in GB, overheads, and what planning took."""
    graph, parameter_bytes = graph_of(network)
    figures: dict[str, Any] = {
        "batch": network.batch,
        "pixels": network.pixels,
        "nodes_published": network.node_count,
        "parameter_bytes": parameter_bytes,
        "forward_cost": sum(n.cost for n in graph.nodes),
        "published_keep_all_gb": network.published[3],
    }
    for model in MODELS:
        keep = simulate(graph, plan(graph, None, "store_all", model=model)).peak_bytes
        figures[f"{model}_keep_all_gb"] = (keep + parameter_bytes) / GB
    for (name, method), published in zip(METHODS.items(), network.published, strict=False):
        figures[f"published_{name}_gb"] = published
        for model in MODELS:
            found = None
            if method != "lower_sets_exact" or model == "paper" or exact_tape:
                found = least(graph, method, model)
            if found is not None:
                figures |= {f"{model}_{name}_{key}": value for key, value in found.items()}
                figures[f"{model}_{name}_gb"] = (found["peak_bytes"] + parameter_bytes) / GB
    return {"network": network.name, "#V": len(graph), "figures": figures}


def least(graph: Graph, method: str, model: str) -> dict[str, float] | None:
    """The least peak that the referee finds, its overhead, and what planning took.

    None where there are too many lower sets.
    """
    found: list[tuple[int, float]] = []
    start = time.process_time()
    try:
        plans = [plan(graph, None, method, "time", model)]
        seconds = time.process_time() - start
        plans.append(plan(graph, None, method, "memory", model))
    except GraphError:
        return None
    for candidate in plans:
        done = simulate(graph, candidate)
        found.append((done.peak_bytes, done.overhead))
    peak, overhead = min(found)
    return {
        "peak_bytes": peak,
        "overhead": overhead,
        "budget_bytes": plans[0].peak_bytes,
        "cpu_seconds": seconds,
    }


def below(row: Row, source: str, name: str) -> float | None:
    """How far a least peak is below keeping all, as a share; None where there is none."""
    figures = row["figures"]
    keep = figures.get(f"{source}_keep_all_gb", PUBLISHED_KEEP_ALL.get(row["network"]))
    peak = figures.get(f"{source}_{name}_gb")
    return None if peak is None else 1 - peak / keep


def again(row: Row, source: str, name: str) -> float | None:
    """What runs again, as a share of the forward pass."""
    overhead = row["figures"].get(f"{source}_{name}_overhead")
    return None if overhead is None else overhead / row["figures"]["forward_cost"]


def _of(what: str, model: str, name: str) -> Callable[[Row], Any]:
    return lambda row: row["figures"].get(f"{model}_{name}_{what}")


def by_family(result: common.Result) -> Iterator[Table]:
    """Make a table a family of plans: published, the paper's model, the tape's model."""
    for name, title in FAMILIES.items():
        columns: list[Column] = [text("network", "network"), counted("calls", "#V")]
        for source, words in SOURCES.items():
            gb = _of("gb", source, name)
            share = partial(below, source=source, name=name)
            columns.append(quantity(f"{words}: peak", gb, "GB"))
            columns.append(quantity("below keeping all", share, "%", per=0.01, places=0))
            if source != "published":
                ran = partial(again, source=source, name=name)
                columns.append(quantity("runs again", ran, "% of forward", per=0.01, places=0))
                cpu = _of("cpu_seconds", source, name)
                columns.append(quantity("planning", cpu, "CPU s", places=2))
        yield Table(columns, result["rows"], title)


def answer(result: common.Result) -> str:
    rows = result["rows"]
    found = {
        source: span((below(row, source, "approx") or 0 for row in rows), percent)
        for source in SOURCES
    }
    return (
        f"The least peak of the approximate family is {found['saved']} below keeping all under "
        f"the tape's model and {found['paper']} under the paper's, where {found['published']} are "
        f"published, over {len(rows)} networks."
    )


SOURCES = {"published": "published", "paper": "paper's model", "saved": "tape's model"}
PUBLISHED_KEEP_ALL = {network.name: network.published[3] for network in NETWORKS}
BENCH = common.Bench("planners", __doc__, answer, tables=by_family)


# -- against the optimum -----------------------------------------------------------------------


def small_graphs(quick: bool) -> dict[str, Graph]:
    """Graphs of up to 40 nodes."""
    found = {"chain of 8": chain(8), "random of 8": scattered(8)}
    if not quick:
        found |= {
            "chain of 16": chain(16),
            "random of 12": scattered(12),
            "residual of 18": residual(6),
            "U of 15": u_shape(3),
            "random of 24": scattered(24),
            "chain of 40": chain(40),
            "residual of 39": residual(13),
            "random of 40": scattered(40),
        }
    return found


def chain(count: int) -> Graph:
    names = [f"n{v}" for v in range(count)]
    nodes = [Node(name, 4 + v % 3, 10 if v % 2 else 1) for v, name in enumerate(names)]
    return Graph(nodes, list(pairwise(names)))


def scattered(count: int) -> Graph:
    source = random.Random(count)
    edges = {(v - 1, v) for v in range(1, count)}
    edges |= {(source.randrange(max(0, v - 5), v), v) for v in range(1, count)}
    nodes = [
        Node(f"n{v}", source.randrange(1, 10), source.choice((1, 1, 10))) for v in range(count)
    ]
    return Graph(nodes, [(f"n{x}", f"n{v}") for x, v in sorted(edges)])


def residual(blocks: int) -> Graph:
    """Blocks of a convolution, a sum that nobody saves, and a relu."""
    nodes, edges, last = [], [], None
    for b in range(blocks):
        names = f"conv{b}", f"sum{b}", f"relu{b}"
        nodes += [Node(names[0], 8, 10), Node(names[1], 8, 1, saved=False), Node(names[2], 8, 1)]
        edges += [(names[0], names[1]), (names[1], names[2])]
        edges += [] if last is None else [(last, names[0]), (last, names[1])]
        last = names[2]
    return Graph(nodes, edges)


def u_shape(depth: int) -> Graph:
    """Down and up again, with a skip at each level."""
    down = [(f"down{d}{half}", 16 >> d) for d in range(depth + 1) for half in "ab"]
    up = [(f"{part}{d}", 16 >> d) for d in reversed(range(depth)) for part in ("concat", "up")]
    names = [name for name, _ in (*down, *up)]
    nodes = [Node(name, size, 1 if "concat" in name else 10) for name, size in (*down, *up)]
    edges = list(pairwise(names))
    return Graph(nodes, edges + [(f"down{d}b", f"concat{d}") for d in range(depth)])


def optimum_rows(name: str, graph: Graph, seconds: float) -> list[dict[str, Any]]:
    """Our overhead and the least there is, at three budgets between the least and keeping all."""
    low = min_budget(graph, model="saved")
    high = plan(graph, None, "store_all", model="saved").peak_bytes
    rows = []
    for share in (0.0, 0.25, 0.5):
        budget = int(low + share * (high - low))
        ours = plan(graph, budget, model="saved")
        done = simulate(graph, ours, budget_bytes=budget)
        start = time.perf_counter()
        best = optimum(graph, ours, budget, seconds)
        if best.bound > done.overhead + 1e-6:
            raise RuntimeError(f"{name}: {done.overhead} is below the optimum, {best.bound}")
        rows.append(
            {
                "graph": name,
                "nodes": len(graph),
                "budget": budget,
                "keep_all": high,
                "method": ours.method,
                "overhead": done.overhead,
                "optimum": best.overhead,
                "bound": best.bound,
                "status": best.status,
                "forward": sum(n.cost for n in graph.nodes),
                "seconds": time.perf_counter() - start,
            }
        )
    return rows


def optimum_answer(result: common.Result) -> str:
    rows = result["rows"]
    proved = [row for row in rows if row["status"] == "optimal"]
    same = sum(row["overhead"] <= row["optimum"] + 1e-6 for row in proved)
    apart = [(row["overhead"] - row["optimum"]) / row["forward"] for row in proved]
    return (
        f"Of {len(rows)} programmes {len(proved)} were solved, of which {same} have the optimum as "
        f"their plan, and none is more than {percent(max(apart, default=0))} of a forward pass "
        "above it."
    )


OPTIMUM = common.Bench(
    "planners-optimum",
    "How far are the tape's plans from the optimum of an integer programme?",
    optimum_answer,
    (
        text("graph", "graph"),
        counted("budget", "budget"),
        counted("keeping all", "keep_all"),
        quantity("forward", "forward", "cost"),
        quantity("ours", "overhead", "cost"),
        quantity("optimum", "optimum", "cost"),
        quantity("bound", "bound", "cost"),
        text("programme", "status"),
        quantity("solving", "seconds", "s"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network and two small graphs.")
@click.option("--network", "names", multiple=True, type=click.Choice([n.name for n in NETWORKS]))
@click.option("--optimum-only", is_flag=True, help="Only the comparison with the optimum.")
@click.option("--seconds", default=30.0, show_default=True, help="For each integer programme.")
@common.json_option
def main(
    quick: bool, names: tuple[str, ...], optimum_only: bool, seconds: float, path: Path | None
) -> None:
    chosen = names or (("GoogLeNet",) if quick else tuple(n.name for n in NETWORKS))
    options = {"quick": quick, "networks": list(chosen), "seconds": seconds}
    if not optimum_only:
        networks = [network for network in NETWORKS if network.name in chosen]
        rows = [network_row(network, exact_tape=not quick) for network in networks]
        BENCH.finish(rows, path, simulated=True, options=options)
    if not names:
        compared: list[dict[str, Any]] = []
        for name, graph in small_graphs(quick).items():
            compared += optimum_rows(name, graph, min(seconds, 5) if quick else seconds)
        beside = path and path.with_name(f"{path.stem}-optimum.json")
        OPTIMUM.finish(compared, beside, simulated=True, options=options)


if __name__ == "__main__":
    main()
