"""`umem.blocks`: host arrays on the software GPU in blocks, read ahead and written back."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest
from software_programs import START, lines, needs_compiler, needs_cupy

import umem
from umem.errors import DeviceError, DeviceNotFoundError

pytestmark = [needs_compiler, needs_cupy]
LATE = START.replace("force=True", "force=True, stream_seed=0")
RANDOM = "x = np.random.default_rng(0).random((601, 700)).astype('f4')\n"


def test_every_way_of_use_has_numpys_results_when_streams_run_late(kernel_cache: Path) -> None:
    begin = """
from umem.memory import host_blocks
host_blocks.SMALLEST_BYTES = 1 << 16
for seed in range(3):
    gpu.reseed(seed)
"""
    program = """
total = cp.zeros((), "f8")
for block in umem.blocks(x):
    total += block.sum(dtype="f8")
print(abs(float(total) - x.sum(dtype="f8")) < 1e-6 * float(total))
for axis in (0, 1, -1):
    first = (*[slice(None)] * (axis % 2), slice(0, 1))
    y = np.empty(x.shape, "i2")
    for block, to in umem.blocks(x, axis, out=y):
        to[...] = block * 100
    print(np.array_equal(y, (x * np.float32(100)).astype("i2")))
    z = x.copy()
    for block in umem.blocks(z, axis, write=True):
        block += 1
    print(np.array_equal(z, x + 1))
    for halo in (1, 3):
        y, z, rows = np.empty_like(x), x.copy(), umem.blocks(x, axis, out=None, halo=halo)
        both = umem.blocks(x, axis, out=y, halo=halo)
        for block, to in both:
            to[...] = block[both.inner] - block.min(axis=axis, keepdims=True) * 0
        print(np.array_equal(y, x), len(both) > 8)
        inside = umem.blocks(z, axis, write=True, halo=halo)
        for block in inside:
            whole = cp.roll(block, 1, axis)
            at = inside.piece
            if at.low == at.start:  # at the edge there is nobody to the left
                whole[first] = block[first]
            block[...] = whole
        right = np.roll(x, 1, axis)
        right[first] = x[first]
        print(np.array_equal(z, right))
"""
    found = lines(RANDOM + begin + indent(program, "    "), kernel_cache, start=LATE)
    assert len(found) == 3 * (1 + 3 * (2 + 2 * 2))
    assert not any("False" in line for line in found)


def test_copies_run_beside_the_loops_body(kernel_cache: Path) -> None:
    """A map takes the time of one way over the link, and not of both."""
    program = """
x = np.ones((24, 1 << 20), "f4")
y = np.empty_like(x)
def seconds(loop):
    before = gpu.figures.seconds
    loop()
    return gpu.figures.seconds - before
def by_hand():
    for row, to in zip(x, y):
        to[...] = (cp.asarray(row) * 2).get()
def doubled():
    for block, to in umem.blocks(x, out=y):
        cp.multiply(block, 2, out=to)
def total():
    return float(sum(block.sum() for block in umem.blocks(x)))
link = x.nbytes / 12e9  # of a T4
print([seconds(loop) < 1.1 * link for loop in (doubled, total)], seconds(by_hand) > 1.8 * link)
"""
    assert lines(program, kernel_cache) == ["[True, True] True"]


def test_an_array_larger_than_vram_takes_no_more_than_its_room(kernel_cache: Path) -> None:
    program = """
x = np.ones((40, 1 << 20), "f4")  # 160 MiB on a GPU of 64
pool = cp.get_default_memory_pool()
parts = umem.blocks(x, room="32MiB")
print(parts.inner if parts.piece else "outside", len(parts), parts)
most = 0
for block in parts:
    block.sum()
    most = max(most, pool.used_bytes())
print(most <= 16 << 20, parts)
again = sum(1 for block in parts)
print(again, parts.done_count, parts.read_bytes == 2 * x.nbytes, parts.piece)
"""
    assert lines(program, kernel_cache) == [
        "outside 20 0 of 20 blocks of 8.0 MiB; 0 B to the GPU and 0 B back",
        "True 20 of 20 blocks of 8.0 MiB; 160.0 MiB to the GPU and 0 B back",
        "20 20 True None",
    ]


def test_buffers_are_plain_memory_in_a_managed_block(kernel_cache: Path) -> None:
    program = """
