"""What do updates in chunks take of the time and the temporaries of Chainer's whole updates?

Each update rule on one large float32 parameter on NumPy: Chainer's own update and
`umem.chainer.chunked_updates`, in turn in one process, by the processor's time; temporaries by
tracemalloc, in updates of their own. The bits are the same;
tests/on_chainer/chunking/test_updates.py holds that.

``--eight-bit`` asks another question: what do optimizer states of 8 bits take, in memory and in
time? One large parameter, and 128 with as many elements together, whose temporaries stay in the
cache with Chainer too: steps of `Adam8bit` and `MomentumSGD8bit`, with Numba and without, beside
Chainer's own, in turn.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
import numpy as np
from report_tables import Row, counted, figure, quantity, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer

from umem.chainer import CHUNKED_RULES
from umem.chainer.optimizers import paths
from umem.units import MIB

VARIANTS = ("AdamW", "AMSGrad", "AdaBound", "AMSBound")
ELEMENTS, QUICK_ELEMENTS = 8 << 20, 1 << 20
RULES, COUNTS = ("Adam", "MomentumSGD"), (1, 128)


def temporaries(update: Callable[[], None]) -> int:
    """The most bytes that an update of what has its state already needs only while it runs."""
    tracemalloc.start(1)
    try:
        update()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def ratio(seconds: list[float], plain: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, plain, strict=True))


# -- in chunks -------------------------------------------------------------------------------------


def updated_parameter(rule: str, elements: int) -> Any:
    """A parameter with a gradient, and with the state of one update."""
    generator = np.random.default_rng(0)
    parameter = chainer.Parameter(generator.standard_normal(elements, "float32"))
    parameter.grad = generator.standard_normal(elements, "float32")
    parameter.update_rule = getattr(chainer.optimizers, rule)().create_update_rule()
    parameter.update_rule.update(parameter)
    return parameter


def measure(rule: str, elements: int, repeats: int) -> Row:
    """Measure the update of one parameter, whole and in chunks, in turn."""
    parameter = updated_parameter(rule, elements)
    seconds: dict[str, list[float]] = {"whole": [], "chunked": []}
    workspace = {}
    on = {"whole": nullcontext, "chunked": umem.chainer.chunked_updates}

    def update() -> None:
        parameter.update_rule.update(parameter)

    for repeat in range(repeats):
        for how in sorted(on, reverse=repeat % 2 == 0):
            with on[how]():
                start = time.process_time()
                update()
                seconds[how].append(time.process_time() - start)
    for how, block in on.items():
        with block():
            workspace[how] = temporaries(update)
    return {
        "rule": rule,
        "parameter_bytes": parameter.array.nbytes,
        "seconds": seconds,
        "ratio": ratio(seconds["chunked"], seconds["whole"]),
        "workspace_bytes": workspace,
    }


def answer(result: common.Result) -> str:
    rows = result["rows"]
    adam = next(row for row in rows if row["rule"] == "Adam")
    return (
        f"Adam takes {figure(adam['ratio'])} of the time in chunks, the rules "
        f"{span(row['ratio'] for row in rows)}; temporaries are at most "
        f"{figure(max(row['workspace_bytes']['chunked'] for row in rows) / MIB)} MiB instead of "
        f"{span(row['workspace_bytes']['whole'] / MIB for row in rows)} MiB."
    )


BENCH = common.Bench(
    "updates",
    __doc__,
    answer,
    columns=(
        text("rule", "rule"),
        quantity("parameter", "parameter_bytes", "MiB", per=MIB),
        quantity("whole", lambda row: statistics.median(row["seconds"]["whole"]), "ms", per=1e-3),
        quantity(
            "in chunks", lambda row: statistics.median(row["seconds"]["chunked"]), "ms", per=1e-3
        ),
        quantity("time of the whole", "ratio"),
        quantity("temporaries whole", lambda r: r["workspace_bytes"]["whole"], "MiB", per=MIB),
        quantity(
            "temporaries in chunks", lambda r: r["workspace_bytes"]["chunked"], "MiB", per=MIB
        ),
    ),
)


# -- states of 8 bits -----------------------------------------------------------------------------


@contextmanager
def without_numba() -> Iterator[None]:
    """Have updates go by NumPy alone."""
    compiled, paths.compiled = paths.compiled, lambda name: None
    try:
        yield
    finally:
        paths.compiled = compiled


class Way(NamedTuple):
    """A way to update, and the parameters that it updates."""

    name: str
    block: Callable[[], AbstractContextManager[None]]
    optimizer: Any
    parameters: list[Any]
    seconds: list[float]

    def update(self) -> None:
        """Take one step of the optimizer, its look at the gradients included; note its time."""
        with self.block():
            start = time.process_time()
            self.optimizer.update()
            self.seconds.append(time.process_time() - start)

    def temporaries(self) -> int:
        """The most bytes that a step needs only while it runs."""
        with self.block():
            return temporaries(self.optimizer.update)


def way(name: str, block: Any, optimizer: Any, elements: int, count: int) -> Way:
    """A way with parameters of its own, which have gradients, and the state of one update."""
    generator = np.random.default_rng(0)
    model = chainer.Chain()
    with model.init_scope():
        for number in range(count):
            value = generator.standard_normal(elements // count, "float32")
            setattr(model, f"W{number}", chainer.Parameter(value))
    for param in model.params():
        param.grad = generator.standard_normal(param.size, "float32") * np.float32(1e-3)
    with block():
        optimizer.setup(model).update()
    return Way(name, block, optimizer, list(model.params()), [])


def small_updates(rule: str, elements: int, count: int, repeats: int) -> list[Row]:
    """Measure updates of 8-bit states: a row a path, Chainer's, with Numba, by NumPy alone."""
    small = getattr(umem.chainer.optimizers, f"{rule}8bit")
    plain = way("Chainer", nullcontext, getattr(chainer.optimizers, rule)(), elements, count)
    found = [plain, way("NumPy", without_numba, small(), elements, count)]
    if paths.compiled("AdamStep") is not None:
        found.append(way("Numba", nullcontext, small(), elements, count))
    for repeat in range(repeats):
        for one in found[:: 1 if repeat % 2 else -1]:
            one.update()
    return [small_row(rule, one, plain) for one in found]


