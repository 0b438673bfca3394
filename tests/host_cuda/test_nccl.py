"""NCCL on the software GPU: between devices of one process, and between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from software_programs import START, needs_compiler, needs_cupy, run

pytestmark = [needs_cupy, needs_compiler]

FOUR = START.replace('"64MiB"', '"64MiB", devices=4')
FOUR += """
from contextlib import contextmanager
from cupy.cuda import nccl

@contextmanager
def group():
    nccl.groupStart()
    yield
    nccl.groupEnd()

def on(device, array):
    with cp.cuda.Device(device):
        return cp.asarray(array)

def fails(words, function, *given):
    try:
        function(*given)
        print("did not fail:", words)
    except nccl.NcclError as error:
        if words not in str(error):
            print(words, "|", error)
"""


def test_collectives_of_four_devices_are_numpy_s(kernel_cache: Path) -> None:
    program = """
comms = nccl.NcclCommunicator.initAll([0, 1, 2, 3])
assert [(c.rank_id(), c.device_id(), c.size()) for c in comms] == [(i, i, 4) for i in range(4)]
kinds = {"b": nccl.NCCL_INT8, "B": nccl.NCCL_UINT8, "i": nccl.NCCL_INT32, "I": nccl.NCCL_UINT32,
         "l": nccl.NCCL_INT64, "L": nccl.NCCL_UINT64, "e": nccl.NCCL_FLOAT16,
         "f": nccl.NCCL_FLOAT32, "d": nccl.NCCL_FLOAT64}
operations = {nccl.NCCL_SUM: np.add, nccl.NCCL_PROD: np.multiply, nccl.NCCL_MAX: np.maximum,
              nccl.NCCL_MIN: np.minimum}
