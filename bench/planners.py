"""How much memory do the planners of recomputation save?

First on the seven networks of the published table (Kusumoto et al., NeurIPS 2019, table 1), beside
it: traced at one image, scaled to the table's batch, parameters included, peaks by the referee
with liveness. Under the paper's model the plans are those of least budget, the better of both
objectives. Then, on graphs of up to 40 nodes and 200 random ones of up to 24, against the optimum
of an integer programme (Checkmate, MLSys 2020) under the same rules.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import common
from checkmate import least_budget, optimum
from published_networks import NETWORKS, Network, graph_of
from report_tables import Column, Row, Table, counted, percent, quantity, span, text
from small_graphs import random_graphs, small_graphs

from umem.errors import GraphError
from umem.planner import Graph, min_budget, plan, simulate

GB = 1e9
MODELS = ("kusumoto", "saved")
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
            if method != "lower_sets_exact" or model == "kusumoto" or exact_tape:
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
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    found = {
        source: span((below(row, source, "approx") or 0 for row in rows), percent)
        for source in SOURCES
    }
    return (
        f"The least peak of the approximate family is {found['saved']} below keeping all under "
        f"the tape's model and {found['kusumoto']} under the paper's, where {found['published']} "
        f"are published, over {len(rows)} networks."
    )


SOURCES = {"published": "published", "kusumoto": "paper's model", "saved": "tape's model"}
PUBLISHED_KEEP_ALL = {network.name: network.published[3] for network in NETWORKS}
BENCH = common.Bench("planners", __doc__, answer, tables=by_family)


# -- against the optimum -----------------------------------------------------------------------


def optimum_rows(name: str, graph: Graph, seconds: float) -> list[dict[str, Any]]:
    """Our overhead and the least there is, at three budgets between the least and keeping all."""
    low = min_budget(graph, "lower_sets", model="saved")
    high = plan(graph, None, "store_all", model="saved").peak_bytes
    budgets = [int(low + share * (high - low)) for share in (0.0, 0.25, 0.5)]
    return [optimum_row(name, graph, budget, seconds) for budget in budgets]


def random_rows(name: str, graph: Graph, seconds: float) -> list[dict[str, Any]]:
    """The same at a random budget, with the least budget beside the programme's."""
    ours = min_budget(graph, model="saved")
    in_order = plan(graph, None, "rematerialize", model="saved")
    best = least_budget(graph, in_order, seconds)
    high = plan(graph, None, "store_all", model="saved").peak_bytes
    low = round(best.least) if best.status == "optimal" and best.least else ours
    budget = max(ours, int(low + random.Random(name).random() * (high - low)))
    row = optimum_row(name, graph, budget, seconds)
    least = {"least": ours, "least_optimum": best.least, "least_status": best.status}
    return [{**row, **least}]


def optimum_row(name: str, graph: Graph, budget: int, seconds: float) -> dict[str, Any]:
    """Compare a plan with the optimum that a solver finds in some seconds."""
    start = time.process_time()
    ours = plan(graph, budget, model="saved")
    cpu_seconds = time.process_time() - start
    done = simulate(graph, ours, budget_bytes=budget)
    start = time.perf_counter()
    best = optimum(graph, ours, budget, seconds)
    if best.bound > done.overhead + 1e-6:
        raise RuntimeError(f"{name}: {done.overhead} is below the optimum, {best.bound}")
    return {
        "graph": name,
        "nodes": len(graph),
        "budget": budget,
        "keep_all": plan(graph, None, "store_all", model="saved").peak_bytes,
        "method": ours.method,
        "overhead": done.overhead,
        "optimum": best.least,
        "bound": best.bound,
        "status": best.status,
        "forward": sum(n.cost for n in graph.nodes),
        "cpu_seconds": cpu_seconds,
        "seconds": time.perf_counter() - start,
    }


def optimum_answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    proved = [row for row in rows if row["status"] == "optimal"]
    same = sum(row["overhead"] <= row["optimum"] + 1e-6 for row in proved)
    near = sum(row["overhead"] <= 1.05 * row["optimum"] + 1e-6 for row in proved)
    apart = [row["overhead"] / row["optimum"] - 1 for row in proved if row["optimum"] > 1e-6]
    least = [
        row["least"] / row["least_optimum"] - 1
        for row in rows
        if row.get("least_status") == "optimal"
    ]
    again = statistics.median([row["overhead"] / row["forward"] for row in proved] or [0])
    limit = statistics.median([row["budget"] / row["keep_all"] for row in proved] or [0])
    beside = f", and none of {len(least)} least budgets more than {percent(max(0.0, *least))}"
    return (
        f"Of {len(rows)} programmes {len(proved)} were solved, of which {same} have the optimum as "
        f"their plan and {near} a plan within 5 % of it; none is more than "
        f"{percent(max(apart, default=0))} above it{beside if least else ''}, where at the median "
        f"{percent(again)} of forward run again in {percent(limit)} of the bytes of keeping all."
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
        quantity("planning", "cpu_seconds", "CPU s"),
        quantity("solving", "seconds", "s"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network and two small graphs.")
@click.option("--network", "names", multiple=True, type=click.Choice([n.name for n in NETWORKS]))
@click.option("--optimum-only", is_flag=True, help="Only the comparison with the optimum.")
@click.option("--random", "random_count", default=200, show_default=True, help="Random graphs.")
@click.option("--seconds", default=60.0, show_default=True, help="For each integer programme.")
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    optimum_only: bool,
    random_count: int,
    seconds: float,
    path: Path | None,
) -> None:
    """Measure, print the tables, and write the result."""
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
        for name, graph in random_graphs(3 if quick else random_count):
            compared += random_rows(name, graph, min(seconds, 5) if quick else seconds)
        beside = path and path.with_name(f"{path.stem}-optimum.json")
        OPTIMUM.finish(compared, beside, simulated=True, options=options)


if __name__ == "__main__":
    main()
