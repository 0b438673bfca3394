"""``umem choose TRACE``: what makes a recorded step fit a GPU, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import click
from rich.console import Console
from rich.text import Text

from umem.as_json import json_text
from umem.cli.batch import doublings
from umem.cli.files_and_sizes import NamesSuccessors, say
from umem.cli.step_options import ChosenStep, StepOptions, of_a_step
from umem.devices.specs import GPUS, GpuSpec, gpu_spec
from umem.errors import BudgetError, GraphError, ScalingError, SizeError
from umem.predict.choosing import Choice, Search
from umem.predict.techniques.registry import TECHNIQUES
from umem.printable import command_line
from umem.reports.choice_report import choice_text, gpus_text
from umem.trace.axes import size_option, size_text, sizes_option
from umem.trace.trace import Trace

_BATCH, _ADVISE = "umem batch TRACE...", "umem advise TRACE..."


class _ChooseCommand(NamesSuccessors):
    successors: ClassVar = {
        "--batch": _BATCH,
        "--effective": "umem choose TRACE... --size N",
        "--maximum": f"{_BATCH} --maximum N",
        "--margin": f"{_BATCH} --margin SHARE",
        "--advise": _ADVISE,
        "--halved": f"{_ADVISE} --halved AXIS=FILE",
        "--png": "umem choose TRACE... --json, which has every figure",
    }


@click.command("choose", cls=_ChooseCommand)
@of_a_step
@click.option("--all", "every", is_flag=True, help="Also what does not fit, with the reasons.")
@click.option("--all-gpus", is_flag=True, help="Which GPU of the table runs it, and how fast.")
def command(asked: StepOptions, every: bool, all_gpus: bool) -> bool:
    """Find which techniques make a step fit a GPU, and how long it then takes.

    TRACE is what umem.record() or umem.record_at(), saved, or `umem run --record` has written, or
    a model in ONNX, of any framework: MODEL.onnx. Then --json has the schedule, too.
    Nothing is run: memory and times are those of the model of a GPU, and simulated.
    The exit status is 3 where nothing makes the step fit.
    """
    if all_gpus and (asked.gpu is not None or asked.vram is not None):
        raise click.UsageError(
            "--all-gpus asks for every GPU of the table: leave --gpu and --vram out"
        )
    if all_gpus and every:
        raise click.UsageError("--all says more of one GPU: leave it or --all-gpus out")
    one, step = asked.spec, asked.step()
    search = Search(step.trace, list(map(gpu_spec, GPUS)) if all_gpus else [one], asked.size)
    _carry_out(search)
    choices = search.choices() if all_gpus else (search.choice(one),)
    if asked.as_json:
        whole = {"simulated": True, "gpus": choices}
        say(json_text(whole if all_gpus else _with_schedule(choices[0], search, one, step)))
    elif all_gpus:
        _print(gpus_text(choices, Console().width))
    else:
        _print(choice_text(choices[0], Console().width, every=every))
    if not asked.as_json:
        _say_sizes(asked, step.trace, None if all_gpus else one)
        _say_next(asked, all_gpus)
    return choices[0].best is not None


def _with_schedule(
    choice: Choice, search: Search, gpu: GpuSpec, step: ChosenStep
) -> dict[str, Any]:
    """Return a choice for JSON; for a model in ONNX with its schedule, or why it has none."""
    found = choice.to_json()
    if step.names is None:
        return found
    try:
        return {**found, "schedule": search.schedule(gpu, step.names)}
    except (BudgetError, GraphError) as error:
        return {**found, "schedule": None, "why_no_schedule": str(error)}


def _say_sizes(asked: StepOptions, trace: Trace, gpu: GpuSpec | None) -> None:
    """Print the size of the step, and for one GPU the cost of doubling each size."""
    if not trace.sizes:
        return
    if asked.size is None:
        example = ",".join(f"{axis}=N" for axis in trace.axes) or "N"
        say(
            f"\nThis is size {size_text(trace.sizes[-1])}, the largest recorded; "
            f"--size {example} takes the step to another."
        )
    if gpu is not None:
        with suppress(ScalingError, SizeError):  # then there is no step of twice the size
            lines = list(doublings(trace, gpu, asked.size))
            say("\nTwice as much (simulated, in plain memory):")
            for line in lines:
                say(line)


def _say_next(asked: StepOptions, all_gpus: bool) -> None:
    """Print the command that asks the related question about the same step."""
    if asked.is_onnx:
        say(
            "\nLines of code are for Chainer. For another framework --json has the schedule: what "
            "to keep, to drop and to recompute, by the model's own names (docs/onnx.md)."
        )
    words: list[str | Path] = ["umem", "choose", *asked.paths]
    words += [] if asked.sizes is None else ["--sizes", sizes_option(asked.sizes)]
    words += [] if asked.size is None else ["--size", size_option(asked.size)]
    words += [] if asked.optimizer is None else ["--optimizer", asked.optimizer]
    words += ["--gpu", "NAME"] if all_gpus else ["--all-gpus"]
    more = "all techniques on one of them" if all_gpus else "which GPU runs it, and how fast"
    say(f"\nNext: {more}:\n  {command_line(*words)}")


def _carry_out(search: Search) -> None:
    """Run the search; a terminal has a line on standard error that says how far it is."""
    total = len(search.gpus) * len(TECHNIQUES)
    with Console(stderr=True).status("Trying every technique") as status:
        for count, _ in enumerate(search.found(), 1):
            status.update(f"Trying every technique: {count} of {total} (Ctrl-C ends it)")


def _print(lines: Iterable[Text]) -> None:
    console = Console(highlight=False, markup=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    sys.stdout.flush()
