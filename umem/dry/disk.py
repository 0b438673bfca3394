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

import builtins
import io
import os
import posix
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import ENOENT
from functools import partial
from types import ModuleType, TracebackType
from typing import Any

from umem.dry.overlay import WRITING, Name, Overlay, caches
from umem.dry.programs import Programs, refusal, replace_at_imports

VARIABLE = "UMEM_DRY_DISK"
"""Tells spawned Pythons: what is written, whether programs are stopped, and the folder."""
FLAG = "UMEM_DRY"
"""Is 1 while a run is on, for the program and for what it starts."""

_MODES = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND}
_MODES["x"] = os.O_CREAT | os.O_EXCL


class ScratchDisk:
    """The disk of a run, as `scratch_disk` gives it.

    Attributes:
        folder: the scratch folder; gone after the run.
    """

    def __init__(self, folder: str, writes: str, programs: str) -> None:
        self.folder = folder
        self.setting = f"{writes}:{programs}:{folder}"
        self.overlay = Overlay(folder, caches()) if writes == "scratch" else None
        self.programs = Programs(folder, programs == "stop", writes == "scratch", VARIABLE)
        self._after: tuple[tuple[str, ...], str | None] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """The files that the program, and Pythons that it started, believe they have written."""
        if self._after is not None:
            return self._after[0]
        return self.overlay.written() if self.overlay is not None else ()

    @property
    def first_connection(self) -> str | None:
        """The line that first connected to another machine, and to which; None: none did."""
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
    if _on.disk is not None:
        from umem.errors import StateError

        raise StateError("a dry run is on already: its scratch disk is one of the process")
    folder = os.path.realpath(tempfile.mkdtemp(prefix="umem-dry-"))
    owner = os.getpid()
    with ExitStack() as undo:

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
    writes, programs, folder = setting.split(":", 2)
    _turn_on(ScratchDisk(folder, writes, programs))


def real_temporary_folder() -> str:
    """Return the folder of temporary files that outlast a dry run, if one is on."""
    disk = _on.disk
    return tempfile.gettempdir() if disk is None else os.path.dirname(disk.folder)


# -- on and off ------------------------------------------------------------------------------------


class _On:
    """What is on in this process."""

    disk: ScratchDisk | None = None
    pairs: tuple[tuple[Any, Any], ...] = ()
    has_hook = False

    @staticmethod
    def put_back() -> None:
        """Undo `replace_at_imports`."""


_on = _On()
_opening = threading.local()
"""Of a thread, the path that a function of the program's opens; the hook lets it pass once."""
_VARIABLES = (FLAG, VARIABLE, "TMPDIR")


def _turn_on(disk: ScratchDisk) -> None:
    if disk.overlay is not None:
        tempfile.tempdir = disk.overlay.temporary
        _on.pairs = tuple(_replacements())
        _exchange({id(original): new for original, new in _on.pairs})
    _on.put_back = replace_at_imports(disk.programs, disk.overlay, disk.variables())
    if not _on.has_hook:
        sys.addaudithook(_audit)
        _on.has_hook = True
    _on.disk = disk


def _turn_off() -> None:
    _on.disk = None
    _on.put_back()
    _exchange({id(new): original for original, new in _on.pairs})
    _on.pairs = ()


def _exchange(found: dict[int, Any]) -> None:
    """Exchange functions in every module that has them, by whatever name."""
    for name, module in list(sys.modules.items()):
        if name in _UNTOUCHED or not isinstance(module, ModuleType):
            continue
        names = ModuleType.__getattribute__(module, "__dict__")  # which loads no lazy module
        _exchange_in(names.items(), found, partial(names.__setitem__))
        if name.partition(".")[0] in _WITH_CLASSES:
            for value in list(names.values()):
                if isinstance(value, type) and value.__module__ == name:
                    _exchange_in(vars(value).items(), found, partial(setattr, value))


_UNTOUCHED = ("posix", "_io", __name__)
"""Modules that importing uses, and this one, keep the real functions."""
_WITH_CLASSES = ("pathlib", "glob")
"""Modules whose classes keep functions of `os` as attributes, in some versions of Python."""


def _exchange_in(items: Any, found: dict[int, Any], store: Callable[[str, Any], None]) -> None:
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


# -- the functions, and how each treats its paths --------------------------------------------------


class Redirected:
    """A function in the place of one of Python's, which it calls with other paths.

    It is no Python function, so that as an attribute of a class it becomes no method; and it is
    equal to what it stands for, so that ``os.supports_dir_fd`` and its like know it.
    """

    def __init__(self, real: Any, treatment: Callable[..., Any]) -> None:
        self.real, self._treatment = real, treatment
        self.__name__ = self.__qualname__ = real.__name__
        self.__module__ = "io" if real is io.open else "os"
        self.__doc__, self.__wrapped__ = real.__doc__, real

    def __call__(self, *given: Any, **named: Any) -> Any:
        disk = _on.disk
        if disk is None or disk.overlay is None:  # kept by somebody beyond the run
            return self.real(*given, **named)
        return self._treatment(disk.overlay, self.real, *given, **named)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.real

    def __hash__(self) -> int:
        return hash(self.real)

    def __repr__(self) -> str:
        return repr(self.real)

    def __reduce__(self) -> str:
        return self.__name__


