"""What do late streams, refusals and a change of umem cost on the software GPU?

The operations and steps of software_gpu_speed.py run in several processes, which take turns:
at once, late, with ``strict=False``, and with the umem of another checkout, if one is given
(``--against``). A new kernel is compiled in each, too. Times are processor time, of the thread or
of the compiler; a ratio is the median of the pairs, each way over at once.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
import common
from report_tables import Column, figure, quantity, text
from software_gpu_speed import gcn, inputs, operations, perceptron

import umem

AT_ONCE, LATE, NOT_STRICT, BEFORE = "at once", "late", "not strict", "before"
COMPILING = "a new kernel, compiled"
NODES, SEEDS = 8_000, 3
STEPS = ("perceptron, 6 x 1024, batch 256", f"GCN, {NODES:,} nodes")
BURST_SECONDS = 1e-2
"""A short operation is repeated for about so long."""
WANTED = {LATE: 1.25, NOT_STRICT: 1.01, BEFORE: 1.05}
"""Times that late streams, refusals and this umem may take in the median."""
KERNEL = 'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] += {}; }}'


# -- in a process of its own -----------------------------------------------------------------------


def serve(way: str) -> None:
    """Name the operations, then run each that is asked for, and say what it took."""
    warnings.simplefilter("ignore")
    options: dict[str, dict[str, Any]] = {LATE: {"stream_seed": 0}, NOT_STRICT: {"strict": False}}
    gpu = umem.software_gpu("v100-32gb", **options.get(way, {}))
    import cupy

    importlib.import_module("umem.chainer")  # makes Chainer ready for today's NumPy
    import chainer

    held = {name: cupy.asarray(array) for name, array in inputs().items()}
    calls = {name: call for name, (_, _, call) in operations(cupy, held).items()}
    place = chainer.get_device("@cupy:0")
    calls |= zip(STEPS, (perceptron(place), gcn(place, NODES)), strict=True)
    counts = {}
    for name, call in calls.items():
        call(), call()
        counts[name] = max(1, round(BURST_SECONDS / max(1e-5, seconds(cupy, call, 1))))
    print(json.dumps([*calls]), flush=True)
    for turn, line in enumerate(sys.stdin):
        name = line.strip()
        if way == LATE:
            gpu.reseed(turn % SEEDS)
        if name == COMPILING:
            print(compile_seconds(cupy, turn), flush=True)
        else:
            print(seconds(cupy, calls[name], counts[name]), flush=True)


def seconds(cupy: Any, call: Callable[[], Any], count: int) -> float:
    """Seconds of the thread for a call, with what it leaves to be done."""
    gc.disable()
    start = time.thread_time()
    for _ in range(count):
        call()
    cupy.cuda.Device().synchronize()
    took = time.thread_time() - start
    gc.enable()
    return took / count


def compile_seconds(cupy: Any, turn: int) -> float:
    """Processor time of the compiler for a kernel that no cache has."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cupy.RawKernel(KERNEL.format(turn), "k")((1,), (1,), (cupy.zeros(1, "f4"),))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# -- turns -----------------------------------------------------------------------------------------


@contextmanager
def process(way: str, against: Path | None) -> Iterator[tuple[TextIO, TextIO]]:
    """Run the operations in a process, with caches of its own; its input and output."""
    with tempfile.TemporaryDirectory() as folder:
        path = [str(against)] if way == BEFORE else [str(common.HERE.parent)]
        variables = {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": folder}
        caches = {"XDG_CACHE_HOME": folder, "CUPY_CACHE_DIR": folder}
        run = subprocess.Popen(
            [sys.executable, __file__, "--inside", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables, **caches},
        )
        assert run.stdin is not None and run.stdout is not None
        try:
            yield run.stdin, run.stdout
        finally:
            run.stdin.close()
            run.wait()


def turns(ways: list[str], against: Path | None, repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Rows of each operation, its seconds by way."""
    rows = []
    with ExitStack() as stack:
        running = {way: stack.enter_context(process(way, against)) for way in ways}
        named = [json.loads(answers.readline()) for _, answers in running.values()]
        for name in (*(named[0][:2] if quick else named[0]), COMPILING):
            found: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(repeats):
                for way in ways if turn % 2 else reversed(ways):
                    requests, answers = running[way]
                    requests.write(f"{name}\n")
                    requests.flush()
                    found[way].append(float(answers.readline()))
            rows.append({"operation": name, "seconds": found, "ratios": ratios(found)})
    return rows


def ratios(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the pairs: late over at once, at once over each of the others."""
    once = found[AT_ONCE]
    pairs = {
        way: zip(took, once, strict=True) if way == LATE else zip(once, took, strict=True)
        for way, took in found.items()
        if way != AT_ONCE
    }
    return {way: common.summary(a / b for a, b in each).median for way, each in pairs.items()}


def _commit_of(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


# -- what is said ----------------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = [row for row in result["rows"] if row["operation"] != COMPILING]
    words = {
        LATE: "late streams take", NOT_STRICT: "refusals take",
        BEFORE: f"this umem takes, against {result['options']['against']},",
    }  # fmt: skip
    sentences = []
    for way in rows[0]["ratios"]:
        median = common.summary(row["ratios"][way] for row in rows).median
        steps = [row["ratios"][way] for row in rows if row["operation"] in STEPS]
        of_steps = f", {' and '.join(map(figure, steps))} of steps" if steps else ""
        sentences.append(
            f"{words[way]} {figure(median)} times the time{of_steps} ({WANTED[way]} wanted)"
        )
    compiling = [r["ratios"] for r in result["rows"] if r["operation"] == COMPILING]
    found = [f"{way}: {figure(ratio)}" for each in compiling for way, ratio in each.items()]
    compiling_text = f"; of compiling a new kernel {', '.join(found)}" if found else ""
    return f"In the median of {len(rows)} operations {', '.join(sentences)}{compiling_text}."


def over(head: str, way: str) -> Column:
    return text(head, lambda row: figure(row["ratios"][way]) if way in row["ratios"] else "-")


BENCH = common.Bench(
    "software_gpu_turns",
    __doc__,
    answer,
    (
        text("operation", "operation"),
        quantity("at once", lambda r: 1e3 * common.summary(r["seconds"][AT_ONCE]).median, "ms"),
        over("late / at once", LATE),
        over("at once / not strict", NOT_STRICT),
        over("at once / before", BEFORE),
    ),
)


@click.command(help=__doc__)
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkout of umem of another commit.",
)
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
@click.option("--quick", is_flag=True, help="Three repeats, and two operations.")
@click.option("--inside", hidden=True)
@common.json_option
def main(
    against: Path | None, repeats: int, quick: bool, inside: str | None, path: Path | None
) -> None:
    """Measure, print the tables, and write the result."""
    if inside is not None:
        serve(inside)
        return
    common.writable(path)
    ways = [AT_ONCE, LATE, NOT_STRICT, *[BEFORE] * (against is not None)]
    rows = turns(ways, against, 3 if quick else repeats, quick)
    commit = None if against is None else _commit_of(against)
    BENCH.finish(rows, path, simulated=False, options={"quick": quick, "against": commit})


if __name__ == "__main__":
    main()
