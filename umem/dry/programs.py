"""Things that a dry run does not redirect: other programs, files that C code opens, connections.

Another program would write to the real disk and could not read this program's files; a library in
C opens its files without Python. Both stop the run, naming its line, before anything happens.
Compilers, and Pythons of this environment, which share the scratch folder, are allowed. So are
connections; the first one is noted.
"""

from __future__ import annotations

import os
import posix
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from umem.dry.overlay import Overlay

if TYPE_CHECKING:
    from umem.errors import DryRunError

COMPILERS = re.compile(
    r"([\w.]+-)*(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|cc1|cc1plus|collect2|ld|as|ar|nm|nvcc|cicc|ptxas)"
    r"(-[\d.]+)?"
)
"""Names of compilers and of programs that they start, also as x86_64-linux-gnu-g++-12."""
HARMLESS = ("uname", "ldconfig")
STARTERS = ("platform", "ctypes.util", "uuid", "matplotlib", "umem")
"""Modules, submodules included, whose programs only look something up, or compile."""
_LINE = "umem_software_gpu.pth"


def refusal(what: str, way_out: str) -> DryRunError:
    """Return the error that stops a run at the program's line."""
    # In a spawned Python this is the first import of umem, and so of NumPy.
    from umem._common.stacks import program_line
    from umem.errors import DryRunError

    return DryRunError(f"{program_line()} {what}. Nothing was done; allow it with {way_out}")


