"""Each GPU's limits, clocks and caches are its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from software_programs import lines, needs_software_gpu

from umem._common.specs import GPUS, gpu_spec
from umem.host_cuda.boards import _BOARDS, attributes, chip_of, resident_blocks

KIB = 1024
START = """
import umem
umem.software_gpu("h100-sxm")
import cupy as cp
"""
PROGRAM = """
kernel = cp.RawKernel('''extern "C" __global__ void f(float* y) {
    extern __shared__ float held[];
    held[threadIdx.x + 50000] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = held[50031 - threadIdx.x];
}''', "f")
kernel.max_dynamic_shared_size_bytes = 227 << 10
y = cp.zeros(32, "f4")
kernel((1,), (32,), (y,), shared_mem=227 << 10)
known = cp.cuda.runtime.getDeviceProperties(0)
free, total = cp.cuda.runtime.memGetInfo()
blocks, threads = cp.cuda.driver.occupancyMaxPotentialBlockSize(kernel.kernel.ptr, 0, 0)
print(int(y[0]), known["clockRate"], known["l2CacheSize"] >> 20, known["memoryBusWidth"])
print(kernel.attributes["binary_version"], blocks, threads)
can_register = cp.cuda.runtime.deviceGetAttribute(99, 0)
print(total == known["totalGlobalMem"], total - free >> 20, can_register)
try:
    kernel.max_dynamic_shared_size_bytes = 228 << 10
except cp.cuda.driver.CUDADriverError as error:
    print(error)
"""


def test_every_gpu_of_the_table_has_a_board_with_its_bandwidth() -> None:
    assert _BOARDS.keys() == GPUS.keys()
    for name, board in _BOARDS.items():
        bandwidth = 2e6 * board.memory_mhz * board.bus_bits / 8
        assert bandwidth == pytest.approx(GPUS[name].memory_bandwidth, rel=0.03), name
        assert 1000 <= board.clock_mhz <= 3000 and 4 <= board.l2_mib <= 128


@pytest.mark.parametrize(
    ("name", "threads", "blocks", "shared", "of_a_block"),
    [
        ("p100-16gb", 2048, 32, 64, 48),
        ("v100-16gb", 2048, 32, 96, 96),
        ("t4", 1024, 16, 64, 64),
        ("a100-40gb", 2048, 32, 164, 163),
        ("rtx-3090", 1536, 16, 100, 99),
        ("rtx-4090", 1536, 24, 100, 99),
        ("h100-sxm", 2048, 32, 228, 227),
        ("rtx-5090", 1536, 24, 100, 99),
    ],
)
def test_limits_are_those_of_the_capability(
    name: str, threads: int, blocks: int, shared: int, of_a_block: int
) -> None:
    found = attributes(gpu_spec(name))
    assert (found[39], found[106]) == (threads, blocks)
    assert (found[81], found[97], found[8]) == (shared * KIB, of_a_block * KIB, 48 * KIB)
    assert found[111] == (KIB if gpu_spec(name).chip >= (8, 0, 0) else 0)  # type: ignore[operator]


def test_a_gpu_that_the_table_does_not_have_has_its_chip_and_no_clock() -> None:
    own = dataclasses.replace(gpu_spec("rtx-4090"), name="rtx-4070", chip=(8, 9, 46))
    found = attributes(own)
    assert found[16] == 46 and 13 not in found and 38 not in found
    newer = dataclasses.replace(own, chip=(12, 1, 48))
    assert chip_of(newer) == chip_of(gpu_spec("rtx-5090"))


def test_occupancy_is_by_threads_blocks_and_shared_memory() -> None:
    t4, a100 = gpu_spec("t4"), gpu_spec("a100-40gb")
    assert resident_blocks(t4, 1024, 0) == 1 and resident_blocks(a100, 1024, 0) == 2
    assert resident_blocks(t4, 33, 0) == 16 and resident_blocks(a100, 33, 0) == 32
    assert resident_blocks(a100, 32, 48 * KIB) == 3  # 164 KiB, 1 of each block CUDA's own
    assert resident_blocks(t4, 32, 65 * KIB) == 0


@needs_software_gpu
def test_cupy_is_told_them(kernel_cache: Path) -> None:
    found = lines(PROGRAM, kernel_cache, start=START)
    assert found[0] == "31 1980000 50 5120"
    assert found[1] == "90 264 1024"
    same, context_mib, can_register = found[2].split()
    assert same == "True" and 390 <= int(context_mib) <= 400 and can_register == "1"
    assert found[3].startswith("CUDA_ERROR_INVALID_VALUE")
