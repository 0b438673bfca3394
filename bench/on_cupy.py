"""In how much VRAM does a program train from its first step, plain and with less?

The least VRAM of a network, by bisection in steps of 2 MiB: CuPy 14 on a software GPU with its
model on, where memory that does not fit is refused, the gaps of CuPy's own pool included. Each try
is a process of its own, of six steps. Beside it: the most that arrays have in use in the first
step and in the last, by a memory hook of the benchmark's own, what the plan predicts, and the most
that the pool reserves where VRAM is plenty. No time is looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import common
from report_tables import figure, quantity, span, text

import umem
from umem.units import MIB

NETWORKS = {
    "residual": ("residual", "6 narrow blocks", 64), "ResNet50": ("ResNet50", "64 px", 4),
    "VGG16": ("VGG16", "32 px", 8), "U-Net": ("U-Net", "4 levels", 1),
    "DenseNet": ("DenseNet", "18 layers", 4), "transformer": ("transformer", "4 layers", 4),
    "LSTM": ("LSTM", "200 narrow words", 64), "GCN": ("GCN", "3 layers, 16 classes", 5000),
    "perceptron": ("MLP", "256 wide", 4096),
}  # fmt: skip
MODES = ("plain", "plain, 4 MiB", "min", "min, 4 MiB", "card, 4 MiB")
"""With "4 MiB" that is the cap on the workspace of convolutions."""
STEPS, GRANULE = 6, 2 * MIB
PLENTY = 4 << 30
SCRIPT = Path(__file__).resolve()


# -- one try -----------------------------------------------------------------------------------


def train(network: str, mode: str, vram: int) -> dict[str, Any]:
    """Train some steps; say how far it came, and what the pool had."""
    umem.software_gpu("t4", vram=vram, force=True)
    from models import build, sent  # imports Chainer, with the compatibility layer

    # isort: split
    import chainer
    import cupy
    import numpy as np

    name, size, batch = NETWORKS[network]
    np.random.seed(0)
    cupy.random.seed(0)
    model, place = build(name, size), chainer.get_device("@cupy:0")
    inputs = sent(model.inputs(batch), place)
    optimizer = chainer.optimizers.Adam().setup(model.link.to_device(place))
    pool, watch = cupy.get_default_memory_pool(), watching()
    recompute, found = None, dict[str, Any](in_use=[], error=None)
    try:
        with watch, context(mode) as recompute:
            for _ in range(STEPS):
                watch.peak = pool.used_bytes()
                optimizer.update(lambda: model.loss(*inputs))
                found["in_use"].append(watch.peak)
    except (cupy.cuda.memory.OutOfMemoryError, umem.UmemError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["reserved"] = pool.total_bytes()
    found["predicted"] = getattr(recompute, "predicted_bytes", None)
    return found


def watching() -> Any:
    """A memory hook that keeps the most that CuPy's pool has in use."""
    import cupy

    pool = cupy.get_default_memory_pool()

    class Watch(cupy.cuda.memory_hook.MemoryHook):
        name, peak = "bench", 0

        def malloc_postprocess(self, **allocation: int) -> None:
            self.peak = max(self.peak, pool.used_bytes())

    return Watch()


@contextmanager
def context(mode: str) -> Iterator[Any]:
    """What is on while it trains; gives the `Recompute`, or None."""
    from umem.chainer import Recompute, workspace

    with workspace("4MiB") if mode.endswith("MiB") else nullcontext():
        if mode.startswith("plain"):
            yield None
        else:
            with Recompute(mode.partition(",")[0]) as recompute:
                yield recompute


# -- the bisection -----------------------------------------------------------------------------


def asked(network: str, mode: str, vram: int) -> dict[str, Any]:
    """One try in a process of its own; memory that the process itself cannot have is an error."""
    command = [sys.executable, str(SCRIPT), "--one", network, mode, str(vram)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:  # before a step: the model and its inputs do not fit
        return {"error": done.stderr.strip().splitlines()[-1][:200], "in_use": []}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def least(network: str, mode: str) -> dict[str, Any]:
    """The least VRAM in which it trains, and what it does where there is plenty."""
    wide = asked(network, mode, PLENTY)
    if wide["error"]:
        return {"network": network, "mode": mode, "error": wide["error"]}
    low = 0 if mode.startswith("card") else min(wide["in_use"]) // GRANULE
    high, last = -(-wide["reserved"] // GRANULE), wide
    while asked(network, mode, high * GRANULE)["error"]:
        low, high = high, high + max(1, high // 8)
    while low + 1 < high:
        middle = (low + high) // 2
        found = asked(network, mode, middle * GRANULE)
        if found["error"]:
            low = middle
        else:
            high, last = middle, found
    return {
        "network": network, "mode": mode, "least_bytes": high * GRANULE,
        "first_bytes": last["in_use"][0], "last_bytes": last["in_use"][-1],
        "predicted_bytes": last["predicted"], "reserved_bytes": wide["reserved"],
    }  # fmt: skip


def rows(networks: list[str], modes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for network in networks:
        plain = 0
        for mode in modes:
            row = least(network, mode)
            plain = plain or row.get("least_bytes", 0)
            if plain and "least_bytes" in row:
                row["of_plain"] = row["least_bytes"] / plain
            click.echo(f"{network}, {mode}: {row.get('least_bytes', 0) / MIB:.0f} MiB", err=True)
            yield row


def answer(result: common.Result) -> str:
    found = [row for row in result["rows"] if row["mode"].startswith("min") and "of_plain" in row]
    best = {row["network"]: row["of_plain"] for row in found}  # the last mode of each
    predicted = [
        row["least_bytes"] / (row["predicted_bytes"] + 4 * MIB)
        for row in found
        if row["predicted_bytes"]
    ]
    return (
        f'Under "min" {len(best)} networks train in {span(best.values())} of the VRAM that plain '
        f"steps need; that is {span(predicted)} of the predicted peak and 4 MiB "
        f"(at most {figure(1.25)} is wanted)."
    )


BENCH = common.Bench(
    "on_cupy",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("mode", "mode"),
        quantity("least VRAM", "least_bytes", "MiB", per=MIB),
        quantity("of plain's", "of_plain"),
        quantity("in use, first step", "first_bytes", "MiB", per=MIB),
        quantity("last step", "last_bytes", "MiB", per=MIB),
        quantity("predicted", "predicted_bytes", "MiB", per=MIB),
        quantity("reserved where VRAM is plenty", "reserved_bytes", "MiB", per=MIB),
    ),
    notes=common.errors("network", "mode"),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network.")
@click.option("--only", "names", multiple=True, type=click.Choice([*NETWORKS]))
@click.option("--mode", "kinds", multiple=True, type=click.Choice(MODES))
@click.option("--one", nargs=3, type=(str, str, int), hidden=True)
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    kinds: tuple[str, ...],
    one: tuple[str, str, int] | None,
    path: Path | None,
) -> None:
    if one:
        click.echo(json.dumps(train(*one)))
        return
    common.writable(path)
    chosen = ["LSTM"] if quick else [n for n in NETWORKS if not names or n in names]
    modes = tuple(m for m in MODES if not kinds or m in kinds)
    found = list(rows(chosen, modes))
    BENCH.finish(found, path, simulated=True, options={"networks": chosen, "modes": modes})


if __name__ == "__main__":
    main()
