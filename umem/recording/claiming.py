"""A file that will be written later: refused now where that cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from umem.errors import FileError, TraceError
from umem.files import check_folder, check_target, reason
from umem.shown import shown

_WAY_OUT = "name another file, or overwrite it (--force, force=True)"


@contextlib.contextmanager
def claimed(path: Path, *, force: bool) -> Iterator[None]:
    """Make sure that a trace can be written at the end of the block; makes its folder.

    Folders that were made and hold nothing at the end are taken away.

    Raises:
        TraceError: the file exists and ``force`` is not given, or is a folder, or its folder
            cannot be made or written to. Nothing was made.
    """
    made: list[Path] = []
    try:
        _claim(path, force, made)
        yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


def _claim(path: Path, force: bool, made: list[Path]) -> None:
    try:
        check_target(path, force=force, way_out=_WAY_OUT)
        made += [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        check_folder(path.parent)
    except FileError as error:
        raise TraceError(str(error)) from None
    except (OSError, ValueError) as error:
        why = reason(error)
        raise TraceError(f"cannot write {shown(path)}: {why}; name another file") from error
