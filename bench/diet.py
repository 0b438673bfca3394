"""Does a diet keep a live step to its budget, and does it cost the time that was predicted?

Each network is given shares of what its plain step takes, by `umem.chainer.diet`, which records
the step small, chooses and turns on. Then it trains at the full batch: once under tracemalloc,
which says what NumPy's arrays take at most in a step that has settled, parameters, gradients and
states included, and some times without, and after them an undieted twin. What is predicted is
simulated; what it is compared with was measured.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models import build
from report_tables import counted, figure, quantity, text, verdict

import umem
import umem.chainer
from umem.errors import BudgetError
from umem.units import MIB

BATCHES = {
    ("MLP", "1,024 wide"): 512,
    ("transformer", "4 layers"): 32,
    ("mixer", "4 layers"): 64,
    ("residual", "12 blocks"): 16,
}
QUICK = {("residual", "3 narrow blocks"): 64}
SHARES = (0.75, 0.5, 0.3)
SMALL = (4, 8)
SETTLING, REPEATS = 4, 3
"""Steps before those that count: a plan of recomputation is followed from the third pass on."""


class Trained:
    """A network in training, and the bytes that its making took."""

    def __init__(self, model: tuple[str, str]) -> None:
        np.random.seed(0)
        self.model = build(*model)
        self.optimizer = self.model.make_optimizer().setup(self.model.link)

    def step(self, size: int) -> None:
        """Train once on a batch; one whose samples lie along the first axis can be split."""
        inputs = self.model.inputs(size)
        self.optimizer.update(self.model.loss, *inputs)


def peak_bytes(trained: Trained, batch: int) -> int:
    """The most bytes in a settled step, without what Python's objects take between steps."""
    for _ in range(SETTLING):
        trained.step(batch)
    gc.collect()
    between = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    trained.step(batch)
    return tracemalloc.get_traced_memory()[1] - between + lasting_bytes(trained)


def lasting_bytes(trained: Trained) -> int:
    """Parameters, gradients, states and statistics."""
    arrays: list[Any] = []
    for param in trained.optimizer.target.params():
        arrays += [param.array, param.grad, *(param.update_rule.state or {}).values()]
        arrays.append(getattr(getattr(param.update_rule, "_fp32_param", None), "array", None))
    for link in trained.optimizer.target.links():
        arrays += [getattr(link, name) for name in link._persistent]
    return sum({id(a): a.nbytes for a in arrays if isinstance(a, np.ndarray)}.values())


def timed(steps: list[Callable[[int], None]], batch: int, repeats: int) -> list[list[float]]:
    """The processor time of each step, in turns."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, seconds in zip(steps, found, strict=True):
            start = time.process_time()
            step(batch)
            seconds.append(time.process_time() - start)
    return found


def measure(model: tuple[str, str], batch: int, repeats: int) -> list[dict[str, Any]]:
    tracemalloc.start()
    plain = peak_bytes(Trained(model), batch)
    tracemalloc.stop()
    return [measured(model, batch, round(share * plain), plain, repeats) for share in SHARES]


def measured(
    model: tuple[str, str], batch: int, budget: int, plain: int, repeats: int
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": model[0], "batch": batch, "plain_bytes": plain, "budget_bytes": budget,
    }  # fmt: skip
    twin = Trained(model)
    tracemalloc.start()
    trained = Trained(model)
    try:
        found = umem.chainer.diet(
            trained.model.link, trained.optimizer, trained.step, budget, size=batch, sizes=SMALL,
            quiet=True,
        )  # fmt: skip
    except BudgetError as error:
        tracemalloc.stop()
        return {**row, "error": str(error).partition(". Give")[0]}
    with found:
        live = peak_bytes(trained, batch)
        tracemalloc.stop()
        best, as_it_is = found.chosen.best, found.chosen.plain
        dieted, undieted = alternately(trained, twin, found, batch, repeats)
    return {
        **row,
        "error": None,
        "on": ", ".join(best.names) or "nothing",
        "simulated_bytes": best.peak_bytes,
        "measured_bytes": live,
        "simulated_slower": best.seconds / as_it_is.seconds,
        "measured_slower": common.summary(dieted).median / common.summary(undieted).median,
        "dieted_cpu_repeats": dieted,
        "undieted_cpu_repeats": undieted,
        "kept": live <= budget,
    }


def alternately(
    trained: Trained, twin: Trained, found: Any, batch: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Processor times under the diet; then, without it, those of a plain twin."""
    for _ in range(2):
        trained.step(batch)
    (dieted,) = timed([trained.step], batch, repeats)
    found.undo()
    twin.step(batch)
    (undieted,) = timed([twin.step], batch, repeats)
    return dieted, undieted


def answer(result: common.Result) -> str:
    rows = [row for row in result["rows"] if not row["error"]]
    rest = len(result["rows"]) - len(rows)
    over = [row["measured_bytes"] / row["budget_bytes"] - 1 for row in rows if not row["kept"]]
    said = f" (the worst is {figure(100 * max(over))}% over it)" if over else ""
    slower = [row["measured_slower"] for row in rows]
    return (
        f"{sum(row['kept'] for row in rows)} of {len(rows)} dieted steps keep to their budget"
        f"{said}, for {figure(min(slower))} to {figure(max(slower))} times the processor time of a "
        f"plain step; for {rest or 'no'} other budgets nothing was found that fits."
    )


BENCH = common.Bench(
    "diet",
    __doc__,
    answer,
    (
        text("model", "model"),
        counted("batch", "batch"),
        quantity("plain", "plain_bytes", "MiB", per=MIB),
        quantity("budget", "budget_bytes", "MiB", per=MIB),
        text("on", "on"),
        quantity("peak predicted", "simulated_bytes", "MiB", per=MIB),
        quantity("measured", "measured_bytes", "MiB", per=MIB),
        quantity("time predicted", "simulated_slower", "x"),
        quantity("measured", "measured_slower", "x"),
        verdict(lambda row: row.get("kept"), met="kept", missed="over"),
    ),
    notes=lambda result: [
        f"{row['model']}, {row['budget_bytes'] / MIB:.1f} MiB: {row['error']}"
        for row in result["rows"]
        if row["error"]
    ],
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One small model.")
@click.option("--only", "names", multiple=True, type=click.Choice([name for name, _ in BATCHES]))
@click.option("--repeats", type=click.IntRange(1), default=REPEATS, show_default=True)
@common.json_option
def main(quick: bool, names: tuple[str, ...], repeats: int, path: Path | None) -> None:
    wanted = QUICK if quick else {m: b for m, b in BATCHES.items() if not names or m[0] in names}
    rows: list[dict[str, Any]] = []
    for model, batch in wanted.items():
        rows += measure(model, batch, repeats)
        click.echo(f"{model[0]}: done", err=True)
    batches = {f"{name}, {size}": batch for (name, size), batch in wanted.items()}
    options = {"quick": quick, "batches": batches, "shares": SHARES, "repeats": repeats}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
