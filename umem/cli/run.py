"""``umem run SCRIPT``: an old script, unchanged, with the Chainer layer on and memory in a mode."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

import click

import umem
from umem.cli.run_record import Options, Recording
from umem.cli.run_watch import Watching
from umem.compat.finder import arm
from umem.compat.installation import find_package
from umem.errors import OutOfMemoryError, UmemError
from umem.memory import environment
from umem.printable import command_line, shown
from umem.trace.recording.kept_steps import Steps
from umem.trace.stacks import end_at_user
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
@click.option("--vram", metavar="SIZE", help="VRAM of the virtual GPU instead of the table's.")
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
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    mode: str | None,
    limit: str | None,
    prefetch: bool,
    virtual: str | None,
    vram: str | None,
    report: bool,
    record: Path | None,
    steps: str | None,
    stacks: bool,
    no_workspace: bool,
    stop: bool,
    force: bool,
    watch: bool,
    traceback: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT unchanged, with Chainer made to work on today's NumPy, Python and CuPy.

    What follows SCRIPT is the script's own. Its exit code and its traceback are its own too.
    Options go before the variables UMEM_MODE, UMEM_LIMIT and UMEM_PREFETCH, and the script and
    the processes that it starts find them there. Chainer is mended in those processes as well;
    the mode holds in this one, and where another calls umem.enable().

    --record keeps steps 2 and 3, where a step ends with an optimizer's update, and then records
    no more; --stop ends the script there.
    """
    source = _read(script)
    if vram and not virtual:
        raise click.UsageError("--vram needs --virtual GPU")
    recording = _recording(record, steps, stacks, no_workspace, stop, force, script)
    watching = Watching() if watch else None
    with ExitStack() as stack:
        try:
            if watching is not None:
                watching.begin(stack)
            _prepare(stack, mode, limit, prefetch, virtual, vram, report)
            if recording is not None:
                _import_chainer()
                recording.begin(stack)
            if watching is not None:
                _import_chainer()
                watching.follow(stack)
        except UmemError as error:
            raise click.ClickException(str(error)) from error
        code, hint = _run(script, source, arguments, virtual, vram, traceback)
    if hint is not None:
        click.echo(hint, err=True)
    if recording is not None and recording.error is not None and code in (0, None):
        code = 1
    raise SystemExit(code)


def _recording(
    path: Path | None,
    steps: str | None,
    stacks: bool,
    no_workspace: bool,
    stop: bool,
    force: bool,
    script: Path,
) -> Recording | None:
    """What is to be recorded, if anything."""
    if path is None:
        options = {
            "--steps": steps,
            "--stacks": stacks,
            "--no-workspace": no_workspace,
            "--stop": stop,
            "--force": force,
        }
        given = [name for name, value in options.items() if value]
        if given:
            raise click.UsageError(f"{given[0]} needs --record FILE")
        return None
    try:
        chosen = Steps() if steps is None else Steps.parse(steps)
    except UmemError as error:
        raise click.BadParameter(str(error), param_hint="--steps") from error
    if stop and chosen.last is None:
        raise click.UsageError("--stop needs --steps that end; all of them have no end")
    return Recording(Options(path, chosen, force, stacks, not no_workspace, stop), script)


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


def _prepare(
    stack: ExitStack,
    mode: str | None,
    limit: str | None,
    prefetch: bool,
    virtual: str | None,
    vram: str | None,
    report: bool,
) -> None:
    """Put everything in place; the stack takes it away again, the report first."""
    chosen = mode or environment.mode()
    on = chosen not in (None, "off")
    for name, value in (("--limit", limit), ("--prefetch", prefetch)):
        if value and not on:
            raise click.UsageError(f"{name} needs a --mode")
    arm()
    if virtual:
        _import_chainer()
        stack.enter_context(umem.virtual_gpu(virtual, vram))
    if on:
        stack.enter_context(umem.enable(chosen, limit=limit, prefetch=prefetch or None))  # type: ignore[arg-type]
    stack.enter_context(_variables(mode, limit, prefetch))
    if report:
        stack.callback(_report, os.getpid())


