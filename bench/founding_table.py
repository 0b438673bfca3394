"""Does the model say what was measured in 2021 for RoBERTa with each technique?

The published run: 84 million parameters, batch 64, a P100 of 16 GB, "MiB in use" as the driver
says, with a framework that is not Chainer (../docs/predicting.md names the source). Here the
same network in Chainer takes a step at two small batches; `Trace.at` makes the step at the
published batch, and the model of that GPU says what tensors take at most, and what CuPy's pool
would reserve for them: simulated. Judged is the change by tensors, because the published run's
allocator is another one. The driver's figure also has the context of CUDA, which no row here has.

``--measure`` asks another question: what do the techniques save a training that really runs? The
network of examples/masked_lm trains on NumPy, a process a technique, on the text that it comes
with, each technique switched on from outside.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from founding_parts.measuring import Measured, measure
from founding_parts.worker import Settings
from models import Region, build, call
from models.roberta import half_products_left_out
from report_tables import Column, figure, percent, quantity, span, text, verdict
from umem.predict.techniques.small_states import with_small_states

import umem
import umem.chainer
from umem.trace import Trace

# isort: split
import chainer  # after the compatibility layer

GPU = "p100-16gb"
BATCH = 64
MIB = 1 << 20
POINTS = 10
SIZE, SMALL = "6 layers", "2 narrow layers"


@dataclass(frozen=True)
class Technique:
    """A row: what is done, and what the source measured."""

    name: str
    published_mib: int | None
    checkpoint: bool = False
    micro_batches: int = 1
    precision: str = "single"
    small_states: bool = False


TECHNIQUES = (
    Technique("base", 12_589),
    Technique("checkpointing", 8_311, checkpoint=True),
    Technique("accumulation, 4 x 16", 3_503, micro_batches=4),
    Technique("half precision (autocast)", 10_119, precision="autocast"),
    Technique("8-bit Adam", 12_621, small_states=True),
    Technique("all", 2_873, True, 4, "autocast", True),
    Technique("half precision (mixed16)", None, precision="mixed16"),
)


def step_of(technique: Technique, size: str) -> Callable[[int], None]:
    """One step of so many lines a micro-batch."""
    np.random.seed(0)
    dtype = chainer.mixed16 if technique.precision == "mixed16" else np.float32
    with chainer.using_config("dtype", dtype):
        model = build("RoBERTa", size)
    optimizer = chainer.optimizers.Adam(1e-4, weight_decay_rate=0.01).setup(model.link)
    if technique.precision == "mixed16":
        optimizer.use_fp32_update()
    region: Region = umem.chainer.checkpoint if technique.checkpoint else call
    autocast = technique.precision == "autocast"

    def step(lines: int) -> None:
        model.link.cleargrads()
        for _ in range(technique.micro_batches):
            loss = model.loss(*model.inputs(lines), region, autocast)
            (loss / technique.micro_batches).backward()
            del loss
        optimizer.update()

    def configured(lines: int) -> None:
        with chainer.using_config("dtype", dtype):
            step(lines)

    return configured


def trace_of(technique: Technique, size: str, lines: tuple[int, int], batch: int) -> Trace:
    """The step at the published batch."""
    with half_products_left_out(), np.errstate(all="ignore"):  # zeros make infinities
        recorded = umem.record_at(step_of(technique, size), lines)
    trace = recorded.at(batch // technique.micro_batches)
    return with_small_states(trace) if technique.small_states else trace


def row_of(technique: Technique, trace: Trace, base: dict[str, Any] | None) -> dict[str, Any]:
    found = umem.replay(trace, GPU, "unmanaged")
    fits = found.fits
    if not fits:
        found = umem.replay(trace, GPU, "managed")
    row: dict[str, Any] = {
        "technique": technique.name, "published_mib": technique.published_mib,
        "simulated_tensors_mib": found.peak_bytes / MIB,
        "simulated_reserved_mib": found.figures.reserved_peak_bytes / MIB,
        "simulated_lasting_mib": lasting_bytes(trace) / MIB,
        "simulated_fits": fits, "because": found.because,
    }  # fmt: skip
    base = base or row
    for name in ("published", "simulated_tensors", "simulated_reserved"):
        mib = row[f"{name}_mib"]
        row[f"{name}_change"] = None if mib is None else mib / base[f"{name}_mib"] - 1
    published = row["published_change"]
    row["points"] = None
    if published is not None and base is not row:
        row["points"] = 100 * (row["simulated_tensors_change"] - published)
    return row


def lasting_bytes(trace: Trace) -> int:
    """Parameters, their gradients, and the optimizer's states."""
    lives = trace.lifetimes()
    updates = [op for op in trace.ops if op.phase == "update"]
    held = {access for op in updates for access in (*op.reads, *op.writes)}
    return sum(lives[access.tensor].alloc.nbytes for access in held)


def met(row: dict[str, Any]) -> bool | None:
    return None if row["points"] is None else abs(row["points"]) <= POINTS


def straight_line(rows: list[dict[str, Any]]) -> str:
    """What the published figures of base and accumulation say about what no batch changes."""
    base, accumulated = (rows[i]["published_mib"] for i in (0, 2))
    rest = accumulated - (base - accumulated) / 3  # 64 lines and 16: a line through both, at 0
    return (
        f"Published, on a straight line through batch 64 and 16: {rest:,.0f} MiB at batch 0. "
        f"Parameters, gradients and Adam's states alone take "
        f"{rows[0]['simulated_lasting_mib']:,.0f} MiB: no step that is affine in its batch has "
        "both published figures, so one of them holds memory that is no tensor's, or their "
        "lines had other lengths."
    )


