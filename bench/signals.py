"""Does a signal at a random point leave anything on?

A program enters and leaves nested blocks over and over, until a signal (Ctrl-C's exception, by a
timer) interrupts it at a random moment; 10,000 times. After each: is anything of umem still on?
Does umem's next call take it off, and say so? Was the exception still KeyboardInterrupt, or was it
swallowed? Is an array counted that has died?

Other rows leave nothing to chance: they raise it where umem's own code is called or has called, at
the first such place of one pass, then at the second, and so on: Python looks for signals there.
The stub GPU is CuPy with pools that hand out one and the same pointer.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import random
import signal
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
import common
from report_tables import counted, quantity, text

import umem
from umem import scopes
from umem.devices import cuda
from umem.memory import process as memory
from umem.trace.recording import sources
from umem.trace.recording import thread as measuring

WANTED_LEFT_OF_10000 = 5
COUNTED = ("signals", "left_on", "said_by_the_next_call", "still_on_after_the_next_call")
COUNTED += ("another_exception", "swallowed")
FOLDER = str(Path(umem.__file__).parent)
GPUS: list[Any] = []
"""The virtual GPU of the last pass: which arrays does it count?"""


# -- the programs --------------------------------------------------------------------------------


def suspended(block: Any) -> Iterator[None]:
    """A generator that is closed inside its block."""
    with block:
        yield


def on_virtual_gpu() -> None:
    """Every kind of block, in and beside each other, and operations in them."""
    with umem.virtual_gpu("t4", vram="64MiB") as gpu:
        GPUS[:] = [gpu]
        xp = gpu.xp
        with umem.enable("hybrid"), umem.record(), umem.statistics():
            a = xp.ones(1000)
            with umem.managed(), umem.track(stacks=False, check=True):
                generator = suspended(umem.unmanaged())
                next(generator)
                xp.add(a, 1)
                generator.close()
            with umem.hybrid("8MiB"), umem.record(measure="workspace"):
                a += 1
        del a


def on_stub_gpu() -> None:
    """The same on CuPy: allocations alone."""
    xp = memory.current_device().xp
    with umem.enable("hybrid"):
        xp.empty(100)
    with umem.record(), umem.statistics(), umem.managed():
        generator = suspended(umem.unmanaged())
        next(generator)
        xp.empty(100)
        with umem.hybrid(), umem.track(stacks=False):
            xp.empty(100)
        generator.close()


@contextmanager
def virtual() -> Iterator[Callable[[], None]]:
    """With Chainer, which a recorder instruments, where it is installed."""
    if importlib.util.find_spec("chainer") is not None:
        importlib.import_module("umem.chainer")
    yield on_virtual_gpu


@contextmanager
def stub() -> Iterator[Callable[[], None]]:
    """umem's CUDA device over stub pools."""
    from stub_gpu import stub_device

    device, before = stub_device(), cuda.open_cuda
    cuda.open_cuda = lambda ordinal=None: device  # type: ignore[assignment]
    try:
        yield on_stub_gpu
    finally:
        cuda.open_cuda = before


# -- what is on ----------------------------------------------------------------------------------


def patched() -> tuple[Any, ...]:
    """What recorders and blocks replace outside umem."""
    chainer, cupy = sys.modules.get("chainer"), sys.modules.get("cupy")
    apply = None if chainer is None else chainer.FunctionNode.apply
    return apply, None if cupy is None else cupy.cuda.get_allocator()


def left_on(before: tuple[Any, ...]) -> list[str]:
    """Everything of umem that is on, in words."""
    found = [scope.title for scope in scopes.inside()]
    now = {
        "umem.enable()": memory.enabled() is not None,
        "instrumented sources": sources._state != "off" or sources._users,
        "tracemalloc": tracemalloc.is_tracing(),
        "something replaced": patched() != before,
        "an operation": measuring.inside(),
        "watches": any(gpu.watches for gpu in GPUS),
    }
    found += [name for name, on in now.items() if on]
    if any(still_counted(gpu) for gpu in GPUS):
        gc.collect()  # the exception's frames may hold an array
        found += ["dead tensors" for gpu in GPUS if still_counted(gpu)]
    return found


def still_counted(gpu: Any) -> bool:
    """Whether a virtual GPU counts an array, though none is alive; one that says that it counts no
    further, having been interrupted in the middle of an operation, is passed over."""
    return bool(gpu.usage() and gpu.model.tensors and gpu.model.is_whole)


def interrupted(run: Callable[[], None], before: tuple[Any, ...], counts: Counter[str]) -> bool:
    """Run until the signal, and count what came of it; False where it was never raised."""
    try:
        run()
        return False
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        counts["another exception"] += 1
        counts[f"exception: {type(error).__name__}: {error}"[:200]] += 1
    counts["signals"] += 1
    on = left_on(before)
    if on:
        counts["left on"] += 1
        counts.update(f"left on: {name}" for name in on)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            umem.status()
        counts["said by the next call"] += bool(said)
        if left_on(before):
            counts["still on after the next call"] += 1
            start_again(before)
    return True


