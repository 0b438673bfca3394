"""What does Offload take out of memory on NumPy, and what does a step cost then?

Steps on NumPy whose saved arrays go to a file, beside plain Chainer. Memory is what the system
says that the process has resident, anonymous pages and those of files (RssAnon and RssFile of
/proc/self/status), above what it had before the first step: "saved" at the end of forward, "peak"
the most that a thread finds which looks every 2 ms. Each figure is of the sixth step of a process
of its own, after freed memory was given back to the system. Times are of one step after another
of the same kind, plain and not in turn in one process, with the median of the ratios: by the
clock, since a thread writes and reads beside, and of the processor, of all threads. Bits are those
of losses, gradients and running statistics over both steps. Where the loss is kept, the graph of
the step before is alive during forward.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import ctypes
import gc
import hashlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from models import build
from report_tables import Row, percent, quantity, span, text

import umem.chainer

# isort: split
import chainer  # after the compatibility layer

MB = 1e6
LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Case:
    """A network, how many samples a step has, and whether the program keeps its loss."""

    name: str
    model: tuple[str, str]
    batch: int
    keeps_loss: bool = False


CASES = (
    Case("transformer", ("transformer", "12 layers"), 24),
    Case("ResNet50", ("ResNet50", "128 px"), 16),
    Case("residual", ("residual", "24 blocks"), 48),
    Case("residual, dropout", ("residual", "24 blocks, dropout"), 32),
    Case("transformer, loss kept", ("transformer", "12 layers"), 24, keeps_loss=True),
)
QUICK = (Case("small residual", ("residual", "6 narrow blocks"), 64),)
WAYS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "plain": lambda folder: nullcontext(),
    "offload": lambda folder: umem.chainer.Offload(folder),
    "recompute + offload": lambda folder: umem.chainer.Recompute("min", offload=folder),
}
"""What a step is run in, given a folder on a disk; plain first."""
LEARNT = {"recompute + offload": 4}
"""So many steps go before those that are measured: two are learnt, one is looked at."""


class Steps:
    """A network that is trained, from the same beginning in every process."""

    def __init__(self, case: Case) -> None:
        np.random.seed(0)
        self._model = build(*case.model)
        self._inputs = self._model.inputs(case.batch)
        self._keeps_loss = case.keeps_loss
        self._kept: Any = None
        self.link = self._model.link
        self._rule = chainer.optimizers.MomentumSGD(lr=1e-4).setup(self.link)
        self.step()
        self._kept = None

    def step(self, between: Callable[[], None] = lambda: None) -> Any:
        loss = self._model.loss(*self._inputs)
        between()
        self.link.cleargrads()
        loss.backward()
        self._rule.update()
        self._kept = loss if self._keeps_loss else None
        return loss.array

    def digest(self, loss: Any) -> str:
        """A checksum of the bits of a step."""
        found = hashlib.blake2b(np.asarray(loss).tobytes())
        for _, parameter in sorted(self.link.namedparams()):
            found.update(np.ascontiguousarray(parameter.grad).tobytes())
        for _, link in sorted(self.link.namedlinks()):
            for name in sorted(link._persistent):
                found.update(np.asarray(getattr(link, name)).tobytes())
        return found.hexdigest()


# -- memory --------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory: anonymous pages, and those of files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(x.split()[1]) << 10 for x in lines if x.startswith(("RssAnon", "RssFile")))


def settled() -> int:
    """The same, once what is free was given back to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return resident()