x = np.ones((8, 1 << 20), "f4")
with umem.managed():
    for block in umem.blocks(x):
        print(umem.location(block).managed, umem.location(block + 1).managed)
        break
"""
    assert lines(program, kernel_cache) == ["False True"]


def test_a_loop_that_is_left_early_writes_what_its_body_has_done(kernel_cache: Path) -> None:
    """By an error, a break, and a return inside a stream's block that the loop outlives."""
    program = """
x = np.zeros((24, 1 << 20), "f4")
def loop(end):
    parts = umem.blocks(x, write=True)
    for number, block in enumerate(parts):
        block += 1
        if number == 3:
            end()
def stop():
    raise ValueError("in the body")
try:
    loop(stop)
except ValueError as error:
    print(error, x[:, 0].tolist()[:6], x[:, -1].tolist()[:6])
parts = umem.blocks(x, write=True)
for block in parts:
    block += 1
    if parts.piece.start == 2:
        break
del block
print(x[:, 0].tolist()[:6], parts.done_count)
x[...], held = 0, []
def in_a_stream():
    held.append(iter(umem.blocks(x, write=True)))
    with cp.cuda.Stream(non_blocking=True):
        for block in held[0]:
            block += 1
            return
in_a_stream()
held.clear()
print(x[:3].min(axis=1).tolist(), x[:3].max(axis=1).tolist())
y = np.full_like(x, 7)
for block, to in umem.blocks(x, out=y):
    to[...] = block
    if float(block[0, 0]) == 0:
        break
print(y[:3].min(axis=1).tolist())
for block in umem.blocks(x):
    block += 5
    break
print(x.max())
"""
    assert lines(program, kernel_cache) == [
        "in the body [1.0, 1.0, 1.0, 1.0, 0.0, 0.0] [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]",
        "[2.0, 2.0, 2.0, 1.0, 0.0, 0.0] 2",
        "[1.0, 0.0, 0.0] [1.0, 0.0, 0.0]",
        "[1.0, 7.0, 7.0]",
        "1.0",
    ]


def test_arrays_of_other_kinds(kernel_cache: Path, tmp_path: Path) -> None:
    """A memory map, other orders of bytes and of axes, gaps, no rows, and slices of one's own."""
    program = f"""
path = {str(tmp_path / "data")!r}
np.arange(6000, dtype="f4").tofile(path)
x = np.memmap(path, "f4", "r+", shape=(60, 100))
for block in umem.blocks(x, write=True):
    block *= 2
x.flush()
print(np.array_equal(np.fromfile(path, "f4"), 2 * np.arange(6000, dtype="f4")))
big = np.arange(600, dtype=">i4").reshape(20, 30)
out = np.empty((20, 30), ">f8")
for block, to in umem.blocks(big, out=out):
    to[...] = block + 0.5
print(np.array_equal(out, big + 0.5))
for strange in (np.asfortranarray(big.astype("f4")), big.astype("c8")[::2, ::3], big[:, :1] > 7):
    found = np.empty_like(strange)
    for block, to in umem.blocks(strange, out=found):
        to[...] = block
    print(np.array_equal(found, strange))
print(list(umem.blocks(big[:0])), len(umem.blocks(big[:, :0])))
class Stored:
    shape, dtype = big.shape, big.dtype
    def __getitem__(self, index):
        return big[index]
print(sum(int(block.sum()) for block in umem.blocks(Stored())) == big.sum())
x = np.memmap(path, "f4", "r", shape=(60, 100))
import os
os.truncate(path, 100)
try:
    list(umem.blocks(x))
except umem.UmemError as error:
    print(str(error).replace(path, "PATH"))
"""
    assert lines(program, kernel_cache) == [
        "True", "True", "True", "True", "True", "[] 0", "True",
        "blocks: PATH has 100 B, and the array needs 23.4 KiB: the file was cut short",
    ]  # fmt: skip


PINS = """
from umem.memory import host_blocks
sizes, alive = [], set()
class Pin(cp.cuda.PinnedMemory):
    def __init__(self, nbytes):
        super().__init__(nbytes)
        sizes.append(nbytes)
        alive.add(id(self))
    def __del__(self):
        alive.remove(id(self))
        super().__del__()
cp.cuda.PinnedMemory = Pin
"""


