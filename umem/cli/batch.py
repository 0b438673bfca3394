"""``umem batch SCRIPT``: the largest batch with which a program fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import click
from rich.console import Console

from umem.choosing import BatchSearch, DryProgram, TriedSize, largest_batch
from umem.cli.run_recompute import RecomputeOptions
from umem.cli.script_options import NOTHING_FITS, of_a_script, print_search
from umem.errors import SizeError
from umem.reports import Column
from umem.units import format_bytes, format_seconds


@click.command("batch", context_settings={"allow_interspersed_args": False})
@click.option(
    "--argument",
    required=True,
    metavar="N",
    help="The batch size: a position in SCRIPT's sys.argv, from 1, or an option of SCRIPT, such "
    "as --batch.",
)
@click.option("--maximum", type=click.IntRange(1), metavar="N", help="Try no batch larger than N.")
@click.option("--recompute", metavar="BUDGET", help="Recompute tensors, as in umem run.")
@click.option("--workspace", metavar="SIZE", help="Limit the workspace, as in umem run.")
@of_a_script
def command(
    program: DryProgram, as_json: bool, argument: str, maximum: int | None, **saving: str | None
) -> None:
    """Find the largest batch with which a program fits a GPU.

    SCRIPT runs unchanged on the software GPU, without its arithmetic, once for each size. The
    search starts from the batch size among SCRIPT's arguments. It doubles the size until SCRIPT no
    longer fits, then bisects. Memory and times are simulated. The exit status is 3 if a batch of 1
    does not fit.

    \b
    Examples:

    \b
        # Find the largest --batch of train.py on a T4
        umem batch --argument --batch train.py --batch 64
        # Its first argument is the batch; try at most 512
        umem batch --gpu v100-16gb --argument 1 --maximum 512 train.py 32
    """
    RecomputeOptions(
        saving["recompute"], saving["workspace"]
    )  # so that bad values are refused before SCRIPT runs
    given = [part for name, value in saving.items() if value for part in (f"--{name}", value)]
    program = replace(program, options=(*program.options, *given))
    with Console(stderr=True).status("Running SCRIPT dry (Ctrl-C stops)") as status:

        def on_tried(one: TriedSize) -> None:
            status.update(f"{argument} = {one.value} {'fits' if one.fits else 'does not fit'}")

        try:
            found = largest_batch(program, argument, maximum, on_tried)
        except SizeError as error:
            raise click.BadParameter(str(error), param_hint="--argument") from error
    print_search(found, program, _columns(found), _result(found), as_json=as_json)
    if found.largest is None:
        click.get_current_context().exit(NOTHING_FITS)


def _columns(found: BatchSearch) -> list[Column]:
    """Return the columns of a table with each size that was tried."""
    tried = found.tried
    shares = [format_seconds(one.sample_seconds) if one.fits else "" for one in tried]
    return [
        Column(found.argument.name, [str(one.value) for one in tried]),
        Column(
            "step" if _has_steps(tried) else "time",
            [format_seconds(one.seconds) if one.fits else "" for one in tried],
        ),
        Column("a sample", shares),
        Column("peak", [format_bytes(one.result.peak_bytes) if one.fits else "" for one in tried]),
        Column("", [one.result.why_not or "fits" for one in tried], left=True),
    ]


def _has_steps(tried: Sequence[TriedSize]) -> bool:
    return any(one.result.has_steps for one in tried)


def _result(found: BatchSearch) -> str:
    largest, quickest = found.largest, found.quickest
    if largest is None or quickest is None:
        return "A batch of 1 does not fit. umem choose tries techniques that need less memory"
    more = ", the maximum" if found.is_maximum else ""
    return (
        f"The largest batch that fits is {largest.value}{more}. The fastest per sample is "
        f"{quickest.value}"
    )
