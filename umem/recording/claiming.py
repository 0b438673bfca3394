"""A file that will be written later: refused now where that cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from umem.errors import TraceError


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
        if path.is_dir():
            raise TraceError(f"{path} is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise TraceError(f"{path} is a device or the like, not a file; name another")
        if path.exists() and not force:
            raise TraceError(
                f"{path} exists; name another file, or overwrite it (--force, force=True)"
            )
        made += [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.probe")
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot write {str(path)!r}: {why}; name another file") from error
