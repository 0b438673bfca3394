"""Does a model in ONNX say as much of a training step as a recording of it?

Thirteen networks are exported from Chainer with train=True, up to where their losses begin, and
recorded on NumPy, taken to a GPU. Compared are the bytes that are kept when backward begins, the
peak with gradients and the optimizer's update but without workspace, and the peaks of the recorded
step under two plans, with the least bytes and with half of what lies between them and a plain step:
made from its own graph, and made from the file's. Then the seconds that graphs of up to 5,000
operators take to be read.

NumPy's transposed convolution leaves its output in a larger array, of which it is a view; CuPy's
does not (chainer/utils/conv.py, col2im_cpu and col2im_gpu), and the recorded step is compared as it
would be on a GPU. onnx_chainer writes
operators by their distance from the inputs, so that GoogLeNet's branches and the words of recurrent
networks come in another order than they ran in, for which plans are made: before plans are
compared, the file's operators are put in the order of the program, by what each reads.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
import onnx
from onnx_parts.exportable import NETWORKS, Network  # before chainer
from onnx_parts.program_order import in_program_order
from onnx_parts.transferred import transferred
from report_tables import Column, Row, Table, counted, percent, quantity, text

import umem
from umem.errors import GraphError
from umem.planner import Graph, Plan
from umem.planner.problem import Problem
from umem.predict.applying import apply
from umem.predict.cupy_differences import on_gpu
from umem.predict.recorded_problem import passes, problems_of
from umem.predict.techniques.steady_state import steady
from umem.trace import Alloc, Event, Free, Op, Trace
from umem.trace.exported import onnx_step
from umem.units import MIB

KEPT, PEAK, PLANNED, SECONDS = 0.02, 0.05, 0.05, 5.0
"""The targets: at most so far apart, and at most so long."""
OPTIMIZERS = {"Adam": "adam", "MomentumSGD": "momentum", "SGD": "sgd"}
QUICK = ("MLP", "autoencoder", "language model")


# -- the two traces --------------------------------------------------------------------------------


def recorded(network: Network) -> Trace:
    """The second step, whose gradients begin at the output."""
    import chainer

    optimizer = getattr(chainer.optimizers, network.optimizer)().setup(network)

    def step() -> None:
        y = network(*network.inputs)
        network.cleargrads()
        y.grad = np.ones_like(y.array)
        y.backward()
        del y
        optimizer.update()

    step()
    with umem.record() as recorder:
        step()
    return on_gpu(recorder.trace)


def exported(network: Network, path: Path) -> None:
    import chainer
    import onnx_chainer

    with warnings.catch_warnings(), chainer.using_config("train", True):
        warnings.simplefilter("ignore")
        onnx_chainer.export(
            network, network.inputs, filename=str(path), train=True, opset_version=11
        )


def without_workspace(trace: Trace) -> Trace:
    def changed(event: Event) -> Event:
        return event._replace(workspace_bytes=0) if isinstance(event, Op) else event

    return trace.map(changed)


def kept_bytes(trace: Trace) -> int:
    """What forward leaves for backward."""
    alive: dict[int, Alloc] = {}
    for event in trace.events:
        if isinstance(event, Alloc):
            alive[event.tensor] = event
        elif isinstance(event, Free):
            alive.pop(event.tensor)
        elif isinstance(event, Op) and event.phase == "backward":
            break
    return sum(a.nbytes for a in alive.values() if a.kind in ("activation", "stash"))


# -- rows ------------------------------------------------------------------------------------------


def plans_of(problem: Problem) -> Iterator[tuple[str, Plan]]:
    least = problem.least()
    middle = (least.peak_bytes + problem.plain_bytes) // 2
    yield "least", least.plan
    yield "middle", problem.within(max(middle, least.peak_bytes)).plan


def planned_peaks(ours: Trace, theirs: Trace) -> dict[str, Any]:
    """Peaks of the recorded step under plans from its own graph and from the file's."""
    ours, theirs = steady(ours, 2), steady(theirs, 2)
    mine, other = next(passes(ours)), next(passes(theirs))
    found: dict[str, Any] = {}
    pairs = zip(plans_of(problems_of(ours)[0]), plans_of(problems_of(theirs)[0]), strict=True)
    for (name, own), (_, from_file) in pairs:
        carried, share = transferred(from_file, other, mine)
        found[f"{name}_own_bytes"] = apply(ours, own).peak_bytes
        found[f"{name}_from_file_bytes"] = carried_out(ours, carried)
        found["matched"] = share
    return found


def carried_out(trace: Trace, plan: Plan) -> int | None:
    """The peak of a step under a plan; None where its calls come in too different an order."""
    try:
        return apply(trace, plan).peak_bytes
    except GraphError:
        return None


def ordered_trace(path: Path, optimizer: Any, ours: Trace) -> Trace:
    """The step of a file whose operators come in the order in which the recorded ones ran."""
    step = onnx_step(path, optimizer=optimizer)
    in_program_order(path, step.names, next(passes(step.trace)), next(passes(ours)))
    return without_workspace(onnx_step(path, optimizer=optimizer).trace)


