"""A job of several ranks, from the first process to the last: it is started, heard and ended."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from umem.launch import hosts, mpi
from umem.launch.installed import first_line
from umem.launch.seats import RankFault, Seat, differing, of_end, of_raise, silent
from umem.launch.watcher import JOB, children, process_state
from umem.printable import shown

START_SECONDS = 120.0
"""How long all ranks have to begin, from one that has."""
CLEAN_UP_SECONDS = 2.5
"""What a rank that failed has before all others are told to end."""
END_SECONDS = 2.5
"""What they have before mpiexec is ended, too."""
_TICK_SECONDS = 0.1
_STOPPED_SECONDS = 1.5
_PAUSE_SECONDS = 2.0
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36


class Job:
    """mpiexec, and a seat for each rank that has begun.

    Args:
        program: the mpiexec that starts them.
        command: what each rank runs.
        count: how many ranks.
        hosts_file: what mpiexec reads the machines from; None: this one.
        there: the same, read.
        variables: what ranks get in their environment.
    """

    def __init__(
        self,
        program: mpi.Mpiexec,
        command: list[str],
        count: int,
        hosts_file: Path | None,
        there: list[hosts.Host],
        variables: dict[str, str],
    ) -> None:
        self._count = count
        self._seats: dict[int, Seat] = {}
        self._strangers: list[Seat] = []
        self._fault: RankFault | None = None
        self._faulted_at = self._ending_at = self._looked_at = 0.0
        self._signal = 0
        self._is_terminated = self._is_let_go = False
        self._stopped_at: dict[int, float] = {}
        self.mpiexec_lines: list[str] = []
        self._token = secrets.token_hex(16)
        self._door = socket.create_server(("0.0.0.0" if there else "127.0.0.1", 0))
        port = self._door.getsockname()[1]
        names = hosts.addresses(there) if there else ["127.0.0.1"]
        told = {
            "command": command,
            "environment": variables,
            "addresses": [[name, port] for name in names],
            "token": self._token,
        }
        exported = {JOB: base64.b64encode(json.dumps(told).encode()).decode()}
        self._environment = {**os.environ, **variables, **exported}
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
            if name in os.environ:
                exported[name] = os.environ[name]
        watcher = [sys.executable, "-S", "-E", str(Path(__file__).with_name("watcher.py"))]
        self._line = mpi.arguments(program, count, hosts_file, exported) + watcher
        self.mpiexec_lines.append(f"$ {' '.join(self._line)}")

    @property
    def is_unexplained(self) -> bool:
        """Whether mpiexec could not start the ranks, so that only it can say why."""
        return self._fault is not None and self._fault.rank is None and not self._is_let_go

    # -- from begin to end -----------------------------------------------------------------

    def run(self) -> tuple[int, str | None]:
        """Start mpiexec and follow all to the end: the exit status, and why if it is not 0."""
        libc = ctypes.CDLL(None)
        others = set(children(os.getpid()))
        me = os.getpid()

        def dies_with_me() -> None:
            libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(1)

        with self._signals(), self._door:
            libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
            self._mpiexec = subprocess.Popen(
                self._line,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                preexec_fn=dies_with_me,
            )
            self._began = time.monotonic()
            try:
                while self._goes_on():
                    self._hear()
                    self._look()
                    self._end_if_due()
            finally:
                self._end_what_is_left(others)
                libc.prctl(_SET_SUBREAPER, 0, 0, 0, 0)
        self._read_mpiexec()
        return self._result()

    def _goes_on(self) -> bool:
        if self._mpiexec.poll() is None:
            return True
        if self._ending_at and time.monotonic() > self._ending_at + 2 * END_SECONDS:
            return False
        return any(seat.is_open for seat in self._everybody())

    def _result(self) -> tuple[int, str | None]:
        if self._signal:
            name = signal.Signals(self._signal).name
            over = sorted(seat.rank for seat in self._seats.values() if seat.over_at is not None)
            early = f" (over before: {', '.join(map(str, over))})" if over else ""
            return 128 + self._signal, f"interrupted by {name}; all ranks were ended{early}"
        if self._fault is None:
            return 0, None
        return self._fault.status, self._with_abort(self._fault).sentence

    def _with_abort(self, fault: RankFault) -> RankFault:
        """Name the rank that called MPI_Abort, of which Open MPI tells, and no process can."""
        for line in self.mpiexec_lines:
            called, _, rest = line.partition("MPI_ABORT was invoked on rank ")
            number = rest.partition(" ")[0]
            if not called and number.isdigit() and int(number) in self._seats:
                host = self._seats[int(number)].host
                return fault._replace(rank=int(number), host=host, cause="called MPI_Abort")
        return fault

    # -- what is heard ---------------------------------------------------------------------

    def _everybody(self) -> Iterator[Seat]:
        yield from self._seats.values()
        yield from self._strangers

    def _hear(self) -> None:
        assert self._mpiexec.stdout is not None
        seats: dict[Any, Seat] = {seat.socket: seat for seat in self._everybody() if seat.is_open}
        output = [] if self._mpiexec.stdout.closed else [self._mpiexec.stdout]
        ready = select.select([self._door, *seats, *output], [], [], _TICK_SECONDS)[0]
        for one in ready:
            if one is self._door:
                self._strangers.append(Seat(self._door.accept()[0]))
            elif one in seats:
                self._listen(seats[one])
            else:
                self._read_mpiexec()

    def _read_mpiexec(self) -> None:
        """Keep what mpiexec itself says: its banners, and what it could not start."""
        stream = self._mpiexec.stdout
        if stream is None or stream.closed:
            return
        if not select.select([stream], [], [], 0)[0]:
            return
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            stream.close()
        self.mpiexec_lines += data.decode(errors="replace").splitlines()

    def _listen(self, seat: Seat) -> None:
        for message in seat.read():
            if "token" in message:
                if message["token"] != self._token:
                    seat.close()
                    return
                self._strangers.remove(seat)
                self._seats[seat.rank] = seat
            elif seat.rank in self._seats:
                seat.write_lines(message)
                self._judge(seat, message)
        if seat.is_open or seat.rank not in self._seats or seat.ended is not None:
            return
        if self._mpiexec.poll() is not None:
            self._blame_mpiexec(self._mpiexec.returncode)
        else:
            self._blame(seat, "was killed, and the process that watches it, too", 137)

    def _judge(self, seat: Seat, message: dict[str, Any]) -> None:
        said = message.get("said", {})
        if "raised" in said:
            self._blame(seat, of_raise(said))
        elif said.get("over"):
            self._blame(seat, f"ended with status {said['over']}", said["over"])
        elif "orphaned" in message:
            self._blame_mpiexec(self._mpiexec.poll(), seat.host)
        elif "ended" in message and not message["fine"] and not message["told"]:
            self._blame(seat, *of_end(message))
        if "versions" in said and len(self._seats) == self._count:
            self._let_go()

    def _let_go(self) -> None:
        """Have the scripts begin once all ranks have checked in, alike."""
        seats = [self._seats[rank] for rank in sorted(self._seats)]
        if self._is_let_go or not all(seat.versions for seat in seats):
            return
        problem = differing(seats)
        if problem is not None:
            self._blame(problem[0], problem[1])
            return
        self._is_let_go = True
        for seat in seats:
            seat.order(rank=seat.rank, size=len(seats))

    # -- what is noticed -------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > _PAUSE_SECONDS:  # this process was stopped, as by Ctrl-Z,
            self._stopped_at.clear()  # and so were the others
            for seat in self._seats.values():
                seat.heard_at = now
        self._looked_at = now
        if self._fault is not None or self._signal:
            return
        status = self._mpiexec.poll()
        if status is not None:
            if status and not any(seat.is_open for seat in self._everybody()):
                self._read_mpiexec()
                self._blame_mpiexec(status)
            return
        if not self._is_let_go and now - self._began > START_SECONDS:
            missing = self._count - len(self._seats)
            self._blame(None, f"{missing} of {self._count} ranks did not start")
        stopped = self._stopped(now)
        if stopped is not None:
            self._blame(stopped[0], stopped[1])
        mute = silent(self._seats.values(), now)
        if mute is not None:
            self._blame(mute, "is not heard of any more: its machine or network is gone")

    def _stopped(self, now: float) -> tuple[Seat | None, str] | None:
        """Find mpiexec or a watcher of this machine that is stopped, which can end no rank."""
        here = socket.gethostname()
        watched: dict[int, Seat | None] = {self._mpiexec.pid: None}
        watched |= {seat.pid: seat for seat in self._seats.values() if seat.host == here}
        for pid, seat in watched.items():
            if process_state(pid) != "T":
                self._stopped_at.pop(pid, None)
            elif now - self._stopped_at.setdefault(pid, now) > _STOPPED_SECONDS:
                who = "mpiexec" if seat is None else "is watched by a process that"
                return seat, f"{who} was stopped (SIGSTOP) and did not go on"
        return None

    def _blame_mpiexec(self, status: int | None, host: str = "") -> None:
        if status is None:  # the one of its processes that is on a host
            self._blame(None, f"mpiexec has ended on {shown(host)}", 137)
            return
        if status < 0:
            self._blame(None, f"mpiexec was killed ({signal.Signals(-status).name})", 128 - status)
            return
        over = [seat for seat in self._seats.values() if seat.over_at is not None]
        if over:
            first = min(over, key=lambda seat: seat.over_at or 0.0)
            self._blame(first, "ended (status 0) while others were in MPI")
            return
        texts = (first_line(line.strip("- ")) for line in self.mpiexec_lines)
        why = next((text for text in texts if text.startswith("umem: ")), None)
        what = f"mpiexec ended with status {status}"
        self._blame(None, f"{what}: {shown(why[6:])}" if why else what, status)

    def _blame(self, seat: Seat | None, cause: str, status: int = 1) -> None:
        """Keep the first fault: others follow from it."""
        if self._fault is None and not self._signal:
            rank, host = (None, "") if seat is None else (seat.rank, seat.host)
            self._fault = RankFault(cause, status, rank, host)
            self._faulted_at = time.monotonic()

    # -- the end ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def on_signal(number: int, _: Any) -> None:
            self._signal = number

        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            with contextlib.suppress(ValueError):  # in another thread than the main one
                before[number] = signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_if_due(self) -> None:
        now = time.monotonic()
        if self._ending_at:
            if now > self._ending_at + END_SECONDS and not self._is_terminated:
                self._is_terminated = True
                self._mpiexec.send_signal(signal.SIGCONT)
                self._mpiexec.terminate()
            if now > self._ending_at + 1.5 * END_SECONDS:
                self._mpiexec.kill()
        elif self._signal or self._is_time_to_end(now):
            self._ending_at = now
            for seat in self._seats.values():
                seat.order(end=self._signal or signal.SIGTERM)

    def _is_time_to_end(self, now: float) -> bool:
        if self._fault is None:
            return False
        failed = self._seats.get(-1 if self._fault.rank is None else self._fault.rank)
        cleans_up = failed is not None and failed.is_open and failed.is_failing
        return not cleans_up or now > self._faulted_at + CLEAN_UP_SECONDS

    def _end_what_is_left(self, others: set[int]) -> None:
        """Kill what this process's death would leave: orphans have become its children."""
        for seat in self._everybody():
            seat.close()
        deadline = time.monotonic() + 3
        while self._fault is not None or self._signal or self._mpiexec.poll() is None:
            left = set(children(os.getpid())) - others
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    if pid != self._mpiexec.pid:
                        os.waitpid(pid, os.WNOHANG)
            self._mpiexec.poll()
            if not left or time.monotonic() > deadline:
                return
            time.sleep(0.02)
