"""What does one plan of three fates gain over recomputation, offload or lookahead alone?

Steps of the networks of bench/, recorded at batches of 4 and 8 and taken to 256, on a virtual V100
and a GH200 whose VRAM is a share of the peak of a plain step: 30 to 90%. All of them,
the plain step too, run under `umem.chainer.workspace` of 16 MiB, because no plan gets below what a
convolution needs while it runs. ``recompute`` is the largest budget of
`umem.chainer.Recompute` that fits, ``offload`` moves all that backward needs, ``lookahead`` is
managed memory with `umem.chainer.LookaheadPrefetch`, and ``one plan`` is the quickest that
`umem.choose` finds with each value kept, recomputed or offloaded: within some budgets, in plain
memory over a link or in managed memory as pages, where that takes all, or nothing moved among them.
All times are simulated.

The bound: no way is quicker than the step's operations on a GPU with room for all of it, nor than
what it copies, each way by itself, over the link's bandwidth. The least: no way at all is quicker
in that VRAM (one_budget_bound.py).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models import build
from one_budget_bound import least_seconds
from prediction import MODELS, QUICK, SIZES
from report_tables import Column, Row, Table, percent, quantity, span, text

import umem
import umem.chainer
from umem.devices.specs import GpuSpec, gpu_spec
from umem.errors import StateError, UmemError
from umem.predict.techniques import offloading, prefetching, recomputation
from umem.predict.techniques.step_variants import StepVariants
from umem.predict.techniques.technique import Prepared
from umem.units import BLOCK_BYTES, MIB

GPUS = ("v100-16gb", "gh200-96gb")
"""One behind PCIe 3, one behind NVLink-C2C, whose link is thirty times as fast."""
SHARES = (0.3, 0.5, 0.7, 0.9)
SIZE, QUICK_SIZE = 256, 16_384
Prepare = Callable[[StepVariants, GpuSpec], Prepared]


def one_plan(subject: StepVariants, gpu: GpuSpec) -> Prepared:
    """The quickest of those that `umem.choose` offers with values kept, recomputed or offloaded.

    Raises:
        StateError: there is none.
    """
    found = [made for prepare in FATES if (made := tried(prepare, subject, gpu)) is not None]
    if not found:
        raise StateError("neither what moves nor what runs again makes it fit")
    return min(found, key=lambda made: seconds_of(subject, gpu, made) or 0.0)


def tried(prepare: Prepare, subject: StepVariants, gpu: GpuSpec) -> Prepared | None:
    """The step under a technique, if it has something to offer that fits."""
    try:
        made = prepare(subject, gpu)
    except UmemError:
        return None
    return made if seconds_of(subject, gpu, made) is not None else None


def seconds_of(subject: StepVariants, gpu: GpuSpec, made: Prepared) -> float | None:
    step = subject.replays.step(made.trace, gpu, made.mode, prefetch=made.prefetch)
    return step.cost.seconds if step.fits else None


ALONE: dict[str, Prepare] = {
    "recompute": recomputation.prepare_largest,
    "offload": offloading.prepare,
    "lookahead": prefetching.prepare,
}
FATES: tuple[Prepare, ...] = (
    *ALONE.values(),
    offloading.prepare_quickest,
    *(partial(recomputation.prepare_lookahead, budget=budget) for budget in ("50%", "min")),
)
WAYS: dict[str, Prepare] = {**ALONE, "one plan": one_plan}
TARGET = 0.85
"""Of the best of the others, in a third of the cases."""
NEAR = 1e-9
CAP_BYTES = 16 * MIB


def measure(
    gpu_name: str, name: str, trace: umem.Trace, share: float, size: int
) -> Iterator[dict[str, Any]]:
    """One row a way; ``seconds`` is None where it does not fit."""
    roomy = gpu_spec(gpu_name).with_vram(1 << 43)
    plain = capped(StepVariants(trace, [roomy], size))
    alone = plain.replays.step(plain.trace, roomy, "unmanaged").cost
    needed = alone.peak_bytes or 0
    vram = max(BLOCK_BYTES, round(share * needed / BLOCK_BYTES) * BLOCK_BYTES)
    gpu = gpu_spec(gpu_name).with_vram(vram)
    subject = capped(StepVariants(trace, [gpu], size))
    least = least_seconds(subject, gpu, alone.seconds or 0.0)
    for way, prepare in WAYS.items():
        row: dict[str, Any] = {
            "gpu": gpu_name, "model": name, "share": share, "way": way, "vram_bytes": vram,
            "plain_bytes": needed,
            "plain_seconds": alone.seconds, "least_seconds": least, "seconds": None,
            "bound_seconds": None, "peak_bytes": None, "why": None, "simulated": True,
        }  # fmt: skip
        try:
            made = prepare(subject, gpu)
            step = subject.replays.step(made.trace, gpu, made.mode, prefetch=made.prefetch)
            row["why"] = step.reason
            if step.fits:
                out, back = step.cost.sent_bytes or 0, step.cost.fetched_bytes or 0
                link = max(out / (gpu.host_out_bandwidth or 1), back / (gpu.host_in_bandwidth or 1))
                row["seconds"], row["line"] = step.cost.seconds, made.line
                row["sent_bytes"], row["peak_bytes"] = out, step.cost.peak_bytes
                row["bound_seconds"] = max(alone.seconds or 0.0, link)
        except UmemError as error:
            row["why"] = str(error)
        yield row


def capped(subject: StepVariants) -> StepVariants:
    """The step with little workspace, where it has more: no plan gets below one call's."""
    try:
        return subject.changed(cap_bytes=CAP_BYTES)
    except UmemError:
        return subject