def network_row(name: str, folder: Path) -> Row:
    np.random.seed(0)
    network = NETWORKS[name]()
    path = folder / "model.onnx"
    exported(network, path)
    start = time.perf_counter()
    optimizer = OPTIMIZERS[network.optimizer]
    file_trace = onnx_step(path, optimizer=optimizer).trace  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    trace, file_trace = without_workspace(recorded(network)), without_workspace(file_trace)
    ordered = ordered_trace(path, optimizer, trace)
    kept, peak = kept_bytes(trace), trace.peak_bytes
    return {
        "table": "networks",
        "network": name,
        "nodes": sum(op.phase == "forward" for op in file_trace.ops),
        "read_seconds": seconds,
        "kept_bytes": kept,
        "kept_from_file_bytes": kept_bytes(file_trace),
        "kept": kept_bytes(file_trace) / kept - 1,
        "peak_bytes": peak,
        "peak_from_file_bytes": file_trace.peak_bytes,
        "peak": file_trace.peak_bytes / peak - 1,
        **planned_peaks(trace, ordered),
    }


def with_ratios(row: Row) -> dict[str, Any]:
    ratios: dict[str, float] = {}
    for name in ("least", "middle"):
        peak = row[f"{name}_from_file_bytes"]
        ratios[name] = inf if peak is None else peak / row[f"{name}_own_bytes"] - 1
    return {**row, **ratios}


def chain_row(count: int, repeats: int, folder: Path) -> Row:
    """So many elementwise operators behind a product: seconds until there is a graph."""
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    kinds = ("Relu", "Neg", "Sigmoid", "Tanh")
    nodes = [helper.make_node("MatMul", ["x", "W"], ["h0"])]
    for n in range(count - 1):
        nodes.append(helper.make_node(kinds[n % 4], [f"h{n}"], [f"h{n + 1}"]))
    weights = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "W")
    ends = [value("x", 1, ["batch", 64])], [value(f"h{count - 1}", 1, ["batch", 64])]
    path = folder / "chain.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", *ends, [weights])), path)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        graph = Graph.from_onnx(path, {"batch": 32})
        seconds.append(time.perf_counter() - start)
    assert len(graph) == count
    return {"table": "lengths", "nodes": count, "seconds": seconds}


# -- what is said ----------------------------------------------------------------------------------


def tables(result: common.Result) -> Iterable[Table]:
    def share(head: str, key: str) -> Column:
        return text(head, lambda row: shown(row[key]))

    networks = [
        text("network", "network"),
        counted("operators", "nodes"),
        quantity("kept, recorded", "kept_bytes", "MiB", per=MIB),
        share("from the file", "kept"),
        quantity("peak, recorded", "peak_bytes", "MiB", per=MIB),
        share("from the file", "peak"),
        quantity("least plan, own", "least_own_bytes", "MiB", per=MIB),
        share("from the file", "least"),
        quantity("middle plan, own", "middle_own_bytes", "MiB", per=MIB),
        share("from the file", "middle"),
        text("calls matched", lambda row: percent(row["matched"])),
    ]
    yield Table(networks, list(map(with_ratios, rows_of(result, "networks"))))
    yield Table(
        [
            counted("operators", "nodes"),
            quantity("read", lambda row: common.summary(row["seconds"]).median, "s"),
        ],
        rows_of(result, "lengths"),
    )


def rows_of(result: common.Result, table: str) -> list[Row]:
    return [row for row in result["rows"] if row["table"] == table]


def shown(ratio: float) -> str:
    return "another order" if ratio == inf else percent(ratio, signed=True)


def answer(result: common.Result) -> str:
    rows = list(map(with_ratios, rows_of(result, "networks")))
    targets = (("kept", KEPT), ("peak", PEAK), ("least", PLANNED), ("middle", PLANNED))
    met = [sum(abs(row[key]) <= target for row in rows) for key, target in targets]
    worst = {key: max(rows, key=lambda row, k=key: abs(row[k])) for key, _ in targets}  # type: ignore[misc]

    def said(key: str) -> str:
        return f"{shown(worst[key][key])} for the {worst[key]['network']}"

    count = len(rows)
    longest = max(rows_of(result, "lengths"), key=lambda row: row["nodes"])
    seconds = common.summary(longest["seconds"]).median
    return (
        f"Of {count} networks {met[0]} keep what was recorded within {percent(KEPT)} (at worst "
        f"{said('kept')}), {met[1]} have its peak within {percent(PEAK)} (at worst "
        f"{said('peak')}), and the recorded step under plans from the file is within "
        f"{percent(PLANNED)} of its own for {met[2]} with the least bytes (at worst "
        f"{said('least')}) and for {met[3]} in the middle (at worst {said('middle')}); "
        f"{longest['nodes']:,} operators are read in {seconds:.2f} s."
    )


BENCH = common.Bench("onnx_graphs", __doc__, answer, tables=tables)


@click.command(help=__doc__)
@click.option("--network", "only", multiple=True, type=click.Choice(list(NETWORKS)))
@click.option("--quick", is_flag=True, help="Three networks, and fewer operators.")
@common.json_option
def main(only: tuple[str, ...], quick: bool, path: Path | None) -> None:
    common.writable(path)
    names = only or (QUICK if quick else tuple(NETWORKS))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows.append(network_row(name, Path(folder)))
        for count in (500,) if quick else (500, 2000, 5000):
            rows.append(chain_row(count, 1 if quick else 5, Path(folder)))
    BENCH.finish(rows, path, simulated=True, options={"quick": quick, "networks": list(names)})


if __name__ == "__main__":
    main()
