"""Makes words.png: peak, plain step, reserved, least budget and floor on one step's memory.

The step is an MLP of 13 layers on a virtual T4: as it is, and under Recompute("min"). Needs Chainer
and matplotlib. Run it from the repository's root: python docs/images/words.py
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import umem.chainer  # isort: skip  (before Chainer)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from umem.errors import BudgetError
from umem.units import MIB

HERE = Path(__file__).resolve().parent
LAYERS, UNITS, BATCH, STEPS = 12, 256, 4096, 6
GREY, BLUE, INK, RED, GREEN = "#c9d0d9", "#2166ac", "#1b2130", "#b3261e", "#2b7a4b"
Curve = list[tuple[float, float]]


class Found(NamedTuple):
    """Memory of a settled step: MiB by the share of its time, and the words' figures in MiB."""

    plain: Curve
    planned: Curve
    peak: float
    reserved: float
    least: float
    floor: float


def measure() -> Found:
    """Train plainly, under the least budget, and once under a budget that is refused."""
    gpu, plain = train(None)
    _, planned = train("min")
    least, floor = refused()
    peak, reserved = gpu.figures.peak_bytes / MIB, gpu.figures.reserved_peak_bytes / MIB
    return Found(plain, planned, peak, reserved, least, floor)


def train(budget: str | None) -> tuple[Any, Curve]:
    """Six steps; the virtual GPU, and the memory of the last step."""
    np.random.seed(0)
    layers = [part for _ in range(LAYERS) for part in (L.Linear(UNITS, UNITS), F.relu)]
    model = chainer.Sequential(*layers, L.Linear(UNITS, 10))
    with umem.virtual_gpu("t4") as gpu, umem.unmanaged():
        device = umem.chainer.device()
        optimizer = chainer.optimizers.Adam().setup(model.to_device(device))
        x, t = device.send((np.ones((BATCH, UNITS), "f"), np.zeros(BATCH, "i")))
        with umem.chainer.Recompute(budget) if budget else nullcontext():
            for _ in range(STEPS):
                optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))
        return gpu, last_step(gpu)


def last_step(gpu: Any) -> Curve:
    """What tensors hold over the last step."""
    end = sum(gpu.figures.step_seconds)
    length = gpu.figures.step_seconds[-1]
    return [
        (1 - (end - sample.seconds) / length, sample.allocated_bytes / MIB)
        for sample in gpu.timeline
        if end - length <= sample.seconds <= end
    ]


def refused() -> tuple[float, float]:
    """The least budget and the floor: what a budget that is too small is told."""
    try:
        train("1MiB")
    except BudgetError as error:
        found = [
            re.search(rf"{name} ([\d.]+) MiB", str(error))
            for name in ("the least budget is", "the floor of")
        ]
        least, floor = (float(match[1]) for match in found if match)
        return least, floor
    raise AssertionError("1 MiB was enough")


def draw(found: Found, path: Path) -> None:
    """One panel; every word stands at what it names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    panel = figure.subplots()
    xs, ys = zip(*found.plain, strict=True)
    panel.fill_between([*xs, 1], [*ys, ys[-1]], step="post", color=GREY, linewidth=0)
    panel.annotate(
        "plain step:\nnothing is dropped",
        (0.62, 0.7 * found.peak),
        ha="center",
        color=INK,
        fontsize=10,
    )
    xs, ys = zip(*found.planned, strict=True)
    panel.step([*xs, 1], [*ys, ys[-1]], where="post", color=BLUE, linewidth=1.8)
    panel.annotate(
        'the same step under Recompute("min")', (0.3, 0.2 * found.peak), color=BLUE, fontsize=10
    )
    at = max(found.plain, key=lambda point: point[1])
    panel.plot(*at, "o", color=INK, markersize=5)
    panel.annotate(
        f"peak of the plain step, {found.peak:.0f} MiB: the most that arrays use",
        at,
        (-10, -2),
        textcoords="offset points",
        ha="right",
        color=INK,
        fontsize=10,
    )
    _line(panel, found.reserved, RED, "reserved", "what the pool took\nfrom the GPU for it")
    _line(panel, found.least, BLUE, "least budget", "the smallest for one\nmore forward pass", 8)
    _line(panel, found.floor, GREEN, "floor", "no plan\nneeds less", -8)
    panel.set_xlim(0, 1)
    panel.set_ylim(0, 1.14 * found.reserved)
    panel.set_xticks([0, 1], ["an update ends", "the next ends"])
    panel.get_xticklabels()[0].set_horizontalalignment("left")
    panel.get_xticklabels()[-1].set_horizontalalignment("right")
    panel.set_ylabel("MiB")
    panel.set_title("Memory of one training step, simulated T4", loc="left", fontsize=12)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _line(panel: Any, mib: float, color: str, word: str, meaning: str, raised: float = 0) -> None:
    """Draw a line and say what it is, so many points above it: two may lie close together."""
    panel.axhline(mib, color=color, linestyle="--", linewidth=1.2)
    panel.annotate(
        f"{word}, {mib:.0f} MiB:\n{meaning}",
        (1, mib),
        (6, raised),
        color=color,
        textcoords="offset points",
        fontsize=10,
        va="center",
        annotation_clip=False,
    )


if __name__ == "__main__":
    draw(measure(), Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "words.png")