@contextmanager
def _named(path: Any, other: Any = None) -> Iterator[None]:
    """Have errors name the program's own paths."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        if error.filename2 is not None:
            error.filename2 = other
        raise


def _read(
    overlay: Overlay, real: Any, path: Any, *more: Any, dir_fd: Any = None, follow: bool = True,
    **named: Any,
) -> Any:  # fmt: skip
    """Read at a path: a file's facts, where a link points, whether one may."""
    if isinstance(path, int):
        return real(path, *more, **named)
    try:
        follows = follow and named.get("follow_symlinks", True)
        place = overlay.to_read(path, dir_fd, follow=follows)
        return real(path if place is None else place, *more, **named)
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


def _may(overlay: Overlay, real: Any, path: Any, *more: Any, **named: Any) -> bool:
    """Be ``os.access``, which raises nothing where there is no file."""
    try:
        return bool(_read(overlay, real, path, *more, **named))
    except FileNotFoundError:
        return False


def _change(
    overlay: Overlay, real: Any, path: Any, *more: Any, dir_fd: Any = None, follow: bool = True,
    **named: Any,
) -> Any:  # fmt: skip
    """Change what is at a path: its mode, times, owner, length."""
    if isinstance(path, int):
        found = overlay.of_descriptor(path)
        mode = os.fstat(path).st_mode
        if not found or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or overlay.is_real(found):
            return real(path, *more, **named)
        real, followed = _OF_PATHS.get(real.__name__, real), found
    else:
        followed = path
    follows = follow and named.get("follow_symlinks", True)
    with _named(path):
        return real(overlay.to_change(followed, dir_fd, follow=follows), *more, **named)


_OF_PATHS = {"fchmod": posix.chmod, "fchown": posix.chown}


def _truncate(overlay: Overlay, real: Any, path: Any, length: int) -> Any:
    if isinstance(path, int):  # which is open for writing, so it is a copy or real on purpose
        return real(path, length)
    with _named(path):
        place = overlay.to_open(path, os.O_WRONLY)
        return real(place, length)


def _make_node(
    overlay: Overlay, real: Any, path: Name, *more: Any, dir_fd: int | None = None, **named: Any
) -> Any:
    """Make something new at a path: a pipe."""
    with _named(path), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(path, dir_fd), follow=False)
        place = resolved if overlay.is_real(resolved) else overlay.to_make(resolved)
        return real(place, *more, **named)


def _make_folder(
    overlay: Overlay, real: Any, path: Name, mode: int = 0o777, *, dir_fd: int | None = None
) -> None:
    with _named(path), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(path, dir_fd), follow=False)
        if overlay.is_real(resolved):
            real(resolved, mode)
        else:
            overlay.make_folder(resolved, mode)


def _remove(
    overlay: Overlay, real: Any, path: Name, *, dir_fd: int | None = None, folder: bool = False
) -> None:
    with _named(path), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(path, dir_fd), follow=False)
        if overlay.is_real(resolved):
            real(resolved)
        else:
            overlay.remove(resolved, folder=folder)


def _move(
    overlay: Overlay, real: Any, src: Name, dst: Name, *,
    src_dir_fd: int | None = None, dst_dir_fd: int | None = None,
) -> None:  # fmt: skip
    with _named(src, dst), overlay.lock:
        source = overlay.resolved(overlay.absolute(src, src_dir_fd), follow=False)
        target = overlay.resolved(overlay.absolute(dst, dst_dir_fd), follow=False)
        overlay.move(source, target)


def _symlink(
    overlay: Overlay, real: Any, src: Name, dst: Name, target_is_directory: bool = False, *,
    dir_fd: int | None = None,
) -> None:  # fmt: skip
    with _named(src, dst), overlay.lock:
        resolved = overlay.resolved(overlay.absolute(dst, dir_fd), follow=False)
        real(src, resolved if overlay.is_real(resolved) else overlay.to_make(resolved))
        overlay.forget_folders()


def _link(
    overlay: Overlay, real: Any, src: Name, dst: Name, *, src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None, follow_symlinks: bool = True,
) -> None:  # fmt: skip
    with _named(src, dst), overlay.lock:
        source = overlay.to_change(src, src_dir_fd, follow=False)
        target = overlay.resolved(overlay.absolute(dst, dst_dir_fd), follow=False)
        real(source, target if overlay.is_real(target) else overlay.to_make(target))


def _open_descriptor(
    overlay: Overlay, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None
) -> Any:
    """Be ``os.open``."""
    with _named(path):
        if flags & WRITING:
            return real(overlay.to_open(path, flags, dir_fd), flags, mode)
        place = overlay.to_read(path, dir_fd, follow=not flags & os.O_NOFOLLOW)
        return real(path if place is None else place, flags, mode)


