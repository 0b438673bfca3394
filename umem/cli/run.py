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
from umem.units import format_bytes, format_seconds


class _RunCommand(click.Command):
    """A command that refuses an option given twice, of which click would take the last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        _, _, given = self.make_parser(ctx).parse_args([*args])
        for option, count in Counter(given).items():
            is_one = isinstance(option, click.Option) and not (option.is_flag or option.multiple)
            if count > 1 and is_one:
                raise click.UsageError(f"{option.opts[0]} is given more than once")
        return super().parse_args(ctx, args)


# What follows the script is its own; an unknown option before it is a mistake.
@click.command("run", cls=_RunCommand, context_settings={"allow_interspersed_args": False})
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
@click.option(
    "--kernel-seconds",
    type=float,
    metavar="S",
    help="With --software: end a kernel that takes so much processor time.",
)
@click.option("--not-strict", is_flag=True, help="With --software: accept what CUDA refuses.")
@click.option(
    "--devices",
    type=click.IntRange(1, MOST_DEVICES),
    metavar="N",
    help="With --software: the number of GPUs.",
)
@click.option("--vram", metavar="SIZE", help="VRAM of that GPU instead of the table's.")
@click.option(
    "--recompute",
    metavar="BUDGET",
    help="Train under umem.chainer.Recompute: 12GiB, card, 60% of a plain step, or min.",
)
@click.option(
    "--workspace",
    metavar="SIZE",
    help="Cap what Chainer's convolutions and poolings need inside, such as 16MiB.",
)
@click.option(
    "--budget",
    metavar="SIZE",
    help="Choose, by dry runs, what keeps SCRIPT to so much VRAM, and run it with that.",
)
@click.option("--gpu", metavar="NAME", help="With --budget: a GPU of the table like the one here.")
@click.option(
    "--resume",
    metavar="OPTIONS",
    help="Save a Trainer's run and go on from it: every=500 or every=1epoch,keep=3,folder=PATH.",
)
@click.option(
    "--old-numpy",
    multiple=True,
    metavar="PACKAGE",
    help="Lend a package's modules the names that NumPy has removed; may be repeated.",
)
@click.option("--report", is_flag=True, help="Say at the end what was used, on standard error.")
@click.option("--paging", is_flag=True, help="Say at the end which pages moved, by line.")
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
@click.option("--watch", is_flag=True, help="Print memory and speed while the script runs.")
@click.option("--traceback", is_flag=True, help="Show umem's own part of its errors' tracebacks.")
@with_dry
@with_ranks
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT unchanged, with Chainer made to work on today's NumPy, Python and CuPy.

    What follows SCRIPT is the script's own. Its exit code and its traceback are its own too.
    Options go before the variables UMEM_MODE, UMEM_LIMIT and UMEM_PREFETCH, and the script and
    the processes that it starts find them there. Chainer is mended in those processes as well;
    the mode holds in this one, and where another calls umem.enable().

    --paging says which managed memory moved, and the lines that allocated it; on a GPU it needs
    cupti-python.

    --record keeps steps 2 and 3, where a step ends with an optimizer's update, and then records
    no more; --stop ends the script there.

    --budget 8GiB runs SCRIPT dry under each technique in plain memory, with that much VRAM, and
    then for real under the quickest that fits. The peak that is said at the end is measured.

    --recompute keeps each training step within a budget, and says at the end what it took.

    --old-numpy chainercv lets the modules of chainercv, and no others, see np.float, np.product and
    the like, and pkg_resources where it is not installed (docs/how-to/run-old-scripts.md).

    --resume saves the whole run beside the Trainer's results; the same command goes on from there.

    --dry t4 tells whether the script fits on that GPU and how long it takes there: it runs without
    its arithmetic until its steps are alike, and writes to a scratch folder
    (docs/reference/dry-runs.md).

    -n runs the script as ranks of MPI, by mpiexec; where one fails, all are ended.
    """
    budgeting = BudgetOption(options)
    drying = DryOptions(options, has_ranks=options["ranks"] is not None)
    ranking = RankOptions(options)
    flags = _RunOptions(**options)
    program = Program.found(script, arguments, is_module=flags.module)
    if flags.virtual and flags.software:
        raise click.UsageError("--virtual follows NumPy arrays, --software CuPy's: one of the two")
    if flags.vram and not (flags.virtual or flags.software):
        raise click.UsageError("--vram needs --virtual GPU or --software GPU")
    for name, given in (
        ("--checked", flags.checked), ("--no-model", flags.no_model), ("--devices", flags.devices),
        ("--not-strict", flags.not_strict), ("--kernel-seconds", flags.kernel_seconds is not None),
    ):  # fmt: skip
        if given and not flags.software:
            raise click.UsageError(f"{name} needs --software GPU")
    if flags.recompute and flags.record:
        raise click.UsageError(
            "--record would keep the steps in which --recompute learns: record without it"
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
        raise click.UsageError("--stop needs --steps that end; all of them have no end")
    keeper = Keeper(steps, flags.stacks, not flags.no_workspace)
    extra = {"stop": flags.stop, "force": flags.force, "at_end": flags.dry}
    return Recording(flags.record, keeper, program.name, **extra)


def _lend_names(package: str, program: Program) -> LentNames:
    """Lend a package, which may lie beside the program, the removed names of NumPy."""
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
            raise click.UsageError(f"{name} needs a --mode")
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
        OLD_NUMPY: ",".join(flags.old_numpy),
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
