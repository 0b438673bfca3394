"""The options that name a step and a GPU: recorded traces, or a model in ONNX."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import click

from umem.cli.files_and_sizes import Caps, StepSizesType, StepSizeType, caps, one_trace, say
from umem.devices.specs import GpuSpec
from umem.predict.choosing import gpu_asked_for
from umem.trace.axes import StepSize
from umem.trace.exported import onnx_step, step_over_batch
from umem.trace.exported.exported_sizes import batch_axis
from umem.trace.exported.updates import OPTIMIZERS, OptimizerName
from umem.trace.trace import Trace

NOTHING_FITS = 3
"""Exit status if nothing makes the step fit; 1 and 2 are errors."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""

_OPTIONS = (
    click.argument(
        "paths", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path)
    ),
    click.option(
        "--sizes",
        type=StepSizesType(),
        metavar="A,B",
        help="The sizes, such as batches, of TRACE TRACE: one step, recorded apart. Of a model in "
        "ONNX: those of its dynamic axes, batch=32,length=128.",
    ),
    click.option(
        "--size",
        type=StepSizeType(),
        metavar="N",
        help="The size to take the step to; along axes with names: batch=64,length=512.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice([*OPTIMIZERS, "none"]),
        help="With MODEL.onnx: whose state is counted (default: adam).",
    ),
    click.option("--gpu", metavar="NAME", help="A GPU of the table (default: t4)."),
    click.option("--vram", metavar="SIZE", help="Usable VRAM instead of the table's, as 12GiB."),
    click.option("--json", "as_json", is_flag=True, help="JSON on standard output."),
    caps,
)


class ChosenStep(NamedTuple):
    """A step, and for a model in ONNX the names of its calls."""

    trace: Trace
    names: tuple[str, ...] | None = None


class StepOptions(NamedTuple):
    """A step, a GPU and an output format, as command-line options."""

    paths: tuple[Path, ...]
    sizes: tuple[StepSize, ...] | None
    size: StepSize | None
    optimizer: OptimizerName | None
    gpu: str | None
    vram: str | None
    as_json: bool
    caps: Caps

    @property
    def spec(self) -> GpuSpec:
        """Return the GPU.

        Raises:
            UnknownGpuError, SizeError: see `umem.virtual_gpu`.
        """
        return gpu_asked_for("t4" if self.gpu is None else self.gpu, self.vram)

    @property
    def is_onnx(self) -> bool:
        """Tell whether the step is a model in ONNX."""
        return is_onnx(self.paths[0])

    @property
    def named_sizes(self) -> dict[str, int]:
        """Return the size given for each named axis of a model in ONNX; empty if none was given.

        Raises:
            click.UsageError: a size was given without a name, or several sets of sizes were given.
        """
        named = self.sizes[0] if self.sizes else {}
        if not isinstance(named, dict) or len(self.sizes or ()) > 1:
            raise click.UsageError("the axes of a model in ONNX have names: --sizes batch=32")
        return named

    def step(self) -> ChosenStep:
        """Read the step from the files; traces of several sizes are joined.

        Raises:
            click.UsageError: sizes are missing, too many, or without names for a model in ONNX.
            UmemError: a file cannot be read, or traces do not go together.
        """
        if not self.is_onnx:
            return ChosenStep(one_trace(self.paths, self.sizes, self.caps))
        step = onnx_step(self.paths[0], self.named_sizes, self.optimizer or "adam")
        return ChosenStep(step.trace, step.names)

    def over_batch(self, batch: int | None = None) -> Trace:
        """Read the step from the files so that it can be scaled to other batches.

        Args:
            batch: of a model in ONNX, the batch that figures are right for; by default the one
                among the sizes.

        Raises:
            click.UsageError: as `step`.
            UmemError: the same; a model in ONNX with a fixed batch.
        """
        if not self.is_onnx:
            return one_trace(self.paths, self.sizes, self.caps)
        sizes = dict(self.named_sizes)
        if batch is not None and (axis := batch_axis(self.paths[0])) is not None:
            sizes[axis] = batch
        return step_over_batch(self.paths[0], sizes, self.optimizer or "adam")

    def check(self) -> None:
        """Refuse options that do not go with a model in ONNX, or only with one.

        Raises:
            click.UsageError: there is something of that kind.
        """
        if not any(map(is_onnx, self.paths)):
            if self.optimizer is not None:
                raise click.UsageError("--optimizer goes with a model in ONNX; a trace has its own")
            return
        if len(self.paths) > 1:
            raise click.UsageError("a model in ONNX stands alone: name one file")
        if self.size is not None:
            raise click.UsageError(
                "--size goes with traces that were recorded; a model in ONNX takes its sizes from "
                "--sizes batch=32"
            )


def is_onnx(path: Path) -> bool:
    """Tell whether a file is a model in ONNX, by its name."""
    return path.suffix.lower() == ".onnx"


def of_a_step(answer: Callable[..., bool]) -> Callable[..., None]:
    """Add the options of `StepOptions` to a command; its function gets them first.

    The exit status is 3 where ``answer`` returns that nothing fits, and 130 after Ctrl-C.
    """

    @wraps(answer)
    def command(max_events: int, max_bytes: int, **options: Any) -> None:
        """Run the command's function, and exit with `NOTHING_FITS` if it returns False."""
        if isinstance(sys.stdout, TextIOWrapper):  # names may have letters that it cannot write
            sys.stdout.reconfigure(errors="backslashreplace")
        told = {name: options.pop(name) for name in StepOptions._fields if name != "caps"}
        step = StepOptions(**told, caps=Caps(max_events, max_bytes))
        step.check()
        try:
            fits = answer(step, **options)
        except KeyboardInterrupt:
            say("\nInterrupted.", err=True)
            raise SystemExit(INTERRUPTED) from None
        if not fits:
            click.get_current_context().exit(NOTHING_FITS)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command
