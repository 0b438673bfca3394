"""Input and output of commands: limits, a GPU by name, files that must not be overwritten."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from umem._common import extras
from umem._common.as_json import json_text
from umem._common.files import check_target, reason, whole
from umem._common.printable import short
from umem._common.specs import GpuSpec, gpu_spec
from umem.errors import FileError, SizeError
from umem.trace import MAX_BYTES, MAX_EVENTS
from umem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.text import Text


def refuse(paths: Sequence[Path], sources: Sequence[Path], *, force: bool) -> None:
    """Refuse output files that cannot or should not be written, before any work.

    Raises:
        click.ClickException: a file exists and ``force`` is not given, is a source, is named
            twice, or its folder does not exist; a folder, a link or a device has its name.
    """
    seen = {os.path.realpath(source) for source in sources}
    for path in paths:
        if os.path.realpath(path) in seen:
            raise click.UsageError(
                f"{short(path)} is given twice. Give each file a name of its own"
            )
        seen.add(os.path.realpath(path))
        try:
            check_target(path, force=force, way_out="--force overwrites it")
        except FileError as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"cannot write {short(path)}: {reason(error)}") from None
        if not path.parent.is_dir():
            folder, name = short(path.parent), short(path.name)
            raise click.ClickException(f"cannot write {name}: there is no folder {folder}")


def refuse_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before any work.

    Raises:
        click.ClickException: its name does not end in ``.png``, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        name = path.with_suffix(".png").name
        raise click.UsageError(
            f"a picture is a PNG file. Name it {short(name)}, not {short(path.name)}"
        )
    if not _has_matplotlib():
        raise click.ClickException(f"pictures need matplotlib; {extras.command('plot')}")


def _has_matplotlib() -> bool:
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"] is not None
    return importlib.util.find_spec("matplotlib") is not None


def write(path: Path, make: Callable[[IO[bytes]], None], *, force: bool) -> None:
    """Write a file by ``make``; it gets its name once it is complete.

    Raises:
        click.ClickException: it cannot be written; what was there is as it was.
    """
    try:
        with whole(path, force=force) as file:
            make(file)
    except FileError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {short(path)}: {reason(error)}") from error


def say(text: str, *, err: bool = False) -> None:
    """Print a text.

    `click.echo` keeps every stream that it finds by itself for as long as the process lives, and
    where many commands run in one, as in tests, all that they printed with it.
    """
    click.echo(text, file=sys.stderr if err else sys.stdout)


def print_result(found: Any, lines: Callable[[int], Iterable[Text]], *, as_json: bool) -> None:
    """Print a result as JSON, or as the lines that are made of it for the terminal's width."""
    if as_json:
        say(json_text(found))
    else:
        print_lines(lines)


def print_lines(lines: Callable[[int], Iterable[Text]]) -> None:
    """Print the lines that are made for the terminal's width."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for line in lines(console.width):
        console.print(line, soft_wrap=True)
    sys.stdout.flush()


class _Bytes(click.ParamType):  # type: ignore[type-arg]
    """A size such as 2GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return parse_bytes(value, "--max-bytes")
        except SizeError as error:
            raise click.BadParameter(str(error), ctx, param) from None


def caps(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--max-events`` and ``--max-bytes`` to a command."""
    events = click.option(
        "--max-events",
        type=click.IntRange(1),
        default=MAX_EVENTS,
        metavar="N",
        help=f"Refuse a trace with more events (default: {MAX_EVENTS:,}).",
    )
    nbytes = click.option(
        "--max-bytes",
        type=_Bytes(),
        default=MAX_BYTES,
        metavar="SIZE",
        help=f"Refuse a trace of more bytes, decompressed (default: {format_bytes(MAX_BYTES)}).",
    )
    return events(nbytes(command))


def spec_with_vram(gpu: str, vram: str | None) -> GpuSpec:
    """Return a GPU of the table, with the given usable VRAM if any.

    Raises:
        UnknownGpuError, SizeError: see `umem.virtual_gpu`.
    """
    spec = gpu_spec(gpu)
    return spec if vram is None else spec.with_vram(parse_bytes(vram, "vram"))