def test_as_much_is_pinned_as_the_copies_need_until_the_loop_ends(kernel_cache: Path) -> None:
    program = """
x = np.ones((24, 1 + (1 << 18)), "f4")
for keywords in ({}, {"out": np.empty_like(x)}, {"write": True}, {"write": True, "halo": 1}):
    sizes.clear()
    for block in umem.blocks(x, room="24MiB", **keywords):
        both = len(alive)
    rows = [nbytes // x[0].nbytes for nbytes in sizes]
    print(rows, sum(sizes) % x[0].nbytes, both, len(alive))
for block in umem.blocks(x):
    break
del block
print(len(alive))
try:
    for block in umem.blocks(x):
        raise ValueError
except ValueError:
    print(len(alive))
sizes.clear()
print([block.shape for block in umem.blocks(x[:1])], [n // x[0].nbytes for n in sizes])
print(list(umem.blocks(x[:0])), len(sizes))
"""
    assert lines(program, kernel_cache, start=START + PINS) == [
        "[2, 2] 0 2 0", "[2, 2, 2, 2] 0 4 0", "[2, 2, 2, 2] 0 4 0", "[4, 4, 2, 2] 0 4 0",
        "0", "0", "[(1, 262145)] [1, 1]", "[] 2",
    ]  # fmt: skip


def test_the_host_is_asked_before_memory_is_pinned(kernel_cache: Path) -> None:
    program = """
from umem._common import host
available = [64 << 20]
host.available_bytes = lambda: available[0]
x = np.ones((96, 1 << 18), "f4")
def outcome(make):
    try:
        return float(sum(block.sum() for block in make())) == x.size
    except (umem.UmemError, MemoryError) as error:
        return f"{type(error).__name__} {error}"
print(len(umem.blocks(x, room="60MiB")), outcome(lambda: umem.blocks(x)))
available[0] = 9 << 20  # half of it: two blocks of two rows
print(len(umem.blocks(x)), outcome(lambda: umem.blocks(x)), max(sizes) >> 20)
available[0] = 3 << 20
print(outcome(lambda: umem.blocks(x)))
available[0] = 64 << 20
parts = umem.blocks(x)
available[0] = 9 << 20
print(outcome(lambda: parts))
available[0] = 64 << 20
def refuse(nbytes):
    raise cp.cuda.runtime.CUDARuntimeError(2)
cp.cuda.PinnedMemory = refuse
print(outcome(lambda: parts))
def fault(nbytes):
    raise cp.cuda.runtime.CUDARuntimeError(700)
cp.cuda.PinnedMemory = fault
try:
    outcome(lambda: parts)
except cp.cuda.runtime.CUDARuntimeError as error:
    print(error.status)
host.available_bytes = lambda: None
cp.cuda.PinnedMemory = Pin
print(outcome(lambda: umem.blocks(x)), len(alive))
"""
    found = lines(program, kernel_cache, start=START + PINS)
    assert found[:2] == ["24 True", "48 True 4"]
    assert "needs 2.0 MiB of pinned memory, and the host can pin 1.5 MiB" in found[2]
    assert found[3].startswith("OutOfMemoryError") and "the host can pin 4.5 MiB" in found[3]
    assert found[4].startswith("OutOfMemoryError") and "the host refuses it" in found[4]
    assert found[5] == "700"  # of a kernel before, which nothing makes room for
    assert found[6] == "True 0"


