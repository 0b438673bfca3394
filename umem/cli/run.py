"""``umem run SCRIPT``: an old script, unchanged, with the Chainer layer on and memory in a mode."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

import umem
from umem.cli.help_layout import Names, OptionsByWish
from umem.cli.run_budget import BudgetOption
from umem.cli.run_dry import DryOptions, with_dry
from umem.cli.run_ranks import RankOptions, with_ranks
from umem.cli.run_recompute import RecomputeOptions
from umem.cli.run_record import Recording
from umem.cli.run_resume import ResumeOption
from umem.cli.run_script import Program, run_program
from umem.cli.run_watch import WatchOption
from umem.cli.startup.sitecustomize import OLD_NUMPY
from umem.compat import LentNames, arm, find_package, lend_removed_names
from umem.dry import FLAG
from umem.errors import UmemError
from umem.host_cuda import MOST_DEVICES, VARIABLE
from umem.launch import local_count
from umem.memory import MEMORY_VARIABLES, mode_of_environment
from umem.trace.recording import Keeper, Steps
from umem.units import KIB, format_bytes, format_seconds


class _RunCommand(OptionsByWish):
    """A command that refuses an option given twice; click would take the last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        _, _, given = self.make_parser(ctx).parse_args([*args])
        for option, count in Counter(given).items():
            is_one = isinstance(option, click.Option) and not (option.is_flag or option.multiple)
            if count > 1 and is_one:
                raise click.UsageError(f"{option.opts[0]} is given more than once. Give it once")
        return super().parse_args(ctx, args)


HEADINGS = {
    "Memory": ("mode", "limit", "prefetch", "budget", "gpu", "paging"),
    "Predict without a GPU": (
        "dry", "vram", "all_gpus", "dry_steps", "answers", "writes", "programs",
        "json_file",
    ),
    "Simulate a GPU": (
        "software", "virtual", "devices", "checked", "kernel_seconds", "not_strict", "no_model",
    ),
    "Train with Chainer": ("recompute", "workspace", "resume", "old_numpy"),
    "Record and watch": (
        "record", "steps", "stop", "stacks", "no_workspace", "force", "watch", "report",
    ),
    "Run several ranks with MPI": ("ranks", "hosts", "threads", "allow_root", "verbose"),
}  # fmt: skip
"""The parameters, by what a user wants to do."""


