"""Where a rank fails, every process of the job is gone soon, and one sentence says why."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import pytest
from ranks import HANGS_AFTER_SECONDS, Ended, Job, needs_ranks, start

from umem.launch import BACKING

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
    "raises in a thread": (
        "threading.Thread(target=lambda: [][0], name='feeder').start(); time.sleep(60)",
        "raised IndexError: list index out of range in the thread feeder",
        1,
    ),
}
MORE_FAULTS = {
    "exits with 3": ("sys.exit(3)", "ended with status 3", 3),
    "exits with a text": ("sys.exit('a text')", "ended with status 1", 1),
    "has no memory": ("bytearray(1 << 62)", r"raised MemoryError \(out of memory\)", 1),
    "has no memory by umem": (
        "import umem; raise umem.OutOfMemoryError('needs 3 GiB')",
        r"raised OutOfMemoryError \(out of memory\): needs 3 GiB",
        1,
    ),
    "crashes": ("ctypes.string_at(0)", r"crashed \(SIGSEGV\)", 139),
    "is interrupted": ("raise KeyboardInterrupt", "raised KeyboardInterrupt", 1),
    "leaves children": (
        "subprocess.Popen(['sleep', '1000'], start_new_session=True); os._exit(9)",
        "ended with status 9",
        9,
    ),
    "closes its standard error": (
        "os.close(2); open('other', 'w'); raise ValueError('late')",
        "ended with status 1",
        1,
    ),
    "exits with more than a status can be": ("sys.exit(10**30)", "ended with status 255", 255),
    "hangs in its own clean-up": (
        "import atexit; atexit.register(comm.recv); raise ValueError('late')",
        "raised ValueError: late",
        1,
    ),
    "kills mpiexec": ("os.kill(os.getppid(), 9); time.sleep(60)", "mpiexec", 137),
}


def check(tmp_path: Path, how: str, cause: str, status: int, n: int) -> None:
    ended = fail(tmp_path, how, n)
    assert ended.status == status, ended.err
    who = "" if cause == "mpiexec" else f"rank 1 on {re.escape(HOST)} "
    cause = r"mpiexec was killed \(SIGKILL\); no rank is left" if not who else cause
    end = "" if not who else "; all ranks were ended"
    assert re.fullmatch(f"umem: {who}{cause}{end}", ended.last), ended.err
    assert "never" not in ended.out
    assert "prterun" not in ended.err


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_one_rank_fails_and_all_are_gone(tmp_path: Path, name: str) -> None:
    check(tmp_path, *FAULTS[name], n=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE_FAULTS)
def test_one_rank_of_three_fails_and_all_are_gone(tmp_path: Path, name: str) -> None:
    check(tmp_path, *MORE_FAULTS[name], n=3)


@pytest.mark.thorough
def test_mpiexecs_own_words_name_a_rank_that_left_without_an_error(tmp_path: Path) -> None:
    ended = fail(tmp_path, "os._exit(0)")
    assert ended.status == 1, ended.err
    expected = "umem: mpiexec ended with status 1: .* process rank 1 .* exiting improperly; .*"
    assert re.fullmatch(expected, ended.last), ended.err


@pytest.mark.thorough
def test_a_rank_may_be_over_long_before_another(tmp_path: Path) -> None:
    """It waits in MPI_Finalize, as under mpiexec, while the other computes."""
    ended = start(tmp_path, f"{BEFORE}        time.sleep(7)").finish()
    assert (ended.status, ended.left) == (0, set()), ended.err


RUNS_ON = f"{BEFORE}        time.sleep(60)\n    mark(){WAITS}"


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGQUIT, marks=pytest.mark.thorough)],
)
def test_the_end_of_umem_run_leaves_no_process(
    tmp_path: Path, number: signal.Signals, ctrl_c: None
) -> None:
    place = {BACKING: str(tmp_path)}  # where SIGKILL leaves files
    job = start(tmp_path, RUNS_ON, environment=place)
    await_file(job, tmp_path / "at1")
    assert len(job.pids()) >= 4  # umem run, mpiexec, and the ranks
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
    """As Ctrl-Z and fg do: umem run is stopped, and the ranks compute on."""
    code = f"""{BEFORE}
    comm.Barrier()
    mark()
    print("fine")
    """
    job = start(tmp_path, code)
    await_file(job, tmp_path / "at1")
    job.process.send_signal(signal.SIGSTOP)
    await_file(job, tmp_path / "at0")
    time.sleep(2)
    job.process.send_signal(signal.SIGCONT)
    ended = job.finish()
    assert (ended.status, ended.out.count("fine")) == (0, 2), ended.err


@pytest.mark.thorough
def test_ctrl_c_names_the_rank_that_ended_while_others_waited(tmp_path: Path) -> None:
    job = start(tmp_path, f"{BEFORE}        sys.exit(0){WAITS}")
    await_file(job, tmp_path / "at1")
    time.sleep(1)  # from its file to its end
    job.process.send_signal(signal.SIGINT)
    ended = ends_in_time(job)
    assert ended.last == "umem: interrupted by SIGINT; all ranks were ended (over before: 1)"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_ranks_clean_up_after_an_interrupt(
    tmp_path: Path, number: signal.Signals, ctrl_c: None
) -> None:
    """mpiexec alone would give all others a quarter of a second once the first has ended."""
    code = f"""{BEFORE}
    try:
        Path(f"in{{comm.rank}}").write_text("x")
        time.sleep(60)
    finally:
        time.sleep(0.6 * comm.rank)
        Path(f"cleaned{{comm.rank}}").write_text("x")
    """
    job = start(tmp_path, code)
    for rank in (0, 1):
        await_file(job, tmp_path / f"in{rank}")
    job.process.send_signal(number)
    ended = ends_in_time(job)
    assert {path.name for path in tmp_path.glob("cleaned*")} == {"cleaned0", "cleaned1"}, ended.err
    assert ended.status == 128 + number
    assert ended.last == f"umem: interrupted by {number.name}; all ranks were ended"


@pytest.mark.thorough
def test_verbose_shows_what_mpiexec_says(tmp_path: Path) -> None:
    job = start(tmp_path, f"{BEFORE}        comm.Abort(7){WAITS}", "--verbose")
    ended = ends_in_time(job)
    assert 'calling\n"abort"' in ended.err and " -n 2 " in ended.err
    assert ended.last == f"umem: rank 1 on {HOST} ended with status 7; all ranks were ended"


@pytest.mark.thorough
def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    said = f"Path('place').write_text(os.environ[{BACKING!r}])"
    count = f"Path('count').write_text(str(len(os.listdir(os.environ[{BACKING!r}]))))"
    fail(tmp_path, f"{said}; {count}; os.kill(os.getpid(), 9)")
    place = Path((tmp_path / "place").read_text())
    assert int((tmp_path / "count").read_text()) >= 2  # a segment of each rank was there
    assert place.name.startswith("umem-ranks-") and not place.exists()
