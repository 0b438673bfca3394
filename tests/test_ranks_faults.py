"""Where a rank fails, every process of the job is gone soon, and one sentence says why."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import HANGS_AFTER_SECONDS, Ended, Job, needs_ranks, start

from umem.launch import BACKING, own_place, sweep
from umem.launch.seats import SILENT_SECONDS

pytestmark = needs_ranks

HOST = socket.gethostname()
BEFORE = """
    import ctypes, os, signal, subprocess, sys, threading, time
    from pathlib import Path
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    comm.Barrier()

    def mark():
        Path(f"at{comm.rank}").write_text(str(os.getpid()))

    if comm.rank == 1:
        mark()
"""
WAITS = "\n    comm.Barrier()\n    print('never')\n"


def fail(folder: Path, how: str, n: int = 2, after: str = WAITS) -> Ended:
    """Have rank 1 fail while the others wait for it."""
    job = start(folder, f"{BEFORE}        {how}{after}", n=n)
    await_file(job, folder / "at1")
    return ends_in_time(job)


def await_file(job: Job, path: Path, timeout: float = 60) -> str:
    """Wait until a rank has written a file."""
    deadline = time.monotonic() + timeout
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline and job.process.poll() is None, job.finish()
        time.sleep(0.02)
    return path.read_text()


def ends_in_time(job: Job) -> Ended:
    ended = job.finish(HANGS_AFTER_SECONDS)
    assert ended.left == set() and ended.status != 0, ended.err
    return ended


FAULTS = {
    "raises": ("raise ValueError('no such\\nfile')", "raised ValueError: no such", 1),
    "is killed": ("os.kill(os.getpid(), 9)", r"was killed \(SIGKILL\)", 137),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", r"was stopped \(SIGSTOP\) .*", 1),
    "raises in a thread": (
        "threading.Thread(target=lambda: [][0], name='feeder').start(); time.sleep(60)",
        "raised IndexError: list index out of range in the thread feeder",
        1,
    ),
}
MORE_FAULTS = {
    "exits with 3": ("sys.exit(3)", "ended with status 3", 3),
    "exits with a text": ("sys.exit('a text')", "ended with status 1", 1),
    "leaves with 0": ("os._exit(0)", "ended with status 0 before MPI_Finalize", 1),
    "leaves with 5": ("os._exit(5)", "ended with status 5", 5),
    "leaves from a thread": (
        "threading.Thread(target=os._exit, args=(6,)).start()",
        "ended with status 6",
        6,
    ),
    "has no memory": ("bytearray(1 << 62)", r"raised MemoryError \(out of memory\)", 1),
    "has no memory by umem": (
        "import umem; raise umem.OutOfMemoryError('needs 3 GiB')",
        r"raised OutOfMemoryError \(out of memory\): needs 3 GiB",
        1,
    ),
    "crashes": ("ctypes.string_at(0)", r"crashed \(SIGSEGV\)", 139),
    "aborts": ("comm.Abort(7)", "called MPI_Abort", 7),
    "is interrupted": ("raise KeyboardInterrupt", "raised KeyboardInterrupt", 1),
    "leaves children": (
        "subprocess.Popen(['sleep', '1000'], start_new_session=True); os._exit(9)",
        "ended with status 9",
        9,
    ),
    "dies with its watcher": (
        "subprocess.Popen(['sleep', '1000']); os.kill(os.getppid(), 9); time.sleep(60)",
        "was killed, and the process that watches it, too",
        137,
    ),
    "has its watcher stopped": (
        "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)",
        r"is watched by a process that was stopped \(SIGSTOP\) .*",
        1,
    ),
    "closes the pipes it is heard by": (
        "os.closerange(3, 1000); raise ValueError('late')",
        "ended with status 1",
        1,
    ),
    "exits with more than a status can be": ("sys.exit(10**30)", "ended with status 255", 255),
    "hangs in its own clean-up": (
        "import atexit; atexit.register(comm.recv); raise ValueError('late')",
        "raised ValueError: late",
        1,
    ),
    "kills mpiexec": (
        "os.kill(int(open(f'/proc/{os.getppid()}/stat').read().split()[3]), 9); time.sleep(60)",
        "mpiexec",
        137,
    ),
}


def check(tmp_path: Path, how: str, cause: str, status: int, n: int) -> None:
    ended = fail(tmp_path, how, n)
    assert ended.status == status, ended.err
    who = "" if cause == "mpiexec" else f"rank 1 on {re.escape(HOST)} "
    cause = r"mpiexec was killed \(SIGKILL\); no rank is left" if not who else cause
    end = "" if not who else "; all ranks were ended"
    assert re.fullmatch(f"umem: {who}{cause}{end}", ended.last), ended.err
    assert "never" not in ended.out
    assert "prterun" not in ended.err and "MPI_ABORT" not in ended.err


@pytest.mark.parametrize("name", FAULTS)
def test_one_rank_fails_and_all_are_gone(tmp_path: Path, name: str) -> None:
    check(tmp_path, *FAULTS[name], n=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE_FAULTS)
def test_one_rank_of_three_fails_and_all_are_gone(tmp_path: Path, name: str) -> None:
    check(tmp_path, *MORE_FAULTS[name], n=3)


COMPUTES = {
    "asleep": "time.sleep(7)",
    "in C with Python's lock": "ctypes.PyDLL(None).sleep(7)",
    "in Python": "end = time.time() + 7\n        while time.time() < end: pass",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMPUTES)
def test_a_rank_that_computes_for_long_is_not_dead(tmp_path: Path, name: str) -> None:
    ended = start(tmp_path, f"{BEFORE}        {COMPUTES[name]}{WAITS}").finish()
    assert (ended.status, ended.left, ended.out.count("never")) == (0, set(), 2), ended.err


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMPUTES)
def test_a_rank_may_be_over_long_before_another(tmp_path: Path, name: str) -> None:
    """It waits in MPI_Finalize, as under mpiexec, while the other computes."""
    ended = start(tmp_path, f"{BEFORE}        {COMPUTES[name]}").finish()
    assert (ended.status, ended.left) == (0, set()), ended.err


RUNS_ON = f"{BEFORE}        time.sleep(60)\n    mark(){WAITS}"


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGQUIT, marks=pytest.mark.thorough)],
)
def test_the_end_of_umem_run_leaves_no_process(
    tmp_path: Path, number: signal.Signals, ctrl_c: None
) -> None:
    job = start(tmp_path, RUNS_ON)
    await_file(job, tmp_path / "at1")
    assert len(job.pids()) >= 6  # umem run, mpiexec, and two of each rank
    job.process.send_signal(number)
    deadline = time.monotonic() + HANGS_AFTER_SECONDS
    while (left := job.pids() - {job.process.pid}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    ended = job.finish()
    if number == signal.SIGKILL:
        assert ended.status == -9
    else:
        assert ended.status == 128 + number, ended.err
        assert ended.last == f"umem: interrupted by {number.name}; all ranks were ended"


@pytest.mark.thorough
def test_a_job_that_a_shell_stops_and_goes_on_with_is_not_ended(tmp_path: Path) -> None:
    """As Ctrl-Z and fg do: umem run is stopped, and mpiexec has the watchers stopped."""
    code = f"""{BEFORE}
    mark()
    while not Path("on").exists():
        time.sleep(0.05)
    comm.Barrier()
    print("fine")
    """
    job = start(tmp_path, code)
    await_file(job, tmp_path / "at1")
    watchers = {
        int(
            Path(f"/proc/{await_file(job, tmp_path / f'at{rank}')}/stat")
            .read_text()
            .rpartition(") ")[2]
            .split()[1]
        )
        for rank in range(2)
    }
    stopped = [job.process.pid, *watchers]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENT_SECONDS + 1)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1)
    (tmp_path / "on").write_text("x")
    ended = job.finish()
    assert (ended.status, ended.out.count("fine")) == (0, 2), ended.err


def test_ctrl_c_names_the_rank_that_ended_while_others_waited(tmp_path: Path) -> None:
    job = start(tmp_path, f"{BEFORE}        sys.exit(0){WAITS}")
    await_file(job, tmp_path / "at1")
    time.sleep(1)  # from its file to its end
    job.process.send_signal(signal.SIGINT)
    ended = ends_in_time(job)
    assert ended.last == "umem: interrupted by SIGINT; all ranks were ended (over before: 1)"


@pytest.mark.thorough
def test_sigterm_ends_the_ranks_and_lets_them_clean_up(tmp_path: Path) -> None:
    code = """
        import signal, sys, time
        from pathlib import Path
        def end(*_):
            Path("cleaned").write_text("x")
            raise SystemExit(1)
        signal.signal(signal.SIGTERM, end)
        Path("at1").write_text("x")
        time.sleep(60)
    """
    job = start(tmp_path, code, n=1)
    await_file(job, tmp_path / "at1")
    job.process.terminate()
    ended = ends_in_time(job)
    assert (ended.status, (tmp_path / "cleaned").exists()) == (143, True), ended.err
    assert ended.last == "umem: interrupted by SIGTERM; all ranks were ended"


@pytest.mark.thorough
def test_a_stopped_mpiexec_ends_the_job(tmp_path: Path) -> None:
    mpiexec = "int(open(f'/proc/{os.getppid()}/stat').read().split()[3])"
    ended = fail(tmp_path, f"os.kill({mpiexec}, signal.SIGSTOP); time.sleep(60)")
    assert ended.last == "umem: mpiexec was stopped (SIGSTOP) and did not go on; no rank is left"


@pytest.mark.thorough
def test_verbose_shows_what_mpiexec_says(tmp_path: Path) -> None:
    job = start(tmp_path, f"{BEFORE}        comm.Abort(7){WAITS}", "--verbose")
    ended = job.finish()
    assert "MPI_ABORT was invoked" in ended.err and " -n 2 " in ended.err
    assert ended.last == f"umem: rank 1 on {HOST} called MPI_Abort; all ranks were ended"


@pytest.mark.thorough
def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    said = f"Path('place').write_text(os.environ[{BACKING!r}])"
    count = f"Path('count').write_text(str(len(os.listdir(os.environ[{BACKING!r}]))))"
    fail(tmp_path, f"{said}; {count}; os.kill(os.getpid(), 9)")
    place = Path((tmp_path / "place").read_text())
    assert int((tmp_path / "count").read_text()) >= 2  # a segment of each rank was there
    assert place.name.startswith("umem-ranks-") and not place.exists()


@pytest.mark.thorough
def test_nothing_is_left_in_tmp_where_mpiexec_is_killed(tmp_path: Path) -> None:
    mpiexec = "int(open(f'/proc/{os.getppid()}/stat').read().split()[3])"
    job = start(tmp_path, f"{BEFORE}        os.kill({mpiexec}, 9); time.sleep(60){WAITS}")
    mpiexecs = set()
    while job.process.poll() is None:
        mpiexecs |= job.pids()
        time.sleep(0.02)
    assert "mpiexec was killed" in job.finish().err
    assert not [pid for pid in mpiexecs if Path(tempfile.gettempdir(), f"ompi.{pid}").exists()]


def test_what_a_killed_job_left_in_shared_memory_goes_with_the_next(tmp_path: Path) -> None:
    left, new, held = (tmp_path / f"umem-ranks-{name}" for name in ("left", "new", "held"))
    for folder in (left, new, held):
        folder.mkdir()
        (folder / "segment").write_bytes(bytes(10))
    for folder in (left, held):
        os.utime(folder, (0, 0))
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    sweep(tmp_path)
    os.close(lock)
    assert (left.exists(), new.exists(), held.exists()) == (False, True, True)
    with ExitStack() as stack:
        own = Path(own_place(str(tmp_path), stack)[BACKING])
        os.utime(own, (0, 0))
        sweep(tmp_path)
        assert own.exists()
    assert not own.exists() and not held.exists()
