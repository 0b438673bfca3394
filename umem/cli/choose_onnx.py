"""``umem choose MODEL.onnx``: what makes the step of an exported model fit a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from umem._common.printable import quoted, short
from umem._common.specs import GpuSpec
from umem.cli.files_and_sizes import print_result
from umem.cli.help_layout import Names
from umem.onnx import OPTIMIZERS, ModelChoice, ModelOption, choose_for_model, onnx_step
from umem.reports import Column, table, wrapped
from umem.units import format_bytes, format_seconds


class _AxisSize(click.ParamType):  # type: ignore[type-arg]
    """The name of a dynamic axis and its size."""

    name = "axis"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, int]:
        """Parse the name of an axis and its size, such as batch=32 or x[0]=32."""
        axis, _, size = str(value).rpartition("=")
        if not axis or not size.strip().isdecimal():
            raise click.BadParameter(
                f"write the name of a dynamic axis and its size, such as batch=32; got "
                f"{quoted(value)}",
                ctx,
                param,
            )
        return axis.strip(), int(size)


_OPTIONS = (
    click.option(
        "--size",
        "sizes",
        type=_AxisSize(),
        multiple=True,
        metavar="AXIS=N",
        help="ONNX: the size of a dynamic axis, such as batch=32. May be repeated.",
    ),
    click.option(
        "--optimizer",
        type=Names([*OPTIMIZERS, "none"]),
        metavar="NAME",
        help=f"ONNX: the optimizer whose state is counted: {', '.join(OPTIMIZERS)} or none "
        "(default: adam).",
    ),
    click.option(
        "--inference", is_flag=True, help="ONNX: predict the forward pass alone, without training."
    ),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a model in ONNX to a command: ``sizes``, ``optimizer``, ``inference``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def is_onnx(path: Path) -> bool:
    """Tell whether a file is a model in ONNX, by its name."""
    return path.suffix.lower() == ".onnx"


def choose_onnx(
    path: Path,
    gpu: GpuSpec,
    sizes: Sequence[tuple[str, int]],
    optimizer: Any,
    *,
    inference: bool,
    as_json: bool,
) -> bool:
    """Print what makes a model's step fit a GPU; return whether anything does.

    Raises:
        click.UsageError: an axis is given twice, or an optimizer for inference.
        OnnxError, MissingDependencyError, SizeError: see `onnx_step`.
    """
    by_axis = dict(sizes)
    if len(by_axis) < len(sizes):
        raise click.UsageError("--size names an axis twice. Give each axis one size")
    if inference and optimizer is not None:
        raise click.UsageError("--inference has no optimizer. Leave --optimizer out")
    step = onnx_step(path, by_axis, optimizer or "adam", inference=inference)
    with Console(stderr=True).status("Trying each way to run the step (Ctrl-C stops)"):
        choice = choose_for_model(step, gpu)
    lines = partial(_lines, choice, short(path), inference=inference)
    print_result(choice, lines, as_json=as_json)
    return bool(choice.options)


def _lines(choice: ModelChoice, name: str, width: int, *, inference: bool) -> Iterator[Text]:
    """Format a choice as text of a width."""
    what = "inference" if inference else "a training step"
    on = f"{choice.title} ({format_bytes(choice.vram_bytes)} usable)"
    if choice.options:
        title = (
            f"Ways to fit {what} of {name} into a {on}, fastest first. All figures are simulated."
        )
    else:
        title = f"No way fits {what} of {name} into a {on} (simulated)."
    yield from (Text(line, style="bold") for line in wrapped(title, width))
    if choice.options:
        yield from map(Text, table(_columns(choice.options), width))
    if choice.dropped:
        yield Text()
        title = "These do not fit, or gain nothing"
        yield from (Text(line, style="bold") for line in wrapped(title, width))
    for option in choice.dropped:
        yield from map(Text, wrapped(f"{option.name}: {option.reason}", width, hang=2))
    if any(option.schedule for option in choice.options):
        message = (
            "--json adds the schedule of each plan: which tensors to keep, drop, recompute and "
            "offload, by their names in the model."
        )
        yield Text()
        yield from map(Text, wrapped(message, width))


def _columns(options: Sequence[ModelOption]) -> list[Column]:
    return [
        Column("way", [option.name for option in options]),
        Column("step", [format_seconds(option.seconds) for option in options]),
        Column("range", [_range(option) for option in options], drop=4),
        Column("peak", [format_bytes(option.peak_bytes) for option in options], drop=1),
        Column("host", [format_bytes(option.host_bytes) for option in options], drop=2),
        Column("moved", [format_bytes(option.moved_bytes) for option in options], drop=3),
    ]


def _range(option: ModelOption) -> str:
    return f"{format_seconds(option.seconds_low)} - {format_seconds(option.seconds_high)}"
