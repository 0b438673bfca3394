"""Files that a command writes: refused where something is in the way, written whole or not."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from umem import extras


def refuse(paths: Sequence[Path], sources: Sequence[Path], *, force: bool) -> None:
    """Refuse what cannot or should not be written, before any work is done.

    Raises:
        click.ClickException: a file exists and ``force`` is not given, is a source, is named
            twice, or its folder does not exist.
    """
    seen = {source.resolve() for source in sources}
    for path in paths:
        if path.resolve() in seen:
            raise click.UsageError(f"{path} is named twice; each file needs a name of its own")
        seen.add(path.resolve())
        if path.is_dir():
            raise click.ClickException(f"{path} is a folder; name a file in it")
        if path.exists() and not force:
            raise click.ClickException(f"{path} exists; --force overwrites it")
        if not path.parent.is_dir():
            raise click.ClickException(f"there is no folder {path.parent} to write {path.name} to")


def refuse_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before any work is done.

    Raises:
        click.ClickException: its name does not end in ``.png``, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        name = path.with_suffix(".png").name
        raise click.UsageError(f"a picture is a PNG: name it {name}, not {path.name}")
    if not _has_matplotlib():
        raise click.ClickException(f"pictures need matplotlib; {extras.command('plot')}")


def _has_matplotlib() -> bool:
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"] is not None
    return importlib.util.find_spec("matplotlib") is not None


def write(path: Path, make: Callable[[Path], None]) -> None:
    """Have ``make`` write a file under another name, and rename it when it is complete.

    Raises:
        click.ClickException: it cannot be written; what was there is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        make(partial)
        partial.replace(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise click.ClickException(f"cannot write {path}: {why}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
