"""How near is what half precision is said to take to a step in halves, on NumPy and on CuPy?

Said: a float32 step recorded on NumPy, changed by `umem.predict.techniques.half_widths`. On NumPy
against the same step recorded under `umem.chainer.half_precision`, over widths and batches of the
models of bench/advice.py; both with the copies in float32 that NumPy computes with. On CuPy,
taken to a GPU, against what the real CuPy allocates for that step on a software GPU. The batch is
there in float32 until the update is over, as in Chainer's updaters. Steps whose gradients overflow
are skipped, so that several run before one is recorded.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import common
from report_tables import Row, Table, figure, quantity, text, verdict

import umem
from umem.units import MIB

LIMIT_PERCENT = 5.0
SCRIPT = Path(__file__).resolve()
STEPS, WARM = 10, 4
SCALE = 16.0
"""Of the loss on CuPy, so small that no step is skipped while they are measured."""
SWEEP: dict[str, list[dict[str, int]]] = {
    "MLP": [
        *({"batch": b, "width": w, "depth": 2} for w in (64, 256, 512) for b in (256, 1024, 4096)),
        *({"batch": 512, "width": 384, "depth": d} for d in (1, 8)),
    ],
    "CNN": [{"batch": b, "width": w, "depth": 3} for w in (8, 16, 48) for b in (4, 8, 32)],
    "LSTM": [
        {"batch": b, "length": 6, "width": w, "embedding": w} for w in (64, 256) for b in (16, 128)
    ],
    "transformer": [
        {"batch": b, "length": n, "width": w, "depth": 2}
        for w in (64, 192)
        for b, n in ((4, 32), (16, 64), (4, 256))
    ],
    "GCN": [{"nodes": n, "width": w, "depth": 3} for n in (1000, 4000) for w in (32, 128)],
}
QUICK = {"MLP": [{"batch": b, "width": 128, "depth": 2} for b in (256, 1024)]}
ON_CUPY = (
    ("MLP", "256 wide", 64, "SGD"), ("MLP", "1,024 wide", 64, "Adam"),
    ("residual", "6 narrow blocks, dropout", 8, "MomentumSGD"), ("VGG16", "32 px", 4, "Adam"),
    ("DenseNet", "18 layers", 2, "Adam"), ("U-Net", "4 levels", 1, "Adam"),
    ("LSTM", "40 words", 4, "SGD"), ("transformer", "4 layers", 2, "AdamW"),
    ("GCN", "3 layers, 16 classes", 2000, "Adam"),
)  # fmt: skip


# -- on NumPy ------------------------------------------------------------------------------------


def numpy_rows(sweep: dict[str, list[dict[str, int]]]) -> Iterator[Row]:
    from advice import CASES, on_numpy, there  # imports Chainer

    for name, points in sweep.items():
        for sizes in points:
            case = CASES[name]
            single = there(case, sizes)
            for _ in range(WARM):
                case.step(True, **sizes)
            found = on_numpy(there(case, sizes, half=True))
            shown = ", ".join(f"{axis} {size:,}" for axis, size in sizes.items())
            yield _row(name, shown, on_numpy(single, half=True), found, on_numpy(single))


def _row(model: str, sizes: str, said: int, found: int, single: int | None = None) -> Row:
    error = 100 * (said / found - 1)
    return {
        "table": "CuPy" if single is None else "NumPy",
        "model": model,
        "sizes": sizes,
        "single_bytes": single,
        "predicted_bytes": said,
        "found_bytes": found,
        "error_percent": error,
        "passed": abs(error) <= LIMIT_PERCENT,
    }


# -- on CuPy, in processes of their own ----------------------------------------------------------


def cupy_rows(numbers: range) -> Iterator[Row]:
    for number in numbers:
        name, size, batch, optimizer = ON_CUPY[number]
        said, found = (_asked(number, where) for where in ("numpy", "cupy"))
        yield _row(f"{name}, {size}", f"batch {batch:,}, {optimizer}", said, found)


def _asked(number: int, where: str) -> int:
    asked = [sys.executable, str(SCRIPT), "--only", str(number), where]
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
    return int(json.loads(done.stdout))


def peak(number: int, on_cupy: bool) -> int:
    """The peak of a step in halves: on CuPy as it is, on NumPy as predicted from float32."""
    if on_cupy:
        umem.software_gpu("t4", force=True)
    from models import build, sent  # imports Chainer

    import umem.chainer as ours
    from umem.chainer.framework import CHAINER
    from umem.predict.cupy_differences import on_gpu
    from umem.predict.techniques.half_widths import in_half
    from umem.trace.recording.kept_steps import Keeper, Steps

    assert CHAINER.name  # is registered: the recorder hears of Chainer
    import chainer
    import numpy as np

    name, size, batch, optimizer = ON_CUPY[number]
    np.random.seed(0)
    model = build(name, size)
    place = chainer.get_device("@cupy:0" if on_cupy else "@numpy")
    trainer = getattr(chainer.optimizers, optimizer)().setup(model.link.to_device(place))
    if on_cupy:
        ours.half_precision(model.link, trainer, scale=SCALE)
    keeper = Keeper(Steps(STEPS - 2, STEPS - 2))
    keeper.start()
    for _ in range(STEPS):
        inputs = sent(model.inputs(batch), place)
        trainer.update(model.loss, *inputs)
    kept = keeper.finish()
    assert kept is not None and not kept.notes, kept
    trace = on_gpu(kept.trace)
    return trace.peak_bytes if on_cupy else in_half(trace).peak_bytes


# -- what is said ----------------------------------------------------------------------------------


def tables(result: common.Result) -> Iterable[Table]:
    for place in ("NumPy", "CuPy"):
        columns = [text("model", "model"), text("sizes", "sizes")]
        if place == "NumPy":
            columns.append(quantity("float32", "single_bytes", "MiB", per=MIB))
        columns += [
            quantity("said", "predicted_bytes", "MiB", per=MIB),
            quantity(f"in halves on {place}", "found_bytes", "MiB", per=MIB),
            quantity("error", "error_percent", "%", places=2, signed=True),
            verdict(),
        ]
        yield Table(columns, [row for row in result["rows"] if row["table"] == place])


def answer(result: common.Result) -> str:
    said = []
    for place in ("NumPy", "CuPy"):
        rows = [row for row in result["rows"] if row["table"] == place]
        worst = max(rows, key=lambda row: abs(row["error_percent"]))
        passed = sum(row["passed"] for row in rows)
        said.append(
            f"{passed} of {len(rows)} steps on {place} are within {LIMIT_PERCENT:g} % (at worst "
            f"{figure(worst['error_percent'], 2)} %, {worst['model']} with {worst['sizes']})"
        )
    return " and ".join(said) + "."


BENCH = common.Bench("half_peaks", __doc__, answer, tables=tables)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two perceptrons on NumPy, one on CuPy.")
@click.option("--only", nargs=2, type=(int, click.Choice(["numpy", "cupy"])), hidden=True)
@common.json_option
def main(quick: bool, only: tuple[int, str] | None, path: Path | None) -> None:
    if only:
        click.echo(json.dumps(peak(only[0], only[1] == "cupy")))
        return
    common.writable(path)
    rows = list(numpy_rows(QUICK if quick else SWEEP))
    rows += cupy_rows(range(1 if quick else len(ON_CUPY)))
    BENCH.finish(rows, path, simulated=True, options={"quick": quick})


if __name__ == "__main__":
    main()
