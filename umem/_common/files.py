"""Reads regular files only, and writes files completely or not at all.

A file is first written under a new, unguessable name in its folder, and renamed when it is
complete. A link that somebody else has put there is therefore never followed, and the old file
stays until the new one is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from umem._common.printable import short
from umem.errors import FileError, TraceError

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_PRIVATE, _COMMON = 0o600, 0o666
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


def reason(error: Exception) -> str:
    """Describe an OSError in words for a message."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    text = getattr(error, "strerror", None) or str(error)
    return text[:1].lower() + text[1:]


# -- reading -----------------------------------------------------------------------------------


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading; never blocks, as opening a pipe would.

    Raises:
        FileError: it is a pipe, a device or another special file. OSError, ValueError: it cannot be
            opened.
    """
    _check_regular(os.stat(path))  # first, because opening some devices has effects
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    try:
        _check_regular(os.fstat(handle))  # the path may have been replaced meanwhile
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise FileError("it is a pipe, a device or the like, not a file")


# -- writing -----------------------------------------------------------------------------------


def check_target(path: Path, *, force: bool, way_out: str = "name another file") -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Refuses all links, because following one may write to a place that somebody else chose.

    Args:
        path: the name of the file.
        force: whether to replace an existing file.
        way_out: the message's advice for an existing file.

    Raises:
        FileError: the path is a folder, a link, a device, or a file that may not be
            replaced. OSError, ValueError: the path cannot be examined.
    """
    status = _status(path)
    if status is None:
        return
    name, mode = short(path), status.st_mode
    if stat.S_ISDIR(mode):
        raise FileError(f"{name} is a folder; name a file in it")
    if stat.S_ISLNK(mode):
        raise FileError(f"{name} is a link, which umem does not follow; name the file itself")
    if not stat.S_ISREG(mode):
        raise FileError(f"{name} is not a regular file; name another")
    if not force:
        raise FileError(f"{name} exists; {way_out}")
    if not os.access(path, os.W_OK):
        raise FileError(f"{name} is not writable; name another file")


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def check_folder(folder: Path) -> None:
    """Check that files can be created in a folder; leaves no file there.

    Raises:
        OSError, ValueError: no file can be created.
    """
    temporary, handle = _temporary(folder, _PRIVATE)
    os.close(handle)
    temporary.unlink()


@contextlib.contextmanager
def whole(path: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Write a file that gets its name only if the block ends without an error.

    The file keeps the permissions and the owner of a file that it replaces.

    Args:
        path: its name.
        force: replace an existing file.

    Raises:
        FileError: see `check_target`, or the owner of the existing file cannot be kept.
        OSError, ValueError: the file cannot be written. After these and any error in the block,
            including interruption, the file system is as before.
    """
    check_target(path, force=force)
    old = _status(path)
    temporary, handle = _temporary(path.parent, _COMMON if old is None else _PRIVATE)
    try:
        with os.fdopen(handle, "wb") as file:
            if old is not None:
                _take_over(file.fileno(), old, path)
            yield file
        _publish(temporary, path, force)
    except BaseException:  # Ctrl-C included
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _temporary(folder: Path, mode: int) -> tuple[Path, int]:
    """Create a file with an unguessable name, which is short because the final one may be long."""
    path = folder / f".umem-{secrets.token_hex(8)}.tmp"
    return path, os.open(path, _FLAGS, mode)


def _take_over(handle: int, old: os.stat_result, path: Path) -> None:
    """Copy owner and permissions of the replaced file."""
    new = os.fstat(handle)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(handle, old.st_uid, old.st_gid)
        except PermissionError:
            raise FileError(
                f"{short(path)} belongs to another user or group; name another file"
            ) from None
    os.fchmod(handle, old.st_mode & 0o777)


def _publish(temporary: Path, path: Path, force: bool) -> None:
    """Rename a complete file; without ``force`` this fails if the name exists by now."""
    if not force:
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            raise FileError(f"{short(path)} exists; name another file") from None
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            check_target(path, force=False)
        else:
            temporary.unlink()
            return
    os.replace(temporary, path)


_WAY_OUT = "name another file, or overwrite it (--force, force=True)"


@contextlib.contextmanager
def claimed(path: Path, *, force: bool) -> Iterator[None]:
    """Check that a trace can be written at the end of the block, and make its folder.

    Removes the folders that it made if they are empty at the end.

    Raises:
        TraceError: the file exists and ``force`` is not given, or is a folder, or its folder
            cannot be made or written to. No folder was made.
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
    """Check a trace's path, and make its folder; adds new folders to ``made``.

    Raises:
        TraceError: the trace cannot be written.
    """
    try:
        check_target(path, force=force, way_out=_WAY_OUT)
        made += [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        check_folder(path.parent)
    except FileError as error:
        raise TraceError(str(error)) from None
    except (OSError, ValueError) as error:
        why = reason(error)
        raise TraceError(f"cannot write {short(path)}: {why}; name another file") from error


# -- files without a name ------------------------------------------------------------------------

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
"""File systems that keep files in memory."""


def open_nameless(folder: Path, prefix: str) -> IO[bytes]:
    """Create an unnamed file in a folder; the system removes it when the last handle is closed.

    Where the system supports it, the file never has a name.

    Raises:
        FileError: there is no such folder, it is not writable, or it is in memory. No file was
            made.
    """
    import tempfile  # loads many modules that nothing else here needs

    try:
        if not folder.is_dir():
            raise FileError(f"{short(folder)} is not a folder: create it, or name another")
        kind = file_system(folder)
        if kind in IN_MEMORY:
            raise FileError(
                f"{short(folder)} is {kind}, which is in memory: it would save no memory. Name a "
                "folder on a disk"
            )
        return tempfile.TemporaryFile(dir=folder, prefix=prefix, buffering=0)
    except FileError:
        raise
    except (OSError, ValueError) as error:
        why = reason(error)
        raise FileError(f"cannot write to {short(folder)}: {why}; name another folder") from error


def file_system(folder: Path) -> str | None:
    """Return the kind of file system of a folder, as Linux names it; None if unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in lines.splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return None


ROOM_LEFT_BYTES = 64 << 20
"""At least this much of a disk's free space is left to other programs: a guess, not measured."""


def write_at(handle: int, data: Any, at: int) -> None:
    """Write all of some bytes to an open file at a position.

    Raises:
        OSError: the system refuses; the file has part of the bytes at most.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(handle, rest, at)
        rest, at = rest[written:], at + written


def free_bytes(handle: int) -> int | None:
    """Return the free bytes of an open file's file system; None if unknown."""
    try:
        status = os.fstatvfs(handle)
    except (AttributeError, OSError):
        return None
    return status.f_bavail * status.f_frsize
