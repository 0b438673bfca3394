"""``umem run SCRIPT``: an old script, unchanged, with the Chainer layer on and memory in a mode."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

import umem
from umem.cli.in_and_out import say
from umem.cli.run_ranks import Ranking, with_ranks
from umem.cli.run_recompute import Budgeting, Slimming
from umem.cli.run_resume import Resuming
from umem.cli.run_script import run_script
from umem.cli.run_watch import Watching
from umem.compat.finder import arm
from umem.compat.installation import find_package
from umem.errors import TraceError, UmemError
from umem.files import claimed
from umem.memory import environment
from umem.printable import command_line, shown
from umem.trace.frameworks import names
from umem.trace.recording.kept_steps import Keeper, Kept, Steps
from umem.units import format_bytes, format_seconds

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("run", context_settings=_SETTINGS)
@click.option(
    "--mode",
    type=click.Choice(["managed", "hybrid", "unmanaged"]),
    help="Where allocations come from (default: UMEM_MODE, or as without umem).",
)
@click.option(
    "--limit",
    metavar="SIZE",
    help="The most the mode may reserve: 24GiB, 1.5x of VRAM, 90% of host memory.",
)
@click.option("--prefetch", is_flag=True, help="Make memory resident as it is handed out.")
@click.option("--virtual", metavar="GPU", help="Follow the run with the model of a GPU.")
@click.option("--software", metavar="GPU", help="Run the real CuPy on host memory, as this GPU.")
@click.option("--no-model", is_flag=True, help="With --software: no VRAM, pages and time.")
@click.option("--checked", is_flag=True, help="With --software: kernels that leave their arrays.")
@click.option("--vram", metavar="SIZE", help="VRAM of that GPU instead of the table's.")
@click.option(
    "--recompute",
    metavar="BUDGET",
    help="Train under umem.chainer.Recompute: 12GiB, 60% of a plain step, or min.",
)
@click.option(
    "--workspace",
    metavar="SIZE",
    help="Cap what Chainer's convolutions and poolings need inside, such as 16MiB.",
)
@click.option(
    "--resume",
    metavar="OPTIONS",
    help="Save a Trainer's run and go on from it: every=500 or every=1epoch,keep=3,folder=PATH.",
)
@click.option(
    "--budget",
    metavar="SIZE",
    help="Keep each step to so much, such as 4GiB, by the cheapest techniques that do.",
)
@click.option("--report", is_flag=True, help="Say at the end what was used, on standard error.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a trace of two training steps, such as out/run.umem.gz.",
)
@click.option("--steps", metavar="STEPS", help="Record these instead of 2-3: 5, 10-12 or all.")
@click.option("--stacks", is_flag=True, help="Record the lines that made each tensor.")
@click.option("--no-workspace", is_flag=True, help="Do not measure what operations need inside.")
@click.option("--stop", is_flag=True, help="End the script once the steps are recorded.")
@click.option("--force", is_flag=True, help="Overwrite the trace if it exists.")
@click.option("--watch", is_flag=True, help="Show memory and speed while the script runs.")
@click.option("--traceback", is_flag=True, help="Show umem's own part of its errors' tracebacks.")
@with_ranks
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: Path, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT unchanged, with Chainer made to work on today's NumPy, Python and CuPy.

    What follows SCRIPT is the script's own. Its exit code and its traceback are its own too.
    Options go before the variables UMEM_MODE, UMEM_LIMIT and UMEM_PREFETCH, and the script and
    the processes that it starts find them there. Chainer is mended in those processes as well;
    the mode holds in this one, and where another calls umem.enable().

    --record keeps steps 2 and 3, where a step ends with an optimizer's update, and then records
    no more; --stop ends the script there.

    --recompute keeps each training step within a budget, and says at the end what it took.

    --budget records the first update's step, chooses the cheapest techniques that keep it to a
    size, and turns them on.

    --resume saves the whole run beside the Trainer's results; the same command goes on from there.

    -n runs the script as ranks of MPI, by mpiexec; where one fails, all are ended.
    """
    ranking = Ranking(options)
    asked = _RunOptions(**options)
    source = _read(script)
    if asked.virtual and asked.software:
        raise click.UsageError("--virtual follows NumPy arrays, --software CuPy's: one of the two")
    if asked.vram and not (asked.virtual or asked.software):
        raise click.UsageError("--vram needs --virtual GPU or --software GPU")
    for name, given in (("--checked", asked.checked), ("--no-model", asked.no_model)):
        if given and not asked.software:
            raise click.UsageError(f"{name} needs --software GPU")
    if asked.budget and (asked.recompute or asked.workspace or asked.record):
        raise click.UsageError(
            "--budget records a step and chooses what to do: leave out --recompute, --workspace "
            "and --record"
        )
    if asked.recompute and asked.record:
        raise click.UsageError(
            "--record would keep the steps in which --recompute learns. Record without it: "
            "umem choose says what a plan would make of the step"
        )
    recording = _recording(asked, script)
    ranking.start()
    watching = Watching() if asked.watch else None
    with ExitStack() as stack:
        if watching is not None:
            watching.begin(stack)
        _prepare(stack, asked)
        if recording is not None:
            _import_chainer()
            recording.begin(stack)
        if watching is not None:
            _import_chainer()
            watching.follow(stack)
        Slimming(asked.recompute, asked.workspace).begin(stack)
        Budgeting(asked.budget).begin(stack)
        Resuming(asked.resume).begin(stack)
        gpu = asked.virtual, asked.vram
        code, hint = run_script(script, source, arguments, *gpu, asked.traceback)
    if hint is not None:
        click.echo(hint, err=True)
    if recording is not None and recording.error is not None and code in (0, None):
        code = 1
    raise SystemExit(code)


