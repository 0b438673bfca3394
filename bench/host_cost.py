"""What does Chainer's Python cost an operation?

On arrays of one element, where arithmetic is nil. An operation is what a trace calls one: a
function applied, forward or in backward, or an update of one parameter. Its cost is the time
of a chain of functions, their backward passes or updates, over the number of operations that a
recorder counts in it, less the time inside the functions' own array code: on a GPU that code
launches kernels, and the model of a GPU charges a launch for it. What is left is the same on
NumPy and CuPy but for the device contexts that Chainer enters on a GPU. Times are processor
time, so that a busy machine does not change them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import counted, figure, listed, quantity, text

import umem
import umem.chainer

# isort: split
import chainer  # after the compatibility layer
import chainer.functions as F
import chainer.links as L
from chainer.function_node import FunctionNode
from chainer.optimizer import UpdateRule

PHASES = ("forward", "backward", "update")
LENGTH = 50


@dataclass(frozen=True)
class Chain:
    """The same function ``LENGTH`` times, from one element to one element."""

    name: str
    make: Callable[[], Callable[[Any], Any]]
    shape: tuple[int, ...] = (1, 1)


def repeated(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: chainer.Sequential(*[make() for _ in range(LENGTH)])


def same(function: Callable[[Any], Any]) -> Callable[[], Any]:
    def run(x: Any) -> Any:
        for _ in range(LENGTH):
            x = function(x)
        return x

    return lambda: run


IMAGE = (1, 1, 1, 1)
CHAINS = (
    Chain("relu", same(F.relu)),
    Chain("sigmoid", same(F.sigmoid)),
    Chain("tanh", same(F.tanh)),
    Chain("add", same(lambda x: x + x)),
    Chain("multiply", same(lambda x: x * x)),
    Chain("reshape", same(lambda x: F.reshape(x, (1, 1)))),
    Chain("transpose", same(F.transpose)),
    Chain("concat", same(lambda x: F.concat((x, x))[:, :1])),
    Chain("sum", same(lambda x: F.sum(x, axis=1, keepdims=True))),
    Chain("dropout", same(F.dropout)),
    Chain("softmax", same(F.softmax)),
    Chain("matmul", same(lambda x: F.matmul(x, x))),
    Chain("max pooling", same(lambda x: F.max_pooling_2d(x, 1)), IMAGE),
    Chain("Linear", repeated(lambda: L.Linear(1, 1))),
    Chain("Convolution2D", repeated(lambda: L.Convolution2D(1, 1, 1)), IMAGE),
    Chain("BatchNormalization", repeated(lambda: L.BatchNormalization(1)), (2, 1)),
    Chain("LayerNormalization", repeated(lambda: L.LayerNormalization(1))),
)  # fmt: skip
OPTIMIZERS = {
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(lr=1e-12),
    "Adam": lambda: chainer.optimizers.Adam(alpha=1e-12),
    "RMSprop": lambda: chainer.optimizers.RMSprop(lr=1e-12),
}
"""Steps so small that nothing overflows in the course of the benchmark."""


# -- time, and the part of it in array code ----------------------------------------------------


class ArrayCode:
    """The seconds inside the array code of functions and update rules."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the time of its outermost calls is summed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            """Call the function, and add the time of its thread."""
            if self._depth:
                return original(*args, **kwargs)
            self._depth += 1
            start = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
                self._depth -= 1

        return timed


def classes(base: type) -> Iterator[type]:
    yield base
    for sub in base.__subclasses__():
        yield from classes(sub)


@contextmanager
def array_code() -> Iterator[ArrayCode]:
    """Time what functions and update rules do with arrays."""
    code = ArrayCode()
    names = {FunctionNode: ("forward",), UpdateRule: ("update_core_cpu",)}
    found = {
        (cls, name)
        for base, wanted in names.items()
        for cls in classes(base)
        for name in wanted
        if name in vars(cls)
    }
    originals = [(cls, name, vars(cls)[name]) for cls, name in found]
    for cls, name, original in originals:
        setattr(cls, name, code.wrap(original))
    try:
        yield code
    finally:
        for cls, name, original in originals:
            setattr(cls, name, original)


# -- one chain ---------------------------------------------------------------------------------


class Runner:
    """Runs a chain phase by phase."""

    def __init__(self, chain: Chain, optimizer: str) -> None:
        np.random.seed(0)
        self._function = chain.make()
        self._x = chainer.Variable(np.ones(chain.shape, np.float32))
        self._optimizer: Any = None
        if isinstance(self._function, chainer.Link):
            self._optimizer = OPTIMIZERS[optimizer]().setup(self._function)
        for _ in range(2):
            self.run()

    def run(self, code: ArrayCode | None = None) -> dict[str, float]:
        """Seconds of each phase; with ``code``, those in array code."""
        found = {}
        read = time.thread_time if code is None else lambda: code.seconds
        start = read()
        y = self._function(self._x)
        found["forward"] = read() - start
        self._x.cleargrad()
        if self._optimizer is not None:
            self._function.cleargrads()
        y.grad = np.ones_like(y.array)
        start = read()
        y.backward()
        found["backward"] = read() - start
        if self._optimizer is not None:
            start = read()
            self._optimizer.update()
            found["update"] = read() - start
        return found

    def counts(self) -> dict[str, int]:
        """How many operations a recorder sees in each phase."""
        with umem.record() as recorder:
            self.run()
        found = dict.fromkeys(PHASES, 0)
        for op in recorder.trace.ops:
            found[op.phase] += 1
        # Where most functions do nothing, what the phase takes is not the operations'.
        return {phase: count for phase, count in found.items() if count >= LENGTH}


def measure(chain: Chain, optimizer: str, repeats: int) -> list[dict[str, Any]]:
    """A row a phase."""
    runner = Runner(chain, optimizer)
    counts = runner.counts()
    gc.collect()
    whole, inside = [], []
    for _ in range(repeats):
        whole.append(runner.run())
        with array_code() as code:
            inside.append(runner.run(code))
    rows = []
    for phase, count in counts.items():
        arrays = common.summary(b[phase] for b in inside).median
        per = [1e6 * (a[phase] - arrays) / count for a in whole]
        found = common.summary(per)
        rows.append(
            {
                "function": chain.name if phase != "update" else f"{optimizer} ({chain.name})",
                "phase": phase,
                "op_count": count,
                "median_us": found.median,
                "low_us": found.low,
                "high_us": found.high,
                "array_us": 1e6 * arrays / count,
                "repeats_us": per,
            }
        )
    return rows


def phase_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over all functions of a phase: the median of their medians, and the smallest and largest."""
    found = []
    for phase in PHASES:
        medians = [row["median_us"] for row in rows if row["phase"] == phase]
        middle = common.summary(medians)
        found.append(
            {
                "function": "all",
                "phase": phase,
                "op_count": None,
                "median_us": middle.median,
                "low_us": middle.low,
                "high_us": middle.high,
                "array_us": None,
            }
        )
    return found