# What follows the script is its own; an unknown option before it is a mistake.
@click.command(
    "run", cls=_RunCommand, headings=HEADINGS, context_settings={"allow_interspersed_args": False}
)
@click.option(
    "--mode",
    type=Names(["managed", "hybrid", "unmanaged"]),
    metavar="MODE",
    help="Where GPU memory comes from: managed (unified memory), hybrid (VRAM first, unified "
    "memory for the rest) or unmanaged (VRAM alone). Default: UMEM_MODE.",
)
@click.option(
    "--limit",
    metavar="SIZE",
    help="With --mode: reserve at most SIZE: 24GiB, 1.5x (of VRAM) or 90% (of host memory).",
)
@click.option("--prefetch", is_flag=True, help="With --mode: move new arrays to the GPU at once.")
@click.option("--virtual", metavar="GPU", help="Simulate this GPU for NumPy arrays.")
@click.option("--software", metavar="GPU", help="Run CuPy on the processor, as if on this GPU.")
@click.option("--no-model", is_flag=True, help="With --software: simulate no VRAM, pages or time.")
@click.option(
    "--checked",
    is_flag=True,
    help="With --software: find kernels that access memory out of bounds.",
)
@click.option(
    "--kernel-seconds",
    type=float,
    metavar="S",
    help="With --software: stop a kernel that takes more than S seconds.",
)
@click.option("--not-strict", is_flag=True, help="With --software: accept calls that CUDA refuses.")
@click.option(
    "--devices",
    type=click.IntRange(1, MOST_DEVICES),
    metavar="N",
    help="With --software: simulate N GPUs.",
)
@click.option(
    "--vram", metavar="SIZE", help="VRAM of the simulated GPU (default: the real card's)."
)
@click.option(
    "--recompute",
    metavar="BUDGET",
    help="Recompute tensors so that each training step fits BUDGET: 12GiB, card (the GPU's VRAM), "
    "60% (of a plain step) or min.",
)
@click.option(
    "--workspace",
    metavar="SIZE",
    help="Limit the workspace of convolutions and poolings, such as 16MiB.",
)
@click.option(
    "--budget",
    metavar="SIZE",
    help="Find, by dry runs, the fastest technique that keeps SCRIPT within SIZE of VRAM. Then run "
    "SCRIPT with it.",
)
@click.option("--gpu", metavar="NAME", help="With --budget: a GPU similar to the one here.")
@click.option(
    "--resume",
    metavar="OPTIONS",
    help="Save the run of a Trainer, and resume it when the command is repeated: every=500 or "
    "every=1epoch,keep=3,folder=PATH.",
)
@click.option(
    "--old-numpy",
    multiple=True,
    metavar="PACKAGE",
    help="Give PACKAGE the names that NumPy has removed, such as np.float, and pkg_resources. May "
    "be repeated.",
)
@click.option("--report", is_flag=True, help="Print the memory used, at the end.")
@click.option(
    "--paging",
    is_flag=True,
    help="Print which pages moved, by line of code, at the end. A real GPU needs cupti-python.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Record two training steps to a trace, such as out/run.umem.gz.",
)
@click.option(
    "--steps",
    metavar="STEPS",
    help="With --record: the steps to record, such as 5, 10-12 or all (default: 2-3).",
)
@click.option(
    "--stacks", is_flag=True, help="With --record: include the lines that made each tensor."
)
@click.option("--no-workspace", is_flag=True, help="With --record: do not measure workspace.")
@click.option("--stop", is_flag=True, help="With --record: stop SCRIPT after these steps.")
@click.option("--force", is_flag=True, help="With --record: overwrite FILE if it exists.")
@click.option("--watch", is_flag=True, help="Print memory and speed every few seconds.")
@click.option("--traceback", is_flag=True, help="Show umem's own frames in tracebacks.")
@with_dry
@with_ranks
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run a Python program unchanged, with the options of umem.

    Options for umem come before SCRIPT. Everything after SCRIPT is passed to it. The exit status
    and the traceback are those of SCRIPT. If SCRIPT uses Chainer, umem also makes it work with
    current Python, NumPy and CuPy.

    \b
    Examples:

    \b
        # Run train.py in unified memory
        umem run --mode managed train.py --batch 64
        # Predict whether train.py fits a T4, without a GPU
        umem run --dry t4 train.py --batch 64
    """
    budgeting = BudgetOption(options)
    drying = DryOptions(options, has_ranks=options["ranks"] is not None)
    ranking = RankOptions(options)
    flags = _RunOptions(**options)
    program = Program.found(script, arguments, is_module=flags.module)
    if flags.virtual and flags.software:
        raise click.UsageError(
            "--virtual simulates a GPU for NumPy arrays, --software one for CuPy. Give one of them"
        )
    if flags.vram and not (flags.virtual or flags.software):
        raise click.UsageError("--vram needs --dry, --software or --virtual")
    for name, given in (
        ("--checked", flags.checked), ("--no-model", flags.no_model), ("--devices", flags.devices),
        ("--not-strict", flags.not_strict), ("--kernel-seconds", flags.kernel_seconds is not None),
    ):  # fmt: skip
        if given and not flags.software:
            raise click.UsageError(f"{name} needs --software GPU")
    if flags.recompute and flags.record:
        raise click.UsageError(
            "--record cannot be used with --recompute, which plans during the recorded steps. "
            "Leave out one of them"
        )
    recording = _recording(flags, program)
    budgeting.choose(program, is_module=flags.module)
    ranking.start()
    watching = WatchOption() if flags.watch else None
    with ExitStack() as stack:
        software = _prepare(stack, flags)
        for package in flags.old_numpy:
            stack.enter_context(_lend_names(package, program))
        if recording is not None:
            _import_chainer()
            recording.begin(stack)
        if watching is not None:
            _import_chainer()
            watching.follow(stack)
        RecomputeOptions(flags.recompute, flags.workspace).begin(stack)
        budgeting.begin(stack)
        ResumeOption(flags.resume).begin(stack)
        if drying.is_on:
            _import_chainer()
            drying.begin(
                stack, software, flags.mode or mode_of_environment(), _last_step(recording)
            )
        gpu = flags.virtual, flags.vram
        code, hint = run_program(program, *gpu, flags.traceback, drying.run)
    if drying.is_on:
        code = drying.report(program.name)
        drying.leave_threads(code)
    if hint is not None:
        click.echo(hint, err=True)
    if recording is not None and recording.error is not None and code in (0, None):
        code = 1
    raise SystemExit(code)


class _RunOptions(NamedTuple):
    """The options of ``umem run``."""

    mode: str | None
    limit: str | None
    prefetch: bool
    virtual: str | None
    dry: bool
    software: str | None
    no_model: bool
    checked: bool
    not_strict: bool
    kernel_seconds: float | None
    devices: int | None
    vram: str | None
    recompute: str | None
    workspace: str | None
    resume: str | None
    old_numpy: tuple[str, ...]
    report: bool
    paging: bool
    record: Path | None
    steps: str | None
    stacks: bool
    no_workspace: bool
    stop: bool
    force: bool
    watch: bool
    traceback: bool
    module: bool


def _recording(flags: _RunOptions, program: Program) -> Recording | None:
    """Return the requested recording, None without one."""
    if flags.record is None:
        for name in ("steps", "stacks", "no_workspace", "stop", "force"):
            if getattr(flags, name):
                raise click.UsageError(f"--{name.replace('_', '-')} needs --record FILE")
        return None
    try:
        steps = Steps() if flags.steps is None else Steps.parse(flags.steps)
    except UmemError as error:
        raise click.BadParameter(str(error), param_hint="--steps") from error
    if flags.stop and steps.last is None:
        raise click.UsageError(
            "--stop needs a last step, and --steps all has none. Give --steps such as 2-3"
        )
    keeper = Keeper(steps, flags.stacks, not flags.no_workspace)
    extra = {"stop": flags.stop, "force": flags.force, "at_end": flags.dry}
    return Recording(flags.record, keeper, program.name, **extra)


def _lend_names(package: str, program: Program) -> LentNames:
    """Lend the script itself or a package, which may be beside it, the removed names of NumPy."""
    if package in ("__main__", program.module_name):
        return LentNames("__main__")
    try:
        return lend_removed_names(package, [program.folder])
    except UmemError as error:
        raise click.BadParameter(str(error), param_hint="--old-numpy") from error


def _prepare(stack: ExitStack, flags: _RunOptions) -> Any:
    """Set everything up for the run; the stack undoes it, the report first.

    Returns the software GPU, None without one.
    """
    mode = flags.mode or mode_of_environment()
    on = mode not in (None, "off")
    for name, value in (("--limit", flags.limit), ("--prefetch", flags.prefetch)):
        if value and not on:
            raise click.UsageError(f"{name} needs --mode or UMEM_MODE")
    software = None
    if flags.dry:  # the scratch disk follows: no line says that writes are real
        os.environ[FLAG] = "1"
        stack.callback(os.environ.pop, FLAG, None)
    if flags.software:
        software = umem.software_gpu(
            flags.software,
            flags.vram,
            model=not flags.no_model,
            checked=flags.checked,
            strict=not flags.not_strict,
            kernel_seconds=flags.kernel_seconds,
            devices=_devices(flags),
            dry=flags.dry,
            force=flags.dry,  # it is to leave a card alone that is there
        )
    arm()
    if flags.virtual:
        _import_chainer()
        stack.enter_context(umem.virtual_gpu(flags.virtual, flags.vram))
    if on:
        prefetch = flags.prefetch or None
        stack.enter_context(umem.enable(mode, limit=flags.limit, prefetch=prefetch))  # type: ignore[arg-type]
    stack.enter_context(_variables(flags))
    if flags.report:
        stack.callback(_report, os.getpid())
    if flags.paging:
        stack.enter_context(_paging(os.getpid()))
    return software


def _last_step(recording: Recording | None) -> int | None:
    return None if recording is None else recording.last_step


def _import_chainer() -> None:
    """Import what recorders and the virtual GPU follow; a script without Chainer is welcome too."""
    if find_package() is not None:
        importlib.import_module("umem.chainer")


@contextmanager
def _variables(flags: _RunOptions) -> Iterator[None]:
    """Set environment variables for the script and its processes, until the run ends."""
    folder = str(Path(__file__).parent / "startup")
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    of_memory = flags.mode, flags.limit, "1" if flags.prefetch else None
    options = {
        **dict(zip(MEMORY_VARIABLES, of_memory, strict=True)),
        VARIABLE: _software(flags),
        OLD_NUMPY: ",".join(name for name in flags.old_numpy if name != "__main__"),
    }
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", *options)}
    _set({"PYTHONPATH": path, **{name: value for name, value in options.items() if value}})
    try:
        yield
    finally:
        _set(before)


def _software(flags: _RunOptions) -> str | None:
    """Return the variables by which child processes open the software GPU."""
    if not flags.software:
        return None
    vram = [f"vram={flags.vram}"] if flags.vram else []
    is_checked = ["checked"] if flags.checked else []
    devices = [f"devices={_devices(flags)}"] if _devices(flags) > 1 else []
    is_off = ["model=off"] * flags.no_model
    is_kind = ["not-strict"] * flags.not_strict
    limit = [] if flags.kernel_seconds is None else [f"kernel-seconds={flags.kernel_seconds:f}"]
    is_dry = ["dry", "force"] * flags.dry
    return ",".join(
        [flags.software, *vram, *devices, *is_off, *is_checked, *is_kind, *limit, *is_dry]
    )


def _devices(flags: _RunOptions) -> int:
    """Return the number of software GPUs: as many as local ranks, unless given."""
    return flags.devices or min(local_count(), MOST_DEVICES)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _paging(process: int) -> Iterator[None]:
    """Print which pages moved, at exit; not in forked children."""
    with umem.paging() as pages:
        yield
    if os.getpid() == process:  # after the block, at whose end a GPU reports the last moves
        click.echo(str(pages), err=True)


def _report(process: int) -> None:
    """Print status and figures at exit; not in forked children."""
    if os.getpid() != process:
        return  # a child by fork that came to the end of the script
    click.echo(umem.status().table(), err=True)
    try:
        from umem.devices import current_device

        device = current_device()
    except UmemError:
        import resource  # Unix alone

        most = KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, by getrusage(2)
        click.echo(f"{'host':<14}{format_bytes(most)} at most, of this process", err=True)
        return
    figures = device.figures
    if figures is not None and figures.seconds is not None:
        # The software GPU's model is told of what the pools take from the driver.
        of = "reserved by the pools" if device.backend == "cupy" else "of tensors"
        click.echo(
            f"{'peak':<14}{format_bytes(figures.peak_bytes)} {of}\n"
            f"{'moved':<14}{format_bytes(figures.moved_bytes)} (simulated)\n"
            f"{'time':<14}{format_seconds(figures.seconds)} (simulated)",
            err=True,
        )