def start_again(before: tuple[Any, ...]) -> None:
    """Take everything off by force, so that the next signal finds nothing of this one."""
    for scope in scopes.inside():
        scope.close()
    if (handle := memory.enabled()) is not None:
        handle._installed.close()
    for user in list(sources._users):
        sources.stop_sources(user)
    tracemalloc.stop()
    GPUS.clear()


# -- at random moments ---------------------------------------------------------------------------


def at_random(program: Callable[[], None], count: int, rng: random.Random) -> dict[str, Any]:
    """Signals from a timer, until so many have been seen."""
    counts: Counter[str] = Counter()
    before = patched()
    seconds = duration(program)

    def lost(unraisable: Any) -> None:
        counts["swallowed"] += 1

    def run() -> None:
        swallowed, latest = counts["swallowed"], time.perf_counter() + 1 + 3 * seconds
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3 * seconds))
        try:
            while counts["swallowed"] == swallowed:
                program()
                if time.perf_counter() > latest and not signal.getitimer(signal.ITIMER_REAL)[0]:
                    counts["swallowed"] += 1  # without a word
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    hooks = sys.unraisablehook, signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = lost
    try:
        while counts["signals"] < count:
            if not interrupted(run, before, counts):
                counts["signals"] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook, _ = hooks[0], signal.signal(signal.SIGALRM, hooks[1])
    return {"counts": dict(counts), "program_us": 1e6 * seconds}


def duration(program: Callable[[], None]) -> float:
    """Seconds of one pass."""
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        program()
        taken.append(time.perf_counter() - start)
    return common.summary(taken).median


# -- at each place -------------------------------------------------------------------------------


def at_each_place(program: Callable[[], None], stride: int) -> dict[str, Any]:
    """Raise at the first place of umem's code in one pass, at the second, and so on."""
    counts: Counter[str] = Counter()
    before = patched()
    program()
    for number in itertools.count(1, stride):
        if not interrupted(lambda number=number: raising_at(number, program), before, counts):
            return {"counts": dict(counts), "program_us": None}


def raising_at(number: int, program: Callable[[], None]) -> None:
    """One pass that raises at that place of umem's code."""
    left = number

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(FOLDER):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        program()
    finally:
        sys.setprofile(None)


# -- all of it -----------------------------------------------------------------------------------


def row(where: str, how: str, measured: dict[str, Any]) -> dict[str, Any]:
    counts = measured["counts"]
    found = {name: counts.get(name.replace("_", " "), 0) for name in COUNTED}
    details = {name: count for name, count in counts.items() if ": " in name}
    return {
        "where": where,
        "how": how,
        **found,
        "details": details,
        "program_us": measured["program_us"],
    }


def measure(count: int, stride: int, seed: int) -> list[dict[str, Any]]:
    """A row for each GPU and way of raising."""
    setups = {"virtual GPU": virtual}
    if importlib.util.find_spec("cupy") is not None:
        setups["CuPy, stub GPU"] = stub
    rows = []
    for where, setup in setups.items():
        with setup() as program:
            rows.append(row(where, "at random", at_random(program, count, random.Random(seed))))
            rows.append(row(where, "at each place", at_each_place(program, stride)))
    return rows


def answer(result: common.Result) -> str:
    signals, left, still = (
        sum(row[key] for row in result["rows"])
        for key in ("signals", "left_on", "still_on_after_the_next_call")
    )
    return (
        f"{'Hardly ever' if left else 'No'}: {left or 'none'} of {signals:,} left something on, "
        f"and {still or 'none'} of them after umem's next call too."
    )


def notes(result: common.Result) -> list[str]:
    found = [
        f"{row['where']}, {row['how']}: {name}: {number}"
        for row in result["rows"]
        for name, number in sorted(row["details"].items())
    ]
    return [*found, f"Wanted: at most {WANTED_LEFT_OF_10000} of 10,000 left on, and each said."]


BENCH = common.Bench(
    "signals",
    __doc__,
    answer,
    (
        text("where", "where"),
        text("when", "how"),
        *(counted(name.replace("_", " "), name) for name in COUNTED),
        quantity("one pass", "program_us", "us"),
    ),
    notes=notes,
)


@click.command(help=__doc__)
@click.option("--count", type=click.IntRange(1), default=10_000, show_default=True)
@click.option(
    "--stride",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Raise at every so many places.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quick", is_flag=True, help="200 signals, and every 37th place.")
@common.json_option
def main(count: int, stride: int, seed: int, quick: bool, path: Path | None) -> None:
    count, stride = (200, 37) if quick else (count, stride)
    BENCH.finish(
        measure(count, stride, seed),
        path,
        simulated=False,
        options={"count": count, "stride": stride, "seed": seed, "quick": quick},
        wanted_left_of_10000=WANTED_LEFT_OF_10000,
    )


if __name__ == "__main__":
    main()
