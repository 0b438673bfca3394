"""The tier of files: what comes back is what went, whatever the order, the disk or the process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umem._common.files import file_system
from umem.chainer.saved.tiers import file_tier
from umem.chainer.saved.tiers.extents import PAGE, Extents
from umem.chainer.saved.tiers.file_tier import FileTier
from umem.chainer.saved.tiers.tiers import link_of
from umem.errors import FileError, OffloadWarning, StateError


@pytest.fixture
def tier(tmp_path: Path) -> Any:
    tier = FileTier(tmp_path)
    yield tier
    tier.close()


def dense(rng: Any, dtype: str, axes: int) -> Any:
    """An array that owns its memory, dense in any order of its axes."""
    shape = tuple(int(n) for n in rng.integers(1, 9, axes))
    count = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    whole = rng.integers(0, 2, count, dtype="u1").view(dtype).reshape(shape)
    return whole.transpose(rng.permutation(axes)).copy("K")


def bits(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.strides, array.tobytes()


STEPS = ("send", "release", "fetch", "array", "write", "drop", "forget")


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7)), max_size=60),
    st.integers(0, 1 << 30),
)
def test_what_went_comes_back_in_any_order(
    tmp_path: Path, steps: list[tuple[str, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tier = FileTier(tmp_path)
    sent: list[Any] = []
    expected: list[Any] = []
    back: list[tuple[Any, Any]] = []
    for step, number in steps:
        if step == "send":
            array = dense(rng, ["f4", "f2", "i8", "?", "c16"][number % 5], number % 4)
            expected.append(bits(array))
            sent.append(tier.send(array))
        elif step == "drop":
            del back[: number % 3]
        elif step == "write":
            if back:
                array = back[-1][0]
                array[...] = np.zeros((), array.dtype)
                back[-1] = array, bits(array)
        elif sent:
            one = sent[number % len(sent)]
            if step == "release":
                one.release()
            elif step == "fetch":
                one.fetch()
            elif step == "array":
                one.release()
                array = one.array()
                assert bits(array) == expected[number % len(sent)]
                back.append((array, bits(array)))
            else:
                one.forget()
                one.forget()
                del expected[sent.index(one)]
                sent.remove(one)
        assert all(bits(array) == then for array, then in back)
    tier.close()
    tier.close()
    assert all(bits(array) == then for array, then in back)


def test_an_array_comes_back_where_it_was_in_its_cache_line(tier: Any) -> None:
    for shift in range(0, 64, 4):
        whole = np.arange(1024, dtype="f4")
        array = whole[shift // 4 :]
        sent = tier.send(array)
        sent.release()
        found = sent.array()
        assert np.array_equal(found, array)
        assert found.ctypes.data % 64 == array.ctypes.data % 64


def test_what_comes_back_is_the_callers_and_can_be_asked_for_again(tier: Any) -> None:
    sent = tier.send(np.arange(1000.0))
    sent.release()
    first = sent.array()
    first[...] = 0
    assert np.array_equal(sent.array(), np.arange(1000.0))


# -- places --------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE)), max_size=60))
def test_places_never_overlap_and_are_used_again(steps: list[tuple[bool, int]]) -> None:
    extents, held = Extents(), []
    for takes, size in steps:
        if takes or not held:
            extent = extents.take(size, lambda nbytes: True)
            assert extent is not None and extent.nbytes >= size
            held.append(extent)
        else:
            del held[size % len(held)]
        extent = None
        spans = sorted((e.start, e.start + e.nbytes) for e in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    size = extents.end_bytes
    held.clear()
    if size:
        assert extents.take(size, lambda nbytes: False).start == 0  # all of it, in one piece


def test_the_file_does_not_grow_with_the_steps(tier: Any, tmp_path: Path) -> None:
    def step() -> None:
        sent = [tier.send(np.ones(1 << 16)) for _ in range(5)]
        for one in sent:
            one.release()
        for one in sent:
            assert one.array()[-1] == 1

    def file_bytes() -> int:  # it has no name
        opened = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        (one,) = (path for path in opened if os.readlink(path).startswith(str(tmp_path)))
        return one.stat().st_size

    step()
    before = file_bytes()
    for _ in range(20):
        step()
    assert file_bytes() == before > 0


def test_a_place_is_not_used_again_while_an_array_lies_there(tier: Any) -> None:
    sent = tier.send(np.ones(1 << 16))
    sent.release()
    array = sent.array()
    sent.forget()
    del sent
    others = [tier.send(np.zeros(1 << 16)) for _ in range(3)]
    for other in others:
        other.release()
    assert array.min() == 1


# -- memory --------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """RssAnon and RssFile of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(x.split()[1]) << 10 for x in lines if x.startswith(("RssAnon", "RssFile")))


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_what_is_below_is_not_in_the_process(tier: Any) -> None:
    before, size = resident_bytes(), 64 << 20
    sent = []
    for _ in range(4):
        sent.append(tier.send(np.ones(size // 8)))
        sent[-1].release()
    assert resident_bytes() - before < size
    for one in sent:
        one.fetch()
        assert one.array().sum() == size // 8
    assert resident_bytes() - before < size


# -- bad folders ---------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs Linux")
def test_a_folder_in_memory_is_refused(tmp_path: Path) -> None:
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is on a disk here")
    with pytest.raises(FileError, match="is tmpfs, which is in memory"):
        FileTier("/dev/shm")
    assert file_system(tmp_path) not in (None, "")


def test_no_room_is_said_once_and_the_array_stays(
    tier: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(file_tier, "free_bytes", lambda handle: 65 << 20)
    small = tier.send(np.ones(1 << 16))
    with pytest.warns(OffloadWarning, match=r"has 65.0 MiB left.*stays in memory") as said:
        assert tier.send(np.ones(1 << 20)) is None
        assert tier.send(np.ones(1 << 20)) is None
    assert len(said) == 1
    small.release()
    assert small.array().min() == 1


def test_a_limit_is_not_said(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 1 << 16)
    assert tier.send(np.ones(1 << 13)) is None or tier.send(np.ones(1 << 13)) is None
    tier.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_stays(tier: Any, code: int, monkeypatch: Any) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file_tier.os, "pwrite", refuse)
    sent = [tier.send(np.arange(1000.0)) for _ in range(3)]
    with pytest.warns(OffloadWarning, match=r"cannot write to .*stays in memory") as said:
        for one in sent:
            one.release()
    assert len(said) == 1
    assert not any(one.is_gone() for one in sent)
    assert all(np.array_equal(one.array(), np.arange(1000.0)) for one in sent)


def test_a_disk_that_refuses_is_no_link(tier: Any, monkeypatch: Any) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.warns(OffloadWarning, match="cannot write"):
        assert not link_of(tier, np.empty(0)).moves


def test_what_cannot_be_read_is_an_error(tier: Any, monkeypatch: Any) -> None:
    sent = tier.send(np.arange(1000.0))
    sent.release()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(file_tier.FileTier, "map", refuse)
        with pytest.raises(FileError, match=r"cannot read a file in .*annot allocate memory"):
            sent.array()
        sent.fetch()
        with pytest.raises(FileError, match="cannot read a file in"):
            sent.array()
    assert np.array_equal(sent.array(), np.arange(1000.0))


def test_a_slow_disk_is_said_once_with_its_rate(tier: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(file_tier, "SLOW_SECONDS", 0.01)
    write = os.pwrite

    def slowly(*args: Any) -> int:
        time.sleep(0.05)
        return write(*args)

    monkeypatch.setattr(file_tier.os, "pwrite", slowly)
    with pytest.warns(OffloadWarning, match=r"takes .*iB a second, and the program") as said:
        for _ in range(4):
            tier.send(np.ones(1 << 16)).release()
    assert len(said) == 1
    assert tier.waited_seconds > 0.1


# -- the end -------------------------------------------------------------------------------------

KILLED = """
import sys, time
import umem.chainer
import numpy as np
from umem.chainer.saved.tiers.file_tier import FileTier
tier = FileTier(sys.argv[1])
sent = tier.send(np.ones(1 << 20))
sent.release()
print("sent", flush=True)
time.sleep(60)
"""


@pytest.mark.thorough
def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "sent\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_an_end_without_close_leaves_nothing(tmp_path: Path) -> None:
    code = KILLED.replace("time.sleep(60)", "")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)
    assert done.returncode == 0 and not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_sends_nothing_and_brings_nothing_back(tier: Any) -> None:
    sent = tier.send(np.arange(1000.0))
    sent.release()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads and fork
        child = os.fork()
    if not child:
        code = 1
        try:
            if tier.send(np.ones(1000)) is None:
                sent.array()
        except StateError:
            tier.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(sent.array(), np.arange(1000.0))


def test_more_arrays_come_back_than_there_are_file_descriptors(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    count = 4 * used + 40
    arrays = [np.full(100, i) for i in range(count)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, before[1]), before[1]))
    try:
        tier = FileTier(tmp_path)
        sent = [tier.send(array) for array in arrays]
        for one in sent:
            one.release()
        found = [one.array() for one in sent]
        tier.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(bits(a) == bits(b) for a, b in zip(found, arrays, strict=True))


def test_any_thread_may_forget(tier: Any) -> None:
    for _ in range(50):
        sent = tier.send(np.ones(1 << 14))
        thread = threading.Thread(target=sent.forget)
        thread.start()
        thread.join()
        del sent
    assert tier.send(np.ones(1 << 14)) is not None
