"""Functions of `os`, and `open`, with redirected paths: one table of how each treats its paths.

While an overlay is in force, a function of the table replaces Python's own, and calls it with the
overlay's paths. Errors name the program's own paths.
"""

from __future__ import annotations

import builtins
import io
import os
import posix
import stat
import threading
from collections.abc import Callable, Iterator
from errno import ELOOP
from functools import partial
from typing import Any

from umem.dry.overlay import WRITING, Name, Overlay

_MODES = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND}
_MODES["x"] = os.O_CREAT | os.O_EXCL


class InForce:
    """The overlay that the functions use; None: they behave as Python's own."""

    overlay: Overlay | None = None


in_force = InForce()
opening = threading.local()
"""By thread, the path that an opener receives; the audit hook ignores its event once."""


class Redirected:
    """A replacement of one of Python's functions, which it calls with redirected paths.

    It is not a Python function, so it does not become a method as an attribute of a class. It is
    equal to the function that it replaces, so ``os.supports_dir_fd`` and similar sets contain it.
    """

    def __init__(self, real: Any, treatment: Callable[..., Any]) -> None:
        self.real, self._treatment = real, treatment
        self.__name__ = self.__qualname__ = real.__name__
        self.__module__ = "io" if real is io.open else "os"
        self.__doc__, self.__wrapped__ = real.__doc__, real

    def __call__(self, *given: Any, **named: Any) -> Any:
        overlay = in_force.overlay
        if overlay is None:  # kept by somebody beyond the run
            return self.real(*given, **named)
        return self._treatment(overlay, self.real, *given, **named)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.real

    def __hash__(self) -> int:
        return hash(self.real)

    def __repr__(self) -> str:
        return repr(self.real)

    def __reduce__(self) -> str:
        return str(self.real.__name__)


class _Named:
    """Makes errors in a block name the program's own paths; fast, because it is called often."""

    __slots__ = ("_other", "_path")

    def __init__(self, path: Any, other: Any = None) -> None:
        self._path, self._other = path, other

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, OSError):
            if error.filename is not None:
                error.filename = self._path
            if error.filename2 is not None:
                error.filename2 = self._other


def _read(
    overlay: Overlay, real: Any, path: Any, *more: Any, dir_fd: Any = None, follow: bool = True,
    **named: Any,
) -> Any:  # fmt: skip
    """Read at a path: a file's facts, a link's target, permissions."""
    if isinstance(path, int):
        return real(path, *more, **named)
    with _Named(path):
        follows = follow and named.get("follow_symlinks", True)
        return real(overlay.to_read(path, dir_fd, follow=follows), *more, **named)


def _facts(
    overlay: Overlay, real: Any, path: Any, *, dir_fd: Any = None, follow_symlinks: bool = True
) -> Any:
    """Replace ``os.stat`` and ``os.lstat``."""
    follow = follow_symlinks and real is posix.stat
    if isinstance(path, int):
        return real(path)
    with _Named(path):
        place = overlay.unchanged(path) if dir_fd is None else None
        if place is not None:
            found = posix.lstat(place)
            if not follow or not stat.S_ISLNK(found.st_mode):
                return found
        place = overlay.to_read(path, dir_fd, follow=follow)
        return posix.stat(place) if follow else posix.lstat(place)


def _may(overlay: Overlay, real: Any, path: Any, *more: Any, **named: Any) -> bool:
    """Replace ``os.access``, which raises no error for a missing file."""
    try:
        return bool(_read(overlay, real, path, *more, **named))
    except FileNotFoundError:
        return False


def _change(
    overlay: Overlay, real: Any, path: Any, *more: Any, dir_fd: Any = None, follow: bool = True,
    **named: Any,
) -> Any:  # fmt: skip
    """Change a file's mode, times, owner or length."""
    if isinstance(path, int):
        found = overlay.of_descriptor(path)
        mode = os.fstat(path).st_mode
        if not found or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or overlay.is_real(found):
            return real(path, *more, **named)
        real, followed = _OF_PATHS.get(real.__name__, real), found
    else:
        followed = path
    follows = follow and named.get("follow_symlinks", True)
    with _Named(path):
        return real(overlay.to_change(followed, dir_fd, follow=follows), *more, **named)


_OF_PATHS = {"fchmod": posix.chmod, "fchown": posix.chown}


def _truncate(overlay: Overlay, real: Any, path: Any, length: int) -> Any:
    if isinstance(path, int):  # which is open for writing, so it is a copy or real on purpose
        return real(path, length)
    with _Named(path):
        place = overlay.to_open(path, os.O_WRONLY)
        return real(place, length)


