"""What does one plan of three fates gain over recomputation, offload or lookahead alone?

Steps of the networks of bench/, recorded at batches of 4 and 8 and taken to 256, on a virtual V100
and a GH200 whose VRAM is a share of the peak of a plain step: 30 to 90%. All of them,
the plain step too, run under `umem.chainer.workspace` of 16 MiB, because no plan gets below what a
convolution needs while it runs. ``recompute`` is the largest budget of
`umem.chainer.Recompute` that fits, ``offload`` moves all that backward needs, ``lookahead`` is
managed memory with `umem.chainer.LookaheadPrefetch`, and ``one plan`` is the
quickest budget that fits with each value kept, made again or moved, as `umem.choose` finds it:
without moves where the replay says that they gain nothing. All times are simulated.

The bound: no way is quicker than the step's operations on a GPU with room for all of it, nor than
what it copies, each way by itself, over the link's bandwidth.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models import build
from prediction import MODELS, QUICK, SIZES
from report_tables import quantity, span, text

import umem
import umem.chainer
from umem.devices.specs import GpuSpec, gpu_spec
from umem.errors import StateError, UmemError
from umem.predict.techniques import offloading, prefetching, recomputation
from umem.predict.techniques.subject import Subject
from umem.predict.techniques.technique import Prepared
from umem.units import BLOCK_BYTES, MIB

GPUS = ("v100-16gb", "gh200-96gb")
"""One behind PCIe 3, one behind NVLink-C2C, whose link is thirty times as fast."""
SHARES = (0.3, 0.5, 0.7, 0.9)
SIZE, QUICK_SIZE = 256, 16_384


def one_plan(subject: Subject, gpu: GpuSpec) -> Prepared:
    """What umem.choose offers of the two: without moves where nothing is gained by them."""
    try:
        return offloading.prepare_quickest(subject, gpu)
    except StateError:
        return recomputation.prepare_largest(subject, gpu)


WAYS: dict[str, Callable[[Subject, GpuSpec], Prepared]] = {
    "recompute": recomputation.prepare_largest,
    "offload": offloading.prepare,
    "lookahead": prefetching.prepare,
    "one plan": one_plan,
}
TARGET = 0.85
"""Of the best of the others, in a third of the cases."""
NEAR = 1e-9
CAP_BYTES = 16 * MIB


def measure(
    gpu_name: str, name: str, trace: umem.Trace, share: float, size: int
) -> Iterator[dict[str, Any]]:
    """One row a way; ``seconds`` is None where it does not fit."""
    roomy = gpu_spec(gpu_name).with_vram(1 << 43)
    plain = capped(Subject(trace, [roomy], size))
    alone = plain.replays.step(plain.trace, roomy, "unmanaged").cost
    needed = alone.peak_bytes or 0
    vram = max(BLOCK_BYTES, round(share * needed / BLOCK_BYTES) * BLOCK_BYTES)
    gpu = gpu_spec(gpu_name).with_vram(vram)
    subject = capped(Subject(trace, [gpu], size))
    for way, prepare in WAYS.items():
        row: dict[str, Any] = {
            "gpu": gpu_name, "model": name, "share": share, "way": way, "vram_bytes": vram,
            "plain_bytes": needed,
            "plain_seconds": alone.seconds, "seconds": None, "bound_seconds": None, "why": None,
            "simulated": True,
        }  # fmt: skip
        try:
            made = prepare(subject, gpu)
            step = subject.replays.step(made.trace, gpu, made.mode, prefetch=made.prefetch)
            row["why"] = step.reason
            if step.fits:
                out, back = step.cost.sent_bytes or 0, step.cost.fetched_bytes or 0
                link = max(out / (gpu.host_out_bandwidth or 1), back / (gpu.host_in_bandwidth or 1))
                row["seconds"], row["line"] = step.cost.seconds, made.line
                row["sent_bytes"] = out
                row["bound_seconds"] = max(alone.seconds or 0.0, link)
        except UmemError as error:
            row["why"] = str(error)
        yield row


def capped(subject: Subject) -> Subject:
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


def ratio(case: dict[str, dict[str, Any]]) -> float | None:
    """One plan's time to the best of the others that fit; None without either."""
    others = [row["seconds"] for way, row in case.items() if way != "one plan" and row["seconds"]]
    ours = case["one plan"]["seconds"]
    return ours / min(others) if ours and others else None


def answer(result: common.Result) -> str:
    found = cases(result["rows"])
    ratios = [r for case in found if (r := ratio(case)) is not None]
    slower = sum(r > 1 + NEAR for r in ratios)
    quick = sum(r <= TARGET for r in ratios)
    alone = sum(
        bool(case["one plan"]["seconds"])
        and not any(row["seconds"] for way, row in case.items() if way != "one plan")
        for case in found
    )
    rows = [row for case in found for row in case.values() if row["seconds"]]
    below = sum(row["seconds"] < row["bound_seconds"] * (1 - NEAR) for row in rows)
    if not ratios:
        return f"In none of {len(found)} cases do one plan and another way fit (simulated)."
    return (
        f"Where any of the others fits, one plan takes {span(ratios)} of the best of them: at "
        f"least 15% less in {quick} of {len(ratios)} cases (a third was asked), more in "
        f"{slower} (none was asked); it alone fits in {alone}; {below} times are below the bound "
        "(simulated)."
    )


BENCH = common.Bench(
    "one_budget",
    __doc__,
    answer,
    (
        text("GPU", "gpu"),
        text("model", "model"),
        quantity("VRAM of what it needs", "share", "%", per=0.01),
        text("way", "way"),
        quantity("step, simulated", "seconds", "ms", per=1e-3),
        quantity("with room for all", "plain_seconds", "ms", per=1e-3),
        quantity("bound", "bound_seconds", "ms", per=1e-3),
    ),
)


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
