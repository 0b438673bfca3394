"""Input and output of commands: sizes of a step, traces, files that must not be overwritten."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import click

from umem import extras
from umem.errors import FileError, SizeError
from umem.files import check_target, reason, whole
from umem.printable import quoted, short
from umem.trace.axes import StepSize
from umem.trace.file import MAX_BYTES, MAX_EVENTS
from umem.trace.trace import Trace
from umem.units import format_bytes, parse_bytes


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
                f"{short(path)} is named twice; each file needs a name of its own"
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
            raise click.ClickException(f"there is no folder {folder} to write {name} to")


def refuse_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before any work.

    Raises:
        click.ClickException: its name does not end in ``.png``, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        name = path.with_suffix(".png").name
        raise click.UsageError(f"a picture is a PNG: name it {short(name)}, not {short(path.name)}")
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


class _Bytes(click.ParamType):  # type: ignore[type-arg]
    """A size such as 2GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return parse_bytes(value, "--max-bytes")
        except SizeError as error:
            raise click.BadParameter(str(error), ctx, param) from None


class Caps(NamedTuple):
    """The limits that `umem.Trace.load` takes."""

    max_events: int
    max_bytes: int


def caps(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--max-events`` and ``--max-bytes`` to a command."""
    events = click.option(
        "--max-events",
        type=click.IntRange(1),
        default=MAX_EVENTS,
        metavar="N",
        help=f"Read traces of at most this many events (default: {MAX_EVENTS:,}).",
    )
    nbytes = click.option(
        "--max-bytes",
        type=_Bytes(),
        default=MAX_BYTES,
        metavar="SIZE",
        help=f"Read at most this much text, decompressed (default: {format_bytes(MAX_BYTES)}).",
    )
    return events(nbytes(command))


def load(paths: Sequence[Path], caps: Caps) -> list[Trace]:
    """Read traces, within the limits given by options.

    Raises:
        TraceError: see `Trace.load`.
    """
    return [Trace.load(path, **caps._asdict()) for path in paths]


def one_trace(paths: Sequence[Path], sizes: Sequence[StepSize] | None, caps: Caps) -> Trace:
    """Read one trace from files; files of several sizes are joined.

    Raises:
        click.UsageError: other sizes than files. UmemError: see `Trace.load`, `Trace.join`.
    """
    if sizes is None and len(paths) > 1:
        raise click.UsageError(
            f"{len(paths)} traces need --sizes, the size that each was recorded at: --sizes 4,8"
        )
    if sizes is not None and len(sizes) != len(paths):
        raise click.UsageError(
            f"--sizes names {_counted(len(sizes), 'size')}, and there "
            f"{'is' if len(paths) == 1 else 'are'} {_counted(len(paths), 'trace')}: each has one"
        )
    loaded = load(paths, caps)
    return loaded[0] if sizes is None else Trace.join(loaded, sizes)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class StepSizeType(click.ParamType):  # type: ignore[type-arg]
    """An integer, or one for each axis by name."""

    name = "size"

    def convert(self, value: object, param: object, ctx: object) -> StepSize:
        return _size(str(value), "--size")


class StepSizesType(click.ParamType):  # type: ignore[type-arg]
    """Integers separated by commas, or sizes by axis separated by semicolons."""

    name = "sizes"

    def convert(self, value: object, param: object, ctx: object) -> tuple[StepSize, ...]:
        """Parse sizes separated by commas, or sizes by axis separated by semicolons."""
        text = str(value)
        parts = text.split(";") if "=" in text else text.split(",")
        try:
            return tuple(_size(part, "--sizes") for part in parts)
        except click.BadParameter:
            raise click.BadParameter(
                "sizes are whole numbers with commas, such as 4,8, or along axes "
                f"'batch=4,length=16;batch=8,length=16'; got {quoted(value)}",
                param_hint="--sizes",
            ) from None


def _size(text: str, option: str) -> StepSize:
    """Parse one size: an integer, or integers by axis."""
    try:
        if "=" not in text:
            return int(text)
        pairs = [part.split("=") for part in text.split(",")]
        found = {axis.strip(): int(value) for axis, value in pairs}
        if len(found) < len(pairs):
            raise ValueError("an axis twice")
        return found
    except ValueError:
        raise click.BadParameter(
            "a size is a whole number, or one for each axis, such as batch=64,length=512; "
            f"got {quoted(text)}",
            param_hint=option,
        ) from None


class NamesSuccessors(click.Command):
    """A command that names the successors of options that it had.

    Attributes:
        successors: by option, the command line that replaces it.
    """

    successors: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options; for a removed one the error names its successor."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in self.successors:
                raise
            raise click.UsageError(
                f"{ctx.command_path} has no {error.option_name} any more; run "
                f"{self.successors[error.option_name]}",
                ctx,
            ) from None
