"""What does paging by plan gain, and how far is it from the bound that the link sets?

The demo's GCN and ResNet50 train live on a virtual GPU: plain managed memory, prefetch on
allocation, and LookaheadPrefetch. All times are simulated.

The bound is the least that the link can carry (`bench/paging_bound.py`): contents that live go out
and in where VRAM has no room, which is solved exactly on the addresses that the run has; over the
bandwidths of the link, which carries one thing at a time, and never less than the time of the
operations. It leaves out what a move costs beside its bytes, and what new memory costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models.catalogue import build
from paging_bound import footprint, largest_blocks, least_moves
from report_tables import quantity, span, text

import umem
import umem.chainer
from umem._common.specs import gpu_spec
from umem.chainer import Workload
from umem.units import BLOCK_BYTES, MIB

FACTORS = (1.25, 1.5, 2.0, 3.0)
DEPTHS = (2, 8)
GPU = "v100-16gb"
TARGET = 1.25
"""Times the bound, wherever no operation alone needs more than VRAM."""
BATCH = 16
Steps = Callable[[int], Iterator[Any]]
"""Trains so many steps from the same start; yields each loss, or another figure of the step."""


@dataclass(frozen=True)
class Row:
    """One way at one factor: a settled step, simulated.

    ``ratio`` is to plain managed memory, ``over_bound`` to the bound. Bytes are of whole blocks.
    ``has_room``: no operation alone needs more than VRAM.
    """

    network: str
    way: str
    factor: float
    vram_bytes: int
    step_seconds: float
    ratio: float
    in_bytes: int
    out_bytes: int
    compute_seconds: float
    bound_seconds: float
    bound_in_bytes: int
    bound_out_bytes: int
    over_bound: float
    has_room: bool
    losses: list[float]
    every_step_seconds: list[float]
    simulated: bool = True


# -- the runs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run showed: figures after each step, and losses."""

    figures: list[Any]
    losses: list[float]

    @property
    def steps(self) -> list[float]:
        """Seconds of each step but the first, which learns and sets up."""
        return [after.seconds - before.seconds for before, after in pairwise(self.figures)]

    def last(self, name: str) -> Any:
        """How much a figure grew in the last step."""
        before, after = self.figures[-2:]
        return getattr(after, name) - getattr(before, name)


def run(
    steps: Steps, count: int, vram_bytes: int, prefetch: bool = False, depth: int | None = None
) -> Run:
    """Train in managed memory on a virtual GPU."""
    help_with: AbstractContextManager[Any] = nullcontext()
    if depth is not None:
        help_with = umem.chainer.LookaheadPrefetch(depth)
    figures: list[Any] = []
    losses: list[float] = []
    with umem.virtual_gpu(GPU, vram_bytes) as gpu, umem.managed(prefetch=prefetch), help_with:
        for loss in steps(count):
            losses.append(float(loss))
            figures.append(gpu.figures)
    return Run(figures, losses)


def gcn(nodes: int) -> Steps:
    """The demo's network on a graph of so many nodes."""
    whole = Workload.generate(nodes, 1)

    def steps(count: int) -> Iterator[Any]:
        return Workload(whole.graph, whole.adjacency, count).train(lambda step: None)

    return steps


def resnet(count: int) -> Iterator[Any]:
    """ResNet50 at 64 pixels; yields a parameter's sum, which every gradient goes into."""
    np.random.seed(0)
    model = build("ResNet50", "64 px")
    step = model.trainer()
    for _ in range(count):
        step(BATCH)
        yield sum(float(param.array.sum()) for param in list(model.link.params())[:3])


# -- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """What the link must carry at least in a settled step."""

    blocks_in: int
    blocks_out: int
    has_room: bool

    def seconds(self, compute_seconds: float) -> float:
        return max(compute_seconds, _link_seconds(self.blocks_in, self.blocks_out))


def _link_seconds(blocks_in: int, blocks_out: int) -> float:
    spec = gpu_spec(GPU)
    assert spec.host_in_bandwidth is not None and spec.host_out_bandwidth is not None
    seconds = blocks_in / spec.host_in_bandwidth + blocks_out / spec.host_out_bandwidth
    return BLOCK_BYTES * seconds


