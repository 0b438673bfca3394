"""``umem advise SCRIPT``: what half of each of a program's sizes saves."""

from __future__ import annotations

from collections.abc import Callable

import click
from rich.console import Console

from umem.choosing import DryProgram, DryResult, HalvedArguments, halve_each
from umem.cli.script_options import NOTHING_FITS, of_a_script, print_search
from umem.errors import SizeError
from umem.reports import Column
from umem.units import format_bytes, format_seconds


@click.command("advise", context_settings={"allow_interspersed_args": False})
@click.option(
    "--argument",
    "names",
    required=True,
    multiple=True,
    metavar="N",
    help="A size to halve: a position in SCRIPT's sys.argv, from 1, or an option of SCRIPT, such "
    "as --batch. May be repeated.",
)
@of_a_script
def command(program: DryProgram, as_json: bool, names: tuple[str, ...]) -> None:
    """Show how much memory and time half of each size saves.

    SCRIPT runs unchanged on the software GPU, without its arithmetic: once as it is, and once with
    half of each size. Memory and times are simulated. The exit status is 3 if none of these fits.

    \b
    Examples:

    \b
        # Halve the batch and the width of a network in turn
        umem advise --argument 1 --argument 2 train.py 64 512
        # Halve its option --batch, on an A100
        umem advise --gpu a100-40gb --argument --batch train.py --batch 64
    """
    with Console(stderr=True).status("Running SCRIPT dry (Ctrl-C stops)") as status:
        try:
            found = halve_each(
                program, names, lambda name: status.update(f"half of {name} has run")
            )
        except SizeError as error:
            raise click.BadParameter(str(error), param_hint="--argument") from error
    print_search(found, program, _columns(found), as_json=as_json)
    if not found.fits:
        click.get_current_context().exit(NOTHING_FITS)


def _columns(found: HalvedArguments) -> list[Column]:
    """Return the columns of a table with the program as it is, and each half."""
    results = [found.whole, *(half.result for half in found.halves)]
    names = [
        f"{argument.name}: {argument.value} to {half.value}" for argument, half in found.rows()
    ]
    return [
        Column("half of", ["nothing", *names]),
        Column(
            "step" if found.whole.has_steps else "time",
            [_figure(one, format_seconds(_seconds(one))) for one in results],
        ),
        Column("", ["", *(_share(found.whole, one, _seconds) for one in results[1:])]),
        Column("peak", [_figure(one, format_bytes(one.peak_bytes)) for one in results]),
        Column("", ["", *(_share(found.whole, one, _peak) for one in results[1:])]),
        Column("", [one.why_not or "fits" for one in results], left=True),
    ]


def _seconds(one: DryResult) -> float:
    return one.seconds[-1] if one.seconds else 0.0


def _peak(one: DryResult) -> float:
    return float(one.peak_bytes)


def _figure(one: DryResult, text: str) -> str:
    return text if one.why_not is None else ""


def _share(whole: DryResult, half: DryResult, of: Callable[[DryResult], float]) -> str:
    """Return what is saved as a share; nothing where one of the two did not run to its end."""
    if whole.why_not is not None or half.why_not is not None or not of(whole):
        return ""
    return f"{of(half) / of(whole) - 1:+.0%}"
