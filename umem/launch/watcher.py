"""One rank, watched from outside: what mpiexec starts, and what starts the script's Python.

Run as a file, with the standard library alone: it starts in a few hundredths of a second and knows
nothing of the script. It tells the launcher over a socket what the rank writes and how it ends, in
lines of JSON, and each second that it is there itself. Only the kernel is asked how the rank is.

Nothing that a failed rank started outlives it: orphans become children of this process, which ends
them too. The rank dies with this process, and this process when mpiexec or the launcher do.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

JOB = "UMEM_LAUNCH_JOB"
"""Where the environment says what to start, and whom to tell: JSON in base64."""
PIPES = "UMEM_LAUNCH_PIPES"
"""The numbers of the pipes by which the rank speaks and is spoken to."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Where Open MPI and MPICH say the number of a rank."""

TICK_SECONDS = 0.1
STOPPED_SECONDS = 1.5
"""How long a rank may be stopped; a debugger's stops are others, and do not count."""
CLEAN_UP_SECONDS = 2.0
"""What a rank that fails, or is told to end, has for its own clean-up."""
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36


class Lines:
    """Bytes as they come, taken apart where lines end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what has come, and give the lines that are complete."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole

    def take_rest(self) -> list[bytes]:
        """Give the line that stands open, if one does."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def as_line(message: dict[str, Any]) -> bytes:
    """Write a message as a line."""
    return json.dumps(message).encode("ascii") + b"\n"


