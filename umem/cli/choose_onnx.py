"""What ``umem choose`` chooses for: recorded traces, or a model in ONNX with its schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from umem.cli.in_and_out import Caps, load, one_trace, say
from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, GraphError
from umem.predict.choosing import Choice, Search
from umem.printable import command_line
from umem.trace.axes import StepSize, size_option, sizes_option
from umem.trace.exported import halves_of, onnx_step, step_over_batch
from umem.trace.exported.updates import OPTIMIZERS, OptimizerName
from umem.trace.trace import Trace


class ChosenStep(NamedTuple):
    """A step, and for a model in ONNX the model's own names of its calls."""

    trace: Trace
    names: tuple[str, ...] | None = None


def onnx_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what goes with a model in ONNX."""
    return click.option(
        "--optimizer",
        type=click.Choice([*OPTIMIZERS, "none"]),
        help="With MODEL.onnx: whose state is counted (default: adam).",
    )(command)


def check_onnx_options(
    paths: tuple[Path, ...], optimizer: str | None, wants: Mapping[str, bool]
) -> None:
    """Refuse what does not go with a model in ONNX, or only with one.

    Args:
        wants: options of recorded traces, and whether they are given.

    Raises:
        click.UsageError: there is something of that kind.
    """
    if not any(map(_is_onnx, paths)):
        if optimizer is not None:
            raise click.UsageError("--optimizer goes with a model in ONNX; a trace has its own")
        return
    if len(paths) > 1:
        raise click.UsageError("a model in ONNX is chosen for alone: name one file")
    given = [option for option, is_given in wants.items() if is_given]
    if given:
        raise click.UsageError(
            f"{given[0]} goes with traces that were recorded; a model in ONNX takes its sizes from "
            "--sizes batch=32"
        )


def _is_onnx(path: Path) -> bool:
    return path.suffix.lower() == ".onnx"


def chosen_for(
    paths: tuple[Path, ...],
    sizes: tuple[StepSize, ...] | None,
    optimizer: OptimizerName | None,
    caps: Caps,
) -> ChosenStep:
    """The step that files hold; traces of several sizes are joined.

    Raises:
        click.UsageError: sizes are missing, too many, or without names for a model in ONNX.
        UmemError: a file cannot be read, or traces do not go together.
    """
    if _is_onnx(paths[0]):
        step = onnx_step(paths[0], _named(sizes), optimizer or "adam")
        return ChosenStep(step.trace, step.names)
    return ChosenStep(one_trace(paths, sizes, caps))


def over_batch(
    paths: tuple[Path, ...],
    sizes: tuple[StepSize, ...] | None,
    optimizer: OptimizerName | None,
    caps: Caps,
) -> Trace:
    """The step that files hold, such that its batch can be another.

    Raises:
        click.UsageError: as `chosen_for`.
        UmemError: the same; a model in ONNX with a fixed batch.
    """
    if not _is_onnx(paths[0]):
        return one_trace(paths, sizes, caps)
    return step_over_batch(paths[0], _named(sizes), optimizer or "adam")


class AdvisedStep(NamedTuple):
    """What is said of halves of: traces of a step, half of it apart, and how large its axes are."""

    traces: list[Trace]
    halved: dict[str, Trace]
    size: StepSize | None


def advised(
    paths: tuple[Path, ...],
    sizes: tuple[StepSize, ...] | None,
    size: StepSize | None,
    halved: tuple[tuple[str, Path], ...],
    optimizer: OptimizerName | None,
    caps: Caps,
) -> AdvisedStep:
    """What files say of a step and its halves; models in ONNX are taken to the same sizes.

    Raises:
        click.UsageError: as `chosen_for`.
        UmemError: the same.
    """
    names = [axis for axis, _ in halved]
    if not _is_onnx(paths[0]):
        traces = load(paths, caps) if sizes is None else [one_trace(paths, sizes, caps)]
        apart = load([path for _, path in halved], caps)
        return AdvisedStep(traces, dict(zip(names, apart, strict=True)), size)
    given = _named(sizes)
    whole, found, now = halves_of(paths[0], given, optimizer or "adam")
    for axis, path in halved:
        if not _is_onnx(path):
            raise click.UsageError(f"half of a model in ONNX is a model in ONNX: --halved {axis}")
        found[axis] = halves_of(path, given, optimizer or "adam")[0]
    return AdvisedStep([whole], found, now or None)


def _named(sizes: tuple[StepSize, ...] | None) -> dict[str, int]:
    """Sizes of a model's axes, by their names."""
    named = sizes[0] if sizes else {}
    if not isinstance(named, dict) or len(sizes or ()) > 1:
        raise click.UsageError("the axes of a model in ONNX have names: --sizes batch=32")
    return named


def say_framework(paths: tuple[Path, ...]) -> None:
    """Say whose the printed code is, where the model may be of any framework."""
    if _is_onnx(paths[0]):
        say(
            "\nLines of code are for Chainer. For another framework --json has the schedule: what "
            "to keep, to let go and to run again, by the model's own names (docs/onnx.md)."
        )


def with_schedule(choice: Choice, search: Search, gpu: GpuSpec, step: ChosenStep) -> dict[str, Any]:
    """A choice for JSON; of a model in ONNX with its schedule, or why there is none."""
    found = choice.to_json()
    if step.names is None:
        return found
    try:
        return {**found, "schedule": search.schedule(gpu, step.names)}
    except (BudgetError, GraphError) as error:
        return {**found, "schedule": None, "why_no_schedule": str(error)}


def say_next(
    paths: tuple[Path, ...],
    sizes: tuple[StepSize, ...] | None,
    size: StepSize | None,
    optimizer: str | None,
    all_gpus: bool,
) -> None:
    """Print the command that asks the other question of the same step."""
    words: list[str | Path] = ["umem", "choose", *paths]
    words += [] if sizes is None else ["--sizes", sizes_option(sizes)]
    words += [] if size is None else ["--size", size_option(size)]
    words += [] if optimizer is None else ["--optimizer", optimizer]
    words += ["--gpu", "NAME"] if all_gpus else ["--all-gpus"]
    say_framework(paths)
    more = "all techniques on one of them" if all_gpus else "which GPU runs it, and how fast"
    say(f"\nNext: {more}:\n  {command_line(*words)}")
