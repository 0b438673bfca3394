"""How does each mode behave as the data outgrow VRAM?

Two workloads. `tensors`: three arrays that together are `factor` times VRAM, then sums over them
again and again. `gcn`: a graph network trained for some steps, whose step needs `factor` times
VRAM; here the data stay and VRAM gets smaller, because a smaller graph would show how long
launches take. A time is that of a step once it has settled, per byte of data, relative to the
same mode at the smallest factor.

On a virtual device (``--device virtual:v100-16gb``) times are simulated: `tensors` runs live, `gcn`
is recorded once and replayed, which gives the same figures. On ``cuda`` they are measured, and
nothing is oversubscribed: a limit plays VRAM for `unmanaged` and `hybrid`, `managed` is never under
pressure, and gpu_guard.py refuses what is too large for the rule it states. NOT RUN YET on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import common
import oversubscribe_views as views

import umem
import umem.chainer
from umem.devices.specs import gpu_spec
from umem.errors import OutOfMemoryError, UmemError
from umem.memory.process import Block
from umem.units import MIB

MODES = ("unmanaged", "managed", "managed + prefetch", "hybrid")
FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
WORKLOADS = ("tensors", "gcn")
GRAPH_NETWORK = "3 layers, 16 classes"
PILOT_NODES = 2000
MARGIN = 1.25
"""On a real GPU: what pools round up and what a step needs beside the tensors it is known by."""

Now = Callable[[], float]


@dataclass(frozen=True)
class Outcome:
    """What one mode did at one factor. ``step_seconds`` has every repeat's steps.

    Migrated bytes are those of the whole run, None where the device does not tell.
    """

    workload: str
    mode: str
    factor: float
    nbytes: int
    vram_bytes: int
    fits: bool
    reason: str | None = None
    step_seconds: list[list[float]] = field(default_factory=list)
    migrated_in_bytes: int | None = None
    migrated_out_bytes: int | None = None

    @property
    def seconds(self) -> float | None:
        """Median of the settled steps: those after each repeat's first."""
        settled = [seconds for steps in self.step_seconds for seconds in steps[1:]]
        return common.summary(settled).median if settled else None


# -- the workloads -----------------------------------------------------------------------------


def sum_arrays(xp: Any, nbytes: int, steps: int, now: Now) -> list[float]:
    """Three arrays of ``nbytes`` together, then sums over them; the seconds of each step."""
    count = nbytes // (3 * 4)
    a, b, c = (xp.full(count, value, "float32") for value in (1, 2, 0))
    ends = [now()]
    for _ in range(steps):
        xp.add(a, b, out=c)
        xp.add(b, c, out=a)
        ends.append(now())
    return [end - start for start, end in pairwise(ends)]


def train(nodes: int, steps: int, device: Any = None, now: Now = time.perf_counter) -> list[float]:
    """Train a GCN on a graph of so many nodes; the seconds of each step."""
    import chainer  # after umem.chainer, which makes it ready
    from models import build, sent

    device = chainer.get_device("@numpy") if device is None else device
    model = build("GCN", GRAPH_NETWORK)
    inputs = sent(model.inputs(nodes), device)
    optimizer = chainer.optimizers.Adam().setup(model.link.to_device(device))
    ends = [now()]
    for _ in range(steps):
        optimizer.update(lambda: model.loss(*inputs))
        ends.append(now())
    return [end - start for start, end in pairwise(ends)]


def record(nodes: int, steps: int) -> umem.Trace:
    """The trace of `train` on NumPy."""
    with umem.record() as recorder:
        train(nodes, steps)
    return recorder.trace


def nodes_for(nbytes: int) -> int:
    """How many nodes make a step that needs about so many bytes."""
    peak = record(PILOT_NODES, 1).peak_bytes
    return max(100, round(PILOT_NODES * nbytes / peak))


def block(mode: str, limit: int | None = None) -> Block:
    """The block of umem that is called so; the limit is for the modes that VRAM bounds."""
    if mode == "unmanaged":
        return umem.unmanaged(limit)
    if mode == "hybrid":
        return umem.hybrid(limit)
    return umem.managed(prefetch=mode != "managed")


# -- the devices -------------------------------------------------------------------------------


