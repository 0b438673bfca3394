"""`scratch_disk`: a program's files are written to a folder that is removed after the run.

While it is active, the functions of `os` and `open` that take a path are replaced, in every module
that has them, by functions that look the path up in an `Overlay`. An audit hook covers the rest:
Python reports to it every file that it opens, renames or removes, even by ways that bypass the
replacements (`io.FileIO`, `posix`, a function that C code holds). A change of a real file stops
the run, naming its line.

Libraries in C or C++ that open their files themselves are out of reach. `programs.WRITERS` lists
the known ones, which are stopped; others write to the real disk. `import` reads the real disk too,
so the program cannot import a module that it has just written, and `posix.mkfifo` called by that
name makes a real pipe. A process's hook cannot be removed: after the run it checks one variable.

`io.open` takes a few microseconds longer to open a file for reading.
"""

from __future__ import annotations

import fcntl
import glob
import os
import posix
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import ENOENT
from functools import partial
from types import ModuleType
from typing import Any

from umem.dry.overlay import WRITING, Overlay, caches
from umem.dry.programs import Programs, refusal, replace_at_imports
from umem.dry.redirected import in_force, opening, replacements

VARIABLE = "UMEM_DRY_DISK"
"""Passes to spawned Pythons the settings for writes and programs, and the folder."""
FLAG = "UMEM_DRY"
"""Is 1 during a run, for the program and the processes that it starts."""
REAL_FOLDER = "UMEM_REAL_TMPDIR"
"""Names the folder of temporary files that outlast the run, such as the headers of kernels."""


class ScratchDisk:
    """The disk of a run; `scratch_disk` makes one.

    Attributes:
        folder: the scratch folder, which is removed after the run.
    """

    def __init__(self, folder: str, writes: str, programs: str) -> None:
        self.folder = folder
        self.setting = f"{writes}:{programs}:{folder}"
        self.overlay = Overlay(folder, caches(folder)) if writes == "scratch" else None
        self.programs = Programs(folder, programs == "stop", writes == "scratch", VARIABLE)
        self._after: tuple[tuple[str, ...], str | None] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Return the files that the program and its Pythons wrote, from their point of view."""
        if self._after is not None:
            return self._after[0]
        return self.overlay.written() if self.overlay is not None else ()

    @property
    def first_connection(self) -> str | None:
        """Return the first connection to another machine, with its line; None without one."""
        if self._after is not None:
            return self._after[1]
        return self.programs.first_connection()

    def close(self) -> None:
        """Remove the folder; the list of written files stays."""
        self._after = self.written, self.first_connection
        shutil.rmtree(self.folder, ignore_errors=True)

    def variables(self) -> dict[str, str]:
        """Return the environment variables for spawned Pythons."""
        found = {FLAG: "1", VARIABLE: self.setting}
        if self.overlay is not None:
            found["TMPDIR"] = self.overlay.temporary
            found[REAL_FOLDER] = os.path.dirname(self.folder)
        return found


@contextmanager
def scratch_disk(*, writes: str = "scratch", programs: str = "stop") -> Iterator[ScratchDisk]:
    """Protect the disk from changes by a program that runs in the block.

    The process, its threads, its forks and the Pythons that it spawns read back their own files.
    Files of `caches`, devices, pipes and open file descriptors are real.

    Args:
        writes: "scratch" redirects writes; "real" writes to the disk.
        programs: "stop": starting another program raises; "run": it runs, and writes to the disk.
            Compilers and Pythons of this environment always run.

    Raises:
        StateError: a scratch disk is already active.
        DryRunError: in the block, before a change that cannot be redirected; nothing was written or
            started.
    """
    if writes not in ("scratch", "real") or programs not in ("stop", "run"):
        raise ValueError('writes must be "scratch" or "real", and programs "stop" or "run"')
    if _active.disk is not None:
        from umem.errors import StateError

        raise StateError("a dry run is on already: a process has only one scratch disk")
    owner = os.getpid()
    with ExitStack() as undo:
        folder = undo.enter_context(_new_folder())

        def only_here(step: Callable[[], Any]) -> None:
            undo.callback(lambda: step() if os.getpid() == owner else None)

        only_here(partial(shutil.rmtree, folder, ignore_errors=True))
        disk = ScratchDisk(folder, writes, programs)
        only_here(disk.close)
        only_here(partial(_restore_variables, {name: os.environ.get(name) for name in _VARIABLES}))
        os.environ.update(disk.variables())
        only_here(partial(_restore_temporary, folder, tempfile.tempdir))
        only_here(_turn_off)
        _turn_on(disk)
        yield disk


def join(setting: str) -> None:
    """Share the parent process's scratch disk until this process ends."""
    if _active.disk is not None:  # site.py reads a folder of packages again that has two names
        return
    writes, programs, folder = setting.split(":", 2)
    _turn_on(ScratchDisk(folder, writes, programs))


@contextmanager
def _new_folder() -> Iterator[str]:
    """Make a folder, locked while this process lives, and remove the folders of dead processes."""
    for left in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{_PREFIX}*")):
        with suppress(OSError), _locked(left):
            found = os.lstat(left)
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _FRESH_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    folder = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
    with ExitStack() as kept:
        with suppress(OSError):  # a file system without locks
            kept.enter_context(_locked(folder))
        yield folder


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a folder; BlockingIOError: a living process has locked it."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


