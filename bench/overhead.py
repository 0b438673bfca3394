"""What does watching a step cost?

Conditions, interleaved step by step in one process, each time in another order: ``off``
(umem.chainer imported, nothing active), ``record`` (a recorder), ``stacks`` (one that keeps
stacks; at most 10% more than ``record``), ``watch`` (one that only counts, as `umem run --watch`
and MemoryReport), ``live`` (a recorder and a live virtual GPU). A second process
imports Chainer through the compatibility layer only and takes part in the interleaving as
``bare``, so that ``off`` can be compared with a program that knows umem's mends and nothing else.

Workloads: a 24-block residual network (3x3 convolution, batch normalisation, relu; batch 8, 32
channels, 32x32 pixels) and a 200-step LSTM of small operations.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import common


def residual_network(chainer: Any, np: Any) -> Any:
    F, L = chainer.functions, chainer.links

    class Block(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.conv = L.Convolution2D(32, 32, 3, pad=1, nobias=True)
                self.norm = L.BatchNormalization(32)

        def forward(self, x: Any) -> Any:
            return F.relu(self.norm(self.conv(x)) + x)

    class Network(chainer.ChainList):
        def forward(self, x: Any) -> Any:
            for block in self:
                x = block(x)
            return F.mean(x * x)

    model = Network(*[Block() for _ in range(24)])
    x = np.random.default_rng(0).standard_normal((8, 32, 32, 32), dtype=np.float32)
    return model, lambda: model(x)


def lstm(chainer: Any, np: Any) -> Any:
    F, L = chainer.functions, chainer.links

    class Network(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.cell = L.LSTM(32, 64)
                self.out = L.Linear(64, 8)

        def forward(self, xs: Any) -> Any:
            self.cell.reset_state()
            loss = 0
            for x in xs:
                loss += F.mean(self.out(self.cell(x)) ** 2)
            return loss

    model = Network()
    xs = np.random.default_rng(0).standard_normal((200, 8, 32), dtype=np.float32)
    return model, lambda: model(xs)


WORKLOADS = {"residual": residual_network, "lstm": lstm}


def make_step(workload: str) -> Any:
    """A function that runs one step and returns its seconds."""
    import chainer
    import numpy as np

    model, loss_of = WORKLOADS[workload](chainer, np)
    optimizer = chainer.optimizers.MomentumSGD(lr=1e-4).setup(model)

    def step() -> float:
        start = time.perf_counter()
        loss = loss_of()
        model.cleargrads()
        loss.backward()
        optimizer.update()
        return time.perf_counter() - start

    return step


def worker(workload: str) -> None:
    """The ``bare`` process: a step for each line that it reads."""
    import umem.compat

    umem.compat.install()
    step = make_step(workload)
    step()
    for _ in sys.stdin:
        print(step(), flush=True)


STACKS_LIMIT = 1.10


def conditions() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What is on in each of the conditions of this process."""
    import umem
    from umem.trace.recording.recorder import Recorder
    from umem.trace.recording.tally import Tally

    @contextmanager
    def live() -> Any:
        with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed():
            yield

    return {
        "off": nullcontext,
        "record": umem.record,
        "stacks": lambda: umem.record(stacks=True),
        "watch": lambda: Recorder(Tally().on_event, keep=False),
        "live": live,
    }


def measure(workload: str, repeats: int) -> dict[str, Any]:
    import umem
    import umem.chainer

    step = make_step(workload)
    with umem.record() as recorder:
        step()
        step()
    op_count = sum(1 for _ in recorder.trace.ops) // 2
    op_seconds = sorted(op.host_seconds or 0.0 for op in recorder.trace.ops)
    command = [sys.executable, __file__, "--worker", workload]
    bare = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert bare.stdin is not None and bare.stdout is not None
    on = conditions()
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", *on)}
    chance = random.Random(0)
    with ExitStack() as stack:
        stack.callback(bare.wait)
        stack.callback(bare.stdin.close)
        for _ in range(repeats):
            bare.stdin.write("\n")
            bare.stdin.flush()
            seconds["bare"].append(float(bare.stdout.readline()))
            for name in chance.sample(list(on), len(on)):
                with on[name]():
                    seconds[name].append(step())
    off = statistics.median(seconds["off"])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        name: statistics.median([a / b for a, b in zip(values, seconds["off"], strict=True)])
        for name, values in seconds.items()
    }
    return {
        "workload": workload,
        "op_count": op_count,
        "median_op_seconds": op_seconds[len(op_seconds) // 2],
        "off_seconds": off,
        "ratio_to_off": ratios,
        "added_us_per_op": {
            name: 1e6 * (medians[name] - off) / op_count for name in on if name != "off"
        },
        "stacks_of_record": statistics.median(
            [a / b for a, b in zip(seconds["stacks"], seconds["record"], strict=True)]
        ),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="three repeats")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--worker", choices=WORKLOADS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    repeats = 3 if args.quick else args.repeats
    rows = [measure(workload, repeats) for workload in WORKLOADS]
    for row in rows:
        print(describe(row))
    if args.json:
        question = (__doc__ or "").splitlines()[0]
        options = {"repeats": repeats}
        common.write_json(
            args.json, common.report("overhead", question, rows, simulated=False, options=options)
        )


def describe(row: dict[str, Any]) -> str:
    ratios, added, stacks = row["ratio_to_off"], row["added_us_per_op"], row["stacks_of_record"]
    verdict = "met" if stacks <= STACKS_LIMIT else "missed"
    return (
        f"{row['workload']:<9}{row['op_count']:5d} operations, "
        f"median {1e3 * row['median_op_seconds']:.3f} ms; off {1 / ratios['bare']:.3f} of bare; "
        f"record {ratios['record']:.3f} of off ({added['record']:+.1f} us an operation); "
        f"stacks {stacks:.3f} of record (limit {STACKS_LIMIT}: {verdict}); "
        f"watch {ratios['watch']:.3f} of off ({added['watch']:+.1f} us); "
        f"live {ratios['live']:.3f} ({added['live']:+.1f} us)"
    )


if __name__ == "__main__":
    main()
