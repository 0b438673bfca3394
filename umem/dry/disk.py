"""`scratch_disk`: what a program writes goes into a folder that ends with the run.

While one is on, the functions of `os` and `open` that take a path are replaced, in every module
that has them, by ones that ask an `Overlay` where that path is. An audit hook is the net beneath:
Python tells it of every file that it opens, renames or removes, also by a way that the
replacements do not see (`io.FileIO`, `posix`, a function that C code holds), and what would change
a real file stops the run with its line.

What Python is not asked about is out of reach: a library in C or C++ that opens its files itself.
`programs.WRITERS` lists the known ones, which are stopped; others write for real. Likewise
`import` reads the real disk, so the program cannot import a module that it has just written, and
`posix.mkfifo` called by that name makes a real pipe. The hook of a process cannot be removed:
after the run it looks at one variable.

`io.open` costs a few microseconds more for a file that is read.
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
"""Tells spawned Pythons: what is written, whether programs are stopped, and the folder."""
FLAG = "UMEM_DRY"
"""Is 1 while a run is on, for the program and for what it starts."""
REAL_FOLDER = "UMEM_REAL_TMPDIR"
"""Names the folder of temporary files that outlast the run, such as the headers of kernels."""


class ScratchDisk:
    """The disk of a run, as `scratch_disk` gives it.

    Attributes:
        folder: the scratch folder; gone after the run.
    """

    def __init__(self, folder: str, writes: str, programs: str) -> None:
        self.folder = folder
        self.setting = f"{writes}:{programs}:{folder}"
        self.overlay = Overlay(folder, caches(folder)) if writes == "scratch" else None
        self.programs = Programs(folder, programs == "stop", writes == "scratch", VARIABLE)
        self._after: tuple[tuple[str, ...], str | None] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Return the files that the program and its Pythons believe they have written."""
        if self._after is not None:
            return self._after[0]
        return self.overlay.written() if self.overlay is not None else ()

    @property
    def first_connection(self) -> str | None:
        """Return the line that first connected to another machine, and to which; None: none did."""
        if self._after is not None:
            return self._after[1]
        return self.programs.first_connection()

    def close(self) -> None:
        """Remove the folder; what was written stays known."""
        self._after = self.written, self.first_connection
        shutil.rmtree(self.folder, ignore_errors=True)

    def variables(self) -> dict[str, str]:
        """Return what a spawned Python is told."""
        found = {FLAG: "1", VARIABLE: self.setting}
        if self.overlay is not None:
            found["TMPDIR"] = self.overlay.temporary
            found[REAL_FOLDER] = os.path.dirname(self.folder)
        return found


@contextmanager
def scratch_disk(*, writes: str = "scratch", programs: str = "stop") -> Iterator[ScratchDisk]:
    """Keep the disk as it is while a program runs inside of the block.

    The process, its threads, its forks and the Pythons that it spawns read back what they write.
    Files of `caches`, devices, pipes and open file descriptors are real.

    Args:
        writes: "scratch", or "real": nothing is held back.
        programs: "stop": starting another program raises; "run": it runs, and writes for real.
            Compilers and Pythons of this environment run in any case.

    Raises:
        StateError: one is on already.
        DryRunError: in the block, at what cannot be redirected; nothing was written or started.
    """
    if writes not in ("scratch", "real") or programs not in ("stop", "run"):
        raise ValueError('writes is "scratch" or "real", and programs is "stop" or "run"')
    if _active.disk is not None:
        from umem.errors import StateError

        raise StateError("a dry run is on already: its scratch disk is one of the process")
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
    """Share the scratch disk of the process that started this one; for the rest of it."""
    if _active.disk is not None:  # site.py reads a folder of packages again that has two names
        return
    writes, programs, folder = setting.split(":", 2)
    _turn_on(ScratchDisk(folder, writes, programs))


@contextmanager
def _new_folder() -> Iterator[str]:
    """Make a folder that is locked as long as this process lives, and remove those of dead ones."""
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
    """Lock a folder; BlockingIOError: a living process has."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


_PREFIX = "umem-dry-"
_FRESH_SECONDS = 60.0
"""A younger folder may be about to be locked: a minute is a choice on the safe side."""

# -- on and off ------------------------------------------------------------------------------------


class _Active:
    """The scratch disk that is on in this process."""

    disk: ScratchDisk | None = None
    pairs: tuple[tuple[Any, Any], ...] = ()
    has_hook = False
    undo_imports: Callable[[], None] | None = None


_active = _Active()
_VARIABLES = (FLAG, VARIABLE, "TMPDIR", REAL_FOLDER)


def _turn_on(disk: ScratchDisk) -> None:
    """Replace the functions that take paths, and lay the net."""
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
"""Modules that importing uses keep the real functions."""
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
        # multiprocessing's private: the folder of this process's sockets and blocks.
        config = process.current_process()._config
        if str(config.get("tempdir", "")).startswith(folder):
            del config["tempdir"]


# -- the net ---------------------------------------------------------------------------------------

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
    """Check what Python is about to do to the disk; the audit hook."""
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
    """Stop the run where a file that is not real to it would be changed past the overlay."""
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
"""Events that concern a name in a folder, not what a link of that name leads to."""


def _after_fork() -> None:
    if _active.disk is not None and _active.disk.overlay is not None:
        _active.disk.overlay.lock = threading.RLock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)
