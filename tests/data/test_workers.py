"""A cache that several processes ask, and what is left when one is killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from typing import Any

import numpy as np
import pytest
from data_cases import Items, same
from processes import python
from project import ROOT

import umem.data
from umem.compat import find_package
from umem.data.pages import Pages
from umem.data.shared_block import SharedBlock
from umem.errors import StateError, UnsupportedError

PROGRAM = ROOT / "tests" / "support" / "data_program.py"
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX system"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
METHODS = ("fork", "forkserver", "spawn")


def run_with_workers(method: str, codec: str) -> dict[str, Any]:
    done = python(PROGRAM, method, codec, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "DataWarning" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    assert found["wrong"] == 0 and all(found["epochs_whole"]) and found["lost"] == 0
    assert found["loads"] == 0 and found["asked"] >= 180  # the disk tier has all that went
    assert found["peak_bytes"] <= 1.05 * found["limit_bytes"]
    assert found["hits"] >= 0.35 * found["asked"]  # 24 of 60 items are in memory


@pytest.mark.thorough
@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
@pytest.mark.parametrize("method", METHODS)
def test_workers_share_one_memory_that_was_used_before(method: str) -> None:
    check(run_with_workers(method, "raw"))


@pytest.mark.slow
@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
@pytest.mark.parametrize("codec", ["raw", "blosc2"])
@pytest.mark.parametrize("method", METHODS)
def test_twenty_runs_with_workers_end(method: str, codec: str) -> None:
    for _ in range(20 if codec == "raw" else 5):
        check(run_with_workers(method, codec))


def child(work: Any) -> int:
    """Do something in a forked process; returns how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_what_a_forked_process_loads_is_in_memory_for_all() -> None:
    source = Items(8)
    with umem.data.cached(source, "1MiB") as data:
        assert child(lambda: all(same(data[i], source.item(i)) for i in range(8))) == 0
        assert all(same(data[i], source.item(i)) for i in range(8))
        assert source.asked.total() == data.counters.check_count  # those of the child aside
        assert data.counters.hit_count == 8 == data.counters.load_count


def test_a_forked_process_waits_for_nothing_of_its_parents_thread() -> None:
    class Slow(Items):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.05)
            return super().__getitem__(index)

    source, order = Slow(20), umem.data.known_order(0)
    with umem.data.cached(source, "1MiB", order=order) as data:
        now = order(np.arange(20), 0).tolist()
        data[now[0]]  # the thread is on its way
        assert child(lambda: all(same(data[i], source.item(i)) for i in now[1:6])) == 0
        assert all(same(data[i], source.item(i)) for i in now[6:])


def test_a_cache_that_is_closed_while_a_thread_is_at_it_is_closed() -> None:
    block = SharedBlock((("numbers", "i8", 4),), 100)
    with block.held():
        block.close()
    with pytest.raises(StateError, match="was closed"), block.held():
        pass


def test_what_a_killed_process_left_half_done_is_told_once() -> None:
    block = SharedBlock((("numbers", "i8", 4),), 100)

    def die() -> None:
        with block.held():
            block.arrays["numbers"][0] = 7
            os.kill(os.getpid(), signal.SIGKILL)

    assert child(die) == -signal.SIGKILL
    with block.held() as is_half_done:
        assert is_half_done and block.arrays["numbers"][0] == 7
    with block.held() as is_half_done:
        assert not is_half_done
    block.close()


def test_after_a_worker_was_killed_in_the_middle_of_a_change_items_are_right() -> None:
    source = Items(6)
    with umem.data.cached(source, 3 * source.packed(), "1MiB") as data:
        for i in range(6):
            data[i]

        def die() -> None:
            Pages.put = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
            data[0]

        assert child(die) == -signal.SIGKILL
        for _ in range(2):
            assert all(same(data[i], source.item(i)) for i in range(6))
        assert data.counters.lost_count == 1


def test_a_cache_goes_only_to_processes_that_are_being_started() -> None:
    with umem.data.cached(Items(2), "1MiB") as data:
        with pytest.raises(UnsupportedError, match="pickle the dataset below it"):
            pickle.dumps(data)
