"""Caches of data under what programs and systems do to them: each is a program with a time limit.

What comes out is right whatever happens, nobody waits for good, and nothing is left behind.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from processes import python

from umem.data.pages import HEAD, Pages

pytest.importorskip("blosc2")
pytest.importorskip("fcntl")
START = """
import os, random, resource, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import numpy as np
from umem.data import BloscCodec, cached, known_order
from umem.errors import DataWarning, UmemError

def value(i):
    return np.random.default_rng(i).poisson(0.3, 500 + 37 * i).astype("f"), np.int64(i)

class Items:
    def __init__(self, count=40): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, i): return value(i)

def right(found, i):
    array, number = value(i)
    return found[1] == number and found[0].shape == array.shape and (found[0] == array).all()
"""


def run(folder: Path, program: str, *args: str, timeout: int = 60) -> list[str]:
    """The words that a program prints; it has to end well in time."""
    script = folder / "program.py"
    script.write_text(START + textwrap.dedent(program))
    done = python(script, *args, cwd=folder, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_pages_that_another_process_chose_anew_are_seen() -> None:
    head: dict[str, int] = dict.fromkeys(HEAD, 0)
    memory = np.zeros(100_000, np.uint8)
    here, there = Pages(head, memory), Pages(head, memory)  # each process has its own
    for nbytes in (1000, 9000, 300):
        first = here.put(bytes(range(100)) * (nbytes // 100))
        assert there.get(first, nbytes).tobytes() == bytes(range(100)) * (nbytes // 100)
        second = there.put(b"b" * 500)
        assert here.get(second, 500).tobytes() == b"b" * 500
        here.forget()


def test_a_dataset_that_ends_the_program_in_the_thread_is_heard_where_it_is_asked(
    tmp_path: Path,
) -> None:
    program = """
    class Ending(Items):
        def __getitem__(self, i):
            if i == 7: raise SystemExit(3)
            return value(i)

    order = known_order(0)
    data = cached(Ending(), "1MiB", order=order)
    now, told = order(np.arange(40), 0), 0
    for _ in range(3):
        for i in now.tolist():
            try: assert right(data[i], i)
            except SystemExit: told += 1
        now = order(now, 40)
    print(told)
    """
    assert run(tmp_path, program) == ["3"]


def test_memory_that_the_system_does_not_give_is_an_error_that_leaves_nothing(
    tmp_path: Path,
) -> None:
    program = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    before = len(os.listdir("/dev/fd"))
    try: cached(Items(), "2MiB")
    except UmemError as error: print(isinstance(error, OSError), "2.1 MiB" in str(error))
    print(len(os.listdir("/dev/fd")) - before)
    """
    assert run(tmp_path, program) == ["True", "True", "0"]


def test_arguments_that_are_none_leave_no_handle_open(tmp_path: Path) -> None:
    program = """
    ordered = known_order(0)
    ordered.of_items(3)
    for arguments in (
        dict(order=3), dict(codec="blosc2"), dict(order=ordered), dict(order=ordered, disk="1MiB"),
        dict(disk="1MiB", folder="gone"), dict(memory=-1), dict(order=known_order(0, lambda *_: 3)),
    ):
        before = len(os.listdir("/dev/fd"))
        try: cached(Items(), **{"memory": "1MiB", **arguments})
        except UmemError: refused = True
        print(refused, len(os.listdir("/dev/fd")) - before)  # now that nobody has the error
        refused = False
    """
    assert run(tmp_path, program) == ["True", "0"] * 7


def test_a_disk_file_that_may_not_grow_is_said_once_and_items_are_right(tmp_path: Path) -> None:
    program = """
    data = cached(Items(), "20KiB", disk="1GiB", folder=".", codec=BloscCodec())
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            assert all(right(data[i], i) for i in range(40))
    assert 0 < data.counters.disk_count < 80
    print(*{warning.category.__name__ for warning in said}, len(said), *os.listdir("."))
    """
    assert run(tmp_path, program) == ["DataWarning", "1", "program.py"]


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["lru", "next-use"])
def test_signals_that_raise_anywhere_cost_no_item_and_no_lock(tmp_path: Path, policy: str) -> None:
    """As Ctrl-C does: at any line of the cache, its locks included."""
    program = """
    class Stop(Exception): pass
    def stop(*_): raise Stop
    signal.signal(signal.SIGALRM, stop)
    draw, stopped = random.Random(0), 0
    warnings.simplefilter("ignore", DataWarning)
    order = known_order(3) if sys.argv[1] == "next-use" else None
    data = cached(Items(), "60KiB", "1MiB", sys.argv[1], order, folder=".", codec=BloscCodec())
    with data:
        now = np.arange(40)
        for epoch in range(40):
            now = order(now, 40 if epoch else 0) if order else now
            for i in now.tolist():
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.random() * 1e-3 + 1e-6)
                    found = data[i]
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    assert right(found, i)
                except Stop: stopped += 1
                finally:
                    try: signal.setitimer(signal.ITIMER_REAL, 0)
                    except Stop: stopped += 1
        for i in now.tolist():
            assert right(data[i], i)
    print(stopped > 20, data.counters.peak_memory_bytes <= 60 * 1024 * 1.05)
    """
    assert run(tmp_path, program, policy) == ["True", "True"]


@pytest.mark.thorough
def test_processes_killed_at_any_moment_leave_the_others_right(tmp_path: Path) -> None:
    program = """
    warnings.simplefilter("ignore", DataWarning)
    data = cached(Items(), "60KiB", "300KiB", folder=".", codec=BloscCodec())
    draw = random.Random(0)
    def child():
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                while True:
                    i = draw.randrange(40)
                    if not right(data[i], i): os._exit(9)
            except BaseException:
                os._exit(8)
        return pid
    for _ in range(25):
        pids = [child() for _ in range(2)]
        end = time.monotonic() + draw.random() * 0.05
        while time.monotonic() < end:
            i = draw.randrange(40)
            assert right(data[i], i)
        for pid in pids: os.kill(pid, signal.SIGKILL)
        for pid in pids: assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    print(data.counters.memory_bytes <= 60 * 1024, *os.listdir("."))
    """
    assert run(tmp_path, program) == ["True", "program.py"]


@pytest.mark.thorough
def test_forks_while_threads_are_in_the_middle_of_everything_wait_for_nobody(
    tmp_path: Path,
) -> None:
    """Checks of the source, fetching ahead, the disk and the codec all hold locks meanwhile."""
    program = """
    import umem.data.loading, umem.data.caching
    umem.data.caching.CHECK_EVERY = 2
    order = known_order(1)
    data = cached(Items(), "60KiB", "300KiB", order=order, folder=".", codec=BloscCodec())
    going = True
    def loop(seed):
        draw = random.Random(seed)
        while going:
            i = draw.randrange(40)
            assert right(data[i], i)
    warnings.simplefilter("ignore", DataWarning)
    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(3)]
    for thread in threads: thread.start()
    for _ in range(40):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os._exit(0 if all(right(data[i], i) for i in range(5)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    going = False
    for thread in threads: thread.join()
    data.close()
    print("done")
    """
    assert run(tmp_path, program) == ["done"]
