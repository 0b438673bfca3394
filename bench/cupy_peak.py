"""How near is the peak that a recording on NumPy predicts to what the real CuPy allocates?

A step is recorded on NumPy with its workspace, and corrected by what Chainer's source says of CuPy
(`umem.predict.cupy_differences`). The same step runs on the real CuPy, on a software GPU, where
every array of every function comes from CuPy's own pool: its peak is measured, not modelled. No
time and no page is looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import common
from report_tables import figure, quantity, text

import umem
from umem.units import MIB

MODELS = (
    ("MLP", "256 wide", 64, "SGD"), ("MLP", "1,024 wide", 64, "Adam"),
    ("residual", "6 narrow blocks, dropout", 8, "MomentumSGD"), ("ResNet50", "64 px", 2, "Adam"),
    ("VGG16", "32 px", 4, "MomentumSGD"), ("DenseNet", "18 layers", 2, "Adam"),
    ("U-Net", "4 levels", 1, "Adam"), ("DCGAN", "32 px", 4, "Adam"),
    ("autoencoder", "32 px", 4, "RMSprop"), ("LSTM", "40 words", 4, "SGD"),
    ("GRU", "40 words", 4, "Adam"), ("transformer", "4 layers", 2, "AdamW"),
    ("mixer", "4 layers", 4, "Adam"), ("GCN", "3 layers, 16 classes", 2000, "Adam"),
)  # fmt: skip
TARGET = 0.02
SCRIPT = Path(__file__).resolve()


def peak(number: int, on_cupy: bool) -> tuple[int, int]:
    """The peak of the second step and its operations; on CuPy as it is, on NumPy as predicted."""
    if on_cupy:
        umem.software_gpu("t4", force=True)
    from models import build, sent  # imports Chainer

    from umem.chainer.framework import CHAINER
    from umem.predict.cupy_differences import on_gpu
    from umem.trace.recording.kept_steps import Keeper, Steps

    assert CHAINER.name  # is registered: the recorder hears of Chainer
    import chainer
    import numpy as np

    name, size, batch, optimizer = MODELS[number]
    np.random.seed(0)
    model = build(name, size)
    place = chainer.get_device("@cupy:0" if on_cupy else "@numpy")
    trainer = getattr(chainer.optimizers, optimizer)().setup(model.link.to_device(place))
    keeper = Keeper(Steps(2, 2))
    keeper.start()
    for _ in range(4):
        inputs = sent(model.inputs(batch), place)
        trainer.update(lambda given=inputs: model.loss(*given))
    kept = keeper.finish()
    assert kept is not None and not kept.notes, kept
    trace = on_gpu(kept.trace)
    return trace.peak_bytes, sum(op.phase != "array" for op in trace.ops)


def _rows(numbers: range) -> Iterator[dict[str, Any]]:
    for number in numbers:
        name, size, batch, optimizer = MODELS[number]
        (predicted, count), (found, other) = (_asked(number, where) for where in ("numpy", "cupy"))
        yield {
            "model": f"{name}, {size}",
            "batch": batch,
            "optimizer": optimizer,
            "op_count": count,
            "same_ops": count == other,
            "predicted_bytes": predicted,
            "measured_bytes": found,
            "error_percent": 100 * (predicted / found - 1),
        }


def _asked(number: int, where: str) -> tuple[int, int]:
    asked = [sys.executable, str(SCRIPT), "--only", str(number), where]
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
    found, count = json.loads(done.stdout)
    return found, count


def _answer(result: common.Result) -> str:
    errors = [row["error_percent"] for row in result["rows"]]
    within = sum(abs(error) <= 100 * TARGET for error in errors)
    return (
        f"From {figure(min(errors), 2)} to {figure(max(errors), 2)} % of what CuPy allocates for "
        f"{len(errors)} models, {within} of them within {TARGET:.0%}."
    )


BENCH = common.Bench(
    "cupy_peak",
    __doc__,
    _answer,
    (
        text("model", "model"),
        quantity("batch", "batch"),
        text("optimizer", "optimizer"),
        quantity("operations", "op_count"),
        quantity("predicted", "predicted_bytes", "MiB", per=MIB),
        quantity("CuPy's", "measured_bytes", "MiB", per=MIB),
        quantity("error", "error_percent", "%", places=2),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One small model.")
@click.option("--only", nargs=2, type=(int, click.Choice(["numpy", "cupy"])), hidden=True)
@common.json_option
def main(quick: bool, only: tuple[int, str] | None, path: Path | None) -> None:
    if only:
        click.echo(json.dumps(peak(only[0], only[1] == "cupy")))
        return
    common.writable(path)
    rows = list(_rows(range(1 if quick else len(MODELS))))
    BENCH.finish(rows, path, simulated=False, options={"quick": quick})


if __name__ == "__main__":
    main()