def _make_node(
    overlay: Overlay, real: Any, path: Name, *more: Any, dir_fd: int | None = None, **named: Any
) -> Any:
    """Make something new at a path: a pipe."""
    with _Named(path), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(path, dir_fd), follow=False)
        place = resolved if overlay.is_real(resolved) else overlay.to_make(resolved)
        return real(place, *more, **named)


def _make_folder(
    overlay: Overlay, real: Any, path: Name, mode: int = 0o777, *, dir_fd: int | None = None
) -> None:
    with _Named(path), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(path, dir_fd), follow=False)
        if overlay.is_real(resolved):
            real(resolved, mode)
        else:
            overlay.make_folder(resolved, mode)


def _remove(
    overlay: Overlay, real: Any, path: Name, *, dir_fd: int | None = None, folder: bool = False
) -> None:
    with _Named(path), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(path, dir_fd), follow=False)
        if overlay.is_real(resolved):
            real(resolved)
        else:
            overlay.remove(resolved, folder=folder)


def _move(
    overlay: Overlay, real: Any, src: Name, dst: Name, *,
    src_dir_fd: int | None = None, dst_dir_fd: int | None = None,
) -> None:  # fmt: skip
    with _Named(src, dst), overlay.lock:
        source = overlay.resolved(overlay.absolute(src, src_dir_fd), follow=False)
        target = overlay.resolved(overlay.absolute(dst, dst_dir_fd), follow=False)
        overlay.move(source, target)


def _symlink(
    overlay: Overlay, real: Any, src: Name, dst: Name, target_is_directory: bool = False, *,
    dir_fd: int | None = None,
) -> None:  # fmt: skip
    with _Named(src, dst), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(dst, dir_fd), follow=False)
        real(src, resolved if overlay.is_real(resolved) else overlay.to_make(resolved))
        overlay.note_change()


def _link(
    overlay: Overlay, real: Any, src: Name, dst: Name, *, src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None, follow_symlinks: bool = True,
) -> None:  # fmt: skip
    with _Named(src, dst), overlay.lock:
        source = overlay.to_change(src, src_dir_fd, follow=False)
        target = overlay.resolved(overlay.absolute(dst, dst_dir_fd), follow=False)
        real(source, target if overlay.is_real(target) else overlay.to_make(target))


def _open_descriptor(
    overlay: Overlay, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None
) -> Any:
    """Replace ``os.open``."""
    with _Named(path):
        if flags & WRITING:
            return real(overlay.to_open(path, flags, dir_fd), flags, mode)
        follow = not flags & os.O_NOFOLLOW
        return real(overlay.to_read(path, dir_fd, follow=follow), flags, mode)


def _open_file(
    overlay: Overlay, real: Any, file: Any, mode: Any = "r", buffering: int = -1,
    encoding: Any = None, errors: Any = None, newline: Any = None, closefd: bool = True,
    opener: Any = None,
) -> Any:  # fmt: skip
    """Replace ``open``."""
    more = (buffering, encoding, errors, newline, closefd)
    if not isinstance(file, (str, bytes, os.PathLike)) or not isinstance(mode, str):
        return real(file, mode, *more, opener)
    if opener is not None:
        opening.path = file  # the opener's own call is judged
        try:
            return real(file, mode, *more, opener)
        finally:
            opening.path = None
    with _Named(file):
        if mode in _READING:
            opened = _unchanged_file(overlay, real, file, mode, more)
            if opened is not None:
                return opened
            place = overlay.to_read(file)
        else:
            kind = [letter for letter in mode if letter in _MODES]
            flags = os.O_RDWR if "+" in mode else os.O_WRONLY if kind != ["r"] else os.O_RDONLY
            if len(kind) != 1 or not flags & WRITING:
                return real(file, mode, *more)  # wrong, or an unusual way to say "r"
            place = overlay.to_open(file, flags | _MODES[kind[0]])
        opened = real(place, mode, *more)
    return _renamed(opened, file)


def _unchanged_file(overlay: Overlay, real: Any, file: Any, mode: str, more: Any) -> Any:
    """Open a file for reading in a folder without changes; None: it may have changes."""
    place = overlay.unchanged(file)
    if place is None or not more[-1]:
        return None
    try:
        number = posix.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == ELOOP:
            return None
        raise
    try:
        return _renamed(real(number, mode, *more), file)
    except BaseException:
        posix.close(number)
        raise


