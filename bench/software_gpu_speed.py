"""How much slower than NumPy is the real CuPy on the software GPU?

Operations on 1024 x 1024 of float32 and whole steps of training, with every kernel compiled before
and one thread for BLAS. NumPy and CuPy take turns in one process, in processor time; what counts
is the median of the ratios of such pairs. The model of the GPU follows every operation, or is off
(``--no-model`` of `umem run --software`). The kernels of all operations are compiled with an empty
cache first, in the processor time of the compiler.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import importlib
import json
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import figure, quantity, text, verdict

import umem

SIZE = 1024
LIMIT, MEDIAN_LIMIT = 3.0, 1.1
"""Times of NumPy that an operation may take, and that the median of all may."""
COMPILE_LIMIT_SECONDS = 0.4
NODES = 64_000
Call = Callable[[], Any]


# -- operations --------------------------------------------------------------------------------


def operations(xp: Any, arrays: dict[str, Any]) -> dict[str, tuple[str, float, Call]]:
    """By name: the kind of operation, how many times NumPy's time it may take, and itself."""
    x, y, row, column = (arrays[name] for name in ("x", "y", "row", "column"))
    condition, absolute = arrays["positive"], arrays["absolute"]
    order, pairs, out = arrays["order"], arrays["pairs"], arrays["out"]
    rows, columns = arrays["rows"], arrays["columns"]

    def softmax() -> Any:
        e = xp.exp(x - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def add_in_place() -> None:
        xp.add(out, y, out=out)

    found: dict[str, tuple[str, float, Call]] = {}
    elementwise: dict[str, Call] = {
        "add": lambda: x + y,
        "multiply by a number": lambda: x * 2,
        "add in place": add_in_place,
        "add a row": lambda: x + row,
        "add a column": lambda: x + column,
        "divide": lambda: x / y,
        "square root": lambda: xp.sqrt(absolute),
        "maximum": lambda: xp.maximum(x, 0),
        "compare": lambda: x > y,
        "where": lambda: xp.where(condition, x, y),
        "to float64": lambda: x.astype("f8"),
        "to float16": lambda: x.astype("f2"),
    }
    gathers: dict[str, Call] = {
        "copy": lambda: x.copy(),
        "transposed copy": lambda: xp.ascontiguousarray(x.T),
        "every second column": lambda: xp.ascontiguousarray(x[:, ::2]),
        "reversed": lambda: xp.ascontiguousarray(x[::-1, ::-1]),
        "concatenate": lambda: xp.concatenate([x, y]),
        "take rows": lambda: x.take(order, axis=0),
        "take columns": lambda: x.take(order, axis=1),
        "take elements": lambda: x.take(pairs),
        "index rows": lambda: x[order],
        "index columns": lambda: x[:, order],
        "index elements": lambda: x[rows, columns],
        "index by a mask": lambda: x[condition],
    }
    functions: dict[str, Call] = {
        "exp": lambda: xp.exp(x),
        "log": lambda: xp.log(absolute),
        "tanh": lambda: xp.tanh(x),
    }
    for kind, some in (
        ("elementwise", elementwise),
        ("gather and copy", gathers),
        ("function", functions),
    ):
        found.update({name: (kind, LIMIT, call) for name, call in some.items()})
    for name in ("sum", "max", "mean", "var", "argmax"):
        for axis in (None, 0, 1):
            call = _reduction(x, name, axis)
            found[name if axis is None else f"{name}, axis {axis}"] = "reduction", LIMIT, call
    found["softmax"] = "reduction", LIMIT, softmax
    found["chainer.functions.softmax"] = "reduction", LIMIT, _chainer_softmax(x)
    return found


def _reduction(x: Any, name: str, axis: int | None) -> Call:
    method = getattr(x, name)
    return lambda: method(axis=axis)


def _chainer_softmax(x: Any) -> Call:
    import chainer.functions as F

    return lambda: F.softmax(x).array


def inputs() -> dict[str, np.ndarray[Any, Any]]:
    """Make the arrays that operations are given, by name."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((2, SIZE, SIZE), dtype="f4")
    return {
        "x": x,
        "y": y,
        "out": np.zeros_like(x),
        "absolute": np.abs(x) + np.float32(0.1),
        "positive": x > 0,
        "row": y[0].copy(),
        "column": y[:, :1].copy(),
        "order": draw.permutation(SIZE),
        "pairs": draw.integers(0, SIZE * SIZE, SIZE * SIZE),
        "rows": draw.integers(0, SIZE, (SIZE, SIZE)),
        "columns": draw.integers(0, SIZE, (SIZE, SIZE)),
    }


# -- steps -------------------------------------------------------------------------------------


def perceptron(device: Any) -> Call:
    """A step of a perceptron of 6 layers of 1024, batch 256."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    np.random.seed(0)
    model = chainer.Sequential()
    for _ in range(5):
        model.append(L.Linear(SIZE, SIZE))
        model.append(F.relu)
    model.append(L.Linear(SIZE, SIZE))
    model.to_device(device)
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    x = device.send(np.random.rand(256, SIZE).astype("f4"))
    t = device.send(np.random.randint(0, SIZE, 256).astype("i4"))

    def step() -> None:
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()

    return step


def gcn(device: Any, nodes: int = NODES) -> Call:
    """A step of the demo's graph convolution network."""
    import chainer
    import chainer.functions as F

    from umem.chainer import GCN, Adjacency, Workload

    workload = Workload.generate(nodes, 1)
    np.random.seed(0)
    adjacency = Adjacency(workload.adjacency).to_device(device)
    graph = workload.graph
    features, labels = device.send((graph.features, graph.labels_where(graph.train_mask)))
    width = features.shape[1]
    model = GCN(width, width, classes=40, layers=3)
    optimizer = chainer.optimizers.Adam(0.01).setup(model.to_device(device))

    def step() -> None:
        loss = F.softmax_cross_entropy(model(adjacency, features), labels)
        model.cleargrads()
        loss.backward()
        optimizer.update()

    return step


# -- measuring, in a process of its own ----------------------------------------------------------


def pairs(ours: Call, numpys: Call, repeats: int) -> Iterator[tuple[float, float]]:
    """Seconds of both, in turns; a short one several times at once."""
    numpys()
    start = time.thread_time()
    numpys(), ours()
    count = max(1, round(2e-3 / (time.thread_time() - start)))
    gc.disable()
    for turn in range(repeats):
        found = {}
        for call in (ours, numpys) if turn % 2 else (numpys, ours):
            start = time.thread_time()
            for _ in range(count):
                call()
            found[call] = (time.thread_time() - start) / count
        yield found[ours], found[numpys]
    gc.enable()


def measure(model: bool, repeats: int, only: str, nodes: int) -> list[dict[str, Any]]:
    """Rows of every operation and step whose name has ``only`` in it."""
    warnings.simplefilter("ignore")
    options = {} if model else {"model": False}
    umem.software_gpu("v100-32gb", **options)  # all of it fits
    import cupy

    importlib.import_module("umem.chainer")  # makes Chainer ready for today's NumPy
    import chainer

    held = inputs()
    on_host = operations(np, held)
    on_gpu = operations(cupy, {name: cupy.asarray(array) for name, array in held.items()})
    calls = {name: (*on_host[name][:2], on_gpu[name][2], on_host[name][2]) for name in on_host}
    rows = [_row(name, *calls[name], repeats, model) for name in calls if only in name]
    devices = chainer.get_device("@cupy:0"), chainer.get_device("@numpy")
    steps = {
        "perceptron, 6 x 1024, batch 256": perceptron,
        f"GCN, {nodes:,} nodes": lambda device: gcn(device, nodes),
    }
    for name, make in steps.items():
        if only in name:
            ours, numpys = map(make, devices)
            rows.append(_row(name, "step", 2.0 if model else 1.3, ours, numpys, repeats, model))
    return rows


def _row(
    name: str, kind: str, limit: float, ours: Call, numpys: Call, repeats: int, model: bool
) -> dict[str, Any]:
    """Compare one operation on the software GPU and in NumPy, in turn."""
    for _ in range(2):
        ours()
    found = list(pairs(ours, numpys, repeats))
    ratios = common.summary(a / b for a, b in found)
    return {
        "operation": name,
        "kind": kind,
        "model": "on" if model else "off",
        "limit": limit,
        "ratio": ratios.median,
        "low": ratios.low,
        "high": ratios.high,
        "cupy_ms": 1e3 * common.summary(a for a, _ in found).median,
        "numpy_ms": 1e3 * common.summary(b for _, b in found).median,
        "passed": ratios.median <= limit,
        "repeats_ms": [[1e3 * a, 1e3 * b] for a, b in found],
    }


def compile_seconds() -> list[float]:
    """Processor time of the compiler for each kernel of a program, with an empty cache."""
    from umem.host_cuda import KernelCompiler

    found = []
    compile_one = KernelCompiler.compile

    def timed(*args: Any) -> Any:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        made = compile_one(*args)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return made

    KernelCompiler.compile = timed  # type: ignore[method-assign]
    umem.software_gpu("v100-32gb")
    import cupy

    importlib.import_module("umem.chainer")
    for _, _, call in operations(cupy, {n: cupy.asarray(a) for n, a in inputs().items()}).values():
        call()
    return [seconds for seconds in found if seconds > 0.01]  # others were there already


# -- what it says ------------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    sentences = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        worst = max(
            (row for row in rows if row["kind"] == kind), key=lambda r: r["ratio"] / r["limit"]
        )
        sentences.append(
            f"{kind}: at most {figure(worst['ratio'])} times ({worst['operation']}; "
            f"{figure(worst['limit'])} allowed)"
        )
    missed = sum(not row["passed"] for row in rows)
    median = common.summary(row["ratio"] for row in rows).median
    seconds, allowed = result["compile_median_seconds"], result["compile_limit_seconds"]
    compiling = f"compiling takes {figure(seconds)} s of processor time a kernel"
    return (
        f"{'; '.join(sentences)}; {missed or 'none'} of {len(rows)} above the limit; the median is "
        f"{figure(median)} times NumPy's time, where {MEDIAN_LIMIT} is wanted; "
        f"{compiling}, where {figure(allowed)} are allowed."
    )


