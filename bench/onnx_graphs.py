"""Does a model in ONNX say as much of a training step as a recording of it?

Ten networks are exported from Chainer with train=True, up to where their losses begin, and recorded
in a dry run on CuPy. Compared are the bytes that are kept when backward begins, and the
peak with gradients and the optimizer's update but without workspace.

onnx_chainer writes a linear link without a bias with one of zeros for each use, so that all of them
have one here.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import common
import numpy as np
from models import build, sent  # before chainer
from models.model import labels
from report_tables import Column, Row, counted, percent, quantity, text

import umem
import umem.chainer
from umem.onnx import onnx_step
from umem.trace import Alloc, Event, Free, Op, Trace
from umem.units import MIB
from umem_software_gpu import VARIABLE

# isort: split
import chainer  # after the compatibility layer
import chainer.functions as F
import chainer.links as L

KEPT, PEAK = 0.02, 0.05
"""The targets: at most so far apart."""
OPTIMIZERS = {"Adam": "adam", "MomentumSGD": "momentum", "SGD": "sgd"}
QUICK = ("MLP", "autoencoder", "language model")


# -- the networks ----------------------------------------------------------------------------------


class Network(chainer.Chain):
    """A link, and what is computed with it from arrays.

    Attributes:
        inputs: the arrays.
        optimizer: by Chainer's name.
    """

    def __init__(
        self, link: Any, run: Callable[..., Any], inputs: tuple[Any, ...], optimizer: str = "Adam"
    ) -> None:
        super().__init__()
        self.run, self.inputs, self.optimizer = run, inputs, optimizer
        with self.init_scope():
            self.link = link

    def forward(self, *inputs: Any) -> Any:
        with without_loss():
            return self.run(*inputs)


@contextmanager
def without_loss() -> Iterator[None]:
    """Losses give back their first argument."""

    def first(y: Any, t: Any) -> Any:
        return y

    with mock.patch.multiple(F, softmax_cross_entropy=first, mean_squared_error=first):
        yield


def known(name: str, size: str, batch: int, optimizer: str | None = None) -> Network:
    """A network of bench/models/; a loss's target, its second input, is no input of it."""
    model = build(name, size)
    x, *targets = model.inputs(batch)
    return Network(
        model.link, lambda h: model.loss(h, *targets), (x,), optimizer or model.optimizer
    )


def language_model() -> Network:
    embed, score = L.EmbedID(4000, 128), L.Linear(128, 4000)

    def run(words: Any) -> Any:
        return score(F.reshape(F.dropout(embed(words)), (-1, 128)))

    return Network(chainer.ChainList(embed, score), run, (labels(8, 32, classes=4000),))


NETWORKS: dict[str, Callable[[], Network]] = {
    "MLP": lambda: known("MLP", "256 wide", 64),
    "residual": lambda: known("residual", "classifier of 4 blocks", 4),
    "ResNet50": lambda: known("ResNet50", "64 px", 4),
    "VGG16": lambda: known("VGG16", "32 px", 4),
    "GoogLeNet": lambda: known("GoogLeNet", "224 px", 2),
    "DenseNet": lambda: known("DenseNet", "18 layers", 4),
    "U-Net": lambda: known("U-Net", "4 levels", 2),
    "DCGAN": lambda: known("DCGAN", "32 px", 16),
    "autoencoder": lambda: known("autoencoder", "32 px", 16, "Adam"),
    "language model": language_model,
}


# -- the two traces --------------------------------------------------------------------------------


def recorded(network: Network) -> Trace:
    """The second step on CuPy, whose gradients begin at the output."""
    place = chainer.get_device("@cupy:0")
    optimizer = getattr(chainer.optimizers, network.optimizer)().setup(network.to_device(place))
    inputs = sent(network.inputs, place)

    def step() -> None:
        y = network(*inputs)
        network.cleargrads()
        y.grad = place.xp.ones_like(y.array)
        y.backward()
        del y
        optimizer.update()

    step()
    with umem.record() as recorder:
        step()
    return recorder.trace


