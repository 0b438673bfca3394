"""What does a rank keep of an optimizer's state in shards, and are the weights the same bits?

A model of one parameter with four fifths of the elements and 200 small ones with the rest, on
NumPy, under mpiexec with one BLAS thread a rank. The state is counted array by array after the
updates, on the rank that has most, and compared with that of the same optimizer in whole. The
weights are compared bit for bit with those of that optimizer, which on each rank gets all
gradients averaged in the order of ranks. Saving and resuming: the most bytes that arrays take
meanwhile above what is there, by tracemalloc, less those of SGD, which has no state.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import common
from mpi_start import ranks_command, ranks_environment
from report_tables import Column, Row, counted, figure, percent, quantity, text

RANK = common.HERE / "sharded_parts" / "rank.py"
COUNTS, QUICK_COUNTS = (2, 3, 4, 8), (2,)
KINDS = ("Adam", "MomentumSGD", "Adam8bit")
MOST_OVER = 0.02
"""Of the whole state, more than an equal share."""


def ranks(count: int, elements: int, updates: int) -> list[dict[str, Any]]:
    """What each rank of a job wrote."""
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [*ranks_command(count), sys.executable, RANK, out, str(elements), str(updates)],
            env=ranks_environment(NUMBA_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"a rank failed: {done.stderr[-2000:]}")
        return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(count)]


def measure(count: int, elements: int, updates: int) -> list[Row]:
    """A row for each optimizer."""
    every = ranks(count, elements, updates)
    rows = []
    for name in KINDS:
        these = [each[name] for each in every]
        whole = these[0]["whole_bytes"]
        largest = max(one["state_bytes"] for one in these)
        over = {
            key: max(each[name][key] - each["SGD"][key] for each in every)
            for key in ("saving_bytes", "resuming_bytes")
        }
        rows.append(
            {
                "optimizer": name,
                "ranks": count,
                "elements": elements,
                "updates": updates,
                "whole_mb": whole / 1e6,
                "share": largest / whole,
                "over": largest / whole - 1 / count,
                "identical": "yes" if all(one["is_identical"] for one in these) else "no",
                "saving_share": over["saving_bytes"] / whole,
                "resuming_share": over["resuming_bytes"] / whole,
            }
        )
    return rows


def answer(result: common.Result) -> str:
    rows = result["rows"]
    shares = ", ".join(
        f"{percent(max(row['share'] for row in rows if row['ranks'] == n))} on {n} ranks"
        for n in sorted({row["ranks"] for row in rows})
    )
    worst = max(row["over"] for row in rows)
    same = sum(row["identical"] == "yes" for row in rows)
    saving = max(row["saving_share"] * row["ranks"] for row in rows)
    resuming = max(row["resuming_share"] * row["ranks"] for row in rows)
    return (
        f"The largest rank keeps of the whole state {shares}, at most {100 * worst:.2f}% of it "
        f"above an equal share ({100 * MOST_OVER:.0f}% allowed); weights are the same bits as "
        f"unsharded in {same} of {len(rows)} rows, and for the state saving takes at most "
        f"{figure(max(saving, 0))} of a share and resuming {figure(max(resuming, 0))}."
    )


COLUMNS = (
    text("optimizer", "optimizer"),
    counted("ranks", "ranks"),
    quantity("whole state", "whole_mb", "MB"),
    Column("on the largest rank", "share", write=percent),
    text("same bits", "identical"),
    Column("saving, of the whole", "saving_share", write=percent),
    Column("resuming, of the whole", "resuming_share", write=percent),
)
BENCH = common.Bench("sharded_state", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small model on two ranks.")
@click.option("--elements", default=4_000_000, help="Elements of the model.")
@click.option("--updates", default=3, help="Updates that are compared.")
@common.json_option
def main(quick: bool, elements: int, updates: int, path: Path | None) -> None:
    common.writable(path)
    if quick:
        elements, updates = min(elements, 1_000_000), min(updates, 2)
    counts = QUICK_COUNTS if quick else COUNTS
    rows = [row for count in counts for row in measure(count, elements, updates)]
    options = {"quick": quick, "elements": elements, "updates": updates}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
