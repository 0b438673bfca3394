"""Do the lines that `umem.choose` says fit a GPU train there from the first step, on CuPy?

Networks of bench/on_cupy.py, recorded on a software GPU with plenty of VRAM, at shares of the least
VRAM in which a plain step trains. Each line that is said to fit is executed as printed, in a
process of its own: CuPy 14 on a software GPU with that VRAM and its model on, where memory that
does not fit is refused, the gaps of CuPy's own pool included. Lines with `accumulate` are left out
for networks whose loss it refuses, those in half precision for ResNet50 and VGG16. One that runs
out of memory is tried again with 5% more. The times are simulated, those said and those live: the
mean of the last steps.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import common
from on_cupy import GRANULE, NETWORKS, PLENTY
from report_tables import counted, quantity, text
from umem.predict.choosing import Option, choose

import umem
from umem.units import MIB

GPU = "t4"
SHARES = (0.4, 0.6, 0.8)
SETTLING, STEPS = 4, 3
"""Steps before those whose time counts: recomputation measures for three. The first may already
run out of memory."""
NEAR = 1.05
"""How much more VRAM a line gets that has run out of memory."""
TOP, APART = 3, 1.1
"""So many lines are to be in the order of their live times, or within this of one another."""
WHOLE_GRAPH = ("GCN", "U-Net")
"""Networks whose input is one graph or one image, which has no smaller batch."""
NOT_SPLIT = ("transformer", "LSTM")
"""Networks whose loss `accumulate` refuses: labels of another length than inputs, means over time
steps. Lines with it are left out."""
SLOW_IN_HALVES = ("ResNet50", "VGG16")
"""Networks whose convolutions in half precision take a quarter of an hour a line on a processor.
Lines with it are left out."""
OTHER_MEMORY = ("with umem.managed", "with umem.hybrid")
"""Beginnings of lines under which the model is moved to the GPU too, which alone may be too large
for it."""


# -- in a process of its own -------------------------------------------------------------------


def trained(network: str, vram: int, record: str | None, line: str | None) -> dict[str, Any]:
    """Record a step of a network into a file, or train it under a line of code."""
    gpu = umem.software_gpu(GPU, vram=vram, force=True)
    from models import build, sent  # imports Chainer, with the compatibility layer

    # isort: split
    import chainer
    import cupy
    import numpy as np

    from umem import chainer as functions  # or a recorder hears kernels, and no functions

    name, size, batch = NETWORKS[network]
    np.random.seed(0)
    cupy.random.seed(0)
    built, place = build(name, size), chainer.get_device("@cupy:0")
    model, held = built.link, dict[int, Any]()
    optimizer = chainer.optimizers.Adam().setup(model)

    def send() -> None:
        held[batch] = sent(built.inputs(batch), place)
        model.to_device(place)

    def step(size: int = batch) -> None:
        optimizer.update(built.loss, *held[size])

    if line is None or not line.startswith(OTHER_MEMORY):
        send()
    if record is not None:
        if network in WHOLE_GRAPH:
            with umem.record() as recorder:
                step()
            recorder.trace.save(record, force=True)
        else:
            held[batch // 2] = sent(built.inputs(batch // 2), place)
            umem.record_at(step, sizes=(batch // 2, batch)).save(record, force=True)
        return {}
    ends: list[float] = []

    def train() -> None:
        if not held:
            send()
        for _ in range(SETTLING + STEPS):
            step()
            cupy.cuda.Device().synchronize()
            ends.append(gpu.figures.seconds)

    error = None
    names = {"umem": umem, "train": train, "model": model, "optimizer": optimizer}
    assert functions is umem.chainer
    code = f"{line or ''}\n{'    ' if line and line.endswith(':') else ''}train()"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, names)
    except (cupy.cuda.memory.OutOfMemoryError, umem.UmemError) as failed:
        error = f"{type(failed).__name__}: {failed}"[:600]
    mean = None if error else (ends[-1] - ends[SETTLING - 1]) / STEPS
    return {"error": error, "steps": len(ends), "simulated_seconds": mean}


def asked(network: str, vram: int, **more: str | None) -> dict[str, Any]:
    """Run `trained` in a process of its own."""
    given = json.dumps({"network": network, "vram": vram, "record": None, "line": None, **more})
    try:
        return dict(common.child(__file__, "--one", given))
    except click.ClickException as error:
        said = error.message.splitlines()[-1][:600]
        return {"error": said, "steps": 0, "simulated_seconds": None}


# -- the comparison ----------------------------------------------------------------------------


def plain_bytes(network: str) -> int:
    """Return the least VRAM in which a plain step trains, as bench/on_cupy.py has measured it."""
    found = json.loads((common.HERE / "results" / "on_cupy.json").read_text("utf-8"))["rows"]
    return next(
        int(r["least_bytes"]) for r in found if (r["network"], r["mode"]) == (network, "plain")
    )


def tried(network: str, vram: int, option: Option) -> dict[str, Any]:
    """Train under an option's line, with more VRAM if it runs out of memory."""
    found = asked(network, vram, line=option.line)
    row = {
        "technique": option.name,
        "line": option.line,
        "simulated_predicted_seconds": option.seconds,
        "simulated_live_seconds": found["simulated_seconds"],
        "error": found["error"],
        "steps": found["steps"],
    }
    if found["error"]:
        more = -(-int(NEAR * vram) // GRANULE) * GRANULE
        row["is_near"] = asked(network, more, line=option.line)["error"] is None
    return row


def measure(network: str, shares: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.umem.gz"
        done = asked(network, PLENTY, record=str(path))
        if done.get("error"):
            yield {"network": network, "lines": [], "error": done["error"]}
            return
        trace = umem.Trace.load(path)
    plain = plain_bytes(network)
    for share in shares:
        vram = round(share * plain / GRANULE) * GRANULE
        lines = []
        for option in choose(trace, GPU, vram=vram).options:
            line = option.line or ""
            if network in NOT_SPLIT and "accumulate" in line:
                continue
            if network in SLOW_IN_HALVES and "half_precision" in line:
                continue
            lines.append(tried(network, vram, option))
            click.echo(f"{network}, {share:.0%}, {lines[-1]}", err=True)
        trains = [line for line in lines if not line["error"]]
        yield {
            "network": network,
            "share": share,
            "vram_bytes": vram,
            "said": len(lines),
            "trained": len(trains),
            "near": sum(line.get("is_near", False) for line in lines),
            "in_order": in_order(trains),
            "first": lines[0]["technique"] if lines else None,
            "lines": lines,
        }


def in_order(lines: list[dict[str, Any]]) -> bool:
    """Tell whether no later of the first lines is live quicker than an earlier one by a tenth."""
    times = [line["simulated_live_seconds"] for line in lines[:TOP]]
    return all(
        earlier <= APART * later for i, earlier in enumerate(times) for later in times[i + 1 :]
    )


def answer(result: common.Result) -> str:
    rows = [row for row in result["rows"] if row["lines"]]
    said, trained, near = (sum(row[key] for row in rows) for key in ("said", "trained", "near"))
    order = sum(row["in_order"] for row in rows)
    return (
        f"{trained} of {said} lines that are said to fit train from the first step "
        f"({trained / max(1, said):.1%}; at least 98% are wanted), {near} more with 5% more VRAM; "
        f"the first three are in the order of their live times, or within 10%, in {order} of "
        f"{len(rows)} choices."
    )


BENCH = common.Bench(
    "choice_live",
    __doc__,
    answer,
    (
        text("network", "network"),
        quantity("of plain's VRAM", "share"),
        quantity("VRAM", "vram_bytes", "MiB", per=MIB),
        counted("said to fit", "said"),
        counted("train", "trained"),
        counted("train with 5% more", "near"),
        text("first three in order", "in_order"),
        text("first", "first"),
    ),
    notes=common.errors("network"),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network, one share.")
@click.option("--only", "names", multiple=True, type=click.Choice([*NETWORKS]))
@click.option("--share", "given", multiple=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--one", hidden=True)
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    given: tuple[float, ...],
    one: str | None,
    path: Path | None,
) -> None:
    if one:
        click.echo(json.dumps(trained(**json.loads(one))))
        return
    common.writable(path)
    chosen = ["GCN"] if quick else [n for n in NETWORKS if not names or n in names]
    shares = given or (SHARES[1:2] if quick else SHARES)
    rows = [row for network in chosen for row in measure(network, shares)]
    options = {"quick": quick, "networks": chosen, "shares": shares, "gpu": GPU}
    BENCH.finish(rows, path, simulated=True, options=options)


if __name__ == "__main__":
    main()