def test_what_is_refused(kernel_cache: Path) -> None:
    program = """
x, small = np.ones((4, 1 << 22), "f4"), np.zeros((24, 16), "f4")
class Rows:
    shape, dtype = small.shape, "float32"
    def __getitem__(self, index):
        return small[0]
wrong = [
    (lambda: umem.blocks([1, 2])),
    (lambda: umem.blocks(cp.ones(3))),
    (lambda: umem.blocks(np.array(["a", None], object))),
    (lambda: umem.blocks(np.array(["a"]))),
    (lambda: umem.blocks(np.float32(1))),
    (lambda: umem.blocks(x, 2)),
    (lambda: umem.blocks(x, halo=-1)),
    (lambda: umem.blocks(x, out=x[:2])),
    (lambda: umem.blocks(x, out=np.empty_like(x), write=True)),
    (lambda: umem.blocks(x, room="much")),
    (lambda: umem.blocks(x, room="120%")),
    (lambda: umem.blocks(x, room="60MiB")),
    (lambda: umem.blocks(np.ones((90, 1 << 20), "f4"), room="20MiB", halo=9, write=True)),
    (lambda: umem.blocks(x, axis=1).inner),
    (lambda: umem.blocks(small, out=small[::-1])),
    (lambda: umem.blocks(np.broadcast_to(np.float32(1), (24, 4)), write=True)),
    (lambda: umem.blocks(Rows(), write=True)),
    (lambda: umem.blocks(np.zeros(4, "longdouble"))),
    (lambda: umem.blocks(np.ma.zeros(4))),
    (lambda: umem.blocks(small, 1.0)),
    (lambda: umem.blocks(small, halo="1")),
    (lambda: list(umem.blocks(Rows()))),
]
for each in wrong:
    try:
        each()
        print("taken")
    except Exception as error:
        print(type(error).__name__, error)
print(len(umem.blocks(small, halo=np.int64(1), out=np.empty_like(small))))
"""
    *found, cut = lines(program, kernel_cache)
    kinds = [line.partition(" ")[0] for line in found]
    assert kinds == [
        *["TypeError"] * 5, *["ValueError"] * 4, *["SizeError"] * 4, "StateError",
        *["ValueError"] * 3, *["TypeError"] * 4, "ValueError",
    ]  # fmt: skip
    assert "umem.lookahead" in found[1]
    assert "64.0 MiB" in found[11] and "another axis" in found[11]
    assert found[14] == "ValueError blocks: out shares memory with x: write=True writes to x"
    assert found[15:17] == ["ValueError blocks: x is read-only"] * 2
    assert found[17].startswith("TypeError blocks: x has the type float128")
    assert found[18].startswith("TypeError blocks: x has a mask")
    assert found[21] == "ValueError blocks: a slice of x has the shape (16,)" and cut == "1"


def test_without_a_gpu_of_cupy_it_is_refused() -> None:
    import numpy as np

    with pytest.raises(DeviceNotFoundError):
        umem.blocks(np.ones(3))
    with umem.virtual_gpu("t4"), pytest.raises(DeviceError, match="software GPU"):
        umem.blocks(np.ones(3))


def test_memory_maps_are_read_as_far_as_their_files_go(kernel_cache: Path, tmp_path: Path) -> None:
    program = """
import os
os.chdir(FOLDER)
np.memmap("a.bin", "f4", "w+", shape=(4096, 1024)).flush()
x = np.memmap("a.bin", "f4", "r+", offset=4096, shape=(4095, 1024))
upper, lower = x[2048:], x[:1000]
def size(array):
    try:
        return sum(block.size for block in umem.blocks(array))
    except umem.UmemError as error:
        return error
print(size(upper) == upper.size, size(lower[::-1, ::2].T) == lower.size // 2)
os.truncate("a.bin", 9 << 20)
print(size(upper))
print(size(lower) == lower.size, size(np.broadcast_to(lower[0], (5000, 1024), subok=True)))
os.unlink("a.bin")
print(size(lower) == lower.size)
with open("a.bin", "wb"):
    pass
print(size(lower) == lower.size, size(x[:0]))
"""
    found = lines(program.replace("FOLDER", repr(str(tmp_path))), kernel_cache)
    cut = "a.bin has 9.0 MiB, and the array needs 16.0 MiB: the file was cut short"
    assert found[1].endswith(cut)
    assert [found[0], *found[2:]] == ["True True", "True 5120000", "True", "True 0"]


def test_one_loop_at_a_time_and_limits_of_cupys_pool(kernel_cache: Path) -> None:
    program = """
x = np.arange(24 << 10, dtype="f4").reshape(24, -1)
z = x.copy()
both = umem.blocks(z, write=True, halo=1)
first = iter(both)
next(first)
try:
    next(iter(both))
except umem.UmemError as error:
    print(error)
first.close()
for block in both:
    block[both.inner] += 1
    both.piece = None
print(np.array_equal(z, x + 1), len(umem.blocks(x, halo=100_000)))
cp.get_default_memory_pool().set_limit(size=16 << 20)
large = umem.blocks(np.ones((80, 1 << 18), "f4"))
print(sum(float(block.sum()) for block in large) == 80 << 18)
"""
    assert lines(program, kernel_cache) == [
        "a loop over these blocks is running: call umem.blocks for another", "True 1", "True"
    ]  # fmt: skip