rng = np.random.default_rng(0)
for char, kind in kinds.items():
    for size in (0, 1, 200_000):  # the last in several pieces
        host = rng.integers(0, 3, (4, size)).astype(char)
        given = [on(i, row) for i, row in enumerate(host)]

        def results(count=size):
            return [on(i, np.full(count, 7, char)) for i in range(4)]

        def check(found, wanted, *said):
            for i, array in enumerate(found):
                if array.get().tobytes() != np.asarray(wanted[i]).astype(char).tobytes():
                    print(char, size, *said, i)

        for op, function in operations.items():
            total = function.reduce(host, axis=0, dtype=char)
            made = results()
            with group():
                for c, x, y in zip(comms, given, made):
                    c.allReduce(x.data.ptr, y.data.ptr, size, kind, op, 0)
            check(made, [total] * 4, "all reduce", op)
            made = results()
            with group():
                for c, x, y in zip(comms, given, made):
                    c.reduce(x.data.ptr, y.data.ptr, size, kind, op, 2, 0)
            seven = np.full(size, 7)
            check(made, [seven, seven, total, seven], "reduce", op)
            part = size // 4
            made = results(part)
            with group():
                for c, x, y in zip(comms, given, made):
                    c.reduceScatter(x.data.ptr, y.data.ptr, part, kind, op, 0)
            check(made, total[: 4 * part].reshape(4, part), "reduce scatter", op)
        made = results()
        with group():
            for c, x, y in zip(comms, given, made):
                c.broadcast(x.data.ptr, y.data.ptr, size, kind, 1, 0)
        check(made, [host[1]] * 4, "broadcast")
        made = [x.copy() for x in given]
        with group():
            for c, y in zip(comms, made):
                c.bcast(y.data.ptr, size, kind, 3, 0)
        check(made, [host[3]] * 4, "bcast")
        made = results(4 * size)
        with group():
            for c, x, y in zip(comms, given, made):
                c.allGather(x.data.ptr, y.data.ptr, size, kind, 0)
        check(made, [host] * 4, "all gather")
        made = results(4 * size)
        with group():  # everybody to everybody, itself too
            for c, x, y in zip(comms, given, made):
                for other in range(4):
                    c.send(x.data.ptr, size, kind, other, 0)
                    c.recv(y.data.ptr + other * y.nbytes // 4, size, kind, other, 0)
        check(made, [host] * 4, "send and recv")
        with group():  # in place, two calls in a group
            for c, x in zip(comms, given):
                c.allReduce(x.data.ptr, x.data.ptr, size, kind, nccl.NCCL_SUM, 0)
        check(given, [host.sum(0, dtype=char)] * 4, "in place")
for c in comms:
    c.destroy()
"""
    assert run(program, kernel_cache, start=FOUR) == ""


def test_a_call_that_cannot_be_is_an_error_by_name(kernel_cache: Path) -> None:
    program = """
comms = nccl.NcclCommunicator.initAll(4)
x, y, host = cp.zeros(4, "f"), on(1, np.zeros(4, "f")), np.zeros(4, "f")
one, kind = comms[0], nccl.NCCL_FLOAT32
fails("is not device memory", one.send, host.ctypes.data, 4, kind, 1, 0)
fails("there is no rank 4 of 4", one.send, x.data.ptr, 4, kind, 4, 0)
fails("there is no rank -1 of 4", one.recv, x.data.ptr, 4, kind, -1, 0)
fails("there is no rank 9 of 4", one.broadcast, x.data.ptr, x.data.ptr, 4, kind, 9, 0)
fails("has no type 11", one.bcast, x.data.ptr, 4, 11, 0, 0)
fails("has no operation 7", one.allReduce, x.data.ptr, x.data.ptr, 4, kind, 7, 0)
fails("the end of a group that has not begun", nccl.groupEnd)
fails("there is no rank 2 of 2", nccl.NcclCommunicator, 2, nccl.get_unique_id(), 2)
fails("devices [0, 9], but there are 4", nccl.NcclCommunicator.initAll, [0, 9])

def other_functions():
    with group():
        comms[0].bcast(x.data.ptr, 4, kind, 0, 0)
        comms[1].recv(y.data.ptr, 2, kind, 0, 0)

fails("rank 1 calls Send for 8 bytes of rank 0, which calls Broadcast with 16", other_functions)
comms[2].destroy()
fails("rank 2 has destroyed its communicator", comms[1].recv, y.data.ptr, 4, kind, 2, 0)
fails("the communicator does not exist, or was destroyed", comms[2].rank_id)
fails("cudaErrorIllegalAddress", comms[3].bcast, y.data.ptr, 4, kind, 3, 0)
name = bytes(128) if isinstance(nccl.get_unique_id(), bytes) else tuple(bytes(128))
fails("ranks share memory in a file: ", nccl.NcclCommunicator, 2, name, 0)
"""
    assert run(program, kernel_cache, start=FOUR) == ""


@pytest.mark.parametrize("dry", ["", ", dry=True"])
def test_devices_of_one_process_split_into_groups(kernel_cache: Path, dry: str) -> None:
    program = """
import threading
comms = nccl.NcclCommunicator.initAll(4)
made = [None] * 4

def work(rank):
    cp.cuda.Device(rank).use()
    color = -1 if rank == 3 else 0
    made[rank] = part = comms[rank].commSplit(color, -rank)
    if part is None:
        return
    x = on(rank, np.full(3, part.rank_id(), "l"))
    part.allReduce(x.data.ptr, x.data.ptr, 3, nccl.NCCL_INT64, nccl.NCCL_SUM, 0)
    assert gpu.is_dry or (x.get() == 3).all()
    assert part.size() == 3

threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print([part and part.rank_id() for part in made])
"""
    wanted = "[2, 1, 0, None]\n"
    if not _has_split():
        pytest.skip("CuPy 13 has no split")
    start = FOUR.replace("devices=4", f"devices=4{dry}")
    assert run(program, kernel_cache, start=start) == wanted


def _has_split() -> bool:
    from importlib.metadata import version

    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        try:
            return not version(name).startswith("13")
        except ModuleNotFoundError:
            continue
    return False


RANK = """
import os, sys, time
import umem
umem.software_gpu("t4", "64MiB", force=True)
import cupy as cp
from cupy.cuda import nccl

rank, what, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
name = bytes.fromhex(name)
if cp.__version__.startswith("13"):
    name = tuple(name)
comm = nccl.NcclCommunicator(2, name, rank)
x = cp.full(100_000, rank + 1.0)
if what == "ends" and rank == 1:
    os._exit(3)
try:
    comm.allReduce(x.data.ptr, x.data.ptr, x.size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, 0)
    print(set(x.get()))
except nccl.NcclError as error:
    print(error)
"""


def ranks_of(what: str, cache: Path) -> list[str]:
    """Run two processes that reduce; return what each prints."""
    from umem.host_cuda.libraries.mailboxes import new_place

    place = new_place()
    name = place.encode().ljust(128, b"\0").hex()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), what, name],
            env={**os.environ, "XDG_CACHE_HOME": str(cache), "CUPY_CACHE_DIR": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [err for _, err in outputs] == ["", ""]
    assert not Path(place).exists()
    return [out.strip() for out, _ in outputs]


def test_two_processes_reduce(kernel_cache: Path) -> None:
    assert [
        line.replace("np.float64(3.0)", "3.0") for line in ranks_of("reduces", kernel_cache)
    ] == ["{3.0}"] * 2


def test_a_rank_that_ends_is_an_error_of_the_other(kernel_cache: Path) -> None:
    said, _ = ranks_of("ends", kernel_cache)
    assert said.startswith("NCCL_ERROR_REMOTE_ERROR: rank 1 (process ")
    assert said.endswith(") has ended")