def cases(rows: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """The rows of each model and share, by their way."""
    found: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["gpu"], row["model"], row["share"]), {})[row["way"]] = row
    return list(found.values())


def best_alone(case: dict[str, dict[str, Any]]) -> float | None:
    """The time of the quickest of the others; None where none fits."""
    times = [row["seconds"] for way, row in case.items() if way != "one plan" and row["seconds"]]
    return min(times, default=None)


def ratio(case: dict[str, dict[str, Any]]) -> float | None:
    """One plan's time to the best of the others that fit; None without either."""
    ours, others = case["one plan"]["seconds"], best_alone(case)
    return ours / others if ours and others else None


def answer(result: common.Result) -> str:
    found = cases(result["rows"])
    ratios = {id(case): r for case in found if (r := ratio(case)) is not None}
    if not ratios:
        return f"In none of {len(found)} cases do one plan and another way fit (simulated)."
    compared = [case for case in found if id(case) in ratios]
    rows = [row for case in found for row in case.values() if row["seconds"]]
    slower = sum(r > 1 + NEAR for r in ratios.values())
    quick = sum(r <= TARGET for r in ratios.values())
    leasts = [case["one plan"].get("least_seconds") for case in compared]
    out_of_reach = sum(
        least > TARGET * (best_alone(case) or 0)
        for case, least in zip(compared, leasts, strict=True)
        if least is not None
    )
    reach = f"; in {out_of_reach} no way is so much quicker" if any(leasts) else ""
    below = sum(row["seconds"] < row["bound_seconds"] * (1 - NEAR) for row in rows)
    below += sum(row["seconds"] < row.get("least_seconds", 0) * (1 - NEAR) for row in rows)
    alone = sum(bool(case["one plan"]["seconds"]) for case in found) - len(compared)
    return (
        f"Where any of the others fits, one plan takes {span(ratios.values())} of the best of "
        f"them: at least 15% less in {quick} of {len(compared)} cases (a third was asked{reach}), "
        f"more in {slower} (none was asked); it alone "
        f"fits in {alone}; {below} times are below a bound (simulated)."
    )


def of(way: str, key: str) -> Callable[[Row], Any]:
    """What a case has of a way."""
    return lambda case: case[way].get(key)


def share_of_best(case: Row) -> float | None:
    return ratio(dict(case))


COLUMNS: tuple[Column, ...] = (
    text("GPU", of("one plan", "gpu")),
    text("model", of("one plan", "model")),
    quantity("VRAM of what it needs", of("one plan", "share"), "%", per=0.01),
    quantity("with room for all", of("one plan", "plain_seconds"), "ms", per=1e-3),
    quantity("least", of("one plan", "least_seconds"), "ms", per=1e-3),
    *(quantity(way, of(way, "seconds"), "ms", per=1e-3) for way in WAYS),
    Column("of the best", share_of_best, write=percent),
    quantity("its bound", of("one plan", "bound_seconds"), "ms", per=1e-3),
    quantity("its peak", of("one plan", "peak_bytes"), "MiB", per=MIB),
)


def tables(result: common.Result) -> Iterator[Table]:
    yield Table(COLUMNS, cases(result["rows"]), "step, simulated")


BENCH = common.Bench("one_budget", __doc__, answer, tables=tables)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two small models, at half of what they need.")
@click.option("--only", multiple=True, help="These models.")
@common.json_option
def main(quick: bool, only: tuple[str, ...], path: Path | None) -> None:
    rows = []
    for name, size in (QUICK if quick else MODELS).items():
        if not only or name in only:
            np.random.seed(0)
            trace = umem.record_at(build(name, size).trainer(), SIZES)
            for gpu in GPUS[:1] if quick else GPUS:
                for share in (0.8,) if quick else SHARES:
                    found = list(measure(gpu, name, trace, share, QUICK_SIZE if quick else SIZE))
                    rows += found
                    said = {row["way"]: row["seconds"] for row in found}
                    click.echo(f"{gpu}, {name}, {share:.0%}: {said}", err=True)
    BENCH.finish(
        rows, path, simulated=True, options={"quick": quick, "gpus": list(GPUS), "only": only}
    )


if __name__ == "__main__":
    main()
