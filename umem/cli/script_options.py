"""Commands that run a script dry, choose, batch and advise: their options, their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import click
from rich.text import Text

from umem._common.printable import command_line
from umem.choosing import DryProgram
from umem.cli.files_and_sizes import print_result, spec_with_vram
from umem.cli.help_layout import Names
from umem.cli.run_script import Program
from umem.reports import Column, table, wrapped
from umem.units import format_bytes

NOTHING_FITS = 3
"""Exit status if nothing makes the program fit; 1 and 2 are errors."""

OF_DRY_RUNS = {
    "answers": "--answer",
    "writes": "--writes",
    "programs": "--programs",
    "old_numpy": "--old-numpy",
}
"""Options that each dry run of the script is given."""


def dry_options(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the options of `OF_DRY_RUNS` that are given, as on a command line."""
    found: list[str] = []
    for name, value in given.items():
        for one in (value,) if isinstance(value, str) else value or ():
            found += [OF_DRY_RUNS[name], one]
    return tuple(found)


def of_a_script(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the script and its GPU to a command, which is given a ``program``.

    The script is found, and the GPU looked up, before anything runs.
    """

    @wraps(command)
    def found(
        script: str,
        arguments: tuple[str, ...],
        gpu: str,
        vram: str | None,
        is_module: bool,
        **options: Any,
    ) -> Any:
        """Call the command with the program and its own options."""
        spec_with_vram(gpu, vram)
        if not script.endswith(".onnx"):
            Program.found(script, arguments, is_module=is_module)
        given = {name: options.pop(name) for name in OF_DRY_RUNS}
        program = DryProgram(script, arguments, gpu, vram, is_module, dry_options(given))
        return command(program=program, **options)

    for option in (
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
        click.argument("script"),
        click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as in python -m."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--old-numpy",
            multiple=True,
            metavar="PACKAGE",
            help="Give PACKAGE the names that NumPy has removed. May be repeated.",
        ),
        click.option(
            "--programs",
            type=Names(["stop", "run"]),
            metavar="HOW",
            help="Other programs that SCRIPT starts: stop (default) or run.",
        ),
        click.option(
            "--writes",
            type=Names(["scratch", "real"]),
            metavar="WHERE",
            help="Where SCRIPT writes files: scratch, a temporary folder (default), or real.",
        ),
        click.option(
            "--answer",
            "answers",
            multiple=True,
            metavar="FILE:LINE=VALUE",
            help="The value that a line of SCRIPT reads from the GPU. May be repeated.",
        ),
        click.option("--vram", metavar="SIZE", help="Usable VRAM, such as 8GiB."),
        click.option("--gpu", default="t4", show_default=True, metavar="NAME", help="The GPU."),
    ):
        found = option(found)
    return found


def print_search(
    found: Any, program: DryProgram, columns: Sequence[Column], sentence: str = "", *, as_json: bool
) -> None:
    """Print a search among a program's arguments: as JSON, or as a table with a sentence below.

    Args:
        found: the result, with the title of the GPU and its VRAM.
        columns: of the table.
        sentence: the sentence.
    """
    on = f"{found.title} with {format_bytes(found.vram_bytes)} of VRAM"
    title = f"{command_line(*program.argv())} on {on} (simulated)"

    def lines(width: int) -> Iterator[Text]:
        yield from (Text(line, style="bold") for line in wrapped(title, width, hang=2))
        yield from map(Text, (*table(columns, width), *wrapped(sentence, width, hang=2)))

    print_result(found, lines, as_json=as_json)