class _RunOptions(NamedTuple):
    """The options of the command."""

    mode: str | None
    limit: str | None
    prefetch: bool
    virtual: str | None
    software: str | None
    no_model: bool
    checked: bool
    vram: str | None
    recompute: str | None
    workspace: str | None
    budget: str | None
    resume: str | None
    report: bool
    record: Path | None
    steps: str | None
    stacks: bool
    no_workspace: bool
    stop: bool
    force: bool
    watch: bool
    traceback: bool


def _recording(asked: _RunOptions, script: Path) -> Recording | None:
    """Return the recording that was asked for, if any."""
    if asked.record is None:
        for name in ("steps", "stacks", "no_workspace", "stop", "force"):
            if getattr(asked, name):
                raise click.UsageError(f"--{name.replace('_', '-')} needs --record FILE")
        return None
    try:
        steps = Steps() if asked.steps is None else Steps.parse(asked.steps)
    except UmemError as error:
        raise click.BadParameter(str(error), param_hint="--steps") from error
    if asked.stop and steps.last is None:
        raise click.UsageError("--stop needs --steps that end; all of them have no end")
    return Recording(asked, asked.record, steps, script)


def _read(script: Path) -> bytes:
    """The script's text, before anything is set up for it."""
    try:
        source = script.read_bytes()
        if b"\0" not in source:
            return source
        problem = f"{shown(script)} is no Python script: it has null bytes in it"
    except IsADirectoryError:
        problem = f"{shown(script)} is a directory"
    except FileNotFoundError:
        problem = f"there is no file {shown(script)}"
    except OSError as error:
        problem = f"{shown(script)} cannot be read: {error.strerror}"
    raise click.BadParameter(problem, param_hint="SCRIPT")


def _prepare(stack: ExitStack, asked: _RunOptions) -> None:
    """Put everything in place; the stack takes it away again, the report first."""
    mode = asked.mode or environment.mode()
    on = mode not in (None, "off")
    for name, value in (("--limit", asked.limit), ("--prefetch", asked.prefetch)):
        if value and not on:
            raise click.UsageError(f"{name} needs a --mode")
    if asked.software:
        umem.software_gpu(
            asked.software, asked.vram, model=not asked.no_model, checked=asked.checked
        )
    arm()
    if asked.virtual:
        _import_chainer()
        stack.enter_context(umem.virtual_gpu(asked.virtual, asked.vram))
    if on:
        prefetch = asked.prefetch or None
        stack.enter_context(umem.enable(mode, limit=asked.limit, prefetch=prefetch))  # type: ignore[arg-type]
    stack.enter_context(_variables(asked.mode, asked.limit, asked.prefetch))
    if asked.report:
        stack.callback(_report, os.getpid())


