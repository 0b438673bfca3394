"""Do programs that overlap work on streams compute the same bits whenever it runs?

On the software GPU, whose streams run late in an order drawn from a seed, as far as CUDA's rules
allow; a program's first run does everything at once. Right programs agree with it under every
seed. Programs with a planted fault (a wait that is missing) must not: how many seeds find it.
Nothing is timed, and no GPU is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401
import click
import common
import stream_programs
from report_tables import counted, text
from stream_programs import PLANTED, RIGHT, Program

import umem

GPU, VRAM = "t4", "48MiB"
QUICK_SEEDS, MOST_QUICK_SEEDS = 6, 100
"""Of a right program, and at most until one finds a planted fault; the rarest shows in 1 of 7."""


@dataclass(frozen=True)
class Row:
    """A program under many seeds: how many computed the bits of the run at once."""

    program: str
    planted: bool
    seed_count: int
    same_count: int
    first_other_seed: int | None


def measure(gpu: Any, program: Program, seeds: Iterable[int], *, stops: bool = False) -> Row:
    """Run a program at once, and then under each seed, or until one `stops` it by other bits."""
    gpu.reseed(None)
    expected = program()
    tried, other = [], []
    for seed in seeds:
        gpu.reseed(seed)
        tried.append(seed)
        if program() != expected:
            other.append(seed)
            if stops:
                break
    gpu.reseed(None)
    return Row(
        program.__name__, program in PLANTED, len(tried), len(tried) - len(other),
        other[0] if other else None,
    )  # fmt: skip


def finished(path: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run that was cut off, at the same commit and with the same options."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    is_same = (before["commit"], before["options"]) == (common.commit(), options)
    return before["rows"] if is_same else []


def faults(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Name the right programs that differ, and the planted faults that no seed finds."""
    return [
        row["program"] for row in rows if row["planted"] == (row["same_count"] == row["seed_count"])
    ]


def answer(result: common.Result) -> str:
    rows = result["rows"]
    right = [row for row in rows if not row["planted"]]
    same = sum(row["same_count"] == row["seed_count"] for row in right)
    planted = [row for row in rows if row["planted"]]
    found = sum(row["same_count"] < row["seed_count"] for row in planted)
    return (
        f"{same} of {len(right)} right programs do, under {rows[0]['seed_count']:,} seeds; "
        f"{found} of {len(planted)} planted faults are found."
    )


BENCH = common.Bench(
    "software_gpu_streams",
    __doc__,
    answer,
    (
        text("program", lambda row: row["program"].replace("_", " ")),
        text("", lambda row: "planted fault" if row["planted"] else "right"),
        counted("seeds", "seed_count"),
        counted("same bits", "same_count"),
    ),
)


@click.command(help=__doc__)
@click.option("--seeds", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--first", type=int, default=0, show_default=True, help="The first seed.")
@click.option("--only", metavar="PROGRAM", help="One program, by its name.")
@click.option("--quick", is_flag=True, help="Six seeds; a planted fault until it is found.")
@click.option("--resume", is_flag=True, help="Keep the programs that --json's file has already.")
@common.json_option
def main(
    seeds: int, first: int, only: str | None, quick: bool, resume: bool, path: Path | None
) -> None:
    common.writable(path)
    seeds = QUICK_SEEDS if quick else seeds
    programs = [p for p in (*RIGHT, *PLANTED) if only in (None, p.__name__)]
    if not programs:
        raise click.BadParameter(f"no program {only!r}; see {stream_programs.__name__}.py")
    gpu = umem.software_gpu(GPU, VRAM, stream_seed=0, force=True)
    options = {"seeds": seeds, "first": first, "quick": quick}
    how = {"simulated": True, "options": options, "gpu": {"name": str(gpu)}}
    rows = finished(path, options) if resume and path is not None else []
    for program in programs:
        if program.__name__ not in [row["program"] for row in rows]:
            until_found = quick and program in PLANTED
            count = MOST_QUICK_SEEDS if until_found else seeds
            row = measure(gpu, program, range(first, first + count), stops=until_found)
            rows.append(asdict(row))
            if path is not None:
                common.write_json(path, BENCH.report(rows, **how))
    BENCH.finish(rows, path, **how)
    if wrong := faults(rows):
        raise click.ClickException(f"not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
