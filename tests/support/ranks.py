"""Scripts run by `umem run -n`, and what is left of them: every process is counted by its pid."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import umem
from umem.compat import find_package

ROOT = Path(umem.__file__).parent.parent
MARK = "UMEM_TEST_RANKS"
"""A variable that all processes of a job inherit, by which they are found."""
HANGS_AFTER_SECONDS = 45.0
"""A job that is still there so long after a fault hangs. umem's own limit is 10 s on a machine with
time to spare, and scripts of these tests go on for 60 s and more by themselves."""


def why_not() -> str | None:
    """Why no ranks can be run here, if so."""
    if find_package("mpi4py") is None:
        return "mpi4py is not installed"
    beside = str(Path(sys.executable).parent)
    if shutil.which("mpiexec") is None and shutil.which("mpiexec", path=beside) is None:
        return "there is no mpiexec"
    return None


needs_ranks = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@dataclass
class Job:
    """A job that has been started."""

    process: subprocess.Popen[str]
    mark: str
    began: float = field(default_factory=time.monotonic)

    def pids(self) -> set[int]:
        """The processes of the job that are there, this one's child included."""
        return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is(pid)}

    def _is(self, pid: int) -> bool:
        try:
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def finish(self, timeout: float = 90) -> Ended:
        """Wait for the end, and see what is left then."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            left = self.pids()
            self.kill()
            raise AssertionError(f"the job still runs, as {len(left)} processes") from None
        left = self.pids()
        self.kill()
        return Ended(self.process.returncode, out, err, left)

    def kill(self) -> None:
        """Leave nothing of it, whatever the test finds."""
        for pid in self.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


@dataclass
class Ended:
    """A job that is over."""

    status: int
    out: str
    err: str
    left: set[int]

    @property
    def last(self) -> str:
        """The last line on standard error."""
        return self.err.splitlines()[-1]

    def of(self, rank: int) -> list[str]:
        """What a rank printed, without its tag."""
        tag = f"[{rank}] "
        return [line[len(tag) :] for line in self.out.splitlines() if line.startswith(tag)]


def start(
    folder: Path,
    code: str,
    *options: str,
    n: int = 2,
    arguments: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Job:
    """Start code as the script of so many ranks."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return start_file(folder, script.name, *options, n=n, arguments=arguments, **environment or {})


def start_file(
    folder: Path,
    script: str,
    *options: str,
    n: int,
    arguments: tuple[str, ...] = (),
    **environment: str,
) -> Job:
    """Start a script as so many ranks."""
    mark = f"{MARK}={uuid.uuid4()}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, MARK: mark.partition("=")[2], **environment}
    command = [sys.executable, "-m", "umem", "run", "-n", str(n), "--allow-root", *options, script]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Job(process, mark)


def run(folder: Path, code: str, *options: str, n: int = 2, **more: object) -> Ended:
    """Run code as the script of so many ranks, to the end."""
    return start(folder, code, *options, n=n, **more).finish()  # type: ignore[arg-type]
