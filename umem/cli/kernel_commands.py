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


@click.group("kernels")
def command() -> None:
    """Compiled kernels of the software GPU: list, move to other machines, compile ahead.

    UMEM_KERNEL_TARGET (native or portable) says for which processors, UMEM_KERNEL_CACHE_SIZE how
    much they may take.
    """


@command.command("list")
def list_() -> None:
    """Show how many there are, and for which processors."""
    folder, now = kernel_folder(), time.time()
    found = kernel_groups(folder)
    limit = format_bytes(kernel_cache_limit())
    say(f"{short(folder)}: {_size(found)} of at most {limit}")
    for group in found:
        target, _, maker = group.label.partition("-")
        what = f"{target}, compiler {maker}" if target else "of earlier versions"
        ages = f"the oldest {_age(now - group.made)}, used {_age(now - group.used)} ago"
        say(f"  {what}: {group.count} kernels, {format_bytes(group.nbytes)}, {ages}")


@command.command("export")
@click.argument("file", type=_FILE)
@click.option("--force", is_flag=True, help="Overwrite the file.")
def export(file: Path, force: bool) -> None:
    """Write those of this compiler and target to FILE, for `umem kernels import`."""
    refuse([file], [], force=force)
    count = 0

    def fill(target: IO[bytes]) -> None:
        nonlocal count
        count = export_kernels(Toolchain(), target, __version__)

    write(file, fill, force=force)
    say(f"Wrote {count} kernels to {short(file)}\nNext, elsewhere: umem kernels import FILE")


@command.command("import")
@click.argument("file", type=_FILE)
def import_(file: Path) -> None:
    """Add the kernels of FILE, which `umem kernels export` wrote.

    They are machine code: import only what you or your CI made.
    """
    folder = kernel_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target, count = import_kernels(file, folder, __version__)
    except (UmemError, OSError) as error:
        raise click.ClickException(f"{short(file)}: {reason(error)}") from error
    say(f"{count} kernels are new in {short(folder)}")
    if target != Processors.wanted().name:
        say(f"They are used with {TARGET_VARIABLE}={target}")


@command.command("trim")
@click.argument("size", required=False)
def trim(size: str | None) -> None:
    """Remove those not used for the longest time, down to SIZE, such as 500MiB."""
    try:
        limit = kernel_cache_limit() if size is None else parse_bytes(size, "SIZE")
    except SizeError as error:
        raise click.UsageError(str(error)) from error
    folder = kernel_folder()
    say(f"Removed {len(trim_kernels(folder, limit))} files of {short(folder)}")


@command.command("clear")
def clear() -> None:
    """Remove all of them, and precompiled headers; programs compile again what they need."""
    folders = (kernel_folder(), headers_folder())
    say(f"Removed {format_bytes(sum(map(clear_kernels, folders)))}")


@command.command("warm")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Default: all.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; one for each core by default.")
def warm(dtypes: tuple[str, ...], jobs: int | None) -> None:
    """Compile ahead what most CuPy programs use.

    Arithmetic, comparisons, casts, reductions and gathers of float32, float64, int32, int64, bool.
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
                raise FileError(last[0] if last else "a worker ended")
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
