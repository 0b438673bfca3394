"""`Overlay`: a scratch folder in front of the disk, which takes changes and serves them back.

The changed file of a path is at the same path below ``FOLDER/files``. A file is copied there before
it is opened for changing. A removed file is marked there by a socket, which the user's program
cannot create by these functions. A folder that is removed and made again has a socket for each of
its former files. A folder that exists in both places shows the names of both. The state is only on
disk, so processes share it by sharing the folder. They also map a few bytes that show each process
when another has changed something, so most reads need no further system call.

All functions here come from `posix`, which `umem.dry.disk` never replaces.
"""

from __future__ import annotations

import errno
import os
import posix
import stat
import threading
from collections.abc import Iterator
from itertools import count
from mmap import mmap
from typing import NamedTuple, TypeAlias

Name: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = getattr(os, "O_TMPFILE", 0)
_MOST_LINKS = 40  # as many as Linux follows
_MOST_FOLDERS = 10_000  # known at a time: some MB
_DOTS = ("", ".", "..")
_PASSING = ("/dev", "/proc", "/sys")


def caches(folder: str) -> tuple[str, ...]:
    """Return the folders whose files stay real, because they do not depend on the run's values.

    They hold compiled kernels of umem and CuPy, the headers for these, and matplotlib's list of
    fonts. Python's ``__pycache__`` folders stay real as well, wherever they are.

    Args:
        folder: the scratch folder; the folder for temporary files that outlast the run is beside
            it.
    """
    home = os.path.expanduser("~")
    cache = os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    found = (
        f"{cache}/umem",
        os.environ.get("CUPY_CACHE_DIR") or f"{home}/.cupy/kernel_cache",
        os.environ.get("MPLCONFIGDIR") or f"{cache}/matplotlib",
        f"{os.path.dirname(folder)}/umem-headers-{os.getuid()}",  # `kernel_cache.headers_folder`
    )
    return tuple(os.path.realpath(folder) for folder in found)


class FolderFacts(NamedTuple):
    """A folder's place, links resolved, and whether anything in it may be changed.

    ``token`` identifies the last change in the `Overlay` at that time.
    """

    token: bytes
    resolved: str
    is_changed: bool


