"""``umem choose TRACE``: what makes a recorded step fit a GPU, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from umem.as_json import json_text
from umem.cli import in_and_out as saying
from umem.cli.choose_batch import (
    AdviseOptions,
    BatchOptions,
    advise_options,
    batch_options,
    check_advise_options,
    check_batch_options,
    doublings,
    say_batches,
    say_halves,
)
from umem.cli.choose_onnx import (
    advised,
    check_onnx_options,
    chosen_for,
    onnx_options,
    over_batch,
    say_next,
    with_schedule,
)  # fmt: skip
from umem.cli.choose_ranks import RankOptions, check_rank_options, rank_options, say_ranks
from umem.cli.in_and_out import (
    Caps,
    StepSizesType,
    StepSizeType,
    caps,
    refuse,
    refuse_picture,
    say,
    write,
)
from umem.devices.specs import GPUS, GpuSpec, gpu_spec
from umem.errors import BudgetError, ScalingError, SizeError, UmemError
from umem.predict.choosing import Choice, Search, gpu_asked_for
from umem.predict.techniques.options import Option
from umem.predict.techniques.registry import TECHNIQUES
from umem.printable import shown
from umem.reports.choice_report import (
    choice_text,
    draw_choice,
    draw_gpus,
    found_of_gpu,
    found_of_technique,
    gpus_text,
    heading,
)
from umem.trace.axes import StepSize, size_text
from umem.trace.exported.updates import OptimizerName

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""
Say = Callable[[Text], None]


def carry_out(search: Search, say: Say | None, width: int) -> bool:
    """Try everything, telling ``say`` of each result as it comes; return whether it ended.

    Ctrl-C ends it: what is left is said on standard error.
    """
    status = _Progress(search, say, width)
    try:
        with status:
            for gpu, option in search.found():
                status.on(gpu, option)
    except KeyboardInterrupt:
        saying.say(f"\nInterrupted: {_left(search)}", err=True)
        return False
    return True


def _left(search: Search) -> str:
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
    """A line that moves where standard error is a terminal, and lines of results above it."""

    def __init__(self, search: Search, say: Say | None, width: int) -> None:
        self._search, self._say, self._width = search, say, width
        self._is_one = len(search.gpus) == 1
        self._count = 0
        self._status: Status = Console(stderr=True).status(self._text())

    def __enter__(self) -> None:
        self._status.start()

    def __exit__(self, *exc: object) -> None:
        self._status.stop()

    def on(self, gpu: GpuSpec, option: Option) -> None:
        """Something was found."""
        self._count += 1
        self._status.update(self._text())
        line = self._line(gpu, option)
        if line is not None and self._say is not None:
            self._status.stop()  # or it would catch what is meant for standard output
            self._say(line)
            self._status.start()

    def _line(self, gpu: GpuSpec, option: Option) -> Text | None:
        """For one GPU each technique; of several each GPU, as soon as something is sure."""
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


NOTHING_FITS = 3
"""The exit status where nothing makes the step fit; 1 and 2 are those of errors."""


@click.command("choose")
@click.argument(
    "traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--sizes",
    type=StepSizesType(),
    metavar="A,B",
    help="The sizes, such as batches, of TRACE TRACE: one step, recorded apart. Of a model in "
    "ONNX: those of its dynamic axes, batch=32,length=128.",
)
@click.option(
    "--size",
    type=StepSizeType(),
    metavar="N",
    help="The size to choose for; along axes with names: batch=64,length=512.",
)
@batch_options
@rank_options
@advise_options
@onnx_options
@click.option("--gpu", default=None, metavar="NAME", help="A GPU of the table (default: t4).")
@click.option("--vram", metavar="SIZE", help="Usable VRAM instead of the table's, as 12GiB.")
@click.option("--all", "every", is_flag=True, help="Also what does not fit, with the reasons.")
@click.option("--all-gpus", is_flag=True, help="Which GPU of the table runs it, and how fast.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="A picture.")
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
@caps
def command(max_events: int, max_bytes: int, **options: Any) -> None:
    """Try what umem can do on a recorded step; list what makes it fit, shortest step first.

    Each result is printed as it is found; Ctrl-C keeps them, with exit status 130.

    With --batch: the largest batch that fits, and the one of least time a sample.
    With --advise: what half of each size would save; each TRACE may be along other axes.
    With --ranks: what several GPUs take, each a rank of MPI, on a graph in parts or a split batch.

    TRACE is what umem.record() or umem.record_at(), saved, or `umem run --record` has written, or
    a model in ONNX, of any framework: MODEL.onnx. Then --json has the schedule, too.
    Nothing is run: memory and times are those of the model of a GPU, and simulated.
    The exit status is 3 where nothing makes the step fit, and then no picture is written.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # names may have letters that it cannot write
        sys.stdout.reconfigure(errors="backslashreplace")
    told = BatchOptions(*(options.pop(name) for name in BatchOptions._fields))
    ranks = RankOptions(*(options.pop(name) for name in RankOptions._fields))
    advice = AdviseOptions(*(options.pop(name) for name in AdviseOptions._fields))
    asked = _ChooseOptions(**options)
    others = {"--all": asked.every, "--all-gpus": asked.all_gpus, "--png": asked.png is not None}
    check_batch_options(asked.batch, told, others)
    check_rank_options(ranks, {"--batch": asked.batch, **others})
    several = {"--batch": asked.batch, "--ranks": ranks.ranks is not None}
    check_advise_options(advice, {**several, **others})
    if asked.all_gpus and (asked.gpu is not None or asked.vram is not None):
        raise click.UsageError(
            "--all-gpus asks for every GPU of the table: leave --gpu and --vram out"
        )
    if asked.all_gpus and asked.every:
        raise click.UsageError("--all says more of one GPU: leave it or --all-gpus out")
    check_onnx_options(asked.traces, asked.optimizer, {"--size": asked.size is not None})
    png = asked.png
    refuse([] if png is None else [png], asked.traces, force=asked.force)
    refuse_picture(png)
    try:
        if asked.batch:
            _answer_batch(asked, told, Caps(max_events, max_bytes))
            return
        if ranks.ranks is not None:
            _answer_ranks(asked, ranks, Caps(max_events, max_bytes))
            return
        if advice.advise:
            _answer_advice(asked, advice, Caps(max_events, max_bytes))
            return
        best = _answer(asked, Caps(max_events, max_bytes))
    except UmemError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        say("\nInterrupted.", err=True)
        raise SystemExit(INTERRUPTED) from None
    if best is None:
        if png is not None:
            say(
                f"Nothing fits, so there is nothing to draw: {shown(png)} was not written.",
                err=True,
            )
        click.get_current_context().exit(NOTHING_FITS)