def measure(
    network: str, steps: Steps, count: int, factors: Sequence[float], depths: Sequence[int]
) -> list[Row]:
    """Every way at every factor."""
    with umem.virtual_gpu(GPU), umem.managed(), umem.record() as recorder:
        list(steps(max(count, 5)))  # until every array has found its place
    trace = recorder.trace
    period = footprint(trace, gpu_spec(GPU))
    rows = []
    for factor in factors:
        vram = round(trace.peak_bytes / factor)
        capacity = vram // BLOCK_BYTES
        bound = Bound(*least_moves(period, capacity), largest_blocks(period) <= capacity)
        runs = {"managed": run(steps, count, vram)}
        runs["managed + prefetch"] = run(steps, count, vram, prefetch=True)
        runs.update({f"lookahead {d}": run(steps, count, vram, depth=d) for d in depths})
        plain = runs["managed"]
        rows += [row(network, way, factor, vram, r, plain, bound) for way, r in runs.items()]
    return rows


def row(
    network: str, way: str, factor: float, vram: int, found: Run, plain: Run, bound: Bound
) -> Row:
    """One line."""
    if found.losses != plain.losses:
        raise click.ClickException(f"{way} at factor {factor:g} changed what {network} computes")
    seconds, compute = found.steps[-1], found.last("compute_seconds")
    least = bound.seconds(compute)
    return Row(
        network=network,
        way=way,
        factor=factor,
        vram_bytes=vram,
        step_seconds=seconds,
        ratio=seconds / plain.steps[-1],
        in_bytes=found.last("migrated_in_bytes"),
        out_bytes=found.last("migrated_out_bytes"),
        compute_seconds=compute,
        bound_seconds=least,
        bound_in_bytes=bound.blocks_in * BLOCK_BYTES,
        bound_out_bytes=bound.blocks_out * BLOCK_BYTES,
        over_bound=seconds / least,
        has_room=bound.has_room,
        losses=found.losses,
        every_step_seconds=found.steps,
    )


def ahead(result: common.Result) -> list[Any]:
    """The rows of LookaheadPrefetch where every operation alone has room."""
    return [r for r in result["rows"] if r["way"].startswith("lookahead") and r["has_room"]]


def answer(result: common.Result) -> str:
    rows = ahead(result)
    return (
        f"A step takes {span(row['ratio'] for row in rows)} of its time in plain managed memory, "
        f"which is {span(row['over_bound'] for row in rows)} times the bound, over factors of "
        f"{span(row['factor'] for row in rows)}, wherever no operation alone needs more than VRAM."
    )


def target(result: common.Result) -> list[str]:
    """Say where the target was met, network by network."""
    answers = []
    for network in dict.fromkeys(row["network"] for row in result["rows"]):
        rows = [row for row in ahead(result) if row["network"] == network]
        met = sum(row["over_bound"] <= TARGET for row in rows)
        answers.append(f"{network}: at most {TARGET} times the bound in {met} of {len(rows)} rows.")
    return answers


BENCH = common.Bench(
    "prefetch",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("way", "way"),
        quantity("factor", "factor"),
        quantity("VRAM", "vram_bytes", "MiB", per=MIB),
        quantity("step", "step_seconds", "ms", per=1e-3),
        quantity("of managed", "ratio"),
        quantity("in", "in_bytes", "MiB", per=MIB),
        quantity("out", "out_bytes", "MiB", per=MIB),
        quantity("operations", "compute_seconds", "ms", per=1e-3),
        quantity("bound", "bound_seconds", "ms", per=1e-3),
        quantity("of bound", "over_bound"),
    ),
    notes=target,
)


@click.command(help=__doc__)
@click.option("--nodes", type=click.IntRange(1000), default=20_000, show_default=True)
@click.option("--steps", type=click.IntRange(3), default=6, show_default=True)
@click.option("--factor", "factors", type=click.FloatRange(1, min_open=True), multiple=True)
@click.option("--depth", "depths", type=click.IntRange(1), multiple=True)
@click.option("--quick", is_flag=True, help="The GCN alone: 8,000 nodes, factor 1.5, depth 2.")
@common.json_option
def main(
    nodes: int,
    steps: int,
    factors: tuple[float, ...],
    depths: tuple[int, ...],
    quick: bool,
    path: Path | None,
) -> None:
    """Measure, print the tables, and write the result."""
    factors, depths = factors or FACTORS, depths or DEPTHS
    if quick:
        nodes, steps, factors, depths = 8000, 6, (1.5,), (2,)
    rows = measure("GCN", gcn(nodes), steps, factors, depths)
    if not quick:
        rows += measure("ResNet50", resnet, steps, factors, depths)
    options = {"nodes": nodes, "steps": steps, "factors": factors, "depths": depths}
    BENCH.finish([asdict(found) for found in rows], path, simulated=True, options=options)


if __name__ == "__main__":
    main()
