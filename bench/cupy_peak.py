"""How near is what a recording predicts of a step on CuPy to what CuPy then does?

A step is recorded in float32, on NumPy and on CuPy, and replayed; in half precision it is changed
by `umem.predict.techniques.half_widths` first. The same step runs on the real CuPy, on a software
GPU: what arrays have in use at most is measured in CuPy's own pool by a memory hook of the
benchmark's own, and so is what the pool has reserved after five steps. Step times are simulated on
both sides, by the same clock: the live one follows kernel by kernel what CuPy launches, the replay
function by function what was recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import common
from on_cupy import NETWORKS, watching
from report_tables import Column, quantity, span, text

import umem
from umem.units import MIB

MORE = {
    "DCGAN": ("DCGAN", "32 px", 4), "autoencoder": ("autoencoder", "32 px", 4),
    "GRU": ("GRU", "40 words", 4), "mixer": ("mixer", "4 layers", 4),
}  # fmt: skip
"""Further networks, of small steps."""
TARGETS = {"in_use_bytes": {"float32": 2, "half": 4}, "reserved_bytes": 8, "simulated_seconds": 15}
"""Percent that predictions may be off."""
PRECISIONS = ("float32", "half")
STEPS, SETTLED = 5, 2
SCALE = 16.0
"""Of the loss in half precision, so small that no step is skipped."""


def step_of(network: str, on_cupy: bool) -> tuple[Any, Any, Any]:
    """Make a network, its optimizer and a step of it; imports Chainer."""
    from models import build, sent

    # isort: split
    import chainer
    import numpy as np

    name, size, batch = (NETWORKS | MORE)[network]
    np.random.seed(0)
    model, place = build(name, size), chainer.get_device("@cupy:0" if on_cupy else "@numpy")
    inputs = sent(model.inputs(batch), place)
    optimizer = chainer.optimizers.Adam().setup(model.link.to_device(place))
    return model.link, optimizer, lambda: optimizer.update(lambda: model.loss(*inputs))


def live(network: str, precision: str) -> dict[str, Any]:
    """Run steps on a software GPU; what a settled one takes there."""
    gpu = umem.software_gpu("t4", force=True)
    link, optimizer, step = step_of(network, on_cupy=True)
    import cupy

    import umem.chainer as ours

    if precision == "half":
        ours.half_precision(link, optimizer, scale=SCALE)
    pool, watch, ends = cupy.get_default_memory_pool(), watching(), []
    with watch:
        for _ in range(STEPS):
            watch.peak = pool.used_bytes()
            step()
            ends.append(gpu.figures.seconds)
    seconds = (ends[-1] - ends[SETTLED - 1]) / (STEPS - SETTLED)
    reserved = pool.total_bytes()
    return {"in_use_bytes": watch.peak, "reserved_bytes": reserved, "simulated_seconds": seconds}


def predicted(network: str, place: str) -> dict[str, dict[str, Any]]:
    """Record a step, and replay it in each precision."""
    if place == "CuPy":
        umem.software_gpu("t4", force=True)
    _, _, step = step_of(network, on_cupy=place == "CuPy")
    from umem.chainer.framework import CHAINER
    from umem.predict.cupy_differences import on_gpu
    from umem.predict.techniques.half_widths import in_half
    from umem.trace.recording.kept_steps import Keeper, Steps

    assert CHAINER.name  # is registered: the recorder hears of Chainer
    keeper = Keeper(Steps(2, 3))
    keeper.start()
    for _ in range(STEPS + 3):
        step()
    kept = keeper.finish()
    assert kept is not None and not kept.notes, kept
    trace, found = on_gpu(kept.trace), {}
    for precision, changed in zip(PRECISIONS, (trace, in_half(trace)), strict=True):
        figures = umem.replay(changed, "t4", "unmanaged").figures
        found[precision] = {
            "in_use_bytes": figures.peak_bytes,
            "reserved_bytes": figures.reserved_peak_bytes,
            "simulated_seconds": figures.step_seconds[-1],
        }
    return found


def rows(networks: list[str]) -> Iterator[dict[str, Any]]:
    for network in networks:
        said = {place: asked(network, place) for place in ("NumPy", "CuPy")}
        for precision in PRECISIONS if network in NETWORKS else PRECISIONS[:1]:
            row = {"network": network, "precision": precision, **asked(network, precision)}
            for place, each in said.items():
                for key, value in each[precision].items():
                    row[f"{key}_from_{place}"] = value
                    row[f"{key}_error_{place}"] = 100 * (value / row[key] - 1)
            click.echo(f"{network}, {precision}", err=True)
            yield row


def asked(network: str, what: str) -> Any:
    return common.child(__file__, "--one", network, what)


def answer(result: common.Result) -> str:
    said = []
    for key, name in (
        ("in_use_bytes", "in use"),
        ("reserved_bytes", "reserved"),
        ("simulated_seconds", "step time (simulated)"),
    ):
        target: Any = TARGETS[key]
        errors = [
            (
                row[f"{key}_error_{place}"],
                target if key != "in_use_bytes" else target[row["precision"]],
            )
            for row in result["rows"]
            for place in ("NumPy", "CuPy")
        ]
        within = sum(abs(error) <= most for error, most in errors)
        said.append(
            f"{name} {span([error for error, _ in errors])} %, {within} of {len(errors)} "
            "within the target"
        )
    return f"Predicted against live: {'; '.join(said)}."


def _columns(head: str, key: str, unit: str, per: float) -> list[Column]:
    return [
        quantity(head, key, unit, per=per),
        *(
            quantity(f"from {place}", f"{key}_error_{place}", "%", places=2, signed=True)
            for place in ("NumPy", "CuPy")
        ),
    ]


BENCH = common.Bench(
    "cupy_peak",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("precision", "precision"),
        *_columns("in use", "in_use_bytes", "MiB", MIB),
        *_columns("reserved", "reserved_bytes", "MiB", MIB),
        *_columns("step, simulated", "simulated_seconds", "ms", 1e-3),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network.")
@click.option("--only", "names", multiple=True, type=click.Choice([*NETWORKS, *MORE]))
@click.option("--one", nargs=2, type=str, hidden=True)
@common.json_option
def main(
    quick: bool, names: tuple[str, ...], one: tuple[str, str] | None, path: Path | None
) -> None:
    if one:
        network, what = one
        click.echo(json.dumps((live if what in PRECISIONS else predicted)(network, what)))
        return
    common.writable(path)
    chosen = ["residual"] if quick else [n for n in NETWORKS | MORE if not names or n in names]
    found = list(rows(chosen))
    BENCH.finish(found, path, simulated=True, options={"networks": chosen})


if __name__ == "__main__":
    main()
