"""What does managed memory cost on this GPU while everything fits, and what does a prefetch save?

A training step under `managed` beside one under `unmanaged`; a prefetch beside a copy of pinned
memory; a prefetch before a step on data that lie on the host beside faulting them in. NOT RUN YET:
no figure of this script has been seen on a GPU. Managed memory stays within the budget of
gpu_guard.py, 4 GiB at most, so nothing is oversubscribed. Without a GPU it says why, and exits
with 1. (Named cuda.py it would hide NVIDIA's package `cuda` from every script beside it.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
import cuda_constants
import gpu_guard
import numpy as np
from report_tables import Column, Row, figure, quantity, span, text

import umem
from umem.devices import Device
from umem.devices.cuda import open_cuda
from umem.errors import UmemError
from umem.units import BLOCK_BYTES, MIB

WARMUP_STEPS = 3
MOST_OF_UNMANAGED = 1.02
LEAST_OF_COPY = 0.9
LEAST_OF_FAULTING = 3.0


class Size(NamedTuple):
    """How much is trained and moved."""

    nodes: int
    batch: int
    residual: str
    nbytes: int
    repeats: int


FULL = Size(150_000, 32, "classifier of 4 blocks", 512 * MIB, 15)
QUICK = Size(2_000, 2, "classifier of 1 block", 32 * MIB, 2)


class Pair(NamedTuple):
    """Two things to time in turn, and what their ratio should be.

    ``ratio`` is ``of`` over ``to``, both medians of seconds; None as target only shows it.
    """

    name: str
    case: str
    of: str
    to: str
    actions: dict[str, Callable[[], float]]
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Training:
    """A model on the current umem device, with all that a step of it reads."""

    loss: Callable[[], Any]
    optimizer: Any
    inputs: tuple[Any, ...]

    def step(self) -> float:
        """Train one step; its loss waits for the device."""
        loss = self.loss()
        self.optimizer.target.cleargrads()
        loss.backward()
        self.optimizer.update()
        return float(loss.array)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What a step finds in memory: parameters, their state, data."""
        data = (getattr(x, "matrix", x) for x in self.inputs)  # of an adjacency
        return self.optimizer.target, self.optimizer, *data


def training(name: str, size: str, batch: int) -> Training:
    """Make a model on the current umem device, with one batch for all its steps."""
    import umem.chainer  # isort: skip  (before the models, whose Chainer it makes ready)
    from models import build, sent

    place = umem.chainer.device()
    np.random.seed(0)
    model = build(name, size)
    inputs = sent(model.inputs(batch), place)
    optimizer = model.make_optimizer().setup(model.link.to_device(place))
    return Training(lambda: model.loss(*inputs), optimizer, inputs)


