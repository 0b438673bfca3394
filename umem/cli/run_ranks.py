"""``umem run -n``: the same script as several ranks, by MPI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

from umem.cli.files_and_sizes import say
from umem.launch import AskedRanks, run_ranks, this_rank

_OPTIONS = ("ranks", "hosts", "allow_root", "verbose", "threads")
_ROOT = Path(__file__).parents[2]


def with_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of several ranks to a command."""
    file = click.Path(path_type=Path)
    for option in (
        click.option("--verbose", is_flag=True, help="With -n: show the output of mpiexec itself."),
        click.option(
            "--threads",
            type=click.IntRange(1),
            metavar="N",
            help="With -n: NumPy threads per rank (default: OMP_NUM_THREADS, or 1).",
        ),
        click.option("--allow-root", is_flag=True, help="With -n: allow root to run ranks."),
        click.option(
            "--hosts",
            type=file,
            metavar="FILE",
            help="With -n: a file of host names, one per line.",
        ),
        click.option(
            "-n",
            "ranks",
            type=click.IntRange(1),
            metavar="N",
            help="Run SCRIPT as N ranks with mpiexec. If one fails, all are stopped.",
        ),
    ):
        command = option(command)
    return command


class RankOptions:
    """The role of a command in a job of ranks: launcher, rank, or neither.

    Args:
        options: the command's; those of ranks are taken out, and in a rank the file of a trace
            gets the rank's number.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        taken = {name: options.pop(name) for name in _OPTIONS}
        count = taken.pop("ranks")
        self._requested = None if count is None else AskedRanks(count, **taken)
        for name, value in taken.items():
            if value and count is None:
                raise click.UsageError(f"--{name.replace('_', '-')} needs -n N")
        rank = this_rank()
        if rank is not None and options["record"] is not None:
            options["record"] = rank_path(options["record"], rank.number)

    def start(self) -> None:
        """Run the command as ranks, if ranks are requested, and exit with their status."""
        if self._requested is None:
            return
        command = umem_run(*given_arguments(click.get_current_context(), _OPTIONS))
        raise SystemExit(run_ranks(command, self._requested, lambda line: say(line, err=True)))


def rank_path(path: Path, number: int) -> Path:
    """Insert a rank's number into a file name: ``run.umem.gz`` becomes ``run.rank0.umem.gz``.

    >>> print(rank_path(Path("out/run.umem.gz"), 3))
    out/run.rank3.umem.gz
    """
    name, dot, rest = path.name.partition(".")
    return path.with_name(f"{name}.rank{number}{dot}{rest}")


def umem_run(*arguments: str) -> list[str]:
    """Return the command by which another process of this umem runs ``umem run``."""
    code = f"import sys; sys.path[0] = {str(_ROOT)!r}; from umem.cli import main; main()"
    return [sys.executable, "-c", code, "run", *arguments]


def given_arguments(context: click.Context, without: Collection[str]) -> list[str]:
    """Return the command's options as given, but for some, and its script with its arguments."""
    script = str(context.params["script"]), *context.params["arguments"]
    return [*given_options(context, without), "--", *script]


def given_options(context: click.Context, without: Collection[str] = ()) -> list[str]:
    """Return the command's options as given, but for some."""
    arguments = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if isinstance(option, click.Option) and option.name not in without and value:
            for one in value if isinstance(value, tuple) else [value]:
                arguments += [option.opts[-1]] if option.is_flag else [option.opts[-1], str(one)]
    return arguments
