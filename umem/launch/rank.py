"""What a rank's own process does for `umem run -n`: it checks in, and says how it is getting on.

All of it is told to the watcher by a pipe. Nothing here is what tells whether a rank is alive.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import json
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from umem.errors import LaunchError
from umem.launch.installed import first_line, mpi_library, starter, versions
from umem.launch.seats import describe
from umem.launch.watcher import PIPES, Lines, as_line

MPI = "mpi4py.MPI"
_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Where Open MPI's and MPICH's mpiexec tell a rank how many are on its machine."""
_LARGEST_STATUS = 2**63 - 1


class Rank:
    """This process as one rank of several; made once, by the command, before the script runs."""

    def __init__(self, says: int, told: int) -> None:
        self._says, self._told = says, told
        self._pipes = {end: _identity(end) for end in (says, told)}
        self._process = os.getpid()
        self._lines = Lines()
        self.number, self.count = 0, 1

    # -- before the script -----------------------------------------------------------------

    def check_in(self) -> None:
        """Say which versions this rank runs, and wait until all ranks have; then be ready.

        Raises:
            LaunchError: the launcher is gone.
        """
        self._say(versions=versions(), library=mpi_library(), starter=starter())
        order = next(self._orders(), None)
        if order is None:
            raise LaunchError("umem run -n has ended: this rank has nobody to run with")
        self.number, self.count = order["rank"], order["size"]
        sys.meta_path.insert(0, _NoticeMpi(self))
        threading.excepthook = self._thread_failed
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def has_mpi(self, module: Any) -> None:
        """MPI_Init has been called, unless the script does that itself.

        Raises:
            LaunchError: mpi4py does not belong to the mpiexec that started the ranks.
        """
        if module.Is_initialized() and module.COMM_WORLD.Get_size() != self.count:
            size = module.COMM_WORLD.Get_size()
            raise LaunchError(
                f"mpi4py sees {size} rank where mpiexec started {self.count}: it is built for "
                f"another MPI ({first_line(module.Get_library_version())}). Install mpi4py "
                "and mpiexec from one place (docs/ranks.md)"
            )
        self._say(mpi="begun")

    # -- how it ends -----------------------------------------------------------------------

    @property
    def is_this_process(self) -> bool:
        """Whether this is the rank itself, and no child of it by fork."""
        return os.getpid() == self._process

    def raised(self, error: BaseException, thread: str | None = None) -> None:
        """Tell of an error that nobody caught; the rank has a moment left to clean up."""
        if not self._say(raised=describe(error), thread=thread):
            self._leave(1)

    def over(self, code: object) -> None:
        """Tell that the script is over, with what it gave `sys.exit`.

        A child of the script by fork ends here: it must not finalise MPI, which is its parent's.
        """
        status = 0 if code is None else code if isinstance(code, int) else 1
        status = status & 255 if abs(status) <= _LARGEST_STATUS else 255  # as Python does
        if not self.is_this_process:
            self._leave(status)
        if not self._say(over=status) and status:
            self._leave(status)

    @staticmethod
    def _leave(status: int) -> None:
        """End this process without MPI_Finalize, which may wait for other ranks for ever."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(status)

    def _thread_failed(self, args: Any) -> None:
        threading.__excepthook__(args)
        if args.exc_type is SystemExit:
            return  # how a thread ends itself
        self.raised(args.exc_value or args.exc_type(), args.thread and args.thread.name)

    # -- the pipes -------------------------------------------------------------------------

    def _orders(self) -> Any:
        while _identity(self._told) == self._pipes[self._told]:
            try:
                data = os.read(self._told, 1 << 12)
            except OSError:  # the script closed it
                return
            if not data:
                return
            for line in self._lines.feed(data):
                yield json.loads(line)

    def _say(self, **message: Any) -> bool:
        """Tell the watcher; False where the script has closed the pipe, as daemons do.

        Its number may be another file's by now, which must not be written to.
        """
        if not self.is_this_process:
            return True
        with contextlib.suppress(OSError):
            if _identity(self._says) == self._pipes[self._says]:
                os.write(self._says, as_line(message))
                return True
        return False


def _identity(end: int) -> tuple[int, int] | None:
    """Which open file a number is; None where it is none."""
    try:
        found = os.fstat(end)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_here: Rank | None = None


def this_rank() -> Rank | None:
    """Return this process as a rank of `umem run -n`, or None where it is none."""
    global _here
    pipes = os.environ.pop(PIPES, None)
    if pipes is not None:
        says, told = map(int, pipes.split(","))
        for end in (says, told):
            os.set_inheritable(end, False)
        _here = Rank(says, told)
    return _here if _here is not None else None


def local_count() -> int:
    """Count the ranks on this rank's machine, ChainerMN's ``intra_size``; 1 in no rank."""
    if _here is None:
        return 1
    found = (os.environ.get(name, "") for name in _LOCAL)
    return next((int(text) for text in found if text.isdigit()), 1)


# -- MPI_Init, noticed ----------------------------------------------------------------------------


class _NoticeMpi(importlib.abc.MetaPathFinder):
    """Finds mpi4py.MPI as the others do, and tells the rank when it is imported."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MPI:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None and self._rank.is_this_process:
            spec.loader = _TellingLoader(spec.loader, self._rank)
        return spec


class _TellingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, rank: Rank) -> None:
        self._loader, self._rank = loader, rank

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._rank.has_mpi(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
