"""Does any broken or hostile trace break `umem report` or `umem replay`?

Small recorded steps (at most 200 operations) are changed, from single bytes of the compressed
file to the sense of its events, and go through both commands with options drawn at random, all in
one process. A command may say one sentence and exit with a status of its own; it must not end in a
traceback, take 5 s of processor time (`replay --all-gpus`: for each of its GPUs), bring the
process 300 MiB above what it had before the first case, or print a control character. Every case
has a number, from which alone it is drawn: `--seed S --case N` runs one again and prints what it
says.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bench_path  # noqa: F401
import click
import common
from click.testing import CliRunner
from hostile_bases import Base, bases
from hostile_mutations import mutated
from report_tables import counted, quantity, text, verdict

from umem.cli import main as umem_main
from umem.devices.specs import GPUS
from umem.units import MIB, format_bytes, format_seconds

MOST_SECONDS = 5.0
MOST_BYTES = 300 * MIB
STOP_SECONDS = 100
"""When a case that takes too long is given up."""
ROOM_BYTES = 8 << 30
"""The address space that a case may take before Python refuses it more."""
QUICK = 60
LONGEST_ERROR = 2500
BROKEN = ("tracebacks", "too_slow", "too_large", "other")


class Ran(NamedTuple):
    """One command on one file; ``share`` is how many GPUs it was for."""

    command: str
    share: int
    status: int
    failure: str | None
    seconds: float
    grown_bytes: int
    output: str


class TooLongError(BaseException):
    """A case was given up."""


# -- what is run -------------------------------------------------------------------------------


def commands(path: Path, base: Path, rng: random.Random) -> Iterator[list[str]]:
    """One `report` and one `replay`, with options drawn."""
    out = str(path.with_name("out"))
    views: list[list[str]] = [[], [], [], ["--json"], ["--json"], ["--gpu", "t4"],
                              ["--html", out, "--force"], ["--export", "perfetto", out, "--force"],
                              [str(base)], ["--vram", "1MiB", "--json", str(base)]]  # fmt: skip
    if rng.random() < 0.02:
        views = [["--png", out + ".png", "--force"]]
    yield ["report", str(path), *rng.choice(views)]
    gpu = rng.choice(("t4", "t4", "v100-16gb", "h100-sxm", "jetson-orin-64gb"))
    options = [["--gpu", gpu], ["--gpu", gpu, "--vram", rng.choice(("2MiB", "8MiB", "64MiB"))]]
    chosen = rng.choice(options) if rng.random() > 0.01 else ["--all-gpus"]
    if rng.random() < 0.3:
        chosen += ["--mode", rng.choice(("unmanaged", "managed", "hybrid"))]
    yield ["replay", str(path), *chosen, *(["--json"] if rng.random() < 0.4 else [])]


def run(arguments: list[str], before_bytes: int) -> Ran:
    """Run a command in this process and look at what it did."""
    _forget_peak()
    signal.setitimer(signal.ITIMER_PROF, STOP_SECONDS)
    start = time.process_time()
    try:
        result = CliRunner().invoke(umem_main, arguments)
        status, output = result.exit_code, result.output
        failure = _failure(result.exception, status, output)
    except TooLongError:
        status, output, failure = -1, "", None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    grown = _peak_bytes() - before_bytes
    share = len(GPUS) if "--all-gpus" in arguments else 1
    return Ran(arguments[0], share, status, failure, seconds, grown, output)


def _failure(error: BaseException | None, status: int, output: str) -> str | None:
    """What must not be, in a word and where; None where all is well."""
    if error is not None and not isinstance(error, SystemExit):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return f"traceback: {type(error).__name__} at {place}"
    strange = next((c for c in output if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160), None)
    if strange is not None:
        return f"control character {ord(strange):#x}"
    if status not in (0, 3) and len(output) > LONGEST_ERROR:
        return f"an error of {len(output)} letters"
    if status not in (0, 3) and "Error: " not in output:
        return f"status {status} without an error"
    return None


def _stop(*_: object) -> None:
    raise TooLongError


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak_bytes() -> int:
    """The most memory since the peak was forgotten."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


# -- all of them -------------------------------------------------------------------------------


def case(number: int, seed: int, found: list[Base], folder: Path, before: int) -> dict[str, Any]:
    """Make one case and run it."""
    rng = random.Random(f"{seed}:{number}")
    base, other = rng.choice(found), rng.choice(found)
    how, content = mutated(base, other, rng)
    path = folder / rng.choice(("x.umem.gz", "x.umem.gz", "x\x1b[31m.gz", "\u202ex", "a b $'\n.gz"))
    path.write_bytes(content)
    try:
        runs = [
            run(each, before) for each in commands(path, folder / f"base{found.index(base)}", rng)
        ]
    finally:
        path.unlink()
    return {"case": number, "base": base.name, "change": how, "runs": runs}