def _import_chainer() -> None:
    """Import what recorders and the virtual GPU follow; a script without Chainer is welcome too."""
    if find_package() is not None:
        importlib.import_module("umem.chainer")


@contextmanager
def _variables(mode: str | None, limit: str | None, prefetch: bool) -> Iterator[None]:
    """Set what the script and its processes find in the environment, for the length of the run."""
    folder = str(Path(__file__).parent / "startup")
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    options = {
        environment.MODE: mode,
        environment.LIMIT: limit,
        environment.PREFETCH: "1" if prefetch else None,
    }
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", *options)}
    _set({"PYTHONPATH": path, **{name: value for name, value in options.items() if value}})
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _report(process: int) -> None:
    if os.getpid() != process:
        return  # a child by fork that came to the end of the script
    click.echo(umem.status().table(), err=True)
    try:
        from umem.devices.open import current_device

        device = current_device()
    except UmemError:
        return
    figures = device.figures
    if figures is not None and figures.seconds is not None:
        click.echo(
            f"{'peak':<14}{format_bytes(figures.peak_bytes)} of tensors\n"
            f"{'moved':<14}{format_bytes(figures.moved_bytes)} (simulated)\n"
            f"{'time':<14}{format_seconds(figures.seconds)} (simulated)",
            err=True,
        )


# -- the recording --------------------------------------------------------------------------------


class Recording:
    """Records the calling thread, writes the trace as soon as it is complete, and tells of it."""

    def __init__(self, asked: _RunOptions, path: Path, steps: Steps, script: Path) -> None:
        self._asked, self._named, self._script = asked, path, script
        self._keeper = Keeper(steps, asked.stacks, not asked.no_workspace, complete=self._complete)
        self._path = path.absolute()  # the script may change folders
        self._written = False
        self.error: str | None = None

    def begin(self, stack: ExitStack) -> None:
        """Record until the stack is left.

        Raises:
            TraceError: the file cannot be written; nothing has begun.
        """
        stack.enter_context(claimed(self._path, force=self._asked.force))
        self._keeper.start()
        stack.callback(self._end)

    def _complete(self, kept: Kept) -> None:
        self._write(kept)
        if self._asked.stop:
            raise SystemExit(0)  # the script's own clean-up runs

    def _end(self) -> None:
        kept = self._keeper.finish()
        if kept is None:
            return  # a child process by fork
        if not any(kept.trace.ops):
            self.error = (
                f"nothing was recorded: no operation of {names()} ran in the script's main thread"
            )
        elif not self._written:
            self._write(kept)
        self._tell(kept)

    def _write(self, kept: Kept) -> None:
        """Failing must not stop the training; it is told, and tried once more, at the end."""
        trace = replace(kept.trace, meta={**kept.trace.meta, "script": self._script.name})
        try:
            trace.save(self._path, force=self._asked.force)
        except TraceError as error:
            self.error = str(error)
        else:
            self._written, self.error = True, None

    def _tell(self, kept: Kept) -> None:
        if self.error is not None:
            say(f"umem: {self.error}", err=True)
            return
        path, count = self._named, sum(1 for _ in kept.trace.ops)
        what = f"steps {kept.steps}" if "-" in kept.steps else f"step {kept.steps}"
        what = what if kept.steps else "no whole step"
        peak = format_bytes(kept.trace.peak_bytes)
        done = f"{what}, {count:,} operations, peak {peak}"
        say(f"umem: wrote {shown(path)}: {done}", err=True)
        for note in kept.notes:
            say(f"umem: {note}", err=True)
        name = command_line(path)
        say(f"  umem report {name}\n  umem choose {name} --gpu t4", err=True)
