"""What the launcher knows of each rank, and how one failed, in words."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from umem.errors import OutOfMemoryError
from umem.launch.installed import first_line
from umem.launch.mpi import kind_of
from umem.launch.watcher import Lines, as_line
from umem.printable import shown

SILENT_SECONDS = 4.5
"""How long nothing may be heard of a rank's watcher, which tells each second."""


class Seat:
    """One rank as the launcher hears of it through its watcher's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lines = Lines()
        self.is_open = True
        self.rank, self.host, self.pid = -1, "", 0
        self.versions: dict[str, str] = {}
        self.library = self.starter = ""
        self.over_at: float | None = None
        self.is_failing = False
        self.ended: int | None = None
        self.heard_at = time.monotonic()

    def read(self) -> list[dict[str, Any]]:
        """Take what has come, note what it says, and give the messages."""
        try:
            data = self.socket.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self.close()
        self.heard_at = time.monotonic()
        messages = []
        for line in self._lines.feed(data):
            message = json.loads(line)
            self._note(message)
            messages.append(message)
        return messages

    def _note(self, message: dict[str, Any]) -> None:
        if "token" in message:
            self.rank, self.host, self.pid = message["rank"], message["host"], message["pid"]
        self.ended = message.get("ended", self.ended)
        said = message.get("said", {})
        self.versions = said.get("versions", self.versions)
        self.library = said.get("library", self.library)
        self.starter = said.get("starter", self.starter)
        if said.get("over") == 0:
            self.over_at = time.monotonic()
        self.is_failing = self.is_failing or "raised" in said or bool(said.get("over"))

    def write_lines(self, message: dict[str, Any]) -> None:
        """Write what the rank wrote, to the same stream, each line with its number."""
        if "stream" not in message:
            return
        stream = sys.stdout if message["stream"] == 1 else sys.stderr
        if stream is None:  # closed by whoever started this process
            return
        text = "".join(f"[{self.rank}] {line}\n" for line in message["lines"])
        buffer = getattr(stream, "buffer", None)
        if buffer is None:
            stream.write(text)
        else:
            buffer.write(text.encode("utf-8", "surrogateescape"))
        stream.flush()

    def order(self, **message: Any) -> None:
        """Tell the rank, or its watcher; one that is gone is noticed elsewhere."""
        if self.is_open:
            with contextlib.suppress(OSError):
                self.socket.sendall(as_line(message))

    def close(self) -> None:
        """Hear no more of it; its watcher ends what it watches then."""
        self.is_open = False
        self.socket.close()


def silent(seats: Iterable[Seat], now: float) -> Seat | None:
    """Find a rank of which nothing has been heard for seconds: its watcher tells each second.

    That is a watcher that is stopped, or a machine that is gone or cut off.
    """
    late = (each for each in seats if each.is_open and now - each.heard_at > SILENT_SECONDS)
    return next(late, None)


def differing(seats: Sequence[Seat]) -> tuple[Seat, str] | None:
    """Find the first rank that does not run what rank 0 runs, and say in what it differs.

    Or whose mpi4py would not find the other ranks: it is of another MPI than what started it.
    """
    first = seats[0]
    for seat in seats:
        if kind_of(seat.library).family != seat.starter:
            return seat, (
                "would see itself alone: its mpi4py is built for another MPI "
                f"({shown(seat.library)}) than that of mpiexec ({seat.starter})"
            )
        for name, version in first.versions.items():
            if seat.versions.get(name) != version:
                theirs = shown(str(seat.versions.get(name)))
                return seat, f"has {name} {theirs}, and rank 0 on {first.host} {shown(version)}"
    return None


# -- faults ---------------------------------------------------------------------------------------

_LONGEST = 1000


class RankFault(NamedTuple):
    """What ended a job: which rank, where, how; ``status`` is the exit status that it gives.

    ``rank`` is None where the job itself failed, such as mpiexec.
    """

    cause: str
    status: int = 1
    rank: int | None = None
    host: str = ""

    @property
    def sentence(self) -> str:
        """The sentence for a person."""
        if self.rank is None:
            return f"{self.cause}; no rank is left"
        return f"rank {self.rank} on {shown(self.host)} {self.cause}; all ranks were ended"


def describe(error: BaseException) -> str:
    """Write an error in one line, as a cause.

    >>> describe(ValueError("no such\\nfile")), describe(MemoryError())
    ('ValueError: no such', 'MemoryError (out of memory)')
    """
    kind = type(error).__name__
    if isinstance(error, (MemoryError, OutOfMemoryError)):
        kind += " (out of memory)"
    text = shown(first_line(str(error)), _LONGEST)
    return f"{kind}: {text}" if text else kind


def of_raise(said: dict[str, Any]) -> str:
    """Word an error that nobody in the script caught."""
    thread = said.get("thread")
    return f"raised {said['raised']}" + (f" in the thread {shown(thread)}" if thread else "")


def of_end(ended: dict[str, Any]) -> tuple[str, int]:
    """Word how a process ended, and give the exit status for it, which is not 0."""
    status = ended["ended"]
    if ended["stopped"]:
        return "was stopped (SIGSTOP) and did not go on", 1
    if ended["memory"]:
        return "was killed by the kernel, which had no memory left (SIGKILL)", 137
    if status < 0:
        how = "crashed" if -status in _CRASHES else "was killed"
        return f"{how} ({_name(-status)})", 128 - status
    if status == 0:
        return "ended with status 0 before MPI_Finalize", 1
    return f"ended with status {status}", status


_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
