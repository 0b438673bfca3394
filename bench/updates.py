"""What do updates in chunks take of the time and the temporaries of Chainer's whole updates?

Each update rule on one large float32 parameter on NumPy: Chainer's own update and
`umem.chainer.chunked_updates`, in turn in one process, by the processor's time; temporaries by
tracemalloc, in updates of their own. The bits are the same;
tests/on_chainer/chunking/test_updates.py holds that.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, figure, quantity, span, text

from umem.trace.analysis.updating import CHUNKED_RULES
from umem.units import MIB

VARIANTS = ("AdamW", "AMSGrad", "AdaBound", "AMSBound")
ELEMENTS, QUICK_ELEMENTS = 8 << 20, 1 << 20


def updated_parameter(rule: str, elements: int) -> Any:
    """A parameter with a gradient, and with the state of one update."""
    import umem.chainer  # noqa: F401  isort: skip  (before chainer)
    import chainer

    generator = np.random.default_rng(0)
    parameter = chainer.Parameter(generator.standard_normal(elements, "float32"))
    parameter.grad = generator.standard_normal(elements, "float32")
    parameter.update_rule = getattr(chainer.optimizers, rule)().create_update_rule()
    parameter.update_rule.update(parameter)
    return parameter


def temporaries(update: Callable[[], None]) -> int:
    """The most bytes that an update of what has its state already needs only while it runs."""
    tracemalloc.start(1)
    try:
        update()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(rule: str, elements: int, repeats: int) -> Row:
    import umem.chainer

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
    pairs = zip(seconds["chunked"], seconds["whole"], strict=True)
    return {
        "rule": rule,
        "parameter_bytes": parameter.array.nbytes,
        "seconds": seconds,
        "ratio": statistics.median(a / b for a, b in pairs),
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


@click.command(help=__doc__)
@click.option("--elements", type=click.IntRange(1), default=ELEMENTS, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=21, show_default=True)
@click.option("--quick", is_flag=True, help="A smaller parameter, three repeats.")
@common.json_option
def main(elements: int, repeats: int, quick: bool, path: Path | None) -> None:
    if quick:
        elements, repeats = QUICK_ELEMENTS, 3
    common.writable(path)
    np.seterr(invalid="ignore")  # MSVAG divides zeros
    rows = [measure(rule, elements, repeats) for rule in (*CHUNKED_RULES, *VARIANTS)]
    options = {"elements": elements, "repeats": repeats}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
