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
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import common
from planning.checkmate import optimum
from planning.networks import NETWORKS, Network, graph_of

from umem.errors import GraphError
from umem.planner import Graph, Node, min_budget, plan, simulate

GB = 1e9
METHODS = {"approx": "lower_sets", "exact": "lower_sets_exact", "chen": "chen"}


# -- the published table -----------------------------------------------------------------------


def network_row(network: Network, *, exact_tape: bool) -> dict[str, Any]:
    """One network: peaks in GB, and times of a step without recomputation being 1."""
    graph, parameter_bytes = graph_of(network)
    total = sum(node.cost for node in graph.nodes)
    row: dict[str, Any] = {
        "network": network.name, "batch": network.batch, "pixels": network.pixels,
        "nodes": len(graph), "nodes_published": network.node_count,
        "parameters_gb": parameter_bytes / GB,
    }  # fmt: skip
    for model in ("paper", "saved"):
        keep = simulate(graph, plan(graph, None, "store_all", model=model)).peak_bytes
        row[f"{model}_keep_all_gb"] = (keep + parameter_bytes) / GB
    row["published_keep_all_gb"] = network.published[3]
    published = dict(zip(METHODS, network.published, strict=False))
    for name, method in METHODS.items():
        row[f"published_{name}_gb"] = published[name]
        for model in ("paper", "saved"):
            if method == "lower_sets_exact" and model == "saved" and not exact_tape:
                continue
            peak, overhead, seconds = least(graph, method, model)
            key = f"{model}_{name}"
            row[f"{key}_gb"] = None if peak is None else (peak + parameter_bytes) / GB
            row[f"{key}_overhead"] = None if peak is None else overhead / total
            row[f"{key}_seconds"] = seconds
    return row


def least(graph: Graph, method: str, model: str) -> tuple[int | None, float, float]:
    """The least peak that the referee finds, its overhead, and the seconds that planning took."""
    found: list[tuple[int, float]] = []
    start = time.perf_counter()
    for objective in ("time", "memory"):
        try:
            best = plan(graph, None, method, objective, model)
        except GraphError:  # too many lower sets
            return None, 0, 0
        if objective == "time":
            seconds = time.perf_counter() - start
        done = simulate(graph, best)
        found.append((done.peak_bytes, done.overhead))
    return *min(found), seconds


def show_networks(rows: list[dict[str, Any]]) -> None:
    def cell(row: dict[str, Any], model: str, name: str) -> str | None:
        peak = row.get(f"{model}_{name}_gb")
        if peak is None:
            return None
        return f"{peak:.1f} ({peak / row[f'{model}_keep_all_gb'] - 1:.0%})"

    def published(row: dict[str, Any], name: str) -> str:
        peak = row[f"published_{name}_gb"]
        return f"{peak:.1f} ({peak / row['published_keep_all_gb'] - 1:.0%})"

    for name in METHODS:
        common.show(
            f"least peak in GB, {name} (below keeping all)",
            ("network", "#V", "published", "paper's model", "tape's model", "T+ paper", "T+ tape",
             "s paper", "s tape"),
            [
                (row["network"], row["nodes"], published(row, name), cell(row, "paper", name),
                 cell(row, "saved", name), *(_short(row.get(f"{model}_{name}_{what}"))
                 for what in ("overhead", "seconds") for model in ("paper", "saved")))
                for row in rows
            ],
        )  # fmt: skip


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


# -- against the optimum -----------------------------------------------------------------------


def small_graphs(quick: bool) -> dict[str, Graph]:
    """Graphs of up to 40 nodes."""
    found = {"chain of 8": chain(8), "random of 8": scattered(8)}
    if not quick:
        found |= {
            "chain of 16": chain(16), "random of 12": scattered(12), "residual of 18": residual(6),
            "U of 15": u_shape(3), "random of 24": scattered(24), "chain of 40": chain(40),
            "residual of 39": residual(13), "random of 40": scattered(40),
        }  # fmt: skip
    return found


def chain(count: int) -> Graph:
    names = [f"n{v}" for v in range(count)]
    nodes = [Node(name, 4 + v % 3, 10 if v % 2 else 1) for v, name in enumerate(names)]
    return Graph(nodes, list(pairwise(names)))


def scattered(count: int) -> Graph:
    source = random.Random(count)
    edges = {(v - 1, v) for v in range(1, count)}
    edges |= {(source.randrange(max(0, v - 5), v), v) for v in range(1, count)}
    nodes = [Node(f"n{v}", source.randrange(1, 10), source.choice((1, 1, 10)))
             for v in range(count)]  # fmt: skip
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
        rows.append({
            "graph": name, "nodes": len(graph), "budget": budget, "keep_all": high,
            "method": ours.method, "overhead": done.overhead, "optimum": best.overhead,
            "bound": best.bound, "status": best.status, "forward": sum(n.cost for n in graph.nodes),
            "seconds": time.perf_counter() - start,
        })  # fmt: skip
    return rows


def show_optimum(rows: list[dict[str, Any]]) -> None:
    common.show(
        "overhead against the optimum (same budget, same rules; the step's forward is 'forward')",
        ("graph", "budget", "keep all", "forward", "ours", "found", "bound", "", "s"),
        [
            (row["graph"], row["budget"], row["keep_all"], row["forward"], f"{row['overhead']:g}",
             _short(row["optimum"]), _short(row["bound"]), row["status"], _short(row["seconds"]))
            for row in rows
        ],
    )  # fmt: skip


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network and two small graphs.")
@click.option("--network", "names", multiple=True, type=click.Choice([n.name for n in NETWORKS]))
@click.option("--optimum-only", is_flag=True, help="Only the comparison with the optimum.")
@click.option("--seconds", default=30.0, show_default=True, help="For each integer programme.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here.")
def main(
    quick: bool, names: tuple[str, ...], optimum_only: bool, seconds: float, path: Path | None
) -> None:
    chosen = names or (("GoogLeNet",) if quick else tuple(n.name for n in NETWORKS))
    rows = []
    for network in NETWORKS if not optimum_only else ():
        if network.name in chosen:
            rows.append(network_row(network, exact_tape=not quick))
    if rows:
        show_networks(rows)
    compared: list[dict[str, Any]] = []
    for name, graph in small_graphs(quick).items() if not names else ():
        compared += optimum_rows(name, graph, min(seconds, 5) if quick else seconds)
    if compared:
        show_optimum(compared)
    if path is not None:
        options = {"quick": quick, "networks": list(chosen), "seconds": seconds}
        question = (__doc__ or "").split("\n\n")[0]
        common.write_json(path, common.report(
            "planners", question, rows or compared, simulated=True, options=options,
            optimum=compared,
        ))  # fmt: skip


if __name__ == "__main__":
    main()