class RankWatcher:
    """Starts the rank's process, tells of it, and ends what is left of it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._parent = os.getppid()
        self._socket = _connected(job["addresses"])
        self._told_at = 0.0
        rank = next(int(os.environ[name]) for name in RANKS if name in os.environ)
        self._tell(token=job["token"], rank=rank, host=socket.gethostname(), pid=os.getpid())
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._asked_to_end = 0
        self._was_told = False
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(kind, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._orders, self._said = Lines(), Lines()
        self._written = {1: Lines(), 2: Lines()}
        self._is_over, self._has_mpi = False, False
        self._kills_at: float | None = None
        self._stopped_at: float | None = None
        self._is_stopped = False
        self._child = self._start(job["command"], job["environment"])
        self._tell(child=self._child)

    # -- the rank's process ----------------------------------------------------------------

    def _start(self, command: list[str], environment: dict[str, str | None]) -> int:
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
        streams = {1: os.pipe(), 2: os.pipe()}
        says, told = os.pipe(), os.pipe()
        me = os.getpid()
        child = os.fork()
        if not child:
            try:
                signal.set_wakeup_fd(-1)
                for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(kind, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.setpgid(0, 0)  # what mpiexec sends to a group is for the watcher
                libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != me:
                    os._exit(1)
                for number, (_, end) in streams.items():
                    os.dup2(end, number)
                for end in (says[1], told[0]):
                    os.set_inheritable(end, True)
                _execute(command, {**environment, PIPES: f"{says[1]},{told[0]}"})
            finally:
                os._exit(127)
        for end in (streams[1][1], streams[2][1], says[1], told[0]):
            os.close(end)
        self._tells = told[1]
        self._streams = {streams[1][0]: 1, streams[2][0]: 2}
        self._says: int | None = says[0]
        return child

    def _is_dead(self) -> int | None:
        """The rank's exit status as `subprocess` has it; reaps orphans on the way."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1
            if pid == self._child:
                return os.waitstatus_to_exitcode(status)
            if not pid:
                return None

    def _look(self) -> None:
        """Notice a rank that is stopped: the kernel says so, however long it computes."""
        now = time.monotonic()
        if now - self._told_at > 1:
            self._tell(alive=True)
        if process_state(self._child) != "T":
            self._stopped_at = None
            return
        self._stopped_at = self._stopped_at or now
        if now - self._stopped_at > STOPPED_SECONDS and not self._is_stopped:
            self._is_stopped = True
            os.kill(self._child, signal.SIGKILL)

    # -- the loop --------------------------------------------------------------------------

    def run(self) -> int:
        """Follow the rank to its end, and return what mpiexec is to be told of it."""
        before = _killed_for_memory()
        while True:
            self._wait()
            status = self._is_dead()
            if status is not None:
                break
            self._look()
            if self._asked_to_end and not self._was_told:
                self._begin_to_end(self._asked_to_end)
            if os.getppid() != self._parent:
                self._tell(orphaned=True)
                return self._end_all()
            if self._kills_at is not None and time.monotonic() > self._kills_at:
                os.kill(self._child, signal.SIGKILL)
        self._drain()
        is_fine = not status and (self._is_over or not self._has_mpi)
        if not is_fine:
            self._end_all()
        self._tell(
            ended=status,
            fine=is_fine,
            stopped=self._is_stopped,
            memory=status == -signal.SIGKILL and _killed_for_memory() > before,
            told=self._was_told,
        )
        return 0 if is_fine else 128 - status if status < 0 else status or 1

    @property
    def _ends(self) -> list[Any]:
        """The pipes by which the rank can still be heard."""
        return [*self._streams, *([] if self._says is None else [self._says])]

    def _wait(self) -> None:
        read = [self._woken, self._socket, *self._ends]
        for ready in select.select(read, [], [], TICK_SECONDS)[0]:
            if ready is self._socket:
                self._obey()
            elif ready == self._woken:
                os.read(self._woken, 1 << 10)
            elif ready == self._says:
                self._listen()
            else:
                self._forward(ready)

    def _forward(self, end: int) -> None:
        data = os.read(end, 1 << 16)
        number = self._streams[end]
        lines = self._written[number].feed(data)
        if not data:
            os.close(end)
            del self._streams[end]
            lines = self._written[number].take_rest()
        self._pass_on(number, lines)

    def _pass_on(self, number: int, lines: list[bytes]) -> None:
        if lines:
            text = [line.decode("utf-8", "surrogateescape") for line in lines]
            self._tell(stream=number, lines=text)

    def _listen(self) -> None:
        """Hear what the rank says of itself: it has begun with MPI, it is over, it raised."""
        assert self._says is not None
        data = os.read(self._says, 1 << 16)
        if not data:
            os.close(self._says)
            self._says = None
        for line in self._said.feed(data):
            said = json.loads(line)
            self._has_mpi = self._has_mpi or said.get("mpi") is not None
            self._is_over = self._is_over or said.get("over") == 0
            if said.get("over") or "raised" in said:
                self._kill_in(CLEAN_UP_SECONDS)
            self._tell(said=said)

    def _drain(self) -> None:
        """Read what the rank wrote last; its own children may hold the pipes open for ever."""
        deadline = time.monotonic() + 0.5
        while self._ends and time.monotonic() < deadline:
            ready = select.select(self._ends, [], [], 0.05)[0]
            for end in ready:
                self._listen() if end == self._says else self._forward(end)
            if not ready:
                break
        for number in self._streams.values():
            self._pass_on(number, self._written[number].take_rest())

    def _obey(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:  # the launcher is gone
            self._end_all()
            os._exit(1)
        for line in self._orders.feed(data):
            order = json.loads(line)
            if "end" in order:
                self._asked_to_end = order["end"]
            else:
                with contextlib.suppress(OSError):  # the rank closed it
                    os.write(self._tells, line + b"\n")

    def _tell(self, **message: Any) -> None:
        self._told_at = time.monotonic()
        with contextlib.suppress(OSError):  # noticed where it is read
            self._socket.sendall(as_line(message))

    # -- the end ---------------------------------------------------------------------------

    def _on_signal(self, number: int, _: Any) -> None:
        self._asked_to_end = number

    def _begin_to_end(self, number: int) -> None:
        """Ask the rank to end, unless it is just dying by itself, which may be why."""
        time.sleep(0.05)
        if process_state(self._child) == "Z":
            return
        self._was_told = True
        os.kill(self._child, number)
        os.kill(self._child, signal.SIGCONT)
        self._kill_in(CLEAN_UP_SECONDS / 2)

    def _kill_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kills_at = at if self._kills_at is None else min(at, self._kills_at)

    def _end_all(self) -> int:
        """Kill all that is left below this process."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for pid in children(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.01)
                continue
            break
        return 1


def _connected(addresses: list[list[Any]]) -> socket.socket:
    """Reach the launcher by the first of its addresses that answers."""
    problems = []
    for name, port in addresses:
        try:
            found = socket.create_connection((name, port), timeout=5)
        except OSError as error:
            problems.append(f"{name}:{port}: {error.strerror or error}")
            continue
        found.settimeout(None)
        if not name.startswith("127."):  # there, one that does not read is not one that is gone
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 6000)  # ms
        return found
    host = socket.gethostname()
    sys.exit(f"umem: {host} does not reach the machine of umem run: {'; '.join(problems)}")


def _execute(command: list[str], environment: dict[str, str | None]) -> None:
    variables = {**os.environ, **environment}
    variables.pop(JOB, None)
    given = {name: value for name, value in variables.items() if value is not None}
    try:
        os.execve(command[0], command, given)
    except OSError as error:
        os.write(2, f"umem: cannot start {command[0]}: {error.strerror}\n".encode())


def process_state(pid: int) -> str:
    """The kernel's letter for how a process is; T is stopped. Empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b") ")[2][0])
    except (OSError, IndexError):
        return ""


def children(pid: int) -> list[int]:
    """Return the children of a process that are alive or not yet waited for."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(name))
    return found


def _killed_for_memory() -> int:
    """How many processes the kernel has killed on this machine for want of memory."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"oom_kill ")), 0)
    return 0


if __name__ == "__main__":
    sys.exit(RankWatcher(json.loads(base64.b64decode(os.environ[JOB]))).run())