def _import_chainer() -> None:
    """What recorders and the virtual GPU follow; a script without Chainer is welcome too."""
    if find_package() is not None:
        importlib.import_module("umem.chainer")


@contextmanager
def _variables(mode: str | None, limit: str | None, prefetch: bool) -> Iterator[None]:
    """What the script and its processes find in the environment, for the length of the run."""
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


def _run(
    script: Path,
    source: bytes,
    arguments: tuple[str, ...],
    virtual: str | None,
    vram: str | None,
    whole: bool,
) -> tuple[int | str | None, str | None]:
    """Run the script as ``__main__``, as Python would: its exit code, and what to do about it.

    Its module stays ``__main__``: what runs at exit, or is pickled, looks there.
    """
    path = os.path.abspath(script)
    sys.argv = [str(script), *arguments]
    if not getattr(sys.flags, "safe_path", False):  # python -P, from 3.11 on
        sys.path[0] = str(Path(path).resolve().parent)
    module = sys.modules["__main__"] = _main_module(path)
    code: int | str | None = 0
    hint = None
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        _show(error, path, whole)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        hint = advice(error, [str(script), *arguments], virtual, vram)
    _wait_for_threads()
    return code, hint


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = path, None
    module.__loader__ = SourceFileLoader("__main__", path)
    return module


def _show(error: BaseException, path: str, whole: bool) -> None:
    """The traceback as Python shows it for the script alone, by the script's own hook if any.

    That of an error of umem's ends at the script's own line, unless the ``whole`` is wanted.
    """
    if isinstance(error, UmemError) and not whole:
        end_at_user(error)
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _wait_for_threads() -> None:
    # Python waits too, but later: they still need what is taken away before.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


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
    if figures is not None:
        moved = format_bytes(figures.migrated_in_bytes + figures.migrated_out_bytes)
        click.echo(
            f"{'peak':<14}{format_bytes(figures.peak_bytes)} of tensors\n"
            f"{'moved':<14}{moved} (simulated)\n"
            f"{'time':<14}{format_seconds(figures.seconds)} (simulated)",
            err=True,
        )


_NO_GPU = "CUDA environment is not correctly set up"
"""How Chainer begins to say that it has no GPU."""
_NO_NUMBER = re.compile(
    r"only 0-dimensional arrays can be converted to Python scalars"
    r"|%\w format: a real number is required, not numpy\.ndarray"
)
"""What NumPy says from 2.4 on where an array of one element was taken for a number before."""


def advice(error: BaseException, words: list[str], gpu: str | None, vram: str | None) -> str | None:
    """The way out of an error, where umem knows one; None elsewhere.

    Args:
        words: the script and its arguments.
        gpu: the virtual GPU that the script ran on, if any.
        vram: what it had instead of the table's, if anything.
    """
    causes = list(_causes(error))
    if any(isinstance(cause, OutOfMemoryError) for cause in causes):
        asked = ["--gpu", gpu or "t4", *(["--vram", vram] if vram else [])]
        return _what_it_needs(command_line(*words), command_line(*asked))
    if any(isinstance(cause, RuntimeError) and str(cause).startswith(_NO_GPU) for cause in causes):
        follows = "" if gpu is None else f", which the virtual {gpu} follows"
        return (
            f"umem: Chainer finds no GPU here. Have the script compute with NumPy{follows}: "
            "most of Chainer's own take -g -1, --gpu -1 or --device -1"
        )
    if any(isinstance(c, TypeError) and _NO_NUMBER.fullmatch(str(c)) for c in causes):
        return (
            "umem: NumPy up to 2.3 took an array of shape (1,) for a number, with a warning; "
            "newer ones do not. Write a.item() for int(a) and float(a), or run the script as it "
            "is with the older one: pip install 'numpy<2.4'"
        )
    return None


def _what_it_needs(command: str, asked: str) -> str:
    return (
        "umem: what the script would need is told by a recording of two steps, made where there "
        "is room for them (without --virtual, or with --mode managed):\n"
        f"  umem run --record out/run.umem.gz {command}\n"
        f"  umem choose out/run.umem.gz {asked}"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from, each once: a program can tie them in a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
