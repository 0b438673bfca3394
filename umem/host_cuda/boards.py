"""Limits, clocks, caches and bus of each GPU, for programs that query them."""

from __future__ import annotations

from typing import NamedTuple

from umem._common.specs import GpuSpec
from umem.units import KIB, MIB

BLOCK_SHARED_BYTES = 48 * KIB
"""Default limit of a block's shared memory, on every GPU."""


class Chip(NamedTuple):
    """Limits of a multiprocessor, and of a block that opts in to more shared memory."""

    thread_count: int
    block_count: int
    shared_bytes: int
    block_shared_bytes: int
    reserved_bytes: int = KIB


_CHIPS = {
    (6, 0): Chip(2048, 32, 64 * KIB, 48 * KIB, 0),
    (7, 0): Chip(2048, 32, 96 * KIB, 96 * KIB, 0),
    (7, 5): Chip(1024, 16, 64 * KIB, 64 * KIB, 0),
    (8, 0): Chip(2048, 32, 164 * KIB, 163 * KIB),
    (8, 6): Chip(1536, 16, 100 * KIB, 99 * KIB),
    (8, 7): Chip(1536, 16, 164 * KIB, 163 * KIB),
    (8, 9): Chip(1536, 24, 100 * KIB, 99 * KIB),
    (9, 0): Chip(2048, 32, 228 * KIB, 227 * KIB),
    (10, 0): Chip(2048, 32, 228 * KIB, 227 * KIB),
    (12, 0): Chip(1536, 24, 100 * KIB, 99 * KIB),
}
"""Chips by compute capability, from the technical specifications in NVIDIA's CUDA C++ Programming
Guide. From 8.0 on CUDA reserves 1 KiB of shared memory for each block.
"""


class Board(NamedTuple):
    """A GPU's highest clocks in MHz, the width of its memory bus, and its L2 cache in MiB."""

    clock_mhz: int
    memory_mhz: int
    bus_bits: int
    l2_mib: float


_BOARDS = {
    "p100-16gb": Board(1328, 715, 4096, 4),
    "v100-16gb": Board(1530, 877, 4096, 6),
    "v100-32gb": Board(1530, 877, 4096, 6),
    "t4": Board(1590, 5001, 256, 4),
    "rtx-2080-ti": Board(1545, 7000, 352, 5.5),
    "rtx-3090": Board(1695, 9751, 384, 6),
    "rtx-4090": Board(2520, 10501, 384, 72),
    "rtx-5090": Board(2407, 14001, 512, 96),
    "a10": Board(1695, 6251, 384, 6),
    "a10g": Board(1710, 6251, 384, 6),
    "rtx-a6000": Board(1800, 8001, 384, 6),
    "l4": Board(2040, 6251, 192, 48),
    "l40": Board(2490, 9001, 384, 96),
    "l40s": Board(2520, 9001, 384, 96),
    "a100-40gb": Board(1410, 1215, 5120, 40),
    "a100-80gb": Board(1410, 1593, 5120, 40),
    "h100-pcie": Board(1755, 1593, 5120, 50),
    "h100-sxm": Board(1980, 2619, 5120, 50),
    "h200": Board(1980, 3201, 6144, 50),
    "gh200-96gb": Board(1980, 2619, 6144, 60),
    "gh200-144gb": Board(1980, 3201, 6144, 60),
    "b200": Board(1965, 3996, 8192, 126),
    "jetson-orin-64gb": Board(1300, 3200, 256, 4),
}
"""Boards by name in the table of GPUs, from NVIDIA's datasheets, its whitepapers for Volta to
Blackwell and the output of its sample deviceQuery. Bandwidth is twice the memory clock times the
bus width.
"""
_NO_BOARD = Board(0, 0, 0, 0)
SHARES_HOST_TABLES = ("gh200",)
"""GPUs that access all host memory through the host's page tables (CUDA C++ Programming Guide, on
systems with address translation services).
"""


def chip_of(spec: GpuSpec) -> Chip:
    """Return the limits of a GPU's chip; for a new chip, the limits of the last known one."""
    assert spec.chip is not None
    known = [version for version in _CHIPS if version <= spec.chip[:2]]
    return _CHIPS[max(known, default=min(_CHIPS))]


def resident_blocks(spec: GpuSpec, block_size: int, shared_bytes: int) -> int:
    """Return the blocks that a multiprocessor can run, by threads, blocks and shared memory.

    Does not count registers, because no compiler here allocates them.

    Args:
        block_size: threads of a block.
        shared_bytes: all shared memory of a block.
    """
    chip = chip_of(spec)
    warps = -(-max(1, block_size) // 32)
    by_threads = chip.thread_count // 32 // warps
    needed = shared_bytes + chip.reserved_bytes
    by_shared = chip.shared_bytes // needed if needed else chip.block_count
    return min(chip.block_count, by_threads, by_shared)


def attributes(spec: GpuSpec) -> dict[int, int]:
    """Return a GPU's own attributes, by cudaDeviceAttr (driver_types.h); clocks in kHz."""
    chip, board = chip_of(spec), _BOARDS.get(spec.name, _NO_BOARD)
    shares_tables = spec.name.startswith(SHARES_HOST_TABLES)
    assert spec.chip is not None
    major, minor, count = spec.chip
    known = {
        13: 1000 * board.clock_mhz, 36: 1000 * board.memory_mhz, 37: board.bus_bits,
        38: round(board.l2_mib * MIB),
    }  # fmt: skip
    return {attribute: value for attribute, value in known.items() if value} | {
        8: BLOCK_SHARED_BYTES, 16: count, 18: spec.host_in_bandwidth is None,
        39: chip.thread_count, 75: major, 76: minor, 81: chip.shared_bytes,
        88: shares_tables, 97: chip.block_shared_bytes, 100: shares_tables,
        106: chip.block_count, 111: chip.reserved_bytes,
    }  # fmt: skip
