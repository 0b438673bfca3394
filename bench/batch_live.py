"""Is the largest batch that `umem batch` finds the largest that trains?

The script of bench/choice_live.py on a software T4, with one and a half times the least VRAM in
which it trains with the batch that is given. Both search by the same doubling and halving, `umem
batch` by dry runs and the other with arithmetic. The two answers are equal with a block of 2 MiB of
grace where the larger one trains with a block more, or not one more than the smaller one with a
block less.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import common
from choice_parts.live import run_live
from choice_parts.networks import BATCH, GPU, GRANULE, NETWORKS, least_bytes, program
from report_tables import counted, quantity, text

from umem.choosing import TECHNIQUES, DryProgram, largest_batch, number_argument
from umem.units import MIB

SHARE = 1.5
"""Of the least VRAM. With less than it, parameters leave a transformer no room for one sample."""
SEARCHED = ("transformer", "DenseNet", "residual", "LSTM", "perceptron")
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # of the processes it starts


def measure(network: str) -> dict[str, Any]:
    """Search both ways."""
    vram = round(SHARE * least_bytes(network) / GRANULE) * GRANULE
    searched = program(network, vram)
    dry = largest_batch(searched, BATCH)
    live = largest_batch(searched, BATCH, run_dry=run_live)
    found, real = (each.largest.value if each.largest else 0 for each in (dry, live))
    equal = "yes"
    if found != real:
        equal = "with a block" if is_within_a_block(searched, vram, found, real) else "no"
    return {
        "network": network, "vram_bytes": vram, "given": NETWORKS[network][-1],
        "dry_batch": found, "live_batch": real, "equal": equal,
        "dry_runs": len(dry.tried), "live_runs": len(live.tried),
    }  # fmt: skip


def is_within_a_block(searched: DryProgram, vram: int, found: int, real: int) -> bool:
    """Tell whether a block more or less makes up for the difference, with arithmetic."""

    def trains(batch: int, nbytes: int) -> bool:
        given = number_argument(searched.arguments, BATCH).given(searched.arguments, batch)
        tried = replace(searched, arguments=given, vram=str(nbytes))
        return run_live(tried, TECHNIQUES[0]).why_not is None

    if found > real:
        return trains(found, vram + GRANULE)
    return not trains(found + 1, vram - GRANULE)


def rows(names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for name in names:
        row = measure(name)
        click.echo(str(row), err=True)
        yield row


def answer(result: common.Result) -> str:
    found = [row["equal"] for row in result["rows"]]
    batches = [row["dry_batch"] or 0 for row in result["rows"]]
    return (
        f"In {found.count('yes')} of {len(found)} networks it is, in "
        f"{found.count('with a block')} more with a block of grace; batches are of "
        f"{min(batches):,} to {max(batches):,}."
    )


BENCH = common.Bench(
    "batch_live",
    __doc__,
    answer,
    (
        text("network", "network"),
        quantity("VRAM", "vram_bytes", "MiB", per=MIB),
        counted("batch given", "given"),
        counted("largest, dry", "dry_batch"),
        counted("largest, live", "live_batch"),
        text("equal", "equal"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network.")
@click.option("--only", "names", multiple=True, type=click.Choice(SEARCHED))
@common.json_option
def main(quick: bool, names: tuple[str, ...], path: Path | None) -> None:
    """Measure, and write the result after each row, as a run may be ended early."""
    common.writable(path)
    chosen = names or (SEARCHED[:1] if quick else SEARCHED)
    found: list[dict[str, Any]] = []
    how = {"simulated": True, "options": {"quick": quick, "gpu": GPU, "share": SHARE}}
    for row in rows(chosen):
        found.append(row)
        if path is not None:
            common.write_json(path, BENCH.report(found, **how))
    BENCH.finish(found, path, **how)


if __name__ == "__main__":
    main()