def _renamed(opened: Any, file: Any) -> Any:
    """Give an open file the name by which the program opened it."""
    raw = getattr(opened, "buffer", opened)
    getattr(raw, "raw", raw).name = file
    return opened


_READING = ("r", "rb", "rt", "br", "tr")


def _list(overlay: Overlay, real: Any, path: Any = None) -> Any:
    with _Named(path):
        resolved = _listed_by_overlay(overlay, path)
        if resolved is None:
            return real(path)
        found = overlay.names(resolved)
        return [os.fsencode(name) for name in found] if isinstance(path, bytes) else found


def _scan(overlay: Overlay, real: Any, path: Any = None) -> Any:
    with _Named(path):
        resolved = _listed_by_overlay(overlay, path)
        return real(path) if resolved is None else Scanned(overlay, resolved, path)


def _listed_by_overlay(overlay: Overlay, path: Any) -> str | None:
    """Return the folder whose names the overlay must list; None: the real disk lists them.

    The overlay lists a folder in which the program has made, renamed or removed something, or that
    is at another place.
    """
    if isinstance(path, int):
        absolute = overlay.of_descriptor(path)
        is_here = bool(absolute)
    else:
        absolute = overlay.absolute("." if path is None else path)
        is_here = overlay.to_read(absolute) == absolute
    if not absolute or (is_here and not overlay.is_changed_folder(absolute)):
        return None
    return overlay.resolved(absolute)


class Scanned:
    """The iterator of ``os.scandir`` over a folder that the program has changed."""

    def __init__(self, overlay: Overlay, resolved: str, path: Any) -> None:
        self._entries = iter(
            [ScannedEntry(overlay, resolved, path, name) for name in overlay.names(resolved)]
        )

    def __iter__(self) -> Scanned:
        return self

    def __next__(self) -> ScannedEntry:
        return next(self._entries)

    def close(self) -> None:
        """Stop the iteration."""
        self._entries = iter(())

    def __enter__(self) -> Scanned:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ScannedEntry:
    """A replacement of an ``os.DirEntry``."""

    def __init__(self, overlay: Overlay, resolved: str, path: Any, name: str) -> None:
        self._overlay, self._resolved = overlay, f"{'' if resolved == '/' else resolved}/{name}"
        self.name: Any = os.fsencode(name) if isinstance(path, bytes) else name
        given: Any = "." if path is None else path
        self.path = self.name if isinstance(path, int) else os.path.join(given, self.name)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the file's facts; with ``follow_symlinks`` False, the link's own."""
        place = self._overlay.to_read(self._resolved, follow=follow_symlinks)
        return posix.stat(place) if follow_symlinks else posix.lstat(place)

    def _has_type(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Tell whether it is a folder."""
        return self._has_type(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Tell whether it is a file."""
        return self._has_type(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Tell whether it is a link."""
        return self._has_type(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """Return False: only Windows has junctions."""
        return False

    def inode(self) -> int:
        """Return its inode number on the disk."""
        return self.stat(follow_symlinks=False).st_ino

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


def _current(overlay: Overlay, real: Any) -> Any:
    found = real()
    return os.fsencode(overlay.seen(os.fsdecode(found))) if isinstance(found, bytes) else (
        overlay.seen(found)
    )  # fmt: skip


TREATMENTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("stat", "lstat"), _facts),
    **dict.fromkeys(("listxattr", "getxattr", "statvfs", "chdir"), _read),
    "readlink": partial(_read, follow=False),
    **dict.fromkeys(("chmod", "chown", "utime", "setxattr", "removexattr"), _change),
    **dict.fromkeys(("fchmod", "fchown"), _change),
    "access": _may,
    "lchown": partial(_change, follow=False),
    "truncate": _truncate,
    **dict.fromkeys(("mkfifo", "mknod"), _make_node),
    "mkdir": _make_folder,
    **dict.fromkeys(("unlink", "remove"), _remove),
    "rmdir": partial(_remove, folder=True),
    **dict.fromkeys(("rename", "replace"), _move),
    "symlink": _symlink,
    "link": _link,
    "open": _open_descriptor,
    "listdir": _list,
    "scandir": _scan,
    **dict.fromkeys(("getcwd", "getcwdb"), _current),
}
"""Functions of `os`, each with the treatment of its paths; `open` is handled beside them."""


def replacements() -> Iterator[tuple[Any, Any]]:
    """Yield each real function with its replacement."""
    for name, treatment in TREATMENTS.items():
        real = getattr(posix, name)
        yield real, Redirected(real, treatment)
    yield builtins.open, Redirected(builtins.open, _open_file)