_PREFIX = "umem-dry-"
_FRESH_SECONDS = 60.0
"""A younger folder may not be locked yet; a minute is a safe choice."""

# -- on and off ------------------------------------------------------------------------------------


class _Active:
    """The active scratch disk of this process."""

    disk: ScratchDisk | None = None
    pairs: tuple[tuple[Any, Any], ...] = ()
    has_hook = False
    undo_imports: Callable[[], None] | None = None


_active = _Active()
_VARIABLES = (FLAG, VARIABLE, "TMPDIR", REAL_FOLDER)


def _turn_on(disk: ScratchDisk) -> None:
    """Replace the functions that take paths, and add the audit hook."""
    if disk.overlay is not None:
        tempfile.tempdir = disk.overlay.temporary
        _active.pairs = tuple(replacements())
        _exchange({id(original): new for original, new in _active.pairs})
        in_force.overlay = disk.overlay
    _active.undo_imports = replace_at_imports(disk.programs, disk.overlay, disk.variables())
    if not _active.has_hook:
        sys.addaudithook(_audit)
        _active.has_hook = True
    _active.disk = disk


def _turn_off() -> None:
    _active.disk = in_force.overlay = None
    if _active.undo_imports is not None:
        _active.undo_imports()
    _exchange({id(new): original for original, new in _active.pairs})
    _active.pairs = ()


def _exchange(found: dict[int, Any]) -> None:
    """Exchange functions in every module that has them, by whatever name."""
    for name, module in list(sys.modules.items()):
        if name in _UNTOUCHED or not isinstance(module, ModuleType):
            continue
        names = ModuleType.__getattribute__(module, "__dict__")  # which loads no lazy module
        _exchange_in(names.items(), found, names.__setitem__)
        if name.partition(".")[0] in _WITH_CLASSES:
            for value in list(names.values()):
                if isinstance(value, type) and value.__module__ == name:
                    _exchange_in(vars(value).items(), found, partial(setattr, value))
    numpys = sys.modules.get("numpy.lib._datasource")
    if numpys is not None:  # NumPy's private: a table with io.open in it, for text files
        openers = numpys._file_openers._file_openers
        _exchange_in(openers.items(), found, openers.__setitem__)


_UNTOUCHED = ("posix", "_io")
"""Modules used by `import`, which keep the real functions."""
_WITH_CLASSES = ("pathlib", "glob")
"""Modules whose classes keep functions of `os` as attributes, in some versions of Python."""


def _exchange_in(items: Any, found: dict[int, Any], store: Callable[[Any, Any], None]) -> None:
    for name, value in list(items):
        function = value.__func__ if isinstance(value, staticmethod) else value
        new = found.get(id(function))
        if new is not None:
            store(name, staticmethod(new) if function is not value else new)


def _restore_variables(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _restore_temporary(folder: str, before: str | None) -> None:
    tempfile.tempdir = before
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        # Private to multiprocessing: the folder of this process's sockets and blocks.
        config = process.current_process()._config
        if str(config.get("tempdir", "")).startswith(folder):
            del config["tempdir"]


# -- the audit hook --------------------------------------------------------------------------------

_NET: dict[str, tuple[tuple[int, int], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, -1),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, -1),),
    "os.removexattr": ((0, -1),),
}
"""Audit events that change files; places of paths and of their dir_fd among the arguments."""


def _audit(event: str, given: tuple[Any, ...]) -> None:
    """Check the change of the disk that Python is about to make; the audit hook."""
    disk = _active.disk
    if disk is None:
        return
    if event == "open":
        if disk.overlay is not None and given[2] and given[2] & WRITING:
            _check_opened(disk.overlay, given[0])
    elif event in _NET:
        if disk.overlay is not None:
            for path, dir_fd in _NET[event]:
                _check_real(
                    disk.overlay, given[path], given[dir_fd] if dir_fd >= 0 else None, event
                )
    else:
        disk.programs.check_event(event, given)


def _check_opened(overlay: Overlay, path: Any) -> None:
    if getattr(opening, "path", None) is path and path is not None:
        opening.path = None
    elif not isinstance(path, int):
        _check_real(overlay, path, None, "open")


def _check_real(overlay: Overlay, path: Any, dir_fd: int | None, event: str) -> None:
    """Stop the run before it changes, without the overlay, a file that should be redirected."""
    if isinstance(path, int):
        found = overlay.of_descriptor(path)
        if not found or event == "os.truncate" or posix.readlink(f"/proc/self/fd/{path}") != found:
            return
    else:
        found = os.fsdecode(path)
        if found.startswith(f"{overlay.folder}/") and ".." not in found:
            return
        with suppress(FileNotFoundError):  # of an empty name
            found = overlay.resolved(overlay.absolute(found, dir_fd), follow=event not in _OF_NAMES)
    if overlay.is_real(found):
        return
    try:
        mode = posix.lstat(found).st_mode
    except OSError as error:
        mode = stat.S_IFREG if error.errno == ENOENT else 0
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode) or event in _OF_NAMES:
        what = "opens a file for writing" if event == "open" else f"changes a file ({event})"
        raise refusal(f"{what} in a way that a dry run cannot redirect: {found}", "--writes real")


_OF_NAMES = ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink")
"""Events that change a name in a folder, and not the target of a link with that name."""


def _after_fork() -> None:
    if _active.disk is not None and _active.disk.overlay is not None:
        _active.disk.overlay.lock = threading.RLock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)
