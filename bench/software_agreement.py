"""Do the virtual GPU and the software GPU agree on the demo's GCN?

The virtual GPU follows Chainer on NumPy, function by function: two steps are recorded, their
workspace is measured, Chainer's source says where CuPy's code needs another, and the trace is
replayed. The software GPU follows the real CuPy, kernel by kernel and allocation by allocation.
Both have the same model of pages and time; all figures are simulated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
import common
from report_tables import quantity, text

import umem
from umem.trace.recording.kept_steps import Keeper, Steps
from umem.units import MIB, parse_bytes

STEPS = 6
SETTLED = 3
"""The first steps are left out: memory is populated, and the pool finds its sizes."""
TARGETS = {"peak": 0.02, "moved": 0.10, "step": 0.15}
SCRIPT = Path(__file__).resolve()


def workload(nodes: int, steps: int) -> Any:
    """The demo's; imports Chainer."""
    from umem.chainer.demo_workload import Workload

    return Workload.generate(nodes, steps)


def on_virtual(nodes: int, gpu: str, vram: str) -> dict[str, Any]:
    """Record on NumPy, replay on the model."""
    keeper = Keeper(Steps(2, 4))
    with umem.virtual_gpu(gpu):  # where the arrays go; what it counts is not used
        made = workload(nodes, STEPS)  # imports Chainer, so that it is recorded
        keeper.start()
        losses = list(made.train(lambda step: None))
        kept = keeper.finish()
    assert kept is not None and not kept.notes, kept
    replayed = umem.replay(kept.trace, gpu, "managed", vram)
    figures = replayed.figures
    count = len(figures.step_seconds)
    return {
        "peak_bytes": figures.peak_bytes,
        "reserved_peak_bytes": figures.reserved_peak_bytes,
        "moved_bytes": round((figures.migrated_bytes or 0) / count),
        "step_seconds": median(figures.step_seconds),
        "losses": losses,
    }


def live(nodes: int, gpu: str, vram: str) -> dict[str, Any]:
    """Run on NumPy, with the virtual GPU beside it, which hears of no workspace."""
    made = workload(nodes, STEPS)
    with umem.virtual_gpu(gpu, vram) as model, umem.managed():
        return _settled(model, made)


def on_software(nodes: int, gpu: str, vram: str) -> dict[str, Any]:
    """Run on the real CuPy, on host memory."""
    software = umem.software_gpu(gpu, vram, force=True)
    made = workload(nodes, STEPS)  # imports Chainer, so that it is recorded
    with umem.record() as recorder, umem.managed():
        found = _settled(software, made)
    return {**found, "peak_bytes": recorder.trace.peak_bytes}


def _settled(model: Any, made: Any) -> dict[str, Any]:
    """Train, and say what a step cost once the first ones were over."""
    losses, ends = [], []
    for loss in made.train(lambda step: None):
        losses.append(loss)
        ends.append(model.figures)
    first, last = ends[SETTLED - 1], ends[-1]
    count = len(ends) - SETTLED
    reserved = last.reserved_peak_bytes or last.peak_bytes  # all that cudaMalloc has given
    return {
        "peak_bytes": last.peak_bytes,
        "reserved_peak_bytes": reserved,
        "moved_bytes": round((last.migrated_bytes - first.migrated_bytes) / count),
        "step_seconds": (last.seconds - first.seconds) / count,
        "losses": losses,
    }


WAYS = {"virtual, replayed": on_virtual, "virtual, live": live, "software": on_software}


def _answer(result: common.Result) -> str:
    replayed, live_row, software = result["rows"]
    losses = zip(live_row["losses"], software["losses"], strict=True)
    worst = max(abs(a - b) / abs(a) for a, b in losses)
    return (
        f"Software over virtual, both live: {_gaps(software, live_row)}; over the replay: "
        f"{_gaps(software, replayed)}; a replay begins at its first recorded step, with what is "
        "there side by side, where a pool that has lived through the start of the program has "
        f"gaps; losses differ by {worst:.0e} of their size at most."
    )


def _gaps(software: dict[str, Any], virtual: dict[str, Any]) -> str:
    found = []
    for name, key in (("peak", "peak_bytes"), ("moved", "moved_bytes"), ("step", "step_seconds")):
        gap = software[key] / virtual[key] - 1
        missed = "" if abs(gap) <= TARGETS[name] else f" (target {TARGETS[name]:.0%})"
        found.append(f"{name} {gap:+.1%}{missed}")
    return ", ".join(found)


BENCH = common.Bench(
    "software_agreement",
    __doc__,
    _answer,
    (
        text("device", "device"),
        quantity("peak", "peak_bytes", "MiB", per=MIB),
        quantity("reserved", "reserved_peak_bytes", "MiB", per=MIB),
        quantity("moved a step", "moved_bytes", "MiB", per=MIB),
        quantity("step", "step_seconds", "ms", per=1e-3),
    ),
)


def _rows(nodes: int, gpu: str, vram: str) -> Iterator[dict[str, Any]]:
    for way in WAYS:
        asked = [sys.executable, str(SCRIPT), "--only", way, "--nodes", str(nodes)]
        done = subprocess.run(
            [*asked, "--gpu", gpu, "--vram", vram], stdout=subprocess.PIPE, text=True, check=True
        )
        yield {"device": way, **json.loads(done.stdout)}


@click.command(help=__doc__)
@click.option("--nodes", default=64_000, show_default=True)
@click.option("--gpu", default="t4", show_default=True)
@click.option("--vram", default="96MiB", show_default=True)
@click.option("--quick", is_flag=True, help="4,000 nodes in 6 MiB.")
@click.option("--only", type=click.Choice(list(WAYS)), hidden=True)
@common.json_option
def main(nodes: int, gpu: str, vram: str, quick: bool, only: str | None, path: Path | None) -> None:
    common.writable(path)
    parse_bytes(vram, "--vram")
    if quick:
        nodes, vram = 4_000, "6MiB"
    if only:
        click.echo(json.dumps(WAYS[only](nodes, gpu, vram)))
        return
    options = {"nodes": nodes, "gpu": gpu, "vram": vram}
    BENCH.finish(list(_rows(nodes, gpu, vram)), path, simulated=True, options=options)


if __name__ == "__main__":
    main()