class Programs:
    """Checks the programs that a run starts, its databases and its connections.

    Args:
        folder: the scratch folder, where the first connection of all processes is noted.
        stops: whether other programs are stopped.
        shares: whether spawned Pythons must share the scratch folder.
        variable: the environment variable by which they share it.
    """

    def __init__(self, folder: str, stops: bool, shares: bool, variable: str) -> None:
        self._note = f"{folder}/connection"
        self._owner = os.getpid()
        self._stops, self._shares, self._variable = stops, shares, variable
        self._checks: dict[str, Callable[..., None]] = {
            "subprocess.Popen": lambda file, args, folder, env: self.started(file, args, env),
            "os.posix_spawn": lambda file, args, env: self.started(file, args, env),
            "os.exec": self._replaced,
            "os.system": self._shell,
            "pty.spawn": lambda args: self.started(args[0], args, None),
            "socket.connect": self._connected,
            "sqlite3.connect": self._database,
        }

    def check_event(self, event: str, given: tuple[Any, ...]) -> None:
        """Check an audit event.

        Raises:
            DryRunError: the event stops the run.
        """
        check = self._checks.get(event)
        if check is not None:
            check(*given)

    def first_connection(self) -> str | None:
        """Return the first connection of this process or its children, as text."""
        try:
            number = posix.open(self._note, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return posix.read(number, 4096).decode(errors="replace")
        finally:
            posix.close(number)

    def started(self, file: Any, args: Any, env: Mapping[Any, Any] | None) -> None:
        """Check a program that is about to be started.

        Raises:
            DryRunError: it is another program, or a Python that would not share the folder.
        """
        name = os.fsdecode(file)
        words = [os.fsdecode(word) for word in ([args] if isinstance(args, (str, bytes)) else args)]
        if _is_this_python(name):
            if self._shares and not _is_tracker(words):
                self._check_sharing(words, os.environ if env is None else env)
        elif self._stops and not _is_allowed(os.path.basename(name)):
            shown = " ".join(words[2:] if words[1:2] == ["-c"] else words) or name
            raise refusal(f"starts another program: {shown}", "--programs run")

    def _check_sharing(self, words: Sequence[str], env: Mapping[Any, Any]) -> None:
        """Refuse to start a Python that would not share the scratch disk."""
        names = {os.fsdecode(name) for name, value in env.items() if value}
        if self._variable not in names:
            raise refusal(
                f"starts a Python whose environment lacks {self._variable}, so it would write for "
                f"real", "--writes real"
            )  # fmt: skip
        if _is_without_site(words):
            raise refusal("starts a Python with -S, which would write for real", "--writes real")
        if not _loads_line(self._variable):
            raise refusal(
                f"starts a Python that does not load {_LINE}, so it would write for real: "
                f"install umem into {sys.prefix}", "--writes real"
            )  # fmt: skip

    def _replaced(self, file: Any, args: Any, env: Any) -> None:
        self.started(file, args, env)
        if self._shares and self._owner == os.getpid():  # nobody would remove the folder
            raise refusal("replaces itself by another program (os.exec)", "--writes real")

    def _shell(self, command: Any) -> None:
        if self._stops:
            shown = os.fsdecode(command)
            raise refusal(f"starts another program: {shown}", "--programs run")

    def _database(self, database: Any) -> None:
        text = os.fsdecode(database)
        is_kept = text.startswith("file:") and re.search(r":memory:|mode=(memory|ro)\b", text)
        if self._shares and text not in ("", ":memory:") and not is_kept:
            raise refusal(f"opens a database that SQLite writes: {text}", "--writes real")

    def _connected(self, _: Any, address: Any) -> None:
        """Note the first connection to another machine, with the program's line."""
        if not isinstance(address, tuple) or len(address) < 2 or _is_loopback(str(address[0])):
            return
        if self.first_connection() is None:
            from umem._common.stacks import program_line

            text = f"{program_line()} connects to {address[0]}:{address[1]}"
            try:
                number = posix.open(self._note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError:  # another thread or process was first, or the run is over
                return
            try:
                posix.write(number, text.encode(errors="replace"))
            finally:
                posix.close(number)


def _is_this_python(name: str) -> bool:
    found = shutil.which(name)
    if found is None:
        return False
    found = os.path.abspath(found)
    return found == sys.executable or (
        os.path.dirname(found) == os.path.dirname(sys.executable)
        and os.path.realpath(found) == os.path.realpath(sys.executable)
    )


def _is_tracker(words: Sequence[str]) -> bool:
    """Tell whether a command is multiprocessing's resource tracker, which writes no file."""
    return "multiprocessing.resource_tracker" in words[-1]


def _is_without_site(words: Sequence[str]) -> bool:
    """Tell whether a Python has the option -S, by which it runs no .pth file."""
    at = 1
    while at < len(words) and words[at].startswith("-") and not words[at].startswith("--"):
        letters = words[at][1:]
        for number, letter in enumerate(letters):
            if letter == "S":
                return True
            if letter in "cm":
                return False
            if letter in "WX":
                at += number == len(letters) - 1
                break
        at += 1
    return False


def _loads_line(variable: str) -> bool:
    """Tell whether Pythons of this environment read the variable when they start."""
    for folder in sys.path:
        try:
            with open(os.path.join(folder, _LINE), encoding="utf-8") as file:
                line = file.read()
        except OSError:
            continue
        if variable in line:
            return True
    return False


def _is_allowed(name: str) -> bool:
    if COMPILERS.fullmatch(name) or name in HARMLESS:
        return True
    frame: Any = sys._getframe(1)
    ours = ("umem.dry.", "subprocess", "os")
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(ours):
        frame = frame.f_back
    starter = "" if frame is None else str(frame.f_globals.get("__name__"))
    return any(f"{starter}.".startswith(f"{one}.") for one in STARTERS)


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host in ("", "localhost")
    return address.is_loopback or address.is_unspecified


def _connects_no_files(module: ModuleType) -> Undo:
    """Prevent databases in memory from attaching files, which raises no audit event."""
    real = module.connect

    def connect(*given: Any, **named: Any) -> Any:
        connection = real(*given, **named)
        connection.set_authorizer(_no_files)
        return connection

    return _put(module, "connect", connect)


def _no_files(action: int, name: str | None, *more: Any) -> int:
    import sqlite3

    is_file = action == sqlite3.SQLITE_ATTACH and name not in ("", ":memory:")
    return sqlite3.SQLITE_DENY if is_file else sqlite3.SQLITE_OK


# -- what has to be replaced where it is imported --------------------------------------------------


class Writer(NamedTuple):
    """A function that opens a file without Python.

    ``path`` and ``mode`` are the places of these arguments; ``mode`` is -1 if it always writes.
    """

    name: str
    path: int
    path_name: str
    mode: int = -1
    default: str = ""


WRITERS = {
    "h5py": Writer("File.__init__", 1, "name", 2, "r"),
    "tables": Writer("open_file", 0, "filename", 1, "r"),
    "cv2": Writer("imwrite", 0, "filename"),
    "torch": Writer("save", 1, "f"),
    "safetensors": Writer("serialize_file", 1, "filename"),
    "_gdbm": Writer("open", 0, "filename", 1, "r"),
    "dbm.gnu": Writer("open", 0, "filename", 1, "r"),
    "_dbm": Writer("open", 0, "filename", 1, "r"),
    "dbm.ndbm": Writer("open", 0, "filename", 1, "r"),
}
"""Known C libraries whose files cannot be redirected; opening one for writing stops the run."""

Undo = Callable[[], None]


def replace_at_imports(
    programs: Programs, overlay: Overlay | None, variables: Mapping[str, str]
) -> Undo:
    """Replace functions that start Pythons or open files in C, now or when they are imported.

    Returns:
        A function that restores them.
    """
    undo: list[Undo] = []

    def pythons(module: ModuleType) -> None:
        undo.append(
            _put(module.Popen, "__init__", _with_variables(module.Popen.__init__, variables))
        )

    def multiprocessing(module: ModuleType) -> None:
        real = module.spawnv_passfds

        def spawnv_passfds(path: Any, args: Any, passfds: Any) -> Any:
            programs.started(path, args, None)
            return real(path, args, passfds)

        # multiprocessing's: it starts Pythons without an audit event.
        undo.append(_put(module, "spawnv_passfds", spawnv_passfds))

    steps: dict[str, Callable[[ModuleType], None]] = {
        "subprocess": pythons, "multiprocessing.util": multiprocessing,
    }  # fmt: skip
    if overlay is not None:
        for name in ("sqlite3.dbapi2", "sqlite3"):
            steps[name] = lambda module: undo.append(_connects_no_files(module))
        for name, writer in WRITERS.items():
            steps[name] = partial(_stop_writer, undo, writer, overlay)
    undo.append(_put(os, "_spawnvef", _checked_spawn(programs)))
    finder = AfterImport(steps)
    sys.meta_path.insert(0, finder)
    undo.append(lambda: sys.meta_path.remove(finder))
    for name in steps:
        module = sys.modules.get(name)
        if module is not None:
            steps[name](module)

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


class AfterImport:
    """A finder that changes a module after it is loaded."""

    def __init__(self, steps: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._steps = steps

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module where the other finders do."""
        step = self._steps.get(name)
        if step is None:
            return None
        for finder in list(sys.meta_path):
            spec = None if isinstance(finder, AfterImport) else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenLoader(spec.loader, step)
                return spec
        return None


class _ThenLoader(Loader):
    """A loader that changes a module after another loader has loaded it."""

    def __init__(self, loader: Any, step: Callable[[ModuleType], None]) -> None:
        self._loader, self._step = loader, step

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._step(module)


def _put(owner: Any, name: str, new: Any) -> Undo:
    before = vars(owner)[name]
    setattr(owner, name, new)
    return lambda: setattr(owner, name, before)


def _with_variables(real: Any, variables: Mapping[str, str]) -> Any:
    """Pass to every program the variables by which Pythons share the folder."""

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        if named.get("env") is not None:
            named["env"] = {**named["env"], **variables}
        real(self, *given, **named)

    return __init__


def _checked_spawn(programs: Programs) -> Any:
    # CPython's private, by which all of os.spawn* go; in the fork an error would be lost.
    real = vars(os)["_spawnvef"]

    def _spawnvef(mode: Any, file: Any, args: Any, env: Any, function: Any) -> Any:
        programs.started(file, args, env)
        return real(mode, file, args, env, function)

    return _spawnvef


def _stop_writer(undo: list[Undo], writer: Writer, overlay: Overlay, module: ModuleType) -> None:
    """Replace a function that opens files in C by one that refuses to write."""
    *owners, name = writer.name.split(".")
    owner: Any = module
    for one in owners:
        owner = getattr(owner, one)
    if name not in vars(owner):
        return
    real = getattr(owner, name)

    def judged(*given: Any, **named: Any) -> Any:
        """Refuse to write, and read where the overlay has the file."""
        at, is_named = writer.path, writer.path_name in named
        path = named.get(writer.path_name) if is_named else given[at] if at < len(given) else None
        is_path = isinstance(path, (str, bytes, os.PathLike))
        in_memory = named.get("driver") == "core" and not named.get("backing_store", True)
        if is_path and path is not None and not in_memory:
            if not _reads(writer, given, named):
                what = f"opens a file for writing in {module.__name__}, which cannot be redirected"
                raise refusal(f"{what}: {os.fsdecode(path)}", "--writes real")
            place = overlay.to_read(path)
            if is_named:
                named[writer.path_name] = place
            else:
                given = (*given[:at], place, *given[at + 1 :])
        return real(*given, **named)

    undo.append(_put(owner, name, judged))


def _reads(writer: Writer, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    if writer.mode < 0:
        return False
    mode = named.get("mode", named.get("flags", given[writer.mode] if writer.mode < len(given)
                                       else None))  # fmt: skip
    return (writer.default if mode is None else mode) in ("r", "rf", "ru", "rfu", "ruf")