def seconds(device: Device, action: Callable[[], Any]) -> float:
    """How long an action takes, until the device has finished it."""
    device.synchronize()
    start = time.perf_counter()
    action()
    device.synchronize()
    return time.perf_counter() - start


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """A row: both in turn, ``repeats`` times, after one round that is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in pair.actions}
    for number in range(repeats + 1):
        for name, action in pair.actions.items():
            value = action()
            if number:
                found[name].append(value)
    ratio = common.summary(found[pair.of]).median / common.summary(found[pair.to]).median
    return {
        "name": pair.name,
        "case": pair.case,
        "ratio_of": pair.of,
        "ratio_to": pair.to,
        "ratio": ratio,
        "at_most": pair.at_most,
        "at_least": pair.at_least,
        "passed": _passed(ratio, pair),
        "repeat_seconds": found,
    }


def _passed(ratio: float, pair: Pair) -> bool | None:
    if pair.at_most is None and pair.at_least is None:
        return None
    return (pair.at_most is None or ratio <= pair.at_most) and (
        pair.at_least is None or ratio >= pair.at_least
    )


def steps(device: Device, name: str, make: Callable[[], Any]) -> tuple[Pair, dict[str, list[Any]]]:
    """A training step in either mode, warmed up; and the losses that each has seen.

    Both models are there at once, so that they can be timed in turn.
    """
    blocks = {"unmanaged": umem.unmanaged, "managed": umem.managed}
    losses: dict[str, list[Any]] = {mode: [] for mode in blocks}
    actions = {}
    for mode, block in blocks.items():
        with block():
            training = make()
            losses[mode] += [training.step() for _ in range(WARMUP_STEPS)]
        actions[mode] = _stepper(device, block, training, losses[mode])
    case = "a training step, all in VRAM"
    pair = Pair(name, case, "managed", "unmanaged", actions, at_most=MOST_OF_UNMANAGED)
    return pair, losses


def _stepper(
    device: Device, block: Callable[[], Any], training: Any, losses: list[Any]
) -> Callable[[], float]:
    def timed() -> float:
        with block():
            return seconds(device, lambda: losses.append(training.step()))

    return timed


def host_resident(device: Device, name: str, make: Callable[[], Any]) -> Pair:
    """A training step whose parameters, state and data lie on the host, faulted in or fetched."""
    with umem.managed():
        training = make()
        for _ in range(WARMUP_STEPS):
            training.step()

    def fetched() -> None:
        umem.prefetch(training.arrays)
        training.step()

    def after_eviction(action: Callable[[], Any]) -> Callable[[], float]:
        def timed() -> float:
            umem.prefetch(training.arrays, "cpu")
            with umem.managed():
                return seconds(device, action)

        return timed

    actions = {"faults": after_eviction(training.step), "prefetch": after_eviction(fetched)}
    return Pair(name, "a training step, its data on the host", "faults", "prefetch", actions)


def transfers(bench: Any) -> list[Pair]:
    """Prefetches beside copies of pinned memory, and beside faults."""

    def of(action: Callable[[Any], float]) -> Callable[[], float]:
        return lambda: action(bench)

    both = (
        ("to the GPU", cuda_constants.prefetch_in, cuda_constants.copy_in),
        ("to the host", cuda_constants.prefetch_out, cuda_constants.copy_out),
    )
    pairs = [
        Pair(
            "prefetch",
            f"{way}, against pinned memory",
            "copy",
            "prefetch",
            {"copy": of(copy), "prefetch": of(prefetch)},
            at_least=LEAST_OF_COPY,
        )
        for way, prefetch, copy in both
    ]
    step = {"faults": of(cuda_constants.fault_in), "prefetch": of(prefetch_then_touch)}
    case = "before a pass over an array on the host, against faults"
    pairs.append(Pair("prefetch", case, "faults", "prefetch", step, at_least=LEAST_OF_FAULTING))
    return pairs


def prefetch_then_touch(bench: Any) -> float:
    """Prefetch everything from the host, and touch it."""
    bench.to("cpu")

    def fetched() -> None:
        bench.device.prefetch(bench.array, bench.device.ordinal, None)
        bench.touch(bench.array)

    taken: float = bench.seconds(fetched)
    return taken


def networks(device: Device, size: Size) -> list[dict[str, Any]]:
    """The rows of training steps; ``same_losses``: equal bit for bit in both modes."""
    graph = partial(training, "GCN", "3 layers, 40 classes", size.nodes)
    residual = partial(training, "residual", size.residual, size.batch)
    rows = []
    for name, make in (("graph network", graph), ("residual network", residual)):
        pair, losses = steps(device, name, make)
        row = measure(pair, size.repeats)
        rows.append({**row, "same_losses": losses["managed"] == losses["unmanaged"]})
        del pair  # with its models
    return [*rows, measure(host_resident(device, "graph network", graph), size.repeats)]


def run(size: Size) -> tuple[Any, list[dict[str, Any]]]:
    """The device and every row.

    Raises:
        UmemError: there is no GPU that can do it, or not enough memory; the message says why.
    """
    device = open_cuda()
    gpu_guard.guard(device)
    bench = cuda_constants.Bench(device, size.nbytes - size.nbytes % BLOCK_BYTES)
    rows = [measure(pair, size.repeats) for pair in transfers(bench)]
    del bench
    return device, [*rows, *networks(device, size)]


def answer(result: common.Result) -> str:
    rows = result["rows"]
    ratios = {of: [row["ratio"] for row in rows if row["ratio_of"] == of] for of in OVER}
    parts = [f"{words} {span(ratios[of])} times" for of, words in OVER.items() if ratios[of]]
    judged = [row["passed"] for row in rows if row["passed"] is not None]
    return f"{'; '.join(parts) or 'Nothing'}; {sum(judged)} of {len(judged)} targets are met."


def _times(which: str) -> Callable[[Row], str]:
    """Name what was timed, with its median and spread in milliseconds."""

    def cell(row: Row) -> str:
        times = row["repeat_seconds"][row[which]]
        median = figure(1e3 * common.summary(times).median)
        return f"{row[which]} {median} ({span(1e3 * value for value in times)})"

    return cell


def _target(row: Row) -> str | None:
    if row["at_most"] is not None:
        return f"at most {row['at_most']:g}"
    return None if row["at_least"] is None else f"at least {row['at_least']:g}"


OVER = {
    "managed": "A step in managed memory takes as long as one in unmanaged memory",
    "copy": "a copy of pinned memory takes as long as a prefetch",
    "faults": "faulting in takes as long as a prefetch with the work",
}
BENCH = common.Bench(
    "cuda_managed",
    __doc__,
    answer,
    (
        text("measure", lambda row: f"{row['name']}: {row['case']}"),
        Column("median, least to most", _times("ratio_of"), "ms"),
        Column("over", _times("ratio_to"), "ms"),
        quantity("ratio", "ratio"),
        text("target", _target),
        text("judged", lambda row: {None: "shown", True: "pass", False: "MISS"}[row["passed"]]),
    ),
)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), help="Rounds, each of every candidate.")
@click.option("--quick", is_flag=True, help="Little data, twice: to see that it runs.")
@common.json_option
def main(repeats: int | None, quick: bool, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    size = QUICK if quick else FULL
    if repeats is not None:
        size = size._replace(repeats=repeats)
    try:
        device, rows = run(size)
    except UmemError as error:
        raise click.ClickException(str(error)) from error
    BENCH.finish(
        rows,
        path,
        simulated=device.simulated,
        options=size._asdict(),
        gpu={"name": device.name, "vram_bytes": device.vram_bytes},
        budget_bytes=gpu_guard.guard(device).budget_bytes,
    )


if __name__ == "__main__":
    main()
