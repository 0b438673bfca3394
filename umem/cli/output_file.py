"""Files that a command writes: refused where something is in the way, written whole or not."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import click

from umem import extras
from umem.errors import FileError
from umem.files import check_target, reason, whole
from umem.shown import shown


def refuse(paths: Sequence[Path], sources: Sequence[Path], *, force: bool) -> None:
    """Refuse what cannot or should not be written, before any work is done.

    Raises:
        click.ClickException: a file exists and ``force`` is not given, is a source, is named
            twice, or its folder does not exist; a folder, a link or a device has its name.
    """
    seen = {os.path.realpath(source) for source in sources}
    for path in paths:
        if os.path.realpath(path) in seen:
            raise click.UsageError(
                f"{shown(path)} is named twice; each file needs a name of its own"
            )
        seen.add(os.path.realpath(path))
        try:
            check_target(path, force=force, way_out="--force overwrites it")
        except FileError as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"cannot write {shown(path)}: {reason(error)}") from None
        if not path.parent.is_dir():
            folder, name = shown(path.parent), shown(path.name)
            raise click.ClickException(f"there is no folder {folder} to write {name} to")


def refuse_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before any work is done.

    Raises:
        click.ClickException: its name does not end in ``.png``, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        name = path.with_suffix(".png").name
        raise click.UsageError(f"a picture is a PNG: name it {shown(name)}, not {shown(path.name)}")
    if not _has_matplotlib():
        raise click.ClickException(f"pictures need matplotlib; {extras.command('plot')}")


def _has_matplotlib() -> bool:
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"] is not None
    return importlib.util.find_spec("matplotlib") is not None


def write(path: Path, make: Callable[[IO[bytes]], None], *, force: bool) -> None:
    """Have ``make`` write a file, which is there when it is complete.

    Raises:
        click.ClickException: it cannot be written; what was there is as it was.
    """
    try:
        with whole(path, force=force) as file:
            make(file)
    except FileError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {shown(path)}: {reason(error)}") from error
