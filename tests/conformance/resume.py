"""Does a run that is killed at any moment go on to the bit, and what do its snapshots cost?

Runs are killed with SIGKILL at random moments and before, after and inside of every kind of file
operation (write, synchronise, rename, prune), and started again until they end; each loss of each
life is compared, digit by digit, with that of a run that nobody killed. Apart from that, the log
of file operations is cut at every prefix, and the newest snapshot is loaded from every disk that
POSIX lets be left there: what was not synchronised is kept, dropped, cut short, or zeros, and
names reach the disk in any order. How long a step waits is measured beside a copy of the same
arrays, in turn. What a process holds is looked at after a tenth of many updates and after all.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401
import click
import common
from report_tables import Row, Table, counted, figure, quantity, text
from resume_parts.costs import blocked, growth
from resume_parts.kills import kill, warm_up
from resume_parts.prefixes import try_all
from resume_parts.runs import KINDS

MIB = 1 << 20


def rows_of(result: common.Result, what: str) -> list[Row]:
    return [row for row in result["rows"] if row["what"] == what]


def least(row: Row, key: str) -> float:
    """The shortest save beside the shortest copy: what others do on the machine only adds."""
    return float(min(row[key]["save"]) / min(row[key]["copy"]))


def answer(result: common.Result) -> str:
    kills = rows_of(result, "kills")
    (cut,) = rows_of(result, "prefixes")
    (wait,) = rows_of(result, "blocked")
    (grown,) = rows_of(result, "growth")
    runs, wrong = (sum(row[key] for row in kills) for key in ("runs", "wrong"))
    bad = cut["lost"] + cut["wrong"] + cut["stuck"]
    return (
        f"After {sum(row['kills'] for row in kills)} kills and "
        f"{sum(row['resumes'] for row in kills)} resumes the losses of {runs - wrong} of {runs} "
        f"runs are those of a run that nobody killed; {cut['disks'] - bad:,} of {cut['disks']:,} "
        f"disks that may be left load the last snapshot that was promised and go on; a step waits "
        f"{figure(least(wait, 'clock_seconds'))} times as long as a copy of the state takes at the "
        f"least, {figure(wait['clock_ratio'])} at the median; from update "
        f"{grown['updates'] // 10:,} to {grown['updates']:,} a process grows by "
        f"{figure((grown['rss_bytes_after'] - grown['rss_bytes_before']) / MIB)} MiB, "
        f"{grown['files_after'] - grown['files_before']} files and "
        f"{grown['threads_after'] - grown['threads_before']} threads."
    )


def tables(result: common.Result) -> Iterator[Table]:
    yield Table(
        (
            text("run", "kind"),
            counted("kills", "kills"),
            counted("resumes", "resumes"),
            counted("runs", "runs"),
            counted("with a wrong loss", "wrong"),
            text("killed in", lambda row: ", ".join(f"{k} {n}" for k, n in row["inside"].items())),
        ),
        rows_of(result, "kills"),
    )
    yield Table(
        (
            counted("prefixes", "prefixes"),
            counted("disks", "disks"),
            counted("a promised one lost", "lost"),
            counted("another loaded", "wrong"),
            counted("cannot go on", "stuck"),
        ),
        rows_of(result, "prefixes"),
    )
    yield Table(
        (
            quantity("state", lambda row: row["state_bytes"] / MIB, "MiB"),
            quantity("least wait of a copy's", lambda row: least(row, "clock_seconds")),
            quantity("at the median", "clock_ratio"),
            quantity("least of the processor's time", lambda row: least(row, "processor_seconds")),
            quantity("median of it", "processor_ratio"),
        ),
        rows_of(result, "blocked"),
    )
    yield Table(
        (
            counted("updates", "updates"),
            counted("snapshots", "snapshots"),
            text("memory (MiB)", lambda row: _then(row, "rss_bytes", MIB)),
            text("files", lambda row: _then(row, "files", 1)),
            text("threads", lambda row: _then(row, "threads", 1)),
            text("entries of the folder", lambda row: _then(row, "entries", 1)),
        ),
        rows_of(result, "growth"),
    )


def _then(row: Row, key: str, unit: int) -> str:
    return f"{figure(row[f'{key}_before'] / unit)}, then {figure(row[f'{key}_after'] / unit)}"


BENCH = common.Bench("resume", __doc__, answer, tables=tables)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A few kills of two kinds of run, and small sizes.")
@click.option("--kills", type=click.IntRange(1), default=200, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@common.json_option
def main(quick: bool, kills: int, seed: int, path: Path | None) -> None:
    common.writable(path)
    kinds = KINDS[:2] if quick else KINDS
    kills = min(kills, 6) if quick else kills
    warm_up(kinds)
    rows: list[dict[str, Any]] = []
    shares = Counter(number % len(kinds) for number in range(kills))
    for number, kind in enumerate(kinds):
        rows.append({"what": "kills", **kill(kind, shares[number], seed + number)})
        click.echo(kind.name, err=True)
    rows.append({"what": "prefixes", **(try_all(2, 1) if quick else try_all(6, 8))})
    rows.append(growth(200, 10) if quick else growth(10_000, 50))
    rows.append(blocked(256, 5) if quick else blocked(2048, 15))  # last: it leaves memory behind
    BENCH.finish(
        rows, path, simulated=False, options={"quick": quick, "kills": kills, "seed": seed}
    )


if __name__ == "__main__":
    main()