def answer(result: common.Result) -> str:
    whole = [row for row in result["rows"] if row["function"] == "all"]
    words = {
        "forward": "a function's forward pass",
        "backward": "one in backward",
        "update": "the update of a parameter",
    }
    said = [f"{figure(row['median_us'])} us for {words[row['phase']]}" for row in whole]
    return f"{listed(said)}: medians over the functions, without their array code."


BENCH = common.Bench(
    "host_cost",
    __doc__,
    answer,
    (
        text("function", "function"),
        text("phase", "phase"),
        counted("operations", "op_count"),
        quantity("median", "median_us", "us"),
        quantity("least", "low_us", "us"),
        quantity("most", "high_us", "us"),
        quantity("array code", "array_us", "us"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Three functions, two repeats.")
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
@common.json_option
def main(quick: bool, repeats: int, path: Path | None) -> None:
    repeats = 2 if quick else repeats
    chains = [c for c in CHAINS if not quick or c.name in ("relu", "add", "Linear")]
    rows = [row for chain in chains for row in measure(chain, "MomentumSGD", repeats)]
    (linear,) = (c for c in CHAINS if c.name == "Linear")
    for optimizer in () if quick else ("Adam", "RMSprop"):
        rows += [r for r in measure(linear, optimizer, repeats) if r["phase"] == "update"]
    options = {"repeats": repeats, "quick": quick}
    BENCH.finish([*phase_rows(rows), *rows], path, simulated=False, options=options)


if __name__ == "__main__":
    main()
