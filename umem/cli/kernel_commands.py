"""``umem kernels``: the software GPU's compiled kernels on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import click

from umem import __version__
from umem._common.files import reason
from umem._common.printable import short
from umem.cli.files_and_sizes import refuse, say, write
from umem.cli.help_layout import Commands, Names
from umem.errors import FileError, SizeError, UmemError
from umem.host_cuda import (
    DTYPES,
    TARGET_VARIABLE,
    KernelGroup,
    Processors,
    Toolchain,
    clear_kernels,
    export_kernels,
    headers_folder,
    import_kernels,
    kernel_cache_limit,
    kernel_folder,
    kernel_groups,
    trim_kernels,
)
from umem.units import format_bytes, parse_bytes

_FILE = click.Path(path_type=Path, dir_okay=False)
_DTYPE_HELP = f"One of {', '.join(DTYPES)} (default: all). May be repeated."


@click.group("kernels", cls=Commands)
def command() -> None:
    """List, move or compile the software GPU's kernels.

    UMEM_KERNEL_TARGET sets the processors that kernels are compiled for: native or portable.
    UMEM_KERNEL_CACHE_SIZE limits their size on disk.

    \b
    Examples:

    \b
        # List the kernels on this machine
        umem kernels list
        # Compile the most common kernels, for example in CI
        umem kernels warm --dtype float32
    """


@command.command("list")
def list_() -> None:
    """Show the number of kernels, and their processors.

    \b
    Examples:

    \b
        # List the kernels on this machine
        umem kernels list
        # List those of another cache folder
        XDG_CACHE_HOME=build umem kernels list
    """
    folder, now = kernel_folder(), time.time()
    found = kernel_groups(folder)
    limit = format_bytes(kernel_cache_limit())
    say(f"{short(folder)}: {_size(found)} of at most {limit}")
    for group in found:
        target, _, maker = group.label.partition("-")
        what = f"{target}, compiler {maker}" if target else "from earlier versions of umem"
        ages = f"the oldest {_age(now - group.made)}, used {_age(now - group.used)} ago"
        say(f"  {what}: {group.count} kernels, {format_bytes(group.nbytes)}, {ages}")


@command.command("export")
@click.argument("file", type=_FILE)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def export(file: Path, force: bool) -> None:
    """Write the kernels to a file, for another machine.

    The file has the kernels of this compiler and of UMEM_KERNEL_TARGET.

    \b
    Examples:

    \b
        # Write the kernels to a file
        umem kernels export kernels.zip
        # Overwrite the file of an earlier export
        umem kernels export --force kernels.zip
    """
    refuse([file], [], force=force)
    count = 0

    def fill(target: IO[bytes]) -> None:
        nonlocal count
        count = export_kernels(Toolchain(), target, __version__)

    write(file, fill, force=force)
    say(
        f"Wrote {count} kernels to {short(file)}\nNext, on the other machine: umem kernels import "
        f"FILE"
    )


@command.command("import")
@click.argument("file", type=_FILE)
def import_(file: Path) -> None:
    """Add the kernels of a file that was exported.

    Kernels are machine code. Import only a file that you or your CI wrote.

    \b
    Examples:

    \b
        # Add the kernels of a file
        umem kernels import kernels.zip
        # Add them to another cache folder
        XDG_CACHE_HOME=build umem kernels import kernels.zip
    """
    folder = kernel_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target, count = import_kernels(file, folder, __version__)
    except (UmemError, OSError) as error:
        raise click.ClickException(f"{short(file)}: {reason(error)}") from error
    say(f"Added {count} kernels to {short(folder)}")
    if target != Processors.wanted().name:
        say(f"Set {TARGET_VARIABLE}={target} to use them")


@command.command("trim")
@click.argument("size", required=False)
def trim(size: str | None) -> None:
    """Remove the least recently used kernels.

    SIZE is the size to keep, such as 500MiB. The default is UMEM_KERNEL_CACHE_SIZE.

    \b
    Examples:

    \b
        # Keep the 500 MiB that were used last
        umem kernels trim 500MiB
        # Keep as much as UMEM_KERNEL_CACHE_SIZE allows
        umem kernels trim
    """
    try:
        limit = kernel_cache_limit() if size is None else parse_bytes(size, "SIZE")
    except SizeError as error:
        raise click.UsageError(str(error)) from error
    folder = kernel_folder()
    say(f"Removed {len(trim_kernels(folder, limit))} files from {short(folder)}")


@command.command("clear")
def clear() -> None:
    """Remove all kernels and precompiled headers.

    Programs compile the kernels that they need again.

    \b
    Examples:

    \b
        # Remove all kernels
        umem kernels clear
        # Remove those of another cache folder
        XDG_CACHE_HOME=build umem kernels clear
    """
    folders = (kernel_folder(), headers_folder())
    say(f"Removed {format_bytes(sum(map(clear_kernels, folders)))}")


@command.command("warm")
@click.option(
    "--dtype", "dtypes", multiple=True, type=Names(DTYPES), metavar="DTYPE", help=_DTYPE_HELP
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Processes (default: one per core)."
)
def warm(dtypes: tuple[str, ...], jobs: int | None) -> None:
    """Compile the kernels that most CuPy programs use.

    These are arithmetic, comparisons, casts, reductions and gathers.

    \b
    Examples:

    \b
        # Compile the common kernels of every dtype
        umem kernels warm
        # Compile those of float32, in two processes
        umem kernels warm --dtype float32 --jobs 2
    """
    folder = Toolchain().folder
    before, start = kernel_groups(folder), time.monotonic()
    jobs = jobs or len(os.sched_getaffinity(0))
    program = [sys.executable, "-m", "umem.host_cuda.common_kernels"]
    commands = [[*program, str(part), str(jobs), *(dtypes or DTYPES)] for part in range(jobs)]
    workers = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for argv in commands]
    try:
        for worker in workers:
            _, error = worker.communicate()
            if worker.returncode:
                last = error.strip().splitlines()[-1:]
                raise FileError(last[0] if last else "a compiling process ended early")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    count = sum(g.count for g in kernel_groups(folder)) - sum(g.count for g in before)
    say(f"Compiled {count} kernels in {time.monotonic() - start:.0f} s into {short(folder)}")


def _size(found: list[KernelGroup]) -> str:
    count = sum(group.count for group in found)
    return f"{count} kernels, {format_bytes(sum(group.nbytes for group in found))}"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