class _ChooseOptions(NamedTuple):
    """The arguments and options of the command."""

    traces: tuple[Path, ...]
    sizes: tuple[StepSize, ...] | None
    size: StepSize | None
    batch: bool
    gpu: str | None
    vram: str | None
    every: bool
    all_gpus: bool
    as_json: bool
    png: Path | None
    force: bool
    optimizer: OptimizerName | None


def _answer_batch(asked: _ChooseOptions, told: BatchOptions, read: Caps) -> None:
    gpu = gpu_asked_for("t4" if asked.gpu is None else asked.gpu, asked.vram)
    trace = over_batch(asked.traces, asked.sizes, asked.optimizer, read)
    try:
        say_batches(trace, gpu, asked.size, told, as_json=asked.as_json)
    except BudgetError as error:
        say(str(error), err=True)
        click.get_current_context().exit(NOTHING_FITS)


def _answer_ranks(asked: _ChooseOptions, told: RankOptions, read: Caps) -> None:
    gpu = gpu_asked_for("t4" if asked.gpu is None else asked.gpu, asked.vram)
    trace = over_batch(asked.traces, asked.sizes, asked.optimizer, read)
    if not say_ranks(trace, gpu, asked.size, told, as_json=asked.as_json):
        click.get_current_context().exit(NOTHING_FITS)


def _answer_advice(asked: _ChooseOptions, told: AdviseOptions, read: Caps) -> None:
    gpu = gpu_asked_for("t4" if asked.gpu is None else asked.gpu, asked.vram)
    step = advised(asked.traces, asked.sizes, asked.size, told.halved, asked.optimizer, read)
    if not say_halves(step.traces, gpu, step.size, step.halved, as_json=asked.as_json):
        click.get_current_context().exit(NOTHING_FITS)


def _answer(asked: _ChooseOptions, read: Caps) -> Option | None:
    """Say what there is to say; returns the best that was found."""
    one = gpu_asked_for("t4" if asked.gpu is None else asked.gpu, asked.vram)
    step = chosen_for(asked.traces, asked.sizes, asked.optimizer, read)
    trace = step.trace
    gpus = list(map(gpu_spec, GPUS)) if asked.all_gpus else [one]
    search = Search(trace, gpus, asked.size)
    _carry_out(search, asked.as_json)
    choices = search.choices() if asked.all_gpus else (search.choice(one),)
    if asked.as_json:
        whole = {"simulated": True, "gpus": choices}
        say(json_text(whole if asked.all_gpus else with_schedule(choices[0], search, one, step)))
    elif asked.all_gpus:
        _print(gpus_text(choices, Console().width))
    else:
        _print(choice_text(choices[0], Console().width, every=asked.every))
    best = choices[0].best
    if asked.png is not None and best is not None:
        _draw(choices, asked)
    if not asked.as_json:
        if asked.size is None and trace.sizes:
            example = ",".join(f"{axis}=N" for axis in trace.axes) or "N"
            say(
                f"\nThis is size {size_text(trace.sizes[-1])}, the largest recorded; "
                f"--size {example} takes the step to another."
            )
        if trace.sizes and not asked.all_gpus:
            with suppress(ScalingError, SizeError):  # then there is no step of twice the size
                lines = list(doublings(trace, one, asked.size))
                say("\nTwice as much (simulated, in plain memory):")
                for line in lines:
                    say(line)
        say_next(asked.traces, asked.sizes, asked.size, asked.optimizer, asked.all_gpus)
    return best


def _draw(choices: tuple[Choice, ...], asked: _ChooseOptions) -> None:
    assert asked.png is not None

    def draw(file: IO[bytes]) -> None:
        if asked.all_gpus:
            draw_gpus(choices, file)
        else:
            draw_choice(choices[0], file)

    write(asked.png, draw, force=asked.force)
    say(f"Wrote {shown(asked.png)}.", err=asked.as_json)


def _carry_out(search: Search, as_json: bool) -> None:
    """Find everything, a line each as it comes; ends the command after Ctrl-C."""
    console = Console(highlight=False, markup=False)
    if not as_json:
        _print(heading(search.choice(search.gpus[0]), len(search.gpus), console.width))
    show = None if as_json else lambda line: _print([line])
    if not carry_out(search, show, console.width):
        raise SystemExit(INTERRUPTED)
    if not as_json:
        say("")


def _print(lines: Iterable[Text]) -> None:
    console = Console(highlight=False, markup=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    sys.stdout.flush()