class VirtualBench:
    """Both workloads on the model of a GPU. Simulated, hence the same in every repeat: one."""

    simulated = True

    def __init__(self, spec: str, vram_bytes: int, top_factor: float, steps: int) -> None:
        self.vram_bytes, self.steps = vram_bytes, steps
        umem.virtual_gpu(spec, vram_bytes)  # refuses what is unknown or too small
        self._spec = gpu_spec(spec)
        self.name = self._spec.title
        self._top_bytes = round(top_factor * vram_bytes)
        self._trace: umem.Trace | None = None

    def tensors(self, mode: str, factor: float) -> Outcome:
        """Live: the arithmetic is done."""
        nbytes = round(factor * self.vram_bytes)
        known = ("tensors", mode, factor, nbytes, self.vram_bytes)
        with umem.virtual_gpu(self._spec, self.vram_bytes) as gpu:

            def now() -> float:
                gpu.synchronize()
                return gpu.figures.seconds

            try:
                with block(mode) as memory:
                    steps = sum_arrays(memory.xp, nbytes, self.steps, now)
            except OutOfMemoryError as error:
                return Outcome(*known, False, str(error))
        found = gpu.figures
        return Outcome(
            *known, True, None, [steps], found.migrated_in_bytes, found.migrated_out_bytes
        )

    def gcn(self, mode: str, factor: float) -> Outcome:
        """Replayed from one recording, on less and less VRAM."""
        if self._trace is None:
            self._trace = record(nodes_for(self._top_bytes), self.steps)
        peak = self._trace.peak_bytes
        vram = round(peak / factor)
        kind, _, prefetch = mode.partition(" + ")
        found = umem.replay(self._trace, self._spec, kind, vram, prefetch=bool(prefetch))
        known = ("gcn", mode, factor, peak, vram, found.fits, found.reason)
        if not found.fits:
            return Outcome(*known)
        figures = found.figures
        steps = list(figures.step_seconds)
        return Outcome(*known, [steps], figures.migrated_in_bytes, figures.migrated_out_bytes)


class CudaBench:
    """Both workloads for real, within the budget that gpu_guard.py gives.

    Managed memory and hybrid's spilled memory come from two pools that keep what they reserve,
    so each must have room for the largest factor.
    """

    simulated = False

    def __init__(self, vram_bytes: int, top_factor: float, steps: int) -> None:
        import gpu_guard

        from umem.devices.cuda import open_cuda

        self.device = open_cuda()
        self.vram_bytes, self.steps = vram_bytes, steps
        self.name = self.device.name
        self._top_bytes = round(top_factor * vram_bytes)
        self._guard = gpu_guard.guard(self.device)
        self._guard.check(round(2 * MARGIN * self._top_bytes))
        self._nodes: int | None = None

    def tensors(self, mode: str, factor: float) -> Outcome:
        """The same code as on a virtual GPU; a limit plays VRAM."""
        nbytes = round(factor * self.vram_bytes)
        return self._run("tensors", mode, factor, nbytes, self.vram_bytes, self._sum)

    def _sum(self, memory: Any, nbytes: int) -> list[float]:
        return sum_arrays(memory.xp, nbytes, self.steps, self._now)

    def gcn(self, mode: str, factor: float) -> Outcome:
        """One graph, under a smaller and smaller limit."""
        if self._nodes is None:
            self._nodes = nodes_for(self._top_bytes)
        limit = round(self._top_bytes / factor)
        return self._run("gcn", mode, factor, self._top_bytes, limit, self._train)

    def _train(self, memory: Any, nbytes: int) -> list[float]:
        assert self._nodes is not None
        return train(self._nodes, self.steps, umem.chainer.device(), self._now)

    def _run(
        self,
        workload: str,
        mode: str,
        factor: float,
        nbytes: int,
        limit: int,
        work: Callable[[Any, int], list[float]],
    ) -> Outcome:
        known = (workload, mode, factor, nbytes, limit)
        try:
            with block(mode, limit) as memory:
                return Outcome(*known, True, None, [work(memory, nbytes)])
        except OutOfMemoryError as error:
            if mode != "unmanaged":  # then it is the guard that refused
                raise
            return Outcome(*known, False, str(error))

    def _now(self) -> float:
        self.device.synchronize()
        return time.perf_counter()


