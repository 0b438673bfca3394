"""``umem batch TRACE``: the largest batch that fits a GPU, and the one of least time a sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import click

import umem
from umem.as_json import json_text
from umem.cli.files_and_sizes import NamesSuccessors, say
from umem.cli.step_options import StepOptions, of_a_step
from umem.devices.specs import GpuSpec
from umem.errors import BudgetError
from umem.predict.batches.finding import batches_of
from umem.predict.batches.found_batches import FoundBatch
from umem.trace.axes import StepSize
from umem.trace.trace import Trace


class _BatchCommand(NamesSuccessors):
    successors: ClassVar = {"--effective": "umem choose TRACE... --size N"}


@click.command("batch", cls=_BatchCommand)
@of_a_step
@click.option("--maximum", type=int, metavar="N", help="Ask for no batch above N.")
@click.option(
    "--margin",
    type=float,
    default=0.0,
    metavar="SHARE",
    help="The share of VRAM that is left free, as 0.05.",
)
def command(step: StepOptions, maximum: int | None, margin: float) -> bool:
    """Find the largest batch that fits a GPU, and the one of least time a sample.

    TRACE is a step of two sizes, as umem.record_at(), saved, or `umem run --record --sizes` has
    written, or a model in ONNX whose batch is dynamic. Of a step along several axes --size gives
    the other sizes: length=512.
    Without --json the peak and time with each size doubled are printed, too.
    Nothing is run: memory and times are those of the model of a GPU, and simulated.
    The exit status is 3 where a batch of one does not fit.
    """
    gpu = step.spec
    try:
        trace, found = _found(step, maximum, margin)
    except BudgetError as error:
        say(str(error), err=True)
        return False
    if step.as_json:
        say(json_text(found))
        return True
    say(str(found))
    for line in doublings(trace, gpu, found.size):
        say(line)
    return True


def _found(step: StepOptions, maximum: int | None, margin: float) -> tuple[Trace, FoundBatch]:
    """Search for the batch; return the step that the search was made on, and the result.

    A model in ONNX is made anew at the batch that was found, until that stays: the workspace of its
    convolutions is capped, so that no line through small batches meets that of a large one.
    """
    trace = step.over_batch()
    found = batches_of(trace, step.spec, size=step.size, maximum=maximum, margin=margin)
    seen: set[int] = set()
    while step.is_onnx and found.largest.batch not in seen:
        seen.add(found.largest.batch)
        trace = step.over_batch(found.largest.batch)
        found = batches_of(trace, step.spec, size=step.size, maximum=maximum, margin=margin)
    return trace, found


def doublings(trace: Trace, gpu: GpuSpec, size: StepSize | None) -> Iterator[str]:
    """Yield a line for each size of a step: the peak and time with it doubled.

    Sizes that cannot be scaled have no line; nor has a trace of one size.
    """
    for row in umem.scale_each(trace, 2, gpu, size).rows if trace.sizes else ():
        if row.missing is None:
            yield f"  {row}"
