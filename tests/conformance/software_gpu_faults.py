"""How many faults planted in right CuPy programs does the software GPU find?

Ten programs of kernels and streams, in each of which one wait, barrier or first value is taken
away, or one index or fill reaches too far: a hundred faults. A missing wait has 20 seeds, each
other fault one run in checked mode and, if that finds nothing, one by default. Found is what ends
in an error, or fails the program's own comparison with NumPy. The right programs must pass in both
modes under all 20 seeds. Nothing is timed, and no GPU is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401
import click
import common
import fault_programs
from fault_mutations import MOST, WAIT, Mutant, made, mutants
from fault_programs import PROGRAMS
from report_tables import counted, text

import umem
from umem_software_gpu.faults import fault_of

GPU, VRAM = "t4", "256MiB"
SEEDS, WANTED = 20, 95
LATE, CHECKED = "late", "checked"
ENDED = "the process ended"
RESULT = "another result"


@dataclass(frozen=True)
class Found:
    """A fault, and in which mode, under which seed and as what it was found; None if not."""

    program: str
    kind: str
    line: int
    text: str
    mode: str | None = None
    seed: int | None = None
    as_what: str | None = None


def chosen(quick: bool) -> list[Mutant]:
    """Return all faults; quick those of one program."""
    programs = PROGRAMS[:1] if quick else PROGRAMS
    return [mutant for program in programs for mutant in mutants(program)]


# -- in a process of its own -----------------------------------------------------------------------


def outcome(gpu: Any, program: Any, seed: int) -> str | None:
    """Run a program under a seed; return as what a fault was found, or None."""
    import cupy

    from umem.host_cuda import revive

    try:
        gpu.reseed(seed)
        program(cupy)
        gpu.finish()
        return None
    except AssertionError:
        return RESULT
    except Exception as error:
        fault = fault_of(error)
        return type(error).__name__ if fault is None else fault.tool
    finally:
        try:
            gpu.finish()
        except Exception:  # of work behind the error
            pass
        revive()


def search(mode: str, quick: bool, numbers: list[int]) -> None:
    """Print a line of JSON for each fault: its number, and the seed and kind that found it."""
    gpu = umem.software_gpu(GPU, VRAM, stream_seed=0, checked=mode == CHECKED, force=True)
    known = chosen(quick)
    for number in numbers:
        mutant = known[number]
        program = made(mutant, vars(fault_programs))
        found = None
        for seed in range(SEEDS if mutant.kind == WAIT else 1):
            found = outcome(gpu, program, seed)
            if found is not None:
                break
        print(json.dumps([number, seed, found]), flush=True)


def alarms(mode: str, seeds: int) -> list[list[Any]]:
    """Run the right programs; return program, seed and kind of each that is said to be wrong."""
    gpu = umem.software_gpu(GPU, VRAM, stream_seed=0, checked=mode == CHECKED, force=True)
    runs = [(program, seed) for program in PROGRAMS for seed in range(seeds)]
    ends = [(program.__name__, seed, outcome(gpu, program, seed)) for program, seed in runs]
    return [list(end) for end in ends if end[2] is not None]


# -- all of them -----------------------------------------------------------------------------------


def searched(mode: str, quick: bool, numbers: list[int]) -> Iterator[tuple[int, int, str | None]]:
    """Look for faults, in a new process behind each that ended one."""
    left = list(numbers)
    while left:
        command = [sys.executable, __file__, f"--inside={mode}", *["--quick"] * quick]
        done = subprocess.run(
            command, input=json.dumps(left), capture_output=True, text=True, env={**os.environ}
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        for number, seed, as_what in lines:
            left.remove(number)
            yield number, seed, as_what
        if done.returncode < 0:
            yield left.pop(0), 0, ENDED
        elif done.returncode:
            raise click.ClickException(done.stderr.strip()[-2000:])


def measure(quick: bool) -> list[Found]:
    """Look for each fault in the modes that it has."""
    known = chosen(quick)
    rows = [Found(each.program, each.kind, each.line, each.text) for each in known]
    waits = [number for number, each in enumerate(known) if each.kind == WAIT]
    others = [number for number, each in enumerate(known) if each.kind != WAIT]
    for mode, numbers in ((LATE, waits), (CHECKED, others), (LATE, others)):
        numbers = [number for number in numbers if rows[number].as_what is None]
        for number, seed, as_what in searched(mode, quick, numbers):
            if as_what is not None:
                place = known[number]
                rows[number] = Found(
                    place.program, place.kind, place.line, place.text, mode, seed, as_what
                )
    return rows


def by_kind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum up: for each kind of fault how many were planted, and how they were found."""
    table = []
    for kind in MOST:
        mine = [row for row in rows if row["kind"] == kind]
        ends = Counter(row["as_what"] for row in mine if row["as_what"] is not None)
        table.append(
            {
                "kind": kind,
                "planted": len(mine),
                "found": sum(ends.values()),
                "late": sum(row["mode"] == LATE for row in mine),
                "checked": sum(row["mode"] == CHECKED for row in mine),
                "as_what": ", ".join(f"{name} {count}" for name, count in sorted(ends.items())),
                "last_seed": max((row["seed"] or 0 for row in mine), default=0),
            }
        )
    return table


def answer(result: common.Result) -> str:
    planted = sum(row["planted"] for row in result["rows"])
    found = sum(row["found"] for row in result["rows"])
    wrong = len(result["alarms"])
    return (
        f"{found} of {planted}, where {WANTED} of 100 are wanted; in {result['right_runs']:,} runs "
        f"of the right programs {wrong or 'none'} was called wrong."
    )


def notes(result: common.Result) -> list[str]:
    """Name the faults that were not found, and the right programs that were called wrong."""
    missed = [row for row in result["faults"] if row["as_what"] is None]
    said = [f"Not found: {row['program']}, {row['kind']}: `{row['text']}`" for row in missed]
    return said + [f"Called wrong: {' '.join(map(str, alarm))}" for alarm in result["alarms"]]


BENCH = common.Bench(
    "software_gpu_faults",
    __doc__,
    answer,
    (
        text("fault", "kind"),
        counted("planted", "planted"),
        counted("found", "found"),
        counted("by default", "late"),
        counted("in checked mode", "checked"),
        text("found as", "as_what"),
        counted("last seed", "last_seed"),
    ),
    notes=notes,
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="The faults of one program, and three seeds.")
@click.option("--inside", type=click.Choice([LATE, CHECKED, "right"]), hidden=True)
@click.option("--mode", type=click.Choice([LATE, CHECKED]), hidden=True)
@common.json_option
def main(quick: bool, inside: str | None, mode: str, path: Path | None) -> None:
    seeds = 3 if quick else SEEDS
    if inside == "right":
        print(json.dumps(alarms(mode, seeds)))
        return
    if inside is not None:
        search(inside, quick, json.load(sys.stdin))
        return
    common.writable(path)
    told = ["--quick"] * quick
    wrong = [
        [mode, *alarm]
        for mode in (LATE, CHECKED)
        for alarm in common.child(__file__, "--inside=right", f"--mode={mode}", *told)
    ]
    found = [asdict(row) for row in measure(quick)]
    BENCH.finish(
        by_kind(found),
        path,
        simulated=True,
        options={"quick": quick},
        faults=found,
        alarms=wrong,
        right_runs=2 * seeds * len(PROGRAMS),
    )
    missed = sum(row["as_what"] is None for row in found)
    if wrong or missed > (100 - WANTED) * len(found) / 100:
        raise click.ClickException(f"{missed} faults not found, {len(wrong)} false alarms")


if __name__ == "__main__":
    main()
