"""``umem advise TRACE``: what half of each size of a step saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

import umem
from umem.as_json import json_text
from umem.cli.files_and_sizes import load, one_trace, say
from umem.cli.step_options import StepOptions, is_onnx, of_a_step
from umem.printable import quoted
from umem.trace.axes import StepSize
from umem.trace.exported import halves_of
from umem.trace.trace import Trace


class _HalfType(click.ParamType):  # type: ignore[type-arg]
    """The name of an axis and a file."""

    name = "half"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Path]:
        """Parse the name of an axis and a file, such as depth=half.umem.gz."""
        axis, _, path = str(value).partition("=")
        if not axis.isidentifier() or not path:
            raise click.BadParameter(
                f"half of an axis is its name and a file, such as depth=half.umem.gz; "
                f"got {quoted(value)}",
                ctx,
                param,
            )
        return axis, Path(path)


@click.command("advise")
@of_a_step
@click.option(
    "--halved",
    type=_HalfType(),
    multiple=True,
    metavar="AXIS=FILE",
    help="The trace, or model, with half of an axis that is not recorded, as depth.",
)
def command(step: StepOptions, halved: tuple[tuple[str, Path], ...]) -> bool:
    """Find how much memory and time half of each size of a step saves.

    TRACE is what umem.record() or umem.record_at(), saved, or `umem run --record` has written;
    each TRACE may be along other axes. Or it is a model in ONNX whose batch is dynamic.
    Nothing is run: memory and times are those of the model of a GPU, and simulated.
    The exit status is 3 where the step fits neither as it is nor with any one size halved.
    """
    names = [axis for axis, _ in halved]
    if len(set(names)) < len(names):
        raise click.UsageError(f"--halved names an axis twice: {', '.join(names)}")
    gpu = step.spec
    read = _of_onnx(step, halved) if step.is_onnx else _of_traces(step, halved)
    found = umem.scale_each(read.traces, 0.5, gpu, read.size, scaled=read.halved)
    say(json_text(found) if step.as_json else str(found))
    return found.helps


class _Halves(NamedTuple):
    """The arguments of `umem.scale_each`."""

    traces: list[Trace]
    halved: dict[str, Trace]
    size: StepSize | None


def _of_traces(step: StepOptions, halved: tuple[tuple[str, Path], ...]) -> _Halves:
    if step.sizes is None:
        traces = load(step.paths, step.caps)
    else:
        traces = [one_trace(step.paths, step.sizes, step.caps)]
    apart = load([path for _, path in halved], step.caps)
    names = [axis for axis, _ in halved]
    return _Halves(traces, dict(zip(names, apart, strict=True)), step.size)


def _of_onnx(step: StepOptions, halved: tuple[tuple[str, Path], ...]) -> _Halves:
    """Read models in ONNX, all of them at the same sizes."""
    sizes, optimizer = step.named_sizes, step.optimizer or "adam"
    whole, found, now = halves_of(step.paths[0], sizes, optimizer)
    for axis, path in halved:
        if not is_onnx(path):
            raise click.UsageError(f"half of a model in ONNX is a model in ONNX: --halved {axis}")
        found[axis] = halves_of(path, sizes, optimizer)[0]
    return _Halves([whole], found, now or None)