def open_bench(
    device: str, vram_bytes: int | None, top_factor: float, steps: int
) -> VirtualBench | CudaBench:
    """The bench that ``--device`` names.

    Raises:
        click.UsageError: it names none. UmemError: the device cannot be had, or is too small.
    """
    kind, _, spec = device.partition(":")
    if kind == "virtual" and spec:
        return VirtualBench(spec, vram_bytes or 64 * MIB, top_factor, steps)
    if device == "cuda":
        return CudaBench(vram_bytes or 256 * MIB, top_factor, steps)
    raise click.UsageError(f"--device is cuda or virtual:GPU, as virtual:v100-16gb; got {device!r}")


# -- the sweep --------------------------------------------------------------------------------


def sweep(
    bench: VirtualBench | CudaBench,
    workloads: tuple[str, ...],
    factors: tuple[float, ...],
    repeats: int,
) -> Iterator[Outcome]:
    """Every mode at every factor, the largest first; repeats are interleaved."""
    for workload in workloads:
        run = getattr(bench, workload)
        for factor in sorted(factors, reverse=True):
            rounds = [[run(mode, factor) for mode in MODES] for _ in range(repeats)]
            for same in zip(*rounds, strict=True):
                steps = [step for outcome in same for step in outcome.step_seconds]
                yield Outcome(**{**asdict(same[0]), "step_seconds": steps})


def rows(outcomes: list[Outcome], simulated: bool) -> list[dict[str, Any]]:
    """The outcomes in ascending factor, each relative to its mode at the smallest one."""
    base: dict[tuple[str, str], float] = {}
    found = []
    for outcome in sorted(
        outcomes, key=lambda o: (WORKLOADS.index(o.workload), o.factor, MODES.index(o.mode))
    ):
        seconds = outcome.seconds
        per_byte = None if seconds is None else seconds / outcome.nbytes
        if per_byte is not None:
            base.setdefault((outcome.workload, outcome.mode), per_byte)
        first = base.get((outcome.workload, outcome.mode))
        relative = per_byte / first if per_byte is not None and first else None
        more = dict(seconds=seconds, seconds_per_byte=per_byte, relative=relative)
        found.append({**asdict(outcome), **more, "simulated": simulated})
    return found


BENCH = common.Bench("oversubscribe", __doc__, views.answer, tables=views.by_workload)


@click.command(help=__doc__)
@click.option("--device", default="virtual:v100-16gb", show_default=True, help="virtual:GPU, cuda.")
@click.option("--vram", type=common.SIZE, help="Default: 64MiB; 256MiB, by a limit, on cuda.")
@click.option("--workload", type=click.Choice(WORKLOADS), multiple=True, help="Default: both.")
@click.option(
    "--factor",
    "factors",
    type=click.FloatRange(0.1, 8),
    multiple=True,
    help="Default: 0.5 to 3 in eight steps. May be given more than once.",
)
@click.option("--steps", type=click.IntRange(2), default=6, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, help="On cuda; simulated is exact.")
@click.option("--quick", is_flag=True, help="Factors 0.5 and 3, 16 MiB, three steps.")
@common.json_option
@click.option("--plot", "picture", type=click.Path(dir_okay=False), help="Write a PNG there.")
def main(
    device: str,
    vram: int | None,
    workload: tuple[str, ...],
    factors: tuple[float, ...],
    steps: int,
    repeats: int,
    quick: bool,
    path: Path | None,
    picture: str | None,
) -> None:
    if quick:
        vram, steps = vram or 16 * MIB, 3
        factors = factors or (0.5, 3.0)
    factors = tuple(dict.fromkeys(factors or FACTORS))
    common.writable(path, picture)
    try:
        bench = open_bench(device, vram, max(factors), steps)
        repeats = 1 if bench.simulated else repeats
        outcomes = list(sweep(bench, workload or WORKLOADS, factors, repeats))
    except UmemError as error:
        raise click.ClickException(str(error)) from error
    found = rows(outcomes, bench.simulated)
    if picture:
        views.plot(found, bench.name, bench.simulated, picture)
    options = dict(
        device=device,
        vram_bytes=bench.vram_bytes,
        factors=sorted(factors),
        steps=steps,
        repeats=repeats,
        quick=quick,
    )
    gpu = None if bench.simulated else {"name": bench.name}
    BENCH.finish(found, path, simulated=bench.simulated, options=options, gpu=gpu)


if __name__ == "__main__":
    main()