def in_order(rows: list[dict[str, Any]]) -> bool:
    """Whether what is published as less by more than 1% is less here, too."""
    pairs = itertools.permutations([row for row in rows if row["published_mib"]], 2)
    return all(
        one["simulated_tensors_mib"] < other["simulated_tensors_mib"]
        for one, other in pairs
        if one["published_mib"] < 0.99 * other["published_mib"]
    )


def answer(result: common.Result) -> str:
    rows = result["rows"]
    points = [abs(row["points"]) for row in rows if row["points"] is not None]
    order = "the same order" if in_order(rows) else "another order"
    return (
        f"For {sum(each <= POINTS for each in points)} of {len(points)} techniques the change of "
        f"what tensors take is within {POINTS} percentage points of the published change (at most "
        f"{figure(max(points))} off), and all are in {order}."
    )


def notes(result: common.Result) -> list[str]:
    rows = result["rows"]
    said = [f"{row['technique']}: {row['because']}" for row in rows]
    return [*said, straight_line(rows)]


def change(head: str, name: str) -> Column:
    return quantity(head, f"{name}_change", "%", per=0.01, places=1, signed=True)


BENCH = common.Bench(
    "founding_table",
    __doc__,
    answer,
    (
        text("technique", "technique"),
        quantity("published", "published_mib", "MiB"),
        quantity("tensors, simulated", "simulated_tensors_mib", "MiB"),
        quantity("reserved, simulated", "simulated_reserved_mib", "MiB"),
        change("published change", "published"),
        change("change of tensors", "simulated_tensors"),
        change("of reserved", "simulated_reserved"),
        quantity("tensors off", "points", "points", places=1, signed=True),
        verdict(met),
    ),
    notes=notes,
)


# -- measured --------------------------------------------------------------------------------------

NETWORK = Settings(layers=6, hidden=384, length=128, vocabulary=8192, batch=64)
SMALL_NETWORK = Settings(layers=1, hidden=64, length=16, vocabulary=300, batch=16)


def measured_techniques(network: Settings) -> tuple[Measured, ...]:
    part = network.batch // 16
    diet = {"budget": "min", "micro_batch": part, "small_states": True}
    return (
        Measured("base", 12_589, network),
        Measured("recomputation", 8_311, replace(network, budget="min")),
        Measured("accumulation, 16 x 4", 3_503, replace(network, micro_batch=part)),
        Measured("half precision", 10_119, replace(network, half=True)),
        Measured("8-bit Adam", 12_621, replace(network, small_states=True)),
        Measured("all but half precision", None, replace(network, **diet)),
        Measured("all", 2_873, replace(network, half=True, **diet)),
    )


def measured_answer(result: common.Result) -> str:
    rows = {row["technique"]: row for row in result["rows"]}
    diet, everything = rows["all but half precision"], rows["all"]
    return (
        "Recomputation, accumulation and 8-bit Adam together take "
        f"{percent(diet['tensors_saved'])} less in tensors and "
        f"{percent(diet['process_saved'])} less in the process than the base, "
        f"at {figure(diet['time_ratio'])} times its time; with half precision, too, "
        f"{percent(everything['tensors_saved'])} and {percent(everything['process_saved'])} less."
    )


def measured_notes(result: common.Result) -> list[str]:
    return [
        "Tensors: the most that arrays and Python's objects take in a settled step, by "
        "tracemalloc, with parameters, gradients, state and the text. Process: the largest "
        "resident memory of the whole run, the first steps included, less that before the "
        "network was built.",
        "Time: processor time on one thread, the techniques' steps in turn. That of half "
        "precision is NumPy's, which computes in single precision a tile at a time.",
        "Published: another framework, on a GPU, with 84 million parameters; the driver's count.",
    ]


MEASURED = common.Bench(
    "founding_table-measured",
    "What do the techniques save a training on NumPy, each alone and all together?",
    measured_answer,
    (
        text("technique", "technique"),
        quantity("tensors", "tensor_bytes", "MiB", per=MIB),
        quantity("process", "process_bytes", "MiB", per=MIB),
        quantity("published less", "published_saved", "%", per=0.01, places=1),
        quantity("less tensors", "tensors_saved", "%", per=0.01, places=1),
        quantity("less in the process", "process_saved", "%", per=0.01, places=1),
        quantity("time, of the base", "time_ratio"),
        text("least to most", lambda row: span((row["ratio_low"], row["ratio_high"]))),
    ),
    notes=measured_notes,
)


def measured(quick: bool, repeats: int, path: Path | None) -> None:
    network = SMALL_NETWORK if quick else NETWORK
    techniques = measured_techniques(network)
    rows = measure((techniques[0], *techniques[-2:]) if quick else techniques, repeats)
    MEASURED.finish(rows, path, simulated=False, options={"quick": quick, **asdict(network)})


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small network: the figures mean nothing.")
@click.option("--measure", "is_measured", is_flag=True, help="Train, and measure.")
@click.option("--repeats", default=5, show_default=True, help="Measured steps of each.")
@common.json_option
def main(quick: bool, is_measured: bool, repeats: int, path: Path | None) -> None:
    common.writable(path)
    if is_measured:
        measured(quick, repeats, path)
        return
    size, batch = (SMALL, 8) if quick else (SIZE, BATCH)
    rows: list[dict[str, Any]] = []
    for technique in TECHNIQUES:
        trace = trace_of(technique, size, (2, 3), batch)
        rows.append(row_of(technique, trace, rows[0] if rows else None))
    BENCH.finish(rows, path, simulated=True, options={"quick": quick, "gpu": GPU, "batch": batch})


if __name__ == "__main__":
    main()
