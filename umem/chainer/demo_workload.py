"""The demo's workload: a 3-layer full-batch GCN that does not fit, in every mode.

A graph convolution network has no mini-batches: the whole graph is one step. That is the case
for which unified memory was first brought to Chainer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import chainer
import chainer.functions as F
import numpy as np

from umem.chainer.current_device import device
from umem.chainer.gcn import GCN, Adjacency
from umem.devices import Mode, current_device
from umem.errors import OutOfMemoryError
from umem.graphs import Graph, normalised_adjacency, rmat
from umem.memory import Block, hybrid, managed, unmanaged, virtual_gpu
from umem.predict import ModeRow, replay, replayed_row, simulated_row
from umem.trace import Trace
from umem.trace.recording import record

if TYPE_CHECKING:
    from umem.devices.software import SoftwareGPU
    from umem.devices.virtual import VirtualGPU

HIDDEN = 128
CLASSES = 40
TIES_PER_NODE = 6.5
GRAPH_ADVICE = {"SparseMatMul.matrix*": "read_mostly"}
VARIANTS: tuple[tuple[Mode, bool, str | None], ...] = (
    ("unmanaged", False, None),
    ("managed", False, None),
    ("managed", True, None),
    ("managed", False, "read_mostly"),
    ("hybrid", False, None),
)
"""Variants that the demo runs: mode, prefetch on allocation, advice for the graph."""
BYTES_PER_NODE = 4030
"""Bytes of a step for each node, from the traced peak of 100,000 nodes; sizes the graph on CUDA."""

Progress = Callable[[str, int], None]
"""Called with the name of the running variant, and the number of its finished steps."""


@dataclass(frozen=True)
class Workload:
    """A generated graph (R-MAT: power-law degrees, fixed seed) and how long to train on it."""

    graph: Graph
    adjacency: Any
    steps: int

    @classmethod
    def generate(cls, nodes: int, steps: int) -> Workload:
        """Generate the graph, the same on every machine."""
        graph = rmat(nodes, round(TIES_PER_NODE * nodes), HIDDEN, CLASSES, seed=7)
        return cls(graph, normalised_adjacency(graph), steps)

    def train(self, progress: Callable[[int], None]) -> Iterator[float]:
        """Train on the current device; yields each step's loss."""
        place = device()
        np.random.seed(0)
        adjacency = Adjacency(self.adjacency).to_device(place)
        features, labels = place.send(
            (self.graph.features, self.graph.labels_where(self.graph.train_mask))
        )
        model = GCN(HIDDEN, HIDDEN, CLASSES, layers=3)
        optimizer = chainer.optimizers.Adam(0.01).setup(model.to_device(place))
        for step in range(self.steps):
            loss = F.softmax_cross_entropy(model(adjacency, features), labels)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            progress(step + 1)
            yield float(loss.array)
            del loss  # it holds the step's graph, which would still be alive in the next step


def run_virtual(
    workload: Workload, gpu: str, vram_bytes: int, progress: Progress
) -> tuple[list[ModeRow], Trace]:
    """Run every variant on a virtual GPU: two with real arithmetic, the others replayed."""

    def run(mode: Mode) -> tuple[ModeRow, Trace]:
        with virtual_gpu(gpu, vram_bytes) as model:
            return _run_live(workload, mode, model, progress)

    return _run_modes(run, gpu, vram_bytes, workload.steps, progress)


def run_software(
    workload: Workload, gpu: SoftwareGPU, vram_bytes: int, progress: Progress
) -> tuple[list[ModeRow], Trace]:
    """Run every variant on the open software GPU: two on CuPy, the others replayed."""

    def run(mode: Mode) -> tuple[ModeRow, Trace]:
        gpu.restart()
        found = _run_live(workload, mode, gpu, progress)
        gc.collect()
        current_device().synchronize()
        current_device().xp.get_default_memory_pool().free_all_blocks()
        return found

    return _run_modes(run, gpu.name, vram_bytes, workload.steps, progress)


def _run_modes(
    run: Callable[[Mode], tuple[ModeRow, Trace]],
    gpu: str,
    vram_bytes: int,
    steps: int,
    progress: Progress,
) -> tuple[list[ModeRow], Trace]:
    """Run unmanaged and managed, and replay the other variants on the trace."""
    stopped, _ = run("unmanaged")
    managed, trace = run("managed")
    rows = [stopped, managed]
    for mode, prefetch, advice in VARIANTS[2:]:
        progress(f"replaying {mode}", steps)
        result = replay(
            trace, gpu, mode, vram_bytes, prefetch=prefetch, advice=GRAPH_ADVICE if advice else None
        )
        rows.append(replayed_row(result, advice))
    return rows, trace


def _run_live(
    workload: Workload, mode: Mode, model: VirtualGPU | SoftwareGPU, progress: Progress
) -> tuple[ModeRow, Trace]:
    """Run and record one variant on a simulated GPU; out of memory becomes its reason."""
    losses: list[float] = []
    ends: list[float] = [0.0]
    reason = None
    progress(mode, 0)
    with record() as recorder, _block(mode):
        try:
            for loss in workload.train(lambda step: progress(mode, step)):
                losses.append(loss)
                ends.append(model.figures.seconds or 0.0)
        except (OutOfMemoryError, MemoryError) as error:
            reason = str(error)
    figures = model.figures
    if not figures.step_seconds:  # the software GPU sees kernels, but no steps
        figures = replace(figures, step_seconds=tuple(b - a for a, b in pairwise(ends)))
    row = simulated_row(mode, "run", figures, model.timeline, reason, None if reason else losses)
    return row, recorder.trace


def run_cuda(workload: Workload, progress: Progress) -> list[ModeRow]:
    """Run every variant on the current CUDA device. Never run on a GPU yet."""
    rows = []
    for mode, prefetch, advice in VARIANTS:
        rows.append(_run_real(workload, mode, prefetch, advice, progress))
    return rows


def _run_real(
    workload: Workload, mode: Mode, prefetch: bool, advice: str | None, progress: Progress
) -> ModeRow:
    """Run one variant on a real GPU; out of memory becomes its reason."""
    gpu = current_device()
    losses: list[float] = []
    ends: list[float] = []
    reason = None
    progress(mode, 0)
    with _block(mode, prefetch=prefetch):
        try:
            ends.append(time.perf_counter())
            for loss in workload.train(lambda step: progress(mode, step)):
                gpu.synchronize()
                ends.append(time.perf_counter())
                losses.append(loss)
        except (OutOfMemoryError, MemoryError) as error:
            reason = str(error)
        peak = gpu.usage().peak_bytes
    times = [end - start for start, end in pairwise(ends[1:])]  # the first step compiles
    return ModeRow(
        mode=mode,
        how="run",
        fits=reason is None,
        prefetch=prefetch,
        advice=advice,
        reason=reason,
        peak_bytes=peak,
        seconds=median(times) if times and reason is None else None,
        loss=None if reason else tuple(losses),
    )


def _block(mode: Mode, *, prefetch: bool = False) -> Block:
    if mode == "managed":
        return managed(prefetch=prefetch)
    return hybrid() if mode == "hybrid" else unmanaged()
