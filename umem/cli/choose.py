"""``umem choose TRACE``: what makes a recorded step fit a GPU, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from umem.as_json import json_text
from umem.cli.batch import doublings
from umem.cli.files_and_sizes import refuse, refuse_picture, say, write
from umem.cli.step_options import INTERRUPTED, ChosenStep, StepOptions, of_a_step
from umem.devices.specs import GPUS, GpuSpec, gpu_spec
from umem.errors import BudgetError, GraphError, ScalingError, SizeError
from umem.predict.choosing import Choice, Search
from umem.predict.techniques.options import Option
from umem.predict.techniques.registry import TECHNIQUES
from umem.printable import command_line, short
from umem.reports.choice_report import (
    choice_text,
    draw_choice,
    draw_gpus,
    found_of_gpu,
    found_of_technique,
    gpus_text,
    heading,
)
from umem.trace.axes import size_option, size_text, sizes_option
from umem.trace.trace import Trace

Show = Callable[[Text], None]


def _left(search: Search) -> str:
    """Say what an interrupted search has not tried."""
    if len(search.gpus) > 1:
        left = [gpu.name for gpu in search.gpus if not search.is_done(gpu)]
        counted = f"{len(left)} of {len(search.gpus)} GPUs"
        said = f"not everything was tried on {counted}: {', '.join(left)}."
        return said if left else "everything was tried."
    done = {option.name for option in search.tried(search.gpus[0])}
    left = [technique.name for technique in TECHNIQUES if technique.name not in done]
    said = f"{len(left)} of {len(TECHNIQUES)} techniques were not tried: {'; '.join(left)}."
    return said if left else "everything was tried."


class _Progress:
    """A progress line where standard error is a terminal, and lines of results above it."""

    def __init__(self, search: Search, show: Show | None, width: int) -> None:
        self._search, self._show, self._width = search, show, width
        self._is_one = len(search.gpus) == 1
        self._count = 0
        self._status: Status = Console(stderr=True).status(self._text())

    def __enter__(self) -> None:
        self._status.start()

    def __exit__(self, *exc: object) -> None:
        self._status.stop()

    def on(self, gpu: GpuSpec, option: Option) -> None:
        """Print a result."""
        self._count += 1
        self._status.update(self._text())
        line = self._line(gpu, option)
        if line is not None and self._show is not None:
            self._status.stop()  # or it would catch what is meant for standard output
            self._show(line)
            self._status.start()

    def _line(self, gpu: GpuSpec, option: Option) -> Text | None:
        """Return the line of a technique for one GPU, or of a GPU that is decided."""
        if self._is_one:
            return found_of_technique(option, self._width)
        if option.name == TECHNIQUES[0].name:
            return found_of_gpu(gpu.name, option, self._width) if option.reason is None else None
        choice = self._search.choice(gpu)
        fits_as_it_is = any(found.name == TECHNIQUES[0].name for found in choice.options)
        if fits_as_it_is or not self._search.is_done(gpu):
            return None
        return found_of_gpu(gpu.name, choice.best, self._width)

    def _text(self) -> str:
        total = len(self._search.gpus) * len(TECHNIQUES)
        where = "" if self._is_one else f" on {len(self._search.gpus)} GPUs"
        return f"Trying every technique{where}: {self._count} of {total} (Ctrl-C ends it)"


_BATCH, _ADVISE = "umem batch TRACE...", "umem advise TRACE..."
_RANKS = "umem ranks TRACE... -n 1,2,4 --link LINK"
_MOVED = {
    "--batch": _BATCH,
    "--effective": f"{_BATCH} --effective N",
    "--maximum": f"{_BATCH} --maximum N",
    "--margin": f"{_BATCH} --margin SHARE",
    "--advise": _ADVISE,
    "--halved": f"{_ADVISE} --halved AXIS=FILE",
    "--ranks": _RANKS,
    "--link": _RANKS,
    "--cut": f"{_RANKS} --cut FOLDER",
    "--recorded": f"{_RANKS} --cut FOLDER --recorded FOLDER",
    "--sharded": f"{_RANKS} --sharded",
}
"""Options that the command had, and the command line that replaces each."""


class _Choose(click.Command):
    """A command that names the successors of removed options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options; for a removed one the error names the command that replaces it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _MOVED:
                raise
            raise click.UsageError(
                f"umem choose has no {error.option_name} any more; run {_MOVED[error.option_name]}",
                ctx,
            ) from None


@click.command("choose", cls=_Choose)
@of_a_step
@click.option("--all", "every", is_flag=True, help="Also what does not fit, with the reasons.")
@click.option("--all-gpus", is_flag=True, help="Which GPU of the table runs it, and how fast.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="A picture.")
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
def command(asked: StepOptions, every: bool, all_gpus: bool, png: Path | None, force: bool) -> bool:
    """Find which techniques make a step fit a GPU, and how long it then takes.

    Each result is printed as it is found; Ctrl-C keeps them, with exit status 130.

    TRACE is what umem.record() or umem.record_at(), saved, or `umem run --record` has written, or
    a model in ONNX, of any framework: MODEL.onnx. Then --json has the schedule, too.
    Nothing is run: memory and times are those of the model of a GPU, and simulated.
    The exit status is 3 where nothing makes the step fit, and then no picture is written.
    """
    if all_gpus and (asked.gpu is not None or asked.vram is not None):
        raise click.UsageError(
            "--all-gpus asks for every GPU of the table: leave --gpu and --vram out"
        )
    if all_gpus and every:
        raise click.UsageError("--all says more of one GPU: leave it or --all-gpus out")
    refuse([] if png is None else [png], asked.paths, force=force)
    refuse_picture(png)
    one, step = asked.spec, asked.step()
    search = Search(step.trace, list(map(gpu_spec, GPUS)) if all_gpus else [one], asked.size)
    _carry_out(search, asked.as_json)
    choices = search.choices() if all_gpus else (search.choice(one),)
    if asked.as_json:
        whole = {"simulated": True, "gpus": choices}
        say(json_text(whole if all_gpus else _with_schedule(choices[0], search, one, step)))
    elif all_gpus:
        _print(gpus_text(choices, Console().width))
    else:
        _print(choice_text(choices[0], Console().width, every=every))
    fits = choices[0].best is not None
    if png is not None and fits:
        write(png, lambda file: _draw(choices, file, all_gpus), force=force)
        say(f"Wrote {short(png)}.", err=asked.as_json)
    if not asked.as_json:
        _say_sizes(asked, step.trace, None if all_gpus else one)
        _say_next(asked, all_gpus)
    if png is not None and not fits:
        say(f"Nothing fits, so there is nothing to draw: {short(png)} was not written.", err=True)
    return fits


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


def _draw(choices: tuple[Choice, ...], file: IO[bytes], all_gpus: bool) -> None:
    if all_gpus:
        draw_gpus(choices, file)
    else:
        draw_choice(choices[0], file)


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


def _carry_out(search: Search, as_json: bool) -> None:
    """Run the search, printing each result.

    Ctrl-C ends the command: standard error has what was not tried.
    """
    width = Console().width
    if not as_json:
        _print(heading(search.choice(search.gpus[0]), len(search.gpus), width))
    status = _Progress(search, None if as_json else lambda line: _print([line]), width)
    try:
        with status:
            for gpu, option in search.found():
                status.on(gpu, option)
    except KeyboardInterrupt:
        say(f"\nInterrupted: {_left(search)}", err=True)
        raise SystemExit(INTERRUPTED) from None
    if not as_json:
        say("")


def _print(lines: Iterable[Text]) -> None:
    console = Console(highlight=False, markup=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    sys.stdout.flush()