def small_row(rule: str, one: Way, plain: Way) -> Row:
    states = (value for p in one.parameters for value in p.update_rule.state.values())
    return {
        "rule": rule, "path": one.name, "elements": sum(p.size for p in one.parameters),
        "count": len(one.parameters), "state_bytes": sum(v.nbytes for v in states),
        "seconds": one.seconds, "temporary_bytes": one.temporaries(),
        "ratio": ratio(one.seconds, plain.seconds),
    }  # fmt: skip


def small_answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    found = [row for row in result["rows"] if row["rule"] == "Adam"]
    adam = {row["path"]: row for row in found}
    state = adam["NumPy"]["state_bytes"] / adam["NumPy"]["elements"]
    times = [
        f"{span(row['ratio'] for row in found if row['path'] == name)} {words}"
        for name, words in (("Numba", "with Numba"), ("NumPy", "without"))
        if name in adam
    ]
    return (
        f"Adam8bit keeps {figure(state)} bytes an element and takes {' and '.join(times)} of the "
        "time of Chainer's Adam."
    )


def per_element(row: Row) -> float:
    return statistics.median(row["seconds"]) / row["elements"]


SMALL = common.Bench(
    "updates-eight_bit",
    "What do optimizer states of 8 bits take, in memory and in time?",
    small_answer,
    (
        text("rule", "rule"),
        counted("parameters", "count"),
        text("path", "path"),
        quantity("state an element", lambda row: row["state_bytes"] / row["elements"], "bytes"),
        quantity("time an element", per_element, "ns", per=1e-9),
        quantity("time of Chainer's update", "ratio"),
        quantity("temporaries of an update", "temporary_bytes", "MiB", per=MIB),
    ),
)


@click.command(help=__doc__)
@click.option("--elements", type=click.IntRange(4096), default=ELEMENTS, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=21, show_default=True)
@click.option("--eight-bit", "is_small", is_flag=True, help="States of 8 bits, beside Chainer's.")
@click.option("--quick", is_flag=True, help="A smaller parameter, three repeats.")
@common.json_option
def main(elements: int, repeats: int, is_small: bool, quick: bool, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    if quick:
        elements, repeats = QUICK_ELEMENTS, 3
    common.writable(path)
    options = {"elements": elements, "repeats": repeats}
    if is_small:
        cases = [(rule, count) for rule in RULES for count in COUNTS]
        rows = [row for case in cases for row in small_updates(case[0], elements, case[1], repeats)]
        SMALL.finish(rows, path, simulated=False, options=options)
        return
    np.seterr(invalid="ignore")  # MSVAG divides zeros
    rows = [measure(rule, elements, repeats) for rule in (*CHUNKED_RULES, *VARIANTS)]
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