BENCH = common.Bench(
    "software_gpu_speed",
    __doc__,
    answer,
    (
        text("operation", "operation"),
        text("kind", "kind"),
        text("model", "model"),
        quantity("CuPy", "cupy_ms", "ms"),
        quantity("NumPy", "numpy_ms", "ms"),
        quantity("ratio", "ratio"),
        quantity("least", "low"),
        quantity("most", "high"),
        quantity("limit", "limit"),
        verdict(),
    ),
)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=21, show_default=True)
@click.option("--quick", is_flag=True, help="Three repeats, and a graph of 2,000 nodes.")
@click.option("--only", default="", help="What the names of the operations have in them.")
@click.option("--inside", type=click.Choice(["on", "off", "compile"]), hidden=True)
@common.json_option
def main(repeats: int, quick: bool, only: str, inside: str | None, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    repeats, nodes = (3, 2_000) if quick else (repeats, NODES)
    parts: dict[str, Callable[[], Any]] = {
        "compile": compile_seconds,
        "on": lambda: measure(True, repeats, only, nodes),
        "off": lambda: measure(False, repeats, only, nodes),
    }
    if inside is not None:
        print(json.dumps(parts[inside]()))
        return
    common.writable(path)
    given = [f"--repeats={repeats}", f"--only={only}", *["--quick"] * quick]
    rows = [
        row
        for model in ("on", "off")
        for row in common.child(__file__, *given, f"--inside={model}")
    ]
    with tempfile.TemporaryDirectory() as folder:
        compiled = common.child(
            __file__, "--inside=compile", XDG_CACHE_HOME=folder, CUPY_CACHE_DIR=folder
        )
    BENCH.finish(
        rows,
        path,
        simulated=False,
        options={"repeats": repeats, "quick": quick, "only": only},
        compile_seconds=compiled,
        compile_median_seconds=common.summary(compiled).median,
        compile_limit_seconds=COMPILE_LIMIT_SECONDS,
    )


if __name__ == "__main__":
    main()
