"""`Overlay`: a scratch folder in front of the disk, in which changes are made and read back.

A path of the program's has its changed file at the same path below ``FOLDER/files``. A file that
is opened for changing is copied there first; one that is removed has a socket there, which no
program of the user's puts into it by these functions. A folder that is removed and made again has
a socket for each of its files before. A folder that is in both places shows the names of both.
The state is on disk alone, so processes share it by sharing the folder.

All functions here are those of `posix`, which `umem.dry.disk` never replaces.
"""

from __future__ import annotations

import os
import posix
import stat
import threading
from collections.abc import Iterator
from errno import (
    EACCES,
    EEXIST,
    EINVAL,
    EISDIR,
    ELOOP,
    ENOENT,
    ENOTDIR,
    ENOTEMPTY,
    EXDEV,
)  # fmt: skip
from itertools import count
from typing import TypeAlias

Name: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = getattr(os, "O_TMPFILE", 0)
_MOST_LINKS = 40  # as many as Linux follows
_PASSING = ("/dev", "/proc", "/sys")


def caches() -> tuple[str, ...]:
    """Return the folders whose files stay real: what they hold depends on no value of the run.

    Compiled kernels of umem and of CuPy, and matplotlib's list of fonts. Python's ``__pycache__``
    folders stay real as well, wherever they are.
    """
    home = os.path.expanduser("~")
    cache = os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    found = (
        f"{cache}/umem",
        os.environ.get("CUPY_CACHE_DIR") or f"{home}/.cupy/kernel_cache",
        os.environ.get("MPLCONFIGDIR") or f"{cache}/matplotlib",
    )
    return tuple(os.path.realpath(folder) for folder in found)


