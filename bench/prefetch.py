"""What does lookahead prefetch gain, and how far is it from the bound that the link sets?

The demo's GCN runs live on a virtual GPU: plain managed memory, prefetch on allocation, and
LookaheadPrefetch at some depths. All times are simulated.

The bound: in a settled step every block that an operation touches must be resident then, and
since its last use it either stayed or was copied in again. Belady's rule (evict what is used
furthest in the future) brings in the fewest blocks; operations are taken to touch theirs one
after the other, which only lowers the count. It is counted on the addresses that the run has, in
blocks of 2 MiB: a block that the pool hands on holds what was in it before, as for the driver.
Every block that comes in pushes one out (VRAM is full, and there is no dirty bit), and the link
carries one thing at a time: the bound is the bytes of both ways over the bandwidth, and never
less than the time of the operations. It leaves out what a move costs beside its bytes. An
allocator that places arrays otherwise has another bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import common
from report_tables import quantity, span, text

import umem
import umem.chainer
from umem.chainer.demo_workload import Workload
from umem.devices.base import Policy
from umem.devices.specs import GpuSpec, gpu_spec
from umem.devices.virtual import VirtualGPU
from umem.trace.events import Event, Mark, Op
from umem.units import BLOCK_BYTES, MIB

FACTORS = (1.25, 1.5, 2.0)
DEPTHS = (1, 2, 3)
GPU = "v100-16gb"
ROUNDS = 50
TARGET = 0.7
"""Of the plain step, at factor 1.5."""


@dataclass(frozen=True)
class Row:
    """One way at one factor: a settled step, simulated.

    ``ratio`` is to plain managed memory, ``over_bound`` to the bound. Bytes are of whole blocks.
    """

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
    over_bound: float
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
    workload: Workload, vram_bytes: int | None, *, prefetch: bool = False, depth: int | None = None
) -> Run:
    """Train in managed memory on a virtual GPU."""
    help_with: AbstractContextManager[Any] = nullcontext()
    if depth is not None:
        help_with = umem.chainer.LookaheadPrefetch(depth)
    figures: list[Any] = []
    losses: list[float] = []
    with umem.virtual_gpu(GPU, vram_bytes) as gpu, umem.managed(prefetch=prefetch), help_with:
        for loss in workload.train(lambda step: None):
            losses.append(loss)
            figures.append(gpu.figures)
    return Run(figures, losses)


# -- the bound ---------------------------------------------------------------------------------


class Footprint(VirtualGPU):
    """A virtual GPU that also writes down the blocks that each operation of a step touches."""

    def __init__(self, spec: GpuSpec) -> None:
        super().__init__(spec)
        self.steps: list[list[list[int]]] = [[]]

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, Op):
            self.steps[-1].append(list(dict.fromkeys(self._blocks(event))))
        elif event == Mark("step"):
            self.steps.append([])

    def _blocks(self, op: Op) -> Iterator[int]:
        for tensor, low, high in (*op.reads, *op.writes):
            if high > low:
                start = self.model.tensors[tensor].span.address
                yield from range((start + low) // BLOCK_BYTES, -(-(start + high) // BLOCK_BYTES))


def footprint(trace: umem.Trace) -> list[list[int]]:
    """The blocks that each operation of the last whole step touches, in managed memory."""
    gpu = Footprint(gpu_spec(GPU))
    gpu.install(Policy("managed"), everywhere=True)
    for event in trace.events:
        gpu.on_event(event)
    return gpu.steps[-2]


def fewest_in(period: Sequence[Iterable[int]], capacity: int) -> int:
    """The fewest blocks that a step that repeats for ever can bring in a time.

    Over `ROUNDS` steps from empty VRAM Belady's rule misses least. A way that brings in m blocks
    a step misses at most ``capacity + ROUNDS * m`` times there, which bounds m from below.
    """
    sequence = [block for blocks in period for block in blocks]
    uses: dict[int, list[int]] = {}
    for time, block in enumerate(sequence):
        uses.setdefault(block, []).append(time)
    following = [0] * len(sequence)
    for times in uses.values():
        for this, after in zip(times, [*times[1:], times[0] + len(sequence)], strict=True):
            following[this] = after
    resident: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    missed = 0
    for start in range(0, ROUNDS * len(sequence), len(sequence)):
        for time, block in enumerate(sequence):
            if block not in resident:
                missed += 1
                if len(resident) == capacity:
                    del resident[_furthest(heap, resident)]
            resident[block] = start + following[time]
            heapq.heappush(heap, (-resident[block], block))
    return max(0, -(-(missed - capacity) // ROUNDS))


def _furthest(heap: list[tuple[int, int]], resident: dict[int, int]) -> int:
    while True:
        use, block = heapq.heappop(heap)
        if resident.get(block) == -use:
            return block


def bound(blocks_in: int, compute_seconds: float) -> float:
    """Seconds that a step takes at least."""
    spec = gpu_spec(GPU)
    assert spec.host_in_bandwidth is not None and spec.host_out_bandwidth is not None
    nbytes = blocks_in * BLOCK_BYTES
    link = nbytes / spec.host_in_bandwidth + nbytes / spec.host_out_bandwidth
    return max(compute_seconds, link)


# -- the table ---------------------------------------------------------------------------------


def measure(nodes: int, steps: int, factors: Sequence[float], depths: Sequence[int]) -> list[Row]:
    """Every way at every factor."""
    workload = Workload.generate(nodes, steps)
    with umem.virtual_gpu(GPU), umem.managed(), umem.record() as recorder:
        list(Workload(workload.graph, workload.adjacency, 3).train(lambda step: None))
    trace = recorder.trace
    period = footprint(trace)
    rows = []
    for factor in factors:
        vram = round(trace.peak_bytes / factor)
        fewest = fewest_in(period, vram // BLOCK_BYTES)
        runs = {"managed": run(workload, vram)}
        runs["managed + prefetch"] = run(workload, vram, prefetch=True)
        runs.update({f"lookahead {d}": run(workload, vram, depth=d) for d in depths})
        plain = runs["managed"]
        rows += [row(way, factor, vram, found, plain, fewest) for way, found in runs.items()]
    return rows


def row(way: str, factor: float, vram: int, found: Run, plain: Run, fewest: int) -> Row:
    """One line."""
    if found.losses != plain.losses:
        raise click.ClickException(f"{way} at factor {factor:g} changed the losses")
    seconds, compute = found.steps[-1], found.last("compute_seconds")
    least = bound(fewest, compute)
    return Row(
        way=way,
        factor=factor,
        vram_bytes=vram,
        step_seconds=seconds,
        ratio=seconds / plain.steps[-1],
        in_bytes=found.last("migrated_in_bytes"),
        out_bytes=found.last("migrated_out_bytes"),
        compute_seconds=compute,
        bound_seconds=least,
        bound_in_bytes=fewest * BLOCK_BYTES,
        over_bound=seconds / least,
        losses=found.losses,
        every_step_seconds=found.steps,
    )


def answer(result: common.Result) -> str:
    ahead = [row for row in result["rows"] if row["way"].startswith("lookahead")]
    return (
        f"A step takes {span(row['ratio'] for row in ahead)} of its time in plain managed memory, "
        f"which is {span(row['over_bound'] for row in ahead)} times the bound, over factors of "
        f"{span(row['factor'] for row in ahead)}."
    )


def target(result: common.Result) -> list[str]:
    found = [r for r in result["rows"] if (r["way"], r["factor"]) == ("lookahead 2", 1.5)]
    verdicts = ["met" if row["ratio"] <= TARGET else "missed" for row in found]
    return [f"Target at factor 1.5, depth 2: {TARGET} of managed: {each}." for each in verdicts]


BENCH = common.Bench(
    "prefetch",
    __doc__,
    answer,
    (
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
@click.option("--steps", type=click.IntRange(3), default=3, show_default=True)
@click.option("--factor", "factors", type=click.FloatRange(1, min_open=True), multiple=True)
@click.option("--depth", "depths", type=click.IntRange(1), multiple=True)
@click.option("--quick", is_flag=True, help="8,000 nodes, factor 1.5, depth 2, three steps.")
@common.json_option
def main(
    nodes: int,
    steps: int,
    factors: tuple[float, ...],
    depths: tuple[int, ...],
    quick: bool,
    path: Path | None,
) -> None:
    factors, depths = factors or FACTORS, depths or DEPTHS
    if quick:
        nodes, steps, factors, depths = 8000, 3, (1.5,), (2,)
    rows = measure(nodes, steps, factors, depths)
    options = {"nodes": nodes, "steps": steps, "factors": factors, "depths": depths}
    BENCH.finish([asdict(found) for found in rows], path, simulated=True, options=options)


if __name__ == "__main__":
    main()
