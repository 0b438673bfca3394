"""``umem ranks TRACE``: what a step of one process takes on several GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import umem
from umem.as_json import json_text
from umem.cli.files_and_sizes import say
from umem.cli.step_options import StepOptions, of_a_step
from umem.graphs import PlannedCut
from umem.printable import quoted


class _RankCounts(click.ParamType):  # type: ignore[type-arg]
    """Integers separated by commas."""

    name = "ranks"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Parse rank counts separated by commas."""
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            found = (0,)
        if min(found) < 1:
            raise click.BadParameter(
                f"ranks are whole numbers from 1, such as 1,2,4; got {quoted(value)}", ctx, param
            )
        return found


class _LinkType(click.ParamType):  # type: ignore[type-arg]
    """A link's name, figures or file; `umem.choose_ranks` checks it."""

    name = "link"

    def get_missing_message(self, param: Any, ctx: Any = None) -> str:
        return (
            "It is nvlink, pcie4, 100gbe, GB/s and microseconds such as 11.8,16, or a file; umem "
            "doctor --mpi measures one"
        )


@click.command("ranks")
@of_a_step
@click.option(
    "-n",
    "counts",
    required=True,
    type=_RankCounts(),
    metavar="1,2,4",
    help="The numbers of ranks to try.",
)
@click.option(
    "--link",
    required=True,
    type=_LinkType(),
    metavar="LINK",
    help="Between two ranks: nvlink, pcie4, 100gbe, GB/s,us or a file.",
)
@click.option(
    "--cut",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The graph, in parts; without it a batch is split.",
)
@click.option(
    "--recorded",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="With --cut: a cut of the smaller graph that TRACE is of.",
)
@click.option("--sharded", is_flag=True, help="1/N of the optimizer's state on each rank.")
def command(
    step: StepOptions,
    counts: tuple[int, ...],
    link: str,
    cut: Path | None,
    recorded: Path | None,
    sharded: bool,
) -> bool:
    """Find how many GPUs a step needs, one a rank of MPI, and its time on them.

    TRACE is a step of one process: what umem.record() or umem.record_at(), saved, or `umem run
    --record` has written, or a model in ONNX whose batch is dynamic. The ranks share the graph
    of --cut, or split the batch.
    Nothing is run: memory and times are those of the model of a GPU, and simulated.
    The exit status is 3 where the step fits with none of the numbers.
    """
    if recorded is not None and cut is None:
        raise click.UsageError("--recorded needs --cut, the larger graph in parts")
    gpu = step.spec
    found = umem.choose_ranks(
        step.over_batch(),
        counts,
        gpu,
        link,
        cut=None if cut is None else PlannedCut(cut),
        recorded=None if recorded is None else PlannedCut(recorded),
        size=step.size,
        sharded=sharded,
    )
    say(json_text(found) if step.as_json else str(found))
    return bool(found.fits)
