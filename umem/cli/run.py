"""``umem run SCRIPT``: an old script, unchanged, with the Chainer layer on and memory in a mode."""

from __future__ import annotations

import importlib
import runpy
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import click

import umem
from umem.compat import install
from umem.errors import MissingDependencyError, UmemError
from umem.units import format_bytes, format_seconds

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("run", context_settings=_SETTINGS)
@click.option("--mode", type=click.Choice(["managed", "hybrid", "unmanaged"]),
              help="Where allocations come from (default: as without umem).")
@click.option("--limit", metavar="SIZE", help="The most bytes the mode may reserve, as 24GiB.")
@click.option("--prefetch", is_flag=True, help="Make memory resident as it is handed out.")
@click.option("--virtual", metavar="GPU", help="Follow the run with the model of a GPU.")
@click.option("--vram", metavar="SIZE", help="VRAM of the virtual GPU instead of the table's.")
@click.option("--report", is_flag=True, help="Say at the end what was used, on standard error.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    mode: str | None, limit: str | None, prefetch: bool, virtual: str | None, vram: str | None,
    report: bool, script: Path, arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Run SCRIPT unchanged, with Chainer made to work on today's NumPy, Python and CuPy.

    What follows SCRIPT is the script's own. Its exit code and its traceback are its own too.
    """
    if not script.is_file():
        raise click.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    for name, value in (("--limit", limit), ("--prefetch", prefetch)):
        if value and not mode:
            raise click.UsageError(f"{name} needs a --mode")
    if vram and not virtual:
        raise click.UsageError("--vram needs --virtual GPU")
    with ExitStack() as stack:
        try:
            _prepare(stack, mode, limit, prefetch, virtual, vram, report)
        except UmemError as error:
            raise click.ClickException(str(error)) from error
        code = _run(script, arguments)
    raise SystemExit(code)


def _prepare(
    stack: ExitStack, mode: str | None, limit: str | None, prefetch: bool, virtual: str | None,
    vram: str | None, report: bool,
) -> None:  # fmt: skip
    """Put everything in place; the stack takes it away again, the report first."""
    try:
        install()
    except MissingDependencyError:  # a script without Chainer is welcome too
        if virtual:
            raise
    if virtual:
        importlib.import_module("umem.chainer")  # what the virtual GPU follows
        stack.enter_context(umem.virtual_gpu(virtual, vram))
    if mode:
        stack.enter_context(umem.enable(mode, limit=limit, prefetch=prefetch))  # type: ignore[arg-type]
    if report:
        stack.callback(_report)


def _run(script: Path, arguments: tuple[str, ...]) -> int | str | None:
    """Run the script as ``__main__`` and return its exit code."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent.resolve())
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        return stop.code
    except KeyboardInterrupt as error:
        _print_own_traceback(error, script)
        return 130
    except BaseException as error:
        _print_own_traceback(error, script)
        return 1
    return 0


def _print_own_traceback(error: BaseException, script: Path) -> None:
    """The traceback as Python prints it for the script alone."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)


def _report() -> None:
    click.echo(str(umem.status()), err=True)
    try:
        from umem.devices.virtual import VirtualGPU
        from umem.memory import current_device

        device = current_device()
    except UmemError:
        return
    if isinstance(device, VirtualGPU):
        figures = device.figures
        moved = format_bytes(figures.migrated_in_bytes + figures.migrated_out_bytes)
        click.echo(
            f"{'peak':<14}{format_bytes(figures.peak_bytes)} of tensors\n"
            f"{'moved':<14}{moved} (simulated)\n"
            f"{'time':<14}{format_seconds(figures.seconds)} (simulated)",
            err=True,
        )
