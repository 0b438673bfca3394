"""What does an allocation cost?

One allocation and its free, called from under 20 frames of the user's own, as `pool alone` (the
pool's method that CuPy would call) and in each of umem's modes, bare and watched. Everything takes
turns, sample by sample, in one process.

Without a GPU the pool is a stub that hands out one and the same pointer, so that what is left is
what umem adds; CuPy's own pool asks the driver and cannot run. With one it is CuPy's pool.

``for the process`` is what `umem.enable` sets, the pool's own method; the others are blocks, where
an allocation looks up first what the calling task is inside of. ``beside a block`` is a task that
is inside of none while another of its thread is.

Counted is the processor time of the one thread, not the wall's: a busy machine slows it less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
import numpy as np
from report_tables import figure, listed, quantity, text

import umem
from umem._common.scopes import Scope
from umem.devices import Policy, Watcher
from umem.devices.cuda import CudaDevice, cuda_reason, open_cuda
from umem.units import MIB

NBYTES = 64 << 10
WANTED_HYBRID_US = 1.0
WANTED_BLOCK_US = 0.1
WANTED_UPSTREAM_US = 3.0
FRAMES = 20
MANAGED = Policy("managed")

Malloc = Callable[[int], Any]


class Case(NamedTuple):
    """One way to allocate; ``open`` is a context that gives the function to call."""

    pool: str
    name: str
    open: Callable[[], Any]


# -- the cases -----------------------------------------------------------------------------------


@contextmanager
def installed(
    device: CudaDevice, policy: Policy, *watchers: Callable[[], Watcher]
) -> Iterator[Malloc]:
    """CuPy's allocator in force under a policy, watched or not."""
    import cupy

    with ExitStack() as stack:
        stack.callback(device.install(policy, everywhere=False))
        for watcher in watchers:
            scope = Scope()
            stack.callback(scope.close)
            device.watch(scope, watcher())
        yield cupy.cuda.get_allocator()


@contextmanager
def everywhere(device: CudaDevice, policy: Policy) -> Iterator[Malloc]:
    """CuPy's allocator in force under a policy for the process."""
    import cupy

    restore = device.install(policy, everywhere=True)
    try:
        yield cupy.cuda.get_allocator()
    finally:
        restore()


@contextmanager
def beside(device: CudaDevice, policy: Policy) -> Iterator[Malloc]:
    """CuPy's allocator in force for a task outside of the block that another one is in."""
    import cupy

    with cupy.cuda.using_allocator(device.driver.default_pool.malloc):
        restore = copy_context().run(device.install, policy, everywhere=False)
        try:
            yield cupy.cuda.get_allocator()
        finally:
            restore()


def cuda_cases(device: CudaDevice, pool: str) -> list[Case]:
    """umem's modes over the pools of a device."""
    from umem.devices.cuda import Retrying  # imports CuPy

    def case(name: str, policy: Policy, *watchers: Callable[[], Watcher]) -> Case:
        return Case(pool, name, lambda: installed(device, policy, *watchers))

    return [
        Case(pool, "pool alone", lambda: nullcontext(device.driver.default_pool.malloc)),
        Case(
            pool,
            "pool alone, with a callback",
            lambda: nullcontext(Retrying(device.driver.default_pool.malloc).malloc),
        ),
        Case(pool, "managed, for the process", lambda: everywhere(device, MANAGED)),
        Case(pool, "beside a block", lambda: beside(device, MANAGED)),
        case("unmanaged", Policy("unmanaged")),
        case("managed", MANAGED),
        case("managed, limit", Policy("managed", limit_bytes=64 * MIB)),
        case("hybrid, before pressure", Policy("hybrid")),
        case("managed, upstream", Policy("managed", upstream=upstream_of(device))),
        case("managed, statistics", MANAGED, umem.statistics),
        case("managed, track without stacks", MANAGED, lambda: umem.track(stacks=False)),
        case("managed, track", MANAGED, umem.track),
        case("managed, statistics and track", MANAGED, umem.statistics, umem.track),
    ]


def upstream_of(device: CudaDevice) -> Malloc:
    """An allocator of managed memory of another library: the stub's, or a pool of CuPy's."""
    import cupy

    if isinstance(device.driver.default_pool, cupy.cuda.MemoryPool):
        return cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc
    stub = device.driver.default_pool.malloc
    return lambda nbytes: stub(nbytes)  # a pool of umem's own would be refused


@contextmanager
def metered(device: CudaDevice) -> Iterator[Malloc]:
    """CuPy's pool while umem measures what it has in use."""
    from umem.devices.cuda import PoolMeter

    with PoolMeter():
        yield device.driver.default_pool.malloc


def gpu_cases() -> list[Case]:
    """Everything that needs a GPU; holds it to the budget of gpu_guard."""
    import gpu_guard

    device = open_cuda()
    gpu_guard.guard(device).check(NBYTES)
    found = [case for case in cuda_cases(device, "CuPy's pool") if _serves(device, case)]
    found.append(Case("CuPy's pool", "pool alone, metered", lambda: metered(device)))
    return found


def _serves(device: CudaDevice, case: Case) -> bool:
    return device.why_not("managed") is None or case.name in ("pool alone", "unmanaged")


def cases(device: str) -> list[Case]:
    """What to measure, the modes of one device first."""
    if device == "cuda":
        return gpu_cases()
    return cuda_cases(stub_device(), "stub")


# -- the stub ------------------------------------------------------------------------------------


