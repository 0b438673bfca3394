"""What does a budget cost a program whose graph never comes back, and is it kept?

Trees and sentences of varied lengths, each step another graph, on NumPy. A step
under `umem.chainer.Recompute` and a plain one from the same seed take turns; times are processor
time on one thread, a ratio is the median of the ratios of steps, the first `WARM` apart. Two
budgets: a tenth above the peak of the plain steps, where nothing has to go, and what parameters,
gradients and state take with half of what the plain steps take above them. Peaks are of arrays, by
NumPy's own allocator, in steps of their own. Results are compared by the bits of losses and
parameters.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import statistics
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import common
from dynamic_parts.programs import PROGRAMS, Program, Size
from recompute_parts.array_bytes import ArrayBytes
from recompute_parts.steps import digest
from report_tables import quantity, span, text

import umem.chainer
from umem.errors import RecomputeWarning

# isort: split
import chainer  # after the compatibility layer
import numpy as np
from chainer.computational_graph import build_computational_graph

WARM = 4
"""So many steps are not timed: in them, it is found that graphs do not come back."""
MB = 1e6


class Training:
    """A program that is being trained, step after step."""

    def __init__(self, program: Program, size: Size) -> None:
        np.random.seed(0)
        self._program, self._size = program, size
        self.model = program.make(size)
        self._optimizer = chainer.optimizers.Adam().setup(self.model)
        self.loss_of(0).backward()
        self.update()  # makes the optimizer's state

    def loss_of(self, seed: int) -> Any:
        np.random.seed(seed)
        return self._program.loss(self.model, self._size, seed)

    def update(self) -> None:
        self._optimizer.update()
        self.model.cleargrads()

    def step(self, seed: int) -> Any:
        loss = self.loss_of(seed)
        loss.backward()
        self.update()
        return digest(loss.array).tobytes()

    def seconds(self, seed: int) -> tuple[float, Any]:
        gc.collect()
        start = time.process_time()
        found = self.step(seed)
        return time.process_time() - start, found

    def peak(self, seed: int) -> int:
        """Of the arrays of one step, above parameters and state."""
        gc.collect()
        try:
            with ArrayBytes() as arrays:
                self.loss_of(seed).backward()
                return arrays.peak
        finally:
            self.update()

    @property
    def parameter_bytes(self) -> int:
        return sum(p.array.nbytes for p in self.model.params())

    @property
    def state_bytes(self) -> int:
        held = (v for p in self.model.params() for v in p.update_rule.state.values())
        return sum(value.nbytes for value in held if isinstance(value, np.ndarray))

    def numbers(self) -> list[bytes]:
        return [p.array.tobytes() for _, p in sorted(self.model.namedparams())]


def operations(training: Training, seed: int) -> int:
    """How many functions a forward applies."""
    graph = build_computational_graph([training.loss_of(seed)])
    return sum(isinstance(node, chainer.FunctionNode) for node in graph.nodes)


def measure(program: Program, size: Size, repeats: int) -> list[dict[str, Any]]:
    """A row a budget."""
    plain = Training(program, size)
    steps = range(1, 1 + WARM + repeats)
    others = range(1000, 1000 + max(4, repeats // 3))
    count = statistics.median(operations(plain, seed) for seed in others)
    raw = max(plain.peak(seed) for seed in others)
    beside = plain.parameter_bytes + plain.state_bytes
    constant = beside + plain.parameter_bytes
    budgets = {
        "a tenth more": round(1.1 * (beside + raw)),
        "half": constant + (raw - plain.parameter_bytes) // 2,
    }
    rows = []
    for space, budget in budgets.items():
        row = timed(program, size, budget, steps)
        row |= {"program": program.name, "budget": space, "operations": count}
        row["more_us"] = (row["median_s"] - row["plain_s"]) / count * 1e6
        row["raw_mb"], row["budget_mb"] = (beside + raw) / MB, budget / MB
        row["peak_of_budget"] = kept(program, size, budget, steps[:WARM], others, beside)
        rows.append(row)
    return rows


def timed(program: Program, size: Size, budget: int, steps: range) -> dict[str, Any]:
    """Steps under a budget and plain ones in turn."""
    plain, ours = Training(program, size), Training(program, size)
    memory = umem.chainer.Recompute(budget)
    pairs, same = [], True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        for seed in steps:
            with memory:
                ours_s, ours_loss = ours.seconds(seed)
            plain_s, plain_loss = plain.seconds(seed)
            pairs.append((ours_s, plain_s))
            same = same and ours_loss == plain_loss
    ratios = [a / b for a, b in pairs]
    return {
        "repeats": pairs,
        "median_s": statistics.median(a for a, _ in pairs[WARM:]),
        "plain_s": statistics.median(b for _, b in pairs[WARM:]),
        "time_ratio": statistics.median(ratios[WARM:]),
        "ratio_low": min(ratios[WARM:]),
        "ratio_high": max(ratios[WARM:]),
        "first_ratio": max(ratios[:WARM]),
        "identical": "yes" if same and plain.numbers() == ours.numbers() else "no",
        "online_count": memory.online_count,
    }


def kept(
    program: Program, size: Size, budget: int, first: range, others: range, beside: int
) -> float:
    """The largest peak of steps under a budget, after the first, of the budget."""
    training = Training(program, size)
    with warnings.catch_warnings(), umem.chainer.Recompute(budget) or nullcontext():
        warnings.simplefilter("ignore", RecomputeWarning)
        for seed in first:
            training.step(seed)
        return (beside + max(training.peak(seed) for seed in others)) / budget


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]

    def ratios(space: str) -> str:
        return span(row["time_ratio"] for row in rows if row["budget"] == space)

    same = sum(row["identical"] == "yes" for row in rows)
    return (
        f"With half of what plain steps take above parameters, gradients and state, a step takes "
        f"{ratios('half')} of a plain one's time; with a tenth more than they need, "
        f"{ratios('a tenth more')}; peaks are {span(row['peak_of_budget'] for row in rows)} of the "
        f"budget, and {same} of {len(rows)} trainings have the bits of plain ones."
    )


BENCH = common.Bench(
    "dynamic",
    __doc__,
    answer,
    (
        text("program", "program"),
        text("budget", "budget"),
        quantity("functions", "operations"),
        quantity("plain peak", "raw_mb", "MB"),
        quantity("budget is", "budget_mb", "MB"),
        quantity("peak of it", "peak_of_budget"),
        quantity("time of plain's", "time_ratio"),
        text("least to most", lambda row: span((row["ratio_low"], row["ratio_high"]))),
        quantity("more a function", "more_us", "us"),
        quantity("slowest first step", "first_ratio"),
        text("same bits", "identical"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Small programs, a few steps.")
@click.option("--only", "names", multiple=True, type=click.Choice([p.name for p in PROGRAMS]))
@click.option("--repeats", type=click.IntRange(1), help="Timed steps of each kind.")
@common.json_option
def main(quick: bool, names: tuple[str, ...], repeats: int | None, path: Path | None) -> None:
    count = repeats or (2 if quick else 21)
    rows = []
    for program in PROGRAMS:
        if not names or program.name in names:
            rows += measure(program, program.quick if quick else program.size, count)
            click.echo(f"{program.name}: done", err=True)
    BENCH.finish(rows, path, simulated=False, options={"quick": quick, "repeats": count})


if __name__ == "__main__":
    main()
