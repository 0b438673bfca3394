"""What a kernel's plain pointer is taken to reach: the block of the pool that it points into."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from software_programs import needs_compiler, needs_cupy, run

from umem.host_cuda.pool_blocks import PoolBlocks

BLOCK = st.tuples(st.integers(0, 60), st.integers(1, 20))


@given(st.lists(BLOCK, max_size=30))
def test_the_end_of_a_block_is_that_of_the_last_one_over_its_bytes(
    blocks: list[tuple[int, int]],
) -> None:
    table = PoolBlocks()
    alive: list[tuple[int, int]] = []
    for low, nbytes in blocks:
        high = low + nbytes
        table.add(low, high)
        alive = [each for each in alive if each[1] <= low or each[0] >= high]
        alive.append((low, high))
    for address in range(85):
        expected = [high for low, high in alive if low <= address < high]
        assert table.end_of(address) == (expected[0] if expected else None)


START = """
import threading
import umem
gpu = umem.software_gpu("t4", "256MiB", force=True)
import cupy as cp
kernel = cp.RawKernel('extern "C" __global__ void f(float* x) {{ x[threadIdx.x] += 1; }}', "f")

def moved(x):
    kernel((1,), (256,), (x,))
    before = gpu.figures.compute_seconds
    kernel((1,), (256,), (x,))
    return round((gpu.figures.compute_seconds - before) * 0.8 * 320e9)  # read and written
""".replace("{{", "{").replace("}}", "}")


@needs_compiler
@needs_cupy
class TestSoftwareGpu:
    def test_a_pointer_into_a_piece_of_the_pool_reaches_its_block(self, kernel_cache: Path) -> None:
        program = """
piece = cp.empty(64 << 20, "u1"); del piece  # the pool keeps it, and cuts from it
cut = cp.zeros(1 << 20, "u1")
print(moved(cut[:1024].view("f4")), moved(cut[4096:].view("f4")))
print(moved(cp.zeros(300, "f4")))
"""
        found = run(program, kernel_cache, start=START).split()
        assert found == [str(2 << 20), str(2 * ((1 << 20) - 4096)), str(2 * 1536)]

    def test_blocks_of_other_threads_are_known(self, kernel_cache: Path) -> None:
        program = """
def work():
    piece = cp.empty(64 << 20, "u1"); del piece
    print(moved(cp.zeros(256, "f4")))

thread = threading.Thread(target=work)
thread.start(); thread.join()
"""
        assert run(program, kernel_cache, start=START).split() == [str(2 * 1024)]

    @pytest.mark.parametrize("mode", ["managed", "unmanaged"])
    def test_so_are_those_of_a_mode_s_pool(self, kernel_cache: Path, mode: str) -> None:
        program = f"""
with umem.{mode}():
    piece = cp.empty(64 << 20, "u1"); del piece
    print(moved(cp.zeros(256, "f4")))
"""
        assert run(program, kernel_cache, start=START).split() == [str(2 * 1024)]

    def test_memory_of_no_pool_is_reached_to_its_end(self, kernel_cache: Path) -> None:
        program = """
piece = cp.empty(1 << 20, "u1"); del piece
cp.get_default_memory_pool().free_all_blocks()
memory = cp.cuda.Memory(1 << 20)
pointer = cp.cuda.MemoryPointer(memory, 0)
print(moved(cp.ndarray(256, "f4", pointer)))
"""
        assert run(program, kernel_cache, start=START).split() == [str(2 << 20)]