def stub_device() -> CudaDevice:
    """umem's CUDA device over stub pools; imports CuPy, asks for no GPU."""
    import cupy

    from umem.devices.cuda import Driver

    buffer = np.empty(NBYTES, np.uint8)
    memory = cupy.cuda.UnownedMemory(buffer.ctypes.data, NBYTES, buffer, device_id=0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)

    class Pool:
        def malloc(self, nbytes: int) -> Any:
            return pointer

        def free_all_blocks(self) -> None: ...
        def n_free_blocks(self) -> int:
            return 0

        def set_limit(self, size: int) -> None: ...
        def used_bytes(self) -> int:
            return 0

        def total_bytes(self) -> int:
            return 0

    class StubDriver(Driver):
        default_pool = Pool()

        def __init__(self) -> None:
            self.ordinal, self.name, self.cuda_major = 0, "stub", 12
            self.vram_bytes, self.integrated = 1 << 30, False

        def current(self, ordinal: int | None = None) -> Any:
            return nullcontext()

        def here(self) -> int:
            return 0

        def make_pool(self, grow: Callable[[int], Any]) -> Any:
            return Pool()

        def capturing(self) -> bool:
            return False

        def gpu_count(self) -> int:
            return 1

        def managed_problem(self) -> str | None:
            return None

        def is_managed(self, address: int) -> bool:
            return True

        def free_bytes(self) -> int:
            return self.vram_bytes

    return CudaDevice(StubDriver())


# -- measuring -----------------------------------------------------------------------------------


def sample(malloc: Malloc, count: int, frames: int = FRAMES) -> float:
    """Seconds of one allocation and its free, called from under so many frames."""
    if frames:
        return sample(malloc, count, frames - 1)
    start = time.process_time()
    for _ in repeat(None, count):
        malloc(NBYTES)
    return (time.process_time() - start) / count


def measure(found: list[Case], repeats: int, count: int) -> list[list[float]]:
    """Seconds of every case, every repeat; cases take turns, from another one each time."""
    seconds: list[list[float]] = [[] for _ in found]
    for number in range(-1, repeats):  # the first fills caches, and is forgotten
        for place in range(len(found)):
            index = (place + number) % len(found)
            with found[index].open() as malloc:
                taken = sample(malloc, count)
            if number >= 0:
                seconds[index].append(taken)
    return seconds


def rows(found: list[Case], seconds: list[list[float]]) -> list[dict[str, Any]]:
    """A row a case; what is added is over ``pool alone`` of the same pool, repeat by repeat."""
    alone = {
        case.pool: taken
        for case, taken in zip(found, seconds, strict=True)
        if case.name == "pool alone"
    }
    made = []
    for case, taken in zip(found, seconds, strict=True):
        s = common.summary(taken)
        base = alone.get(case.pool)
        added = None
        if base is not None and case.name != "pool alone":
            added = 1e6 * common.summary(a - b for a, b in zip(taken, base, strict=True)).median
        made.append(
            {
                "pool": case.pool,
                "allocation": case.name,
                "median_us": 1e6 * s.median,
                "lowest_us": 1e6 * s.low,
                "highest_us": 1e6 * s.high,
                "added_us": added,
                "seconds": taken,
            }
        )
    return made


# -- all of it -----------------------------------------------------------------------------------


WORDS = {
    "managed": "a managed block",
    "hybrid, before pressure": "hybrid before pressure",
    "managed, upstream": "an allocator given as `upstream=`",
    "managed, statistics": "statistics",
    "managed, track": "tracking with stacks",
}


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = {row["allocation"]: row for row in result["rows"] if row["added_us"] is not None}
    added = [
        f"{figure(rows[name]['added_us'], 2)} us with {words}"
        for name, words in WORDS.items()
        if name in rows
    ]
    first = result["rows"][0]
    return (
        f"{figure(first['median_us'], 2)} us ({first['pool']}, {first['allocation']})"
        f"{', and ' + listed(added) + ' more' if added else ''}."
    )


BENCH = common.Bench(
    "allocation",
    __doc__,
    answer,
    (
        text("pool", "pool"),
        text("allocation", "allocation"),
        quantity("median", "median_us", "us"),
        quantity("least", "lowest_us", "us"),
        quantity("most", "highest_us", "us"),
        quantity("added", "added_us", "us", places=3, signed=True),
    ),
    notes=lambda result: [
        f"Wanted: a block adds at most {WANTED_BLOCK_US:g} microseconds, hybrid less than "
        f"{WANTED_HYBRID_US:g} before pressure, and `upstream=` at most {WANTED_UPSTREAM_US:g}."
    ],
)


@click.command(help=__doc__)
@click.option(
    "--device",
    type=click.Choice(["auto", "stub", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: the GPU where there is one.",
)
@click.option("--repeats", type=click.IntRange(1), default=31, show_default=True)
@click.option("--quick", is_flag=True, help="Five short repeats.")
@common.json_option
def main(device: str, repeats: int, quick: bool, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    reason = None if device == "stub" else cuda_reason()
    if device == "cuda" and reason is not None:
        raise click.ClickException(f"no CUDA device: {reason}")
    device = "cuda" if device != "stub" and reason is None else "stub"
    repeats, count = (5, 500) if quick else (repeats, 5000)
    found = cases(device)
    made = rows(found, measure(found, repeats, count))
    options = dict(
        device=device, repeats=repeats, quick=quick, count=count, nbytes=NBYTES, frames=FRAMES
    )
    BENCH.finish(
        made,
        path,
        simulated=device == "cuda" and open_cuda().simulated,
        options=options,
        gpu={"name": open_cuda().name} if device == "cuda" else None,
        wanted_hybrid_added_us=WANTED_HYBRID_US,
        wanted_block_added_us=WANTED_BLOCK_US,
        wanted_upstream_added_us=WANTED_UPSTREAM_US,
    )


if __name__ == "__main__":
    main()
