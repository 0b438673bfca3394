"""``umem choose TRACE --ranks``: what a step of one process takes on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

import umem
from umem.as_json import json_text
from umem.cli.in_and_out import say
from umem.devices.specs import GpuSpec
from umem.graphs import PlannedCut
from umem.printable import quoted
from umem.trace.axes import StepSize
from umem.trace.trace import Trace


class RankOptions(NamedTuple):
    """What goes with ``--ranks``."""

    ranks: tuple[int, ...] | None
    link: str | None
    cut: Path | None
    recorded: Path | None
    sharded: bool


class _RankCounts(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them."""

    name = "ranks"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            found = (0,)
        if min(found) < 1:
            raise click.BadParameter(
                f"ranks are whole numbers from 1, such as 1,2,4; got {quoted(value)}", ctx, param
            )
        return found


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--ranks`` and what goes with it."""
    folder = click.Path(path_type=Path)
    options = (
        click.option("--ranks", type=_RankCounts(), metavar="1,2,4", help="On so many ranks each."),
        click.option(
            "--link", metavar="LINK", help="With --ranks: nvlink, pcie4, 100gbe, GB/s,us or a file."
        ),
        click.option(
            "--cut", type=folder, metavar="FOLDER", help="With --ranks: the graph, in parts."
        ),
        click.option(
            "--recorded",
            type=folder,
            metavar="FOLDER",
            help="With --cut: a cut of the smaller graph that TRACE is of.",
        ),
        click.option("--sharded", is_flag=True, help="With --ranks: 1/N of the optimizer's state."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_rank_options(told: RankOptions, others: dict[str, bool]) -> None:
    """Refuse what does not go with ``--ranks``, and what goes only with it.

    Raises:
        click.UsageError: names the options.
    """
    given = {name for name, value in told._asdict().items() if value}
    if given and told.ranks is None:
        raise click.UsageError(f"{', '.join(f'--{name}' for name in sorted(given))} needs --ranks")
    if told.recorded is not None and told.cut is None:
        raise click.UsageError("--recorded needs --cut, the larger graph in parts")
    wrong = [name for name, is_given in others.items() if is_given]
    if told.ranks is not None and wrong:
        raise click.UsageError(f"--ranks is of one GPU a rank: leave {', '.join(wrong)} out")
    if told.ranks is not None and told.link is None:
        raise click.UsageError(
            "--ranks needs --link: nvlink, pcie4, 100gbe, GB/s and microseconds such as 11.8,16, "
            "or a file; umem doctor --mpi measures one"
        )


def say_ranks(
    trace: Trace, gpu: GpuSpec, size: StepSize | None, told: RankOptions, *, as_json: bool
) -> bool:
    """Say what the step takes on each number of ranks; return whether it fits any.

    Raises:
        UmemError: see `umem.choose_ranks`.
    """
    assert told.ranks is not None and told.link is not None
    found = umem.choose_ranks(
        trace,
        told.ranks,
        gpu,
        told.link,
        cut=None if told.cut is None else PlannedCut(told.cut),
        recorded=None if told.recorded is None else PlannedCut(told.recorded),
        size=size,
        sharded=told.sharded,
    )
    say(json_text(found) if as_json else str(found))
    return bool(found.fits)