class Overlay:
    """The disk as the program of a dry run sees it.

    Methods take and return absolute paths. Most take ``resolved`` paths, in which only the last
    name may be a link. Threads may share an overlay; processes share its folder.

    Args:
        folder: an existing folder for all changed files.
        real: further folders whose files are opened, changed and removed on the real disk.
    """

    def __init__(self, folder: str, real: tuple[str, ...] = ()) -> None:
        self.folder = os.path.realpath(folder)
        self.files = f"{self.folder}/files"
        self.temporary = f"{self.folder}/tmp"
        self._real = tuple(f"{one}/" for one in (self.folder, *_PASSING, *real))
        self._folders: dict[str, FolderFacts] = {}
        self._numbers = count()
        self.lock = threading.RLock()
        for made in (self.files, self.temporary):
            if not _mode(made):
                posix.mkdir(made, 0o700)
        self._changes = _shared(f"{self.folder}/changes")

    # -- names -----------------------------------------------------------------------------------

    def absolute(self, path: Name, dir_fd: int | None = None) -> str:
        """Return an absolute path, as the program sees it; links and dots are not resolved."""
        text = os.fsdecode(path)
        if text[:1] != "/":
            if not text:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            base = self.current() if dir_fd in (None, -1) else self.of_descriptor(dir_fd)
            text = f"{base}/{text}"
        return text

    def current(self) -> str:
        """Return the current folder as the program sees it."""
        return self.seen(posix.getcwd())

    def of_descriptor(self, number: int | None) -> str:
        """Return the path of an open file as the program sees it; "" if it has none."""
        try:
            path = posix.readlink(f"/proc/self/fd/{number}")
        except OSError:
            return ""
        return self.seen(path) if path[:1] == "/" and _mode(path) else ""

    def seen(self, path: str) -> str:
        """Return a path of the disk as the program sees it."""
        return path.removeprefix(self.files) or "/" if _below(path, self.files) else path

    def resolved(self, path: str, *, follow: bool = True) -> str:
        """Resolve an absolute path by the links that the program sees."""
        head, _, name = path.rpartition("/")
        if name not in _DOTS:
            here = f"{self._facts(head).resolved}/{name}"
            if not follow or self._target(here) is None:
                return here
        return self._walked(path, follow)

    def _facts(self, path: str) -> FolderFacts:
        """Return the facts of a folder; its path is absolute, or "" for the root."""
        token = self._changes[:]
        known = self._folders.get(path)
        if known is None or known.token != token:
            if len(self._folders) > _MOST_FOLDERS:
                self._folders.clear()
            known = self._folders[path] = self._folder_facts(path, token)
        return known

    def _folder_facts(self, path: str, token: bytes) -> FolderFacts:
        """Look up a folder: links resolved, and whether anything in it may be changed."""
        if not path:
            return FolderFacts(token, "", True)
        head, _, name = path.rpartition("/")
        parent = self._facts(head)
        resolved = f"{parent.resolved}/{name}"
        if name in _DOTS:
            resolved = self._walked(path, True)
        elif parent.is_changed:
            if self._target(resolved) is not None:
                resolved = self._walked(path, True)
        elif not stat.S_ISLNK(_mode(resolved)):
            return FolderFacts(token, resolved, False)
        else:
            resolved = self._walked(path, True)
        resolved = "" if resolved == "/" else resolved
        if self.is_real(resolved):
            return FolderFacts(token, resolved, False)
        try:
            posix.lstat(self.files + resolved)
        except FileNotFoundError:
            return FolderFacts(token, resolved, False)
        except NotADirectoryError:
            pass
        return FolderFacts(token, resolved, True)

    def _walked(self, path: str, follow: bool) -> str:
        """Resolve a path name by name, in the overlay's view."""
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
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target[:1] == "/":
                at, target = "", self.seen(target)
            todo += [name for name in reversed(target.split("/")) if name and name != "."]
        return at or "/"

    def _target(self, path: str) -> str | None:
        """Return a link's target; None: the path is not a link."""
        place = self.place(path, as_folder=False)
        try:
            return None if place is None else posix.readlink(place)
        except OSError:
            return None

    def is_real(self, resolved: str) -> bool:
        """Tell whether a file is opened, changed and removed on the real disk."""
        return f"{resolved}/".startswith(self._real) or "/__pycache__/" in f"{resolved}/"

    def place(self, resolved: str, *, as_folder: bool = True) -> str | None:
        """Return the real path of a program's path; None: the program has removed it.

        For a folder in both places, it is the real folder.
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

    def note_change(self) -> None:
        """Make all processes look up folders and their changes again."""
        self._changes[:] = os.urandom(len(self._changes))

    # -- reading ---------------------------------------------------------------------------------

    def unchanged(self, path: Name) -> str | None:
        """Return the real path of an unchanged file; None: the program may have changed it.

        Open the path without following a link, because the program may have changed a link's
        target. Costs a microsecond in a folder without changes, and no system call.
        """
        text = path if type(path) is str else os.fsdecode(path)
        absolute = text if text[:1] == "/" else self.absolute(text)
        head, _, name = absolute.rpartition("/")
        folder = self._folders.get(head)
        if folder is None or folder.token != self._changes[:]:
            folder = self._facts(head)
        if name in _DOTS:
            return None
        if folder.is_changed:
            try:
                posix.lstat(f"{self.files}{folder.resolved}/{name}")
            except FileNotFoundError:
                pass
            except NotADirectoryError:
                return None
            else:
                return None
        return text if folder.resolved == head else f"{folder.resolved}/{name}"

    def to_read(self, path: Name, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """Return the path to read instead of ``path``.

        Raises:
            FileNotFoundError: the program has removed it.
        """
        if dir_fd is None:
            place = self.unchanged(path)
            if place is not None and not (follow and stat.S_ISLNK(_mode(place))):
                return place
        resolved = self.resolved(self.absolute(path, dir_fd), follow=follow)
        if self.is_real(resolved):
            return resolved
        found = self.place(resolved)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def names(self, resolved: str) -> list[str]:
        """List the names that the program sees in a folder."""
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

    def is_changed_folder(self, path: str) -> bool:
        """Tell whether a folder may differ from the real one."""
        return self._facts(path).is_changed

    # -- writing ---------------------------------------------------------------------------------

    def to_open(self, path: Name, flags: int, dir_fd: int | None = None) -> str:
        """Return the path to open for writing instead of ``path``.

        Raises:
            OSError: the error that the system would raise for this path.
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
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                return self.to_make(resolved)
            assert place is not None
            if exclusive:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if stat.S_ISLNK(mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if not stat.S_ISREG(mode):
                return place  # a pipe or a device is written for real
            if not posix.access(place, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return self.copied(resolved, empty=bool(flags & os.O_TRUNC))

    def to_change(self, path: Name, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """Return the path to change in place instead of ``path``, a copy."""
        with self.lock:
            resolved = self.resolved(self.absolute(path, dir_fd), follow=follow)
            return resolved if self.is_real(resolved) else self.copied(resolved)

    def copied(self, resolved: str, *, empty: bool = False) -> str:
        """Copy a file or folder into the scratch folder, if it is not there; returns the copy.

        A folder is made without its contents.
        """
        here = self.files + resolved
        place = self._existing(resolved)
        if place == here or _mode(here):
            return here
        self._make_parents(resolved)
        mode = _mode(place)
        if stat.S_ISDIR(mode):
            _make(here)
            self.note_change()
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
        """Return the path at which to make something new instead of ``resolved``.

        Raises:
            OSError: the path exists, or its folder does not.
        """
        place = self.place(resolved)
        if place is not None and _mode(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), resolved)
        self._check_parent(resolved)
        self._make_parents(resolved)
        here = self.files + resolved
        if _mode(here):
            posix.unlink(here)
        return here

    def make_folder(self, resolved: str, mode: int = 0o777) -> None:
        """Make a folder, which the program sees empty."""
        here = self.to_make(resolved)
        posix.mkdir(here, mode)
        if stat.S_ISDIR(_mode(resolved)):
            for name in posix.listdir(resolved):
                _mark_removed(f"{here}/{name}")
        self.note_change()

    def remove(self, resolved: str, *, folder: bool = False) -> None:
        """Remove a file, or an empty folder, for the program."""
        place = self._existing(resolved)
        if stat.S_ISDIR(_mode(place)) != folder:
            error = errno.ENOTDIR if folder else errno.EISDIR
            raise OSError(error, os.strerror(error), resolved)
        if folder and self.names(resolved):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), resolved)
        self._check_parent(resolved)
        here = self.files + resolved
        if folder and _mode(here):
            for name in posix.listdir(here):
                posix.unlink(f"{here}/{name}")
            posix.rmdir(here)
        elif _mode(here):
            posix.unlink(here)
        self._hide(resolved)
        self.note_change()

    def move(self, source: str, target: str) -> None:
        """Rename a file or a folder for the program, and replace the target for the program."""
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
            error = errno.ENOTDIR if is_folder else errno.EISDIR
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
                if error.errno != errno.EXDEV:
                    raise
                self._copy_over(place, here)
                posix.unlink(place)
        else:
            self._copy_over(place, here)
        if not self.is_real(source):
            self._hide(source)
        self.note_change()

    def _move_folder(self, source: str, target: str, is_there: bool) -> None:
        """Move a folder of the scratch disk; raises OSError as `os.rename` does."""
        if f"{target}/".startswith(f"{source}/"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source, None, target)
        if self.is_real(source) or self.is_real(target):
            # As between two disks, where programs copy.
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
        if not is_there:
            self.make_folder(target)
        elif self.names(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), source, None, target)
        for name in self.names(source):
            self.move(f"{source}/{name}", f"{target}/{name}")
        self.remove(source, folder=True)

    # -- what was written ------------------------------------------------------------------------

    def written(self) -> tuple[str, ...]:
        """List the files that the program has written from its point of view, sorted."""
        return tuple(sorted(self._scratch_files("")))

    def _scratch_files(self, resolved: str) -> Iterator[str]:
        """Yield the files of the scratch folder below a folder, by the program's paths."""
        try:
            names = posix.listdir(self.files + resolved)
        except FileNotFoundError:  # what cleans up temporary files has removed it
            return
        for name in names:
            path = f"{resolved}/{name}"
            mode = _mode(self.files + path)
            if stat.S_ISDIR(mode):
                yield from self._scratch_files(path)
            elif not stat.S_ISSOCK(mode):
                yield path

    # -- steps -----------------------------------------------------------------------------------

    def _existing(self, resolved: str) -> str:
        place = self.place(resolved)
        if place is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), resolved)
        posix.lstat(place)
        return place

    def _check_parent(self, resolved: str) -> None:
        """Raise the system's error if a name cannot be added to a folder or removed from it."""
        parent = resolved.rpartition("/")[0] or "/"
        place = self.place(parent)
        mode = 0 if place is None else _mode(place)
        if not mode:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), resolved)
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), resolved)
        if place is None or not posix.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), resolved)

    def _make_parents(self, resolved: str) -> None:
        parent = resolved.rpartition("/")[0]
        if _mode(self.files + parent):
            return
        at = self.files
        for name in parent.split("/")[1:]:
            at = f"{at}/{name}"
            _make(at)
        self.note_change()

    def _hide(self, resolved: str) -> None:
        if _mode(resolved):
            self._make_parents(resolved)
            _mark_removed(self.files + resolved)

    def _copy_over(self, source: str, target: str) -> None:
        """Copy a file or link of the real disk to a path of the scratch folder."""
        if stat.S_ISLNK(_mode(source)):
            if _mode(target):
                posix.unlink(target)
            posix.symlink(posix.readlink(source), target)
            return
        new = self._copy(source)
        try:
            posix.rename(new, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            beside = f"{target}.{posix.getpid()}.{next(self._numbers)}"
            _copy(new, beside)
            posix.rename(beside, target)
            posix.unlink(new)

    def _copy(self, source: str, empty: bool = False) -> str:
        new = f"{self.folder}/{posix.getpid()}.{threading.get_ident()}.{next(self._numbers)}"
        _copy(source, new, empty)
        return new


def _shared(path: str) -> mmap:
    """Map a file of a few bytes, which processes share."""
    number = posix.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        posix.ftruncate(number, 8)
        return mmap(number, 8)
    finally:
        posix.close(number)


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
    """Return a path's mode, without following a link; 0 if the path does not exist."""
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
