"""The ``umem`` command: one small file a subcommand, loaded when it is called.

People call it; `umem.choosing` runs ``umem run --dry`` in processes of their own. This file has the
table of commands, and turns errors of umem into one sentence.

    doctor.py           is ``umem doctor``
    demo.py             is ``umem demo``
    report.py           is ``umem report``
    replay.py           is ``umem replay``
    batch.py            is ``umem batch``
    advise.py           is ``umem advise``
    compat.py           is ``umem compat``
    graph_cut.py        is ``umem graph cut``
    kernel_commands.py  is ``umem kernels``
    choose.py           is ``umem choose``
    choose_script.py    is its answer for a program
    choose_onnx.py      is its answer for a model in ONNX
    script_options.py   has the options and tables that choose, batch and advise share
    run.py              is ``umem run``
    run_script.py       runs the program as ``__main__``, and advises where it ends with an error of
                        umem
    run_record.py       is ``--record``
    run_watch.py        is ``--watch``
    run_budget.py       is ``--budget``
    run_recompute.py    is ``--recompute`` and ``--workspace``
    run_resume.py       is ``--resume``
    run_ranks.py        is ``-n``: several ranks
    run_dry.py          is ``--dry``
    run_dry_gpus.py     is ``--all-gpus``: which GPUs have the memory
    dry_run.py          follows a dry run, and ends it once it has shown enough
    help_layout.py      puts commands and options under headings, and suggests nearest names
    files_and_sizes.py  checks limits and GPUs, and writes files that must not be overwritten
    startup/            is on the path of the processes that a script starts

- Text that umem did not write itself is made printable before it reaches a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

from umem import __version__
from umem._common.files import reason
from umem._common.printable import sentence
from umem.cli.help_layout import Commands
from umem.errors import UmemError

HEADINGS = {
    "Run a program": ("run", "demo"),
    "Before you rent a GPU": ("choose", "batch", "advise", "replay"),
    "See where the memory goes": ("report",),
    "This machine": ("doctor", "compat", "kernels"),
    "Data": ("graph",),
}
"""The commands, by what a user wants to do."""
COMMANDS = tuple(name for names in HEADINGS.values() for name in names)

FILES = {"graph": "graph_cut", "kernels": "kernel_commands"}
"""Commands whose file bears another name, as theirs is taken."""
EXTENDED = ("choose", "report")
"""Commands that other packages may add to."""


def _load_extensions() -> None:
    """Import the modules that other packages name in the entry-point group ``umem``.

    Raises:
        click.ClickException: one of them cannot be imported; names it and its package.
    """
    for entry in entry_points(group="umem"):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "unknown"
            what = f"{entry.name!r} of the package {package!r}"
            raise click.ClickException(
                f"{what} cannot be loaded: {sentence(repr(error))}. Repair or uninstall the package"
            ) from error


class _Lazy(Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        if name in EXTENDED:
            _load_extensions()
        module = importlib.import_module(f"umem.cli.{FILES.get(name, name)}")
        command: click.Command = module.command
        return command

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        with _in_a_sentence():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _in_a_sentence():
            try:
                return super().invoke(ctx)
            finally:
                _flush()


@contextlib.contextmanager
def _in_a_sentence() -> Iterator[None]:
    """Turn an error into one printable sentence, which click prints before it exits.

    click itself repeats what it was given, such as the name of an option.
    """
    try:
        yield
    except UmemError as error:
        raise click.ClickException(sentence(str(error))) from error
    except click.ClickException as error:
        vars(error)["message"] = sentence(error.message)
        raise
    except OSError as error:
        if error.filename is not None or error.errno == errno.EPIPE:
            raise  # not of what is printed; or nobody reads it, which click knows of
        _give_up_printing()
        raise click.ClickException(f"cannot write the output: {reason(error)}") from error


def _flush() -> None:
    """Write what is printed while a failure can still be told."""
    with contextlib.suppress(AttributeError, ValueError):  # a script closed it, or put its own
        sys.stdout.flush()


def _give_up_printing() -> None:
    """Redirect the rest of standard output to nowhere: Python would retry at exit, and complain."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it has no such thing
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.command(
    cls=_Lazy, headings=HEADINGS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="umem")
def main() -> None:
    """Run CuPy and Chainer programs that need more memory than the GPU has.

    \b
    Examples:

    \b
        # Run a program in unified memory
        umem run --mode managed train.py
        # Predict whether it fits a T4, without a GPU
        umem run --dry t4 train.py
    """


if TYPE_CHECKING:
    from umem.cli.dry_run import DryRun
    from umem.cli.files_and_sizes import write
    from umem.cli.run_script import Program, run_program
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__, dry_run="DryRun", files_and_sizes="write", run_script="Program run_program"
    )
