"""What does a kernel of CuPy's cost on the software GPU when it is used first?

Processor time of the compiler, child processes included, with an empty cache and without
precompiled headers, each repeat in a process of its own. A second process finds everything in the
cache of the first.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
from report_tables import figure, quantity, text

import umem

LIMIT_SECONDS = 0.25
START, FIRST, AGAIN = "start", "precompiled headers and first kernels", "all, a second process"
KERNEL = "kernel"


def programs(cupy: Any) -> dict[str, Callable[[], Any]]:
    """By name what compiles one new kernel each."""
    x, y = cupy.arange(8, dtype="f4"), cupy.ones(8, "f4")
    numbers, table = cupy.arange(4), cupy.empty((2, 4), "f4")
    barrier = cupy.RawKernel(
        'extern "C" __global__ void turn(float* x) {\n'
        "__shared__ float s[8]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads();\n"
        "x[threadIdx.x] = s[7 - threadIdx.x]; }",
        "turn",
    )
    own = cupy.ElementwiseKernel("T x, T y", "T z", "z = x * x + y", "square")
    return {
        "fill": lambda: cupy.full(8, 2, "i4"),
        "add": lambda: x + y,
        "multiply by a number": lambda: x * 2,
        "compare": lambda: x > y,
        "exp": lambda: cupy.exp(x),
        "cast": lambda: x.astype("f8"),
        "an ElementwiseKernel": lambda: own(x, y),
        "copy of two dimensions": lambda: table[:, ::2].copy(),
        "take": lambda: x.take(numbers),
        "sum": lambda: x.sum(),
        "argmax": lambda: x.argmax(),
        "a RawKernel with a barrier": lambda: barrier((1,), (8,), (x,)),
    }


def spent() -> float:
    """Seconds of the processor that children took which have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def measure(count: int | None) -> dict[str, float]:
    """Seconds of each program, of the start and of the first kernel, in this process."""
    found, before = {}, spent()

    def note(name: str) -> None:
        nonlocal before
        found[name], before = spent() - before, spent()

    umem.software_gpu("t4", model=False, force=True)
    import cupy

    note(START)
    first = cupy.RawKernel('extern "C" __global__ void first(float* x) { x[0] = 2; }', "first")
    first((1,), (1,), (cupy.ones(8, "f4"),))  # CuPy's own kernels have other headers
    made = programs(cupy)
    note(FIRST)
    for name in list(made)[:count]:
        made[name]()
        note(name)
    return found


def child(folder: Path, count: int | None) -> dict[str, float]:
    """Measure in a process whose caches are below a folder."""
    asked = [sys.executable, __file__, "--child"] + (["--quick"] if count else [])
    places = dict.fromkeys(("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "TMPDIR"), str(folder))
    done = subprocess.run(
        asked, capture_output=True, text=True, env={**os.environ, **places}, check=False
    )
    if done.returncode:
        raise click.ClickException(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(result: common.Result) -> str:
    kernels = [row["seconds"] for row in result["rows"] if row["kind"] == KERNEL]
    others = {row["program"]: row["seconds"] for row in result["rows"] if row["kind"] != KERNEL}
    return (
        f"A kernel takes {figure(common.summary(kernels).median)} s of the processor in the median "
        f"and {figure(max(kernels))} s at most, where {figure(LIMIT_SECONDS)} were aimed at; the "
        f"start {figure(others[START])} s, once for a cache; a second process "
        f"{figure(others[AGAIN])} s."
    )


COLUMNS = (
    text("first use of", "program"),
    quantity("processor time", "seconds", "s"),
    quantity("least", "low", "s"),
    quantity("most", "high", "s"),
)
BENCH = common.Bench("kernel_compile", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One repeat of two kernels.")
@click.option("--child", "is_child", is_flag=True, hidden=True)
@common.json_option
def main(quick: bool, is_child: bool, path: Path | None) -> None:
    count = 2 if quick else None
    if is_child:
        print(json.dumps(measure(count)))
        return
    common.writable(path)
    repeats = []
    for _ in range(1 if quick else 5):
        with tempfile.TemporaryDirectory() as folder:
            found = child(Path(folder), count)
            found[AGAIN] = sum(child(Path(folder), count).values())
            repeats.append(found)
    rows = []
    for name in repeats[0]:
        seconds = [found[name] for found in repeats]
        median, low, high = common.summary(seconds)
        kind = "other" if name in (START, FIRST, AGAIN) else KERNEL
        rows.append(
            {"program": name, "kind": kind, "seconds": median, "low": low, "high": high,
             "repeats": seconds}
        )  # fmt: skip
    BENCH.finish(rows, path, simulated=False, options={"quick": quick})


if __name__ == "__main__":
    main()