class Overlay:
    """The disk as the program of a dry run sees it.

    Methods take and return absolute paths. ``resolved`` paths have no links in them but the last
    name, and are what the other methods want. Threads may share one; processes share the folder.

    Args:
        folder: a folder for all that is written, which exists.
        real: further folders whose files are opened, changed and removed for real.
    """

    def __init__(self, folder: str, real: tuple[str, ...] = ()) -> None:
        self.folder = os.path.realpath(folder)
        self.files = f"{self.folder}/files"
        self.temporary = f"{self.folder}/tmp"
        self._real = tuple(f"{one}/" for one in (self.folder, *_PASSING, *real))
        self._folders: dict[str, str] = {}
        self._numbers = count()
        self.lock = threading.RLock()
        for made in (self.files, self.temporary):
            if not _mode(made):
                posix.mkdir(made, 0o700)

    # -- names -----------------------------------------------------------------------------------

    def absolute(self, path: Name, dir_fd: int | None = None) -> str:
        """Return a path from the root, as the program sees it; links and dots stay in it."""
        text = os.fsdecode(path)
        if text[:1] != "/":
            if not text:
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT), path)
            base = self.current() if dir_fd in (None, -1) else self.of_descriptor(dir_fd)
            text = f"{base}/{text}"
        return text

    def current(self) -> str:
        """Return the current folder as the program sees it."""
        return self.seen(posix.getcwd())

    def of_descriptor(self, number: int | None) -> str:
        """Return the path of an open file as the program sees it; "" for what has none."""
        try:
            path = posix.readlink(f"/proc/self/fd/{number}")
        except OSError:
            return ""
        return self.seen(path) if path[:1] == "/" and _mode(path) else ""

    def seen(self, path: str) -> str:
        """Return a path of the disk as the program sees it."""
        return path.removeprefix(self.files) or "/" if _below(path, self.files) else path

    def resolved(self, path: str, *, follow: bool = True) -> str:
        """Return where an absolute path leads, by the links that the program sees."""
        todo = [name for name in reversed(path.split("/")) if name and name != "."]
        at, links = "", 0
        while todo:
            name = todo.pop()
            if name == "..":
                at = at.rpartition("/")[0]
                continue
            here = f"{at}/{name}"
            target = self._target(here) if todo or follow else None
            if target is None or (not todo and here.startswith("/proc/") and "/fd/" in here):
                at = here
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(ELOOP, os.strerror(ELOOP), path)
            if target[:1] == "/":
                at, target = "", self.seen(target)
            todo += [name for name in reversed(target.split("/")) if name and name != "."]
        return at or "/"

    def _target(self, path: str) -> str | None:
        """Return where a link points to; None: it is no link."""
        place = self.place(path, as_folder=False)
        try:
            return None if place is None else posix.readlink(place)
        except OSError:
            return None

    def is_real(self, resolved: str) -> bool:
        """Tell whether a file is opened, changed and removed for real."""
        return f"{resolved}/".startswith(self._real) or "/__pycache__/" in f"{resolved}/"

    def place(self, resolved: str, *, as_folder: bool = True) -> str | None:
        """Return where on the disk the program finds a path; None: it has removed it.

        A folder that is in both places is found in the real one.
        """
        here = self.files + resolved
        try:
            mode = posix.lstat(here).st_mode
        except FileNotFoundError:
            return resolved
        except NotADirectoryError:
            return None
        if stat.S_ISSOCK(mode):
            return None
        if as_folder and stat.S_ISDIR(mode) and stat.S_ISDIR(_mode(resolved)):
            return resolved
        return here

    def forget_folders(self) -> None:
        """Look up anew where folders lead, after a link was made."""
        self._folders.clear()

    # -- reading ---------------------------------------------------------------------------------

    def to_read(self, path: Name, dir_fd: int | None = None, *, follow: bool = True) -> str | None:
        """Return the path to read instead of ``path``; None: itself.

        Costs a few microseconds: where the folder leads is looked up once.

        Raises:
            FileNotFoundError: the program has removed it.
        """
        text = self.absolute(path, dir_fd)
        head, _, name = text.rpartition("/")
        if name in ("", ".", ".."):
            resolved = self.resolved(text, follow=follow)
        else:
            folder = self._folders.get(head)
            if folder is None:
                folder = self._folders[head] = self.resolved(head)
            resolved = f"{folder}/{name}" if folder != "/" else f"/{name}"
            try:
                posix.lstat(self.files + resolved)
            except FileNotFoundError:
                if not follow or not stat.S_ISLNK(_mode(resolved)):
                    return None if text is path and folder == head else resolved
            except NotADirectoryError:
                pass
            if follow:
                resolved = self.resolved(text)
        if self.is_real(resolved):
            return resolved
        found = self.place(resolved)
        if found is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), path)
        return found

    def names(self, resolved: str) -> list[str]:
        """List what the program sees in a folder."""
        place = self._existing(resolved)
        upper = self.files + resolved
        if self.is_real(resolved) or not _mode(upper):
            return posix.listdir(place)
        found = dict.fromkeys(posix.listdir(place))
        for name in posix.listdir(upper):
            if stat.S_ISSOCK(_mode(f"{upper}/{name}")):
                found.pop(name, None)
            else:
                found[name] = None
        return list(found)

    def has_changed(self, resolved: str) -> bool:
        """Tell whether a folder does not show just what is in the real one."""
        return not self.is_real(resolved) and _mode(self.files + resolved) != 0

    # -- writing ---------------------------------------------------------------------------------

    def to_open(self, path: Name, flags: int, dir_fd: int | None = None) -> str:
        """Return the path to open for writing instead of ``path``.

        Raises:
            OSError: as the system would for this path.
        """
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        follow = not exclusive and not flags & os.O_NOFOLLOW
        with self.lock:
            resolved = self.resolved(self.absolute(path, dir_fd), follow=bool(follow))
            if self.is_real(resolved):
                return resolved
            if _TMPFILE and flags & _TMPFILE == _TMPFILE:
                return self.temporary
            place = self.place(resolved)
            mode = 0 if place is None else _mode(place)
            if not mode:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(ENOENT, os.strerror(ENOENT), path)
                return self.to_make(resolved)
            assert place is not None
            if exclusive:
                raise FileExistsError(EEXIST, os.strerror(EEXIST), path)
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR), path)
            if stat.S_ISLNK(mode):
                raise OSError(ELOOP, os.strerror(ELOOP), path)
            if not stat.S_ISREG(mode):
                return place  # a pipe or a device is written for real
            if not posix.access(place, os.W_OK):
                raise PermissionError(EACCES, os.strerror(EACCES), path)
            return self.copied(resolved, empty=bool(flags & os.O_TRUNC))

    def to_change(self, path: Name, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """Return the path to change in place instead of ``path``, a copy."""
        with self.lock:
            resolved = self.resolved(self.absolute(path, dir_fd), follow=follow)
            return resolved if self.is_real(resolved) else self.copied(resolved)

    def copied(self, resolved: str, *, empty: bool = False) -> str:
        """Copy what is at a path into the scratch folder, if it is not there; returns the copy.

        A folder is made without what is in it.
        """
        here = self.files + resolved
        place = self._existing(resolved)
        if place == here or _mode(here):
            return here
        self._make_parents(resolved)
        mode = _mode(place)
        if stat.S_ISDIR(mode):
            _make(here)
        elif stat.S_ISLNK(mode):
            posix.symlink(posix.readlink(place), here)
        else:
            new = self._copy(place, empty)
            try:
                posix.link(new, here)  # whole or not there, also for another process
            except FileExistsError:
                pass
            posix.unlink(new)
        return here

    def to_make(self, resolved: str) -> str:
        """Return the path at which something new is made instead of ``resolved``.

        Raises:
            OSError: something is there, or there is no folder for it.
        """
        place = self.place(resolved)
        if place is not None and _mode(place):
            raise FileExistsError(EEXIST, os.strerror(EEXIST), resolved)
        self._check_parent(resolved)
        self._make_parents(resolved)
        here = self.files + resolved
        if _mode(here):
            posix.unlink(here)
        return here

    def make_folder(self, resolved: str, mode: int = 0o777) -> None:
        """Make a folder, which is empty for the program."""
        self._folders.clear()
        here = self.to_make(resolved)
        posix.mkdir(here, mode)
        if stat.S_ISDIR(_mode(resolved)):
            for name in posix.listdir(resolved):
                _mark_removed(f"{here}/{name}")

    def remove(self, resolved: str, *, folder: bool = False) -> None:
        """Remove a file, or an empty folder, for the program."""
        self._folders.clear()
        place = self._existing(resolved)
        if stat.S_ISDIR(_mode(place)) != folder:
            error = ENOTDIR if folder else EISDIR
            raise OSError(error, os.strerror(error), resolved)
        if folder and self.names(resolved):
            raise OSError(ENOTEMPTY, os.strerror(ENOTEMPTY), resolved)
        self._check_parent(resolved)
        here = self.files + resolved
        if folder and _mode(here):
            for name in posix.listdir(here):
                posix.unlink(f"{here}/{name}")
            posix.rmdir(here)
        elif _mode(here):
            posix.unlink(here)
        self._hide(resolved)

    def move(self, source: str, target: str) -> None:
        """Rename a file or a folder for the program; what it replaces is gone for the program."""
        self._folders.clear()
        place = self._existing(source)
        is_folder = stat.S_ISDIR(_mode(place))
        if source == target:
            return
        if self.is_real(source) and self.is_real(target):
            posix.rename(source, target)
            return
        there = self.place(target)
        there_mode = 0 if there is None else _mode(there)
        if there_mode and stat.S_ISDIR(there_mode) != is_folder:
            error = ENOTDIR if is_folder else EISDIR
            raise OSError(error, os.strerror(error), source, None, target)
        if is_folder:
            self._move_folder(source, target, bool(there_mode))
            return
        if self.is_real(target):
            here = target
        else:
            self._check_parent(target)
            self._make_parents(target)
            here = self.files + target
        if not self.is_real(source):
            self._check_parent(source)
        if place == self.files + source or self.is_real(source):
            try:
                posix.rename(place, here)
            except OSError as error:
                if error.errno != EXDEV:
                    raise
                self._copy_over(place, here)
                posix.unlink(place)
        else:
            self._copy_over(place, here)
        if not self.is_real(source):
            self._hide(source)

    def _move_folder(self, source: str, target: str, is_there: bool) -> None:
        if f"{target}/".startswith(f"{source}/"):
            raise OSError(EINVAL, os.strerror(EINVAL), source, None, target)
        if self.is_real(source) or self.is_real(target):
            # As between two disks, where programs copy.
            raise OSError(EXDEV, os.strerror(EXDEV), source, None, target)
        if not is_there:
            self.make_folder(target)
        elif self.names(target):
            raise OSError(ENOTEMPTY, os.strerror(ENOTEMPTY), source, None, target)
        for name in self.names(source):
            self.move(f"{source}/{name}", f"{target}/{name}")
        self.remove(source, folder=True)

    # -- what was written ------------------------------------------------------------------------

    def written(self) -> tuple[str, ...]:
        """List the files that the program believes it has written, sorted."""
        return tuple(sorted(self._written("")))

    def _written(self, resolved: str) -> Iterator[str]:
        for name in posix.listdir(self.files + resolved):
            path = f"{resolved}/{name}"
            mode = _mode(self.files + path)
            if stat.S_ISDIR(mode):
                yield from self._written(path)
            elif not stat.S_ISSOCK(mode):
                yield path

    # -- steps -----------------------------------------------------------------------------------

    def _existing(self, resolved: str) -> str:
        place = self.place(resolved)
        if place is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), resolved)
        posix.lstat(place)
        return place

    def _check_parent(self, resolved: str) -> None:
        """Raise as the system would where a name cannot be added to a folder or taken from it."""
        parent = resolved.rpartition("/")[0] or "/"
        place = self.place(parent)
        mode = 0 if place is None else _mode(place)
        if not mode:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), resolved)
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), resolved)
        if place is None or not posix.access(place, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES), resolved)

    def _make_parents(self, resolved: str) -> None:
        at = self.files
        for name in resolved.split("/")[1:-1]:
            at = f"{at}/{name}"
            if not _mode(at):
                _make(at)

    def _hide(self, resolved: str) -> None:
        if _mode(resolved):
            self._make_parents(resolved)
            _mark_removed(self.files + resolved)

    def _copy_over(self, source: str, target: str) -> None:
        if stat.S_ISLNK(_mode(source)):
            if _mode(target):
                posix.unlink(target)
            posix.symlink(posix.readlink(source), target)
            return
        new = self._copy(source)
        try:
            posix.rename(new, target)
        except OSError as error:
            if error.errno != EXDEV:
                raise
            beside = f"{target}.{posix.getpid()}.{next(self._numbers)}"
            _copy(new, beside)
            posix.rename(beside, target)
            posix.unlink(new)

    def _copy(self, source: str, empty: bool = False) -> str:
        new = f"{self.folder}/{posix.getpid()}.{threading.get_ident()}.{next(self._numbers)}"
        _copy(source, new, empty)
        return new


def _copy(source: str, target: str, empty: bool = False) -> None:
    """Copy a file with its mode and times."""
    facts = posix.stat(source)
    reader = posix.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        writer = posix.open(target, flags, stat.S_IMODE(facts.st_mode))
        try:
            at = 0
            while not empty and (sent := posix.sendfile(writer, reader, at, 1 << 30)):
                at += sent
            posix.fchmod(writer, stat.S_IMODE(facts.st_mode))
        finally:
            posix.close(writer)
    finally:
        posix.close(reader)
    posix.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _mode(path: str) -> int:
    """Return the mode of what is at a path, of a link itself; 0 if there is nothing."""
    try:
        return posix.lstat(path).st_mode
    except OSError:
        return 0


def _make(folder: str) -> None:
    try:
        posix.mkdir(folder, 0o777)
    except FileExistsError:
        pass


def _mark_removed(path: str) -> None:
    try:
        posix.mknod(path, stat.S_IFSOCK | 0o600)
    except FileExistsError:
        pass


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