def measure(count: int, seed: int, only: int | None) -> dict[str, Any]:
    """Run all cases, or one; what they were, and each that failed."""
    found = bases()
    numbers = range(count) if only is None else (only,)
    kept: list[dict[str, Any]] = []
    changes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    slowest = largest = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for place, base in enumerate(found):
            (folder / f"base{place}").write_bytes(_gzip(base))
        for warm in range(-30, 0):  # modules that are loaded when they are needed
            case(warm, seed, found, folder, 0)
        gc.collect()
        _forget_peak()
        before = _peak_bytes()
        for number in numbers:
            one = case(number, seed, found, folder, before)
            changes[one["change"].partition(",")[0]] += 1
            slowest = max(slowest, *(ran.seconds / ran.share for ran in one["runs"]))
            largest = max(largest, *(ran.grown_bytes for ran in one["runs"]))
            kept += _failed(one, totals)
            if only is not None:
                _tell(one)
    return {
        "changes": dict(changes),
        "totals": dict(totals),
        "slowest_seconds": slowest,
        "largest_growth_bytes": largest,
        "failed": kept,
    }


def _gzip(base: Base) -> bytes:
    import gzip

    return gzip.compress(b"".join(line + b"\n" for line in base.lines), 1)


def _failed(one: dict[str, Any], totals: Counter[str]) -> Iterator[dict[str, Any]]:
    """Each run that did what it must not; counts all."""
    for ran in one["runs"]:
        verdicts = {
            "tracebacks": bool(ran.failure and ran.failure.startswith("traceback")),
            "too_slow": ran.seconds > MOST_SECONDS * ran.share,
            "too_large": ran.grown_bytes > MOST_BYTES,
            "other": bool(ran.failure and not ran.failure.startswith("traceback")),
        }
        totals["runs"] += 1
        totals["accepted"] += ran.status in (0, 3)
        for name, is_bad in verdicts.items():
            totals[name] += is_bad
        if any(verdicts.values()):
            yield {
                "case": one["case"],
                "base": one["base"],
                "change": one["change"],
                "command": ran.command,
                "failure": ran.failure,
                "seconds": ran.seconds,
                "grown_bytes": ran.grown_bytes,
            }


def _tell(one: dict[str, Any]) -> None:
    print(f"case {one['case']}: {one['base']}: {one['change']}")
    for ran in one["runs"]:
        print(
            f"-- {ran.command}: status {ran.status}, {ran.failure}, "
            f"{format_seconds(ran.seconds)}, {format_bytes(ran.grown_bytes)}\n{ran.output}"
        )


def row(count: int, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """The result, as one row."""
    totals = found["totals"]
    bad = {name: totals.get(name, 0) for name in BROKEN}
    return {
        "traces": count,
        "seed": seed,
        "commands": totals["runs"],
        "accepted": totals.get("accepted", 0),
        **bad,
        "slowest_seconds": found["slowest_seconds"],
        "largest_growth_mib": found["largest_growth_bytes"] / MIB,
        "passed": not any(bad.values()),
        "failed": found["failed"],
        "changes": found["changes"],
    }


def answer(result: common.Result) -> str:
    (row,) = result["rows"]
    bad = sum(row[name] for name in BROKEN)
    return (
        f"{'Yes' if bad else 'No'}: of {row['commands']:,} commands on {row['traces']:,} traces "
        f"{bad or 'none'} ended in a traceback, took too long or too much memory, or printed what "
        f"it must not, and {row['accepted']:,} could make something of their trace."
    )


BENCH = common.Bench(
    "hostile_traces",
    __doc__,
    answer,
    (
        text("seed", "seed"),
        counted("traces", "traces"),
        counted("commands", "commands"),
        counted("accepted", "accepted"),
        *(counted(name.replace("_", " "), name) for name in BROKEN),
        quantity("slowest", "slowest_seconds", "CPU s"),
        quantity("largest growth", "largest_growth_mib", "MiB"),
        verdict(),
    ),
    notes=lambda result: map(str, result["rows"][0]["failed"][:50]),
)


@click.command(help=__doc__)
@click.option("--count", type=click.IntRange(1, 10_000_000), default=2000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--case", "only", type=int, default=None, help="Run this one and print its output.")
@click.option("--quick", is_flag=True, help=f"{QUICK} traces.")
@common.json_option
def main(count: int, seed: int, only: int | None, quick: bool, path: Path | None) -> None:
    count = QUICK if quick else count
    faulthandler.enable()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (ROOM_BYTES, hard))
    signal.signal(signal.SIGPROF, _stop)
    os.environ.setdefault("COLUMNS", "100")
    found = measure(count, seed, only)
    result = row(count, seed, found)
    if only is None:
        BENCH.finish([result], path, simulated=False, options={"count": count, "seed": seed})
    if not result["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