def exported(network: Network, path: Path) -> None:
    import onnx_chainer

    with warnings.catch_warnings(), chainer.using_config("train", True):
        warnings.simplefilter("ignore")
        onnx_chainer.export(
            network, network.inputs, filename=str(path), train=True, opset_version=11
        )


def without_workspace(trace: Trace) -> Trace:
    def changed(event: Event) -> Event:
        return event._replace(workspace_bytes=0) if isinstance(event, Op) else event

    return trace.with_events(map(changed, trace.events))


def kept_bytes(trace: Trace) -> int:
    """What forward leaves for backward."""
    alive: dict[int, Alloc] = {}
    for event in trace.events:
        if isinstance(event, Alloc):
            alive[event.tensor] = event
        elif isinstance(event, Free):
            alive.pop(event.tensor)
        elif isinstance(event, Op) and event.phase == "backward":
            break
    return sum(a.nbytes for a in alive.values() if a.kind in ("activation", "stash"))


# -- rows ------------------------------------------------------------------------------------------


def in_child(name: str) -> Row:
    """Run `network_row` in a process of its own, whose CuPy is dry."""
    return dict(common.child(__file__, "--one", name, **{VARIABLE: "t4,dry"}))


def network_row(name: str, folder: Path) -> Row:
    """Compare the step made of an exported network with the recorded one."""
    np.random.seed(0)
    network = NETWORKS[name]()
    path = folder / "model.onnx"
    exported(network, path)
    start = time.perf_counter()
    optimizer = OPTIMIZERS[network.optimizer]
    file_trace = onnx_step(path, optimizer=optimizer).trace  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    trace, file_trace = without_workspace(recorded(network)), without_workspace(file_trace)
    kept, peak = kept_bytes(trace), trace.peak_bytes
    return {
        "network": name,
        "nodes": sum(op.phase == "forward" for op in file_trace.ops),
        "read_seconds": seconds,
        "kept_bytes": kept,
        "kept_from_file_bytes": kept_bytes(file_trace),
        "kept": kept_bytes(file_trace) / kept - 1,
        "peak_bytes": peak,
        "peak_from_file_bytes": file_trace.peak_bytes,
        "peak": file_trace.peak_bytes / peak - 1,
    }


# -- what is said ----------------------------------------------------------------------------------


def share(head: str, key: str) -> Column:
    return text(head, lambda row: percent(row[key], signed=True))


def answer(result: common.Result) -> str:
    rows = result["rows"]

    def found(key: str, words: str, target: float) -> str:
        near = sum(abs(row[key]) <= target for row in rows)
        worst = max(rows, key=lambda row: abs(row[key]))
        apart = f"{percent(worst[key], signed=True)} for the {worst['network']}"
        return f"{near} {words} within {percent(target)} (at worst {apart})"

    kept, peak = found("kept", "keep what was recorded", KEPT), found("peak", "have its peak", PEAK)
    return f"Of {len(rows)} networks {kept}, {peak}."


BENCH = common.Bench(
    "onnx_graphs",
    __doc__,
    answer,
    (
        text("network", "network"),
        counted("operators", "nodes"),
        quantity("kept, recorded", "kept_bytes", "MiB", per=MIB),
        share("from the file", "kept"),
        quantity("peak, recorded", "peak_bytes", "MiB", per=MIB),
        share("from the file", "peak"),
    ),
)


@click.command(help=__doc__)
@click.option("--network", "only", multiple=True, type=click.Choice(list(NETWORKS)))
@click.option("--quick", is_flag=True, help="Three networks.")
@click.option("--one", hidden=True)
@common.json_option
def main(only: tuple[str, ...], quick: bool, one: str | None, path: Path | None) -> None:
    if one:
        with tempfile.TemporaryDirectory() as folder:
            click.echo(json.dumps(network_row(one, Path(folder))))
        return
    common.writable(path)
    names = only or (QUICK if quick else tuple(NETWORKS))
    rows = [in_child(name) for name in names]
    BENCH.finish(rows, path, simulated=True, options={"quick": quick, "networks": list(names)})


if __name__ == "__main__":
    main()