def _open_file(
    overlay: Overlay, real: Any, file: Any, mode: Any = "r", buffering: int = -1,
    encoding: Any = None, errors: Any = None, newline: Any = None, closefd: bool = True,
    opener: Any = None,
) -> Any:  # fmt: skip
    """Be ``open``."""
    more = (buffering, encoding, errors, newline, closefd)
    if not isinstance(file, (str, bytes, os.PathLike)) or not isinstance(mode, str):
        return real(file, mode, *more, opener)
    if opener is not None:
        _opening.path = file  # the opener's own call is judged
        try:
            return real(file, mode, *more, opener)
        finally:
            _opening.path = None
    try:
        if mode in _READING:
            place = overlay.to_read(file)
        else:
            kind = [letter for letter in mode if letter in _MODES]
            flags = os.O_RDWR if "+" in mode else os.O_WRONLY if kind != ["r"] else os.O_RDONLY
            if len(kind) != 1 or not flags & WRITING:
                return real(file, mode, *more)  # wrong, or an unusual way to say "r"
            place = overlay.to_open(file, flags | _MODES[kind[0]])
        if place is None:
            return real(file, mode, *more)
        opened = real(place, mode, *more)
    except OSError as error:
        if error.filename is not None:
            error.filename = file
        raise
    raw = getattr(opened, "buffer", opened)
    getattr(raw, "raw", raw).name = file
    return opened


_READING = ("r", "rb", "rt", "br", "tr")


def _list(overlay: Overlay, real: Any, path: Any = None) -> Any:
    with _named(path):
        resolved = _listed(overlay, path)
        if resolved is None:
            return real(path)
        found = overlay.names(resolved)
        return [os.fsencode(name) for name in found] if isinstance(path, bytes) else found


def _scan(overlay: Overlay, real: Any, path: Any = None) -> Any:
    with _named(path):
        resolved = _listed(overlay, path)
        return real(path) if resolved is None else Scanned(overlay, resolved, path)


def _listed(overlay: Overlay, path: Any) -> str | None:
    """Return the folder whose names are not just the real ones; None: they are."""
    if isinstance(path, int):
        resolved, is_plain = overlay.of_descriptor(path), True
        if not resolved:
            return None
    else:
        given = "." if path is None else path
        is_plain = overlay.to_read(given) is None
        resolved = overlay.resolved(overlay.absolute(given))
    if is_plain and not overlay.has_changed(resolved):
        return None
    return resolved


class Scanned:
    """What ``os.scandir`` gives, of a folder that the program has changed."""

    def __init__(self, overlay: Overlay, resolved: str, path: Any) -> None:
        self._entries = iter(
            [ScannedEntry(overlay, resolved, path, name) for name in overlay.names(resolved)]
        )

    def __iter__(self) -> Scanned:
        return self

    def __next__(self) -> ScannedEntry:
        return next(self._entries)

    def close(self) -> None:
        """Give no more entries."""
        self._entries = iter(())

    def __enter__(self) -> Scanned:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class ScannedEntry:
    """What stands for an ``os.DirEntry``."""

    def __init__(self, overlay: Overlay, resolved: str, path: Any, name: str) -> None:
        self._overlay, self._resolved = overlay, f"{'' if resolved == '/' else resolved}/{name}"
        self.name: Any = os.fsencode(name) if isinstance(path, bytes) else name
        given = "." if path is None else path
        self.path = self.name if isinstance(path, int) else os.path.join(given, self.name)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the facts of the file, of a link itself on demand."""
        place = self._overlay.to_read(self._resolved, follow=follow_symlinks)
        found = self._resolved if place is None else place
        return posix.stat(found) if follow_symlinks else posix.lstat(found)

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Tell whether it is a folder."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Tell whether it is a file."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Tell whether it is a link."""
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """Tell whether it is a link of Windows: never."""
        return False

    def inode(self) -> int:
        """Return its number on the disk."""
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
    **dict.fromkeys(("stat", "listxattr", "getxattr", "statvfs", "chdir"), _read),
    **dict.fromkeys(("lstat", "readlink"), partial(_read, follow=False)),
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
"""Functions of `os`, each with how it treats its paths; `open` itself is beside them."""


def _replacements() -> Iterator[tuple[Any, Any]]:
    """Give each real function with what stands for it."""
    for name, treatment in TREATMENTS.items():
        real = getattr(posix, name)
        yield real, Redirected(real, treatment)
    yield builtins.open, Redirected(builtins.open, _open_file)


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
    disk = _on.disk
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
        disk.programs.judge(event, given)


def _check_opened(overlay: Overlay, path: Any) -> None:
    if getattr(_opening, "path", None) is path and path is not None:
        _opening.path = None
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
    if _on.disk is not None and _on.disk.overlay is not None:
        _on.disk.overlay.lock = threading.RLock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)