class Looking(threading.Thread):
    """Looks for the most that is resident while a block runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.most = max(self.most, resident())

    def __enter__(self) -> Looking:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self.join()


def memory(case: Case, way: str, folder: str) -> dict[str, Any]:
    """What a step takes, and the bits of two; for a process of its own."""
    steps, ends = Steps(case), list[int]()
    steps.link.cleargrads()
    before = settled()
    with WAYS[way](folder):
        for _ in range(max(LEARNT.values())):
            steps.step()
        bits = [steps.digest(steps.step())]
        steps.link.cleargrads()
        settled()
        with Looking() as looking:
            loss = steps.step(between=lambda: ends.append(resident()))
        bits.append(steps.digest(loss))
    return {"saved_bytes": ends[0] - before, "peak_bytes": looking.most - before, "bits": bits}


# -- time ----------------------------------------------------------------------------------------


def seconds(case: Case, way: str, folder: str, repeats: int) -> dict[str, Any]:
    """Ratios of steps to plain ones, by the clock and of the processor, in a process of its own."""
    steps, found = Steps(case), {"wall": [], "processor": [], "plain_s": []}
    for number in range(repeats):
        order = ("plain", way) if number % 2 else (way, "plain")
        times = [timed(steps, WAYS[name](folder), LEARNT.get(name, 0)) for name in order]
        plain, other = times if number % 2 else reversed(times)
        found["plain_s"].append(plain[0])
        found["wall"].append(other[0] / plain[0])
        found["processor"].append(other[1] / plain[1])
    return found


def timed(
    steps: Steps, context: AbstractContextManager[Any], learnt: int = 0
) -> tuple[float, float]:
    """Return the seconds of one step by the clock and by the processor."""
    with context:
        for _ in range(1 + learnt):
            steps.step()
        gc.collect()
        wall, processor = time.perf_counter(), time.process_time()
        steps.step()
        return time.perf_counter() - wall, time.process_time() - processor


def measure(case: Case, folder: str, repeats: int) -> list[Row]:
    """A row a way."""
    rows = []
    for way in WAYS:
        found = common.child(__file__, "--memory", case.name, way, folder)
        if way == "plain":
            plain = found
        pace = common.child(
            __file__, "--seconds", case.name, way, folder, "--repeats", str(repeats)
        )
        row: dict[str, Any] = {
            "network": case.name,
            "way": way,
            "saved_mb": found["saved_bytes"] / MB,
            "saved_of_plain": found["saved_bytes"] / plain["saved_bytes"],
            "peak_mb": found["peak_bytes"] / MB,
            "peak_of_plain": found["peak_bytes"] / plain["peak_bytes"],
            "wall_ratio": statistics.median(pace["wall"]),
            "processor_ratio": statistics.median(pace["processor"]),
            "wall_low": min(pace["wall"]),
            "wall_high": max(pace["wall"]),
            "identical": "yes" if found["bits"] == plain["bits"] else "no",
            "repeats": pace,
        }
        rows.append(row)
    return rows


def answer(result: common.Result) -> str:
    answers = (_way_answer(result, way) for way in WAYS if way != "plain")
    return "; ".join(text for text in answers if text) + "."


def _way_answer(result: common.Result, way: str) -> str:
    """Word the figures of one way."""
    rows = [row for row in result["rows"] if row["way"] == way]
    if not rows:
        return ""
    same = sum(row["identical"] == "yes" for row in rows)
    return (
        f"{way.capitalize()} leaves {span((row['saved_of_plain'] for row in rows), percent)} of "
        f"what a plain step has saved in memory, and "
        f"{span((row['peak_of_plain'] for row in rows), percent)} of its peak, at "
        f"{span(row['wall_ratio'] for row in rows)} of its time by the clock "
        f"({span(row['processor_ratio'] for row in rows)} of the processor's): {same} of "
        f"{len(rows)} networks have the bits of plain Chainer"
    )


def notes(result: common.Result) -> list[str]:
    plain = [row["wall_ratio"] for row in result["rows"] if row["way"] == "plain"]
    return [
        f"Plain steps in turn with plain ones took {span(plain)} of their time by the clock: that "
        "far the figures by the clock may be off on this machine."
    ]


BENCH = common.Bench(
    "offload",
    __doc__,
    answer,
    (
        text("network", "network"),
        text("way", "way"),
        quantity("saved", "saved_mb", "MB"),
        quantity("saved of plain's", "saved_of_plain"),
        quantity("peak", "peak_mb", "MB"),
        quantity("peak of plain's", "peak_of_plain"),
        quantity("time of plain's", "wall_ratio"),
        text("least to most", lambda row: span((row["wall_low"], row["wall_high"]))),
        quantity("processor's time of plain's", "processor_ratio"),
        text("same bits", "identical"),
    ),
    notes=notes,
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small network, two repeats.")
@click.option("--only", "names", multiple=True, type=click.Choice([c.name for c in CASES]))
@click.option("--folder", help="On a disk; a temporary one unless given.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--memory", "memory_of", nargs=3, hidden=True)
@click.option("--seconds", "seconds_of", nargs=3, hidden=True)
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    folder: str | None,
    repeats: int,
    memory_of: tuple[str, str, str] | None,
    seconds_of: tuple[str, str, str] | None,
    path: Path | None,
) -> None:
    """Measure, print the tables, and write the result."""
    known = {case.name: case for case in (*CASES, *QUICK)}
    if memory_of is not None:
        print(json.dumps(memory(known[memory_of[0]], *memory_of[1:])))
        return
    if seconds_of is not None:
        print(json.dumps(seconds(known[seconds_of[0]], *seconds_of[1:], repeats)))
        return
    common.writable(path)
    chosen = QUICK if quick else [case for case in CASES if not names or case.name in names]
    repeats = 2 if quick else repeats
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in chosen:
            rows += measure(case, folder or temporary, repeats)
            click.echo(case.name, err=True)
    options = {"quick": quick, "networks": [case.name for case in chosen], "repeats": repeats}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
