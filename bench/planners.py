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
MODELS = ("paper", "saved")
METHODS = {"approx": "lower_sets", "exact": "lower_sets_exact", "chen": "chen"}


# -- the published table -----------------------------------------------------------------------


def network_row(network: Network, *, exact_tape: bool) -> dict[str, Any]:
    """One network: peaks in GB as text for a reader, and all figures."""
    graph, parameter_bytes = graph_of(network)
    figures: dict[str, Any] = {
        "batch": network.batch,
        "pixels": network.pixels,
        "nodes_published": network.node_count,
        "parameter_bytes": parameter_bytes,
        "forward_cost": sum(n.cost for n in graph.nodes),
    }
    row: dict[str, Any] = {"network": network.name, "#V": len(graph), "figures": figures}
    for model in MODELS:
        keep = simulate(graph, plan(graph, None, "store_all", model=model)).peak_bytes
        figures[f"{model}_keep_all_gb"] = (keep + parameter_bytes) / GB
    published = dict(zip(METHODS, network.published, strict=False))
    for name, method in METHODS.items():
        figures[f"published_{name}_gb"] = published[name]
        row[f"{name}, published"] = text(published[name], network.published[3])
        for model, shown in (("paper", "paper's model"), ("saved", "tape's model")):
            found = None
            if method != "lower_sets_exact" or model == "paper" or exact_tape:
                found = least(graph, method, model)
            row[f"{name}, {shown}"] = None
            if found is not None:
                peak = (found["peak_bytes"] + parameter_bytes) / GB
                row[f"{name}, {shown}"] = text(peak, figures[f"{model}_keep_all_gb"])
                figures |= {f"{model}_{name}_{key}": value for key, value in found.items()}
                figures[f"{model}_{name}_gb"] = peak
    row["CPU s, paper's"] = round(figures["paper_approx_cpu_seconds"], 2)
    row["CPU s, tape's"] = round(figures["saved_approx_cpu_seconds"], 2)
    return row


def text(peak: float, keep_all: float) -> str:
    return f"{peak:.1f} ({peak / keep_all - 1:.0%})"


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


def show_networks(rows: list[dict[str, Any]]) -> None:
    for name in METHODS:
        common.show(
            f"{name}: least peak in GB (below keeping all); cost of what runs again, of forward's",
            (
                "network",
                "#V",
                "published",
                "paper's model",
                "again",
                "tape's model",
                "again",
                "CPU s, paper's",
                "CPU s, tape's",
            ),
            [
                (
                    row["network"],
                    row["#V"],
                    row[f"{name}, published"],
                    row[f"{name}, paper's model"],
                    share(row["figures"], f"paper_{name}"),
                    row[f"{name}, tape's model"],
                    share(row["figures"], f"saved_{name}"),
                    *(short(row["figures"].get(f"{model}_{name}_cpu_seconds")) for model in MODELS),
                )
                for row in rows
            ],
        )


def share(figures: dict[str, Any], key: str) -> str | None:
    overhead = figures.get(f"{key}_overhead")
    return None if overhead is None else f"{overhead / figures['forward_cost']:.0%}"


def short(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


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


def show_optimum(rows: list[dict[str, Any]]) -> None:
    common.show(
        "overhead against the optimum (same budget, same rules; the step's forward is 'forward')",
        ("graph", "budget", "keep all", "forward", "ours", "found", "bound", "", "s"),
        [
            (
                row["graph"],
                row["budget"],
                row["keep_all"],
                row["forward"],
                f"{row['overhead']:g}",
                short(row["optimum"]),
                short(row["bound"]),
                row["status"],
                short(row["seconds"]),
            )
            for row in rows
        ],
    )


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network and two small graphs.")
@click.option("--network", "names", multiple=True, type=click.Choice([n.name for n in NETWORKS]))
@click.option("--optimum-only", is_flag=True, help="Only the comparison with the optimum.")
@click.option("--seconds", default=30.0, show_default=True, help="For each integer programme.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write here.")
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
    if path is None:
        return
    options = {"quick": quick, "networks": list(chosen), "seconds": seconds}
    if rows:
        question = (__doc__ or "").split("\n\n")[0]
        common.write_json(
            path, common.report("planners", question, rows, simulated=True, options=options)
        )
    if compared:
        question = "How far are the tape's plans from the optimum of an integer programme?"
        common.write_json(
            path.with_name(f"{path.stem}-optimum.json"),
            common.report("planners", question, compared, simulated=True, options=options),
        )


if __name__ == "__main__":
    main()
