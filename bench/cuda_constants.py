"""What do a fault, a first touch, a prefetch, an eviction and a copy cost on this GPU?

The constants that the virtual GPU's cost model takes from publications, measured. NOT RUN YET:
no figure of this script has been seen on a GPU. Managed memory stays within the budget of
gpu_guard.py, so nothing is oversubscribed: an eviction is measured as what it consists of,
moving 2 MiB to the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import common
import gpu_guard
from report_tables import Row, duration, listed, quantity, text

from umem.devices import Policy
from umem.devices.cuda import CudaDevice, open_cuda
from umem.errors import UmemError
from umem.units import BLOCK_BYTES, GIB, MIB


class Bench:
    """The arrays of one run, and a timer that waits for the GPU before and after."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        cupy = device.xp
        self.device, self.nbytes = device, nbytes
        self.guard = gpu_guard.guard(device)
        self.guard.check(2 * nbytes)  # one array, and one fresh allocation beside it
        with managed(device):
            self.array = cupy.zeros(nbytes // 4, dtype="u4")
        self.block = self.array[: BLOCK_BYTES // 4]
        self.touch = cupy.ElementwiseKernel("", "uint32 x", "x += 1", "umem_touch")
        self.pinned = cupy.cuda.alloc_pinned_memory(nbytes)
        with managed(device, "unmanaged"):
            self.plain = cupy.empty(nbytes, dtype="u1")

    def seconds(self, action: Callable[[], Any]) -> float:
        """How long an action takes, until the GPU has finished it."""
        self.device.synchronize()
        start = time.perf_counter()
        action()
        self.device.synchronize()
        return time.perf_counter() - start

    def to(self, place: Any, array: Any = None) -> None:
        """Move an array before something is timed."""
        self.device.prefetch(self.array if array is None else array, place, None)
        self.device.synchronize()


@contextmanager
def managed(device: CudaDevice, mode: Any = "managed") -> Iterator[None]:
    """A mode, for the length of a block."""
    restore = device.install(Policy(mode), everywhere=False)
    try:
        yield
    finally:
        restore()


def resident_pass(bench: Bench) -> float:
    """Touch everything when it is resident: to be taken off the faulting passes."""
    bench.to(bench.device.ordinal)
    return bench.seconds(lambda: bench.touch(bench.array))


def fault_in(bench: Bench) -> float:
    """Touch everything when it is on the host."""
    bench.to("cpu")
    return bench.seconds(lambda: bench.touch(bench.array))


def fault_one_block(bench: Bench) -> float:
    """Touch 2 MiB that are on the host."""
    bench.to("cpu")
    return bench.seconds(lambda: bench.touch(bench.block))


def populate_by_fault(bench: Bench) -> float:
    """Touch everything of an allocation that was never written."""
    return _fresh(bench, bench.touch)


def populate_by_prefetch(bench: Bench) -> float:
    """Prefetch an allocation that was never written."""
    return _fresh(bench, lambda array: bench.device.prefetch(array, bench.device.ordinal, None))


def _fresh(bench: Bench, action: Callable[[Any], Any]) -> float:
    with bench.guard.raw(bench.nbytes) as pointer:
        seconds = _first_use(bench, action, pointer)
        del pointer  # freed before the guard gives its bytes back to the pools
    return seconds


def _first_use(bench: Bench, action: Callable[[Any], Any], pointer: Any) -> float:
    array = bench.device.xp.ndarray((bench.nbytes // 4,), dtype="u4", memptr=pointer)
    return bench.seconds(lambda: action(array))


def prefetch_in(bench: Bench) -> float:
    """Prefetch everything from the host to the GPU."""
    bench.to("cpu")
    return bench.seconds(lambda: bench.device.prefetch(bench.array, bench.device.ordinal, None))


def prefetch_out(bench: Bench) -> float:
    """Prefetch everything from the GPU to the host."""
    bench.to(bench.device.ordinal)
    return bench.seconds(lambda: bench.device.prefetch(bench.array, "cpu", None))


def evict_one_block(bench: Bench) -> float:
    """Move 2 MiB to the host, as an eviction does."""
    bench.to(bench.device.ordinal)
    return bench.seconds(lambda: bench.device.prefetch(bench.block, "cpu", None))


def copy_in(bench: Bench) -> float:
    """Copy pinned host memory to plain device memory."""
    stream = bench.device.xp.cuda.get_current_stream()
    return bench.seconds(
        lambda: bench.plain.data.copy_from_host_async(bench.pinned.ptr, bench.nbytes, stream)
    )


def copy_out(bench: Bench) -> float:
    """Copy plain device memory to pinned host memory."""
    stream = bench.device.xp.cuda.get_current_stream()
    return bench.seconds(
        lambda: bench.plain.data.copy_to_host_async(bench.pinned.ptr, bench.nbytes, stream)
    )


ONE_BLOCK = (fault_one_block, evict_one_block)
MEASURES = (
    resident_pass, fault_in, fault_one_block, populate_by_fault, populate_by_prefetch,
    prefetch_in, prefetch_out, evict_one_block, copy_in, copy_out,
)  # fmt: skip


def measure(bench: Bench, repeats: int) -> list[dict[str, Any]]:
    """Every measure in turn, ``repeats`` times, after one round that is thrown away."""
    seconds: dict[str, list[float]] = {action.__name__: [] for action in MEASURES}
    for number in range(repeats + 1):
        for action in MEASURES:
            value = action(bench)
            if number:
                seconds[action.__name__].append(value)
    return [_row(bench, action, seconds[action.__name__]) for action in MEASURES]


def _row(bench: Bench, action: Callable[..., Any], seconds: list[float]) -> dict[str, Any]:
    """Make the row of an action from the times of its repeats."""
    nbytes = BLOCK_BYTES if action in ONE_BLOCK else bench.nbytes
    median = common.summary(seconds).median
    return {
        "name": action.__name__,
        "what": (action.__doc__ or "").strip(),
        "nbytes": nbytes,
        "repeat_seconds": seconds,
        "block_seconds": median * BLOCK_BYTES / nbytes,
        "bytes_per_second": nbytes / median,
    }


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = {row["name"]: row for row in result["rows"]}
    words = {
        "fault_one_block": "a fault",
        "populate_by_fault": "a first touch",
        "prefetch_in": "a prefetch",
        "evict_one_block": "an eviction",
        "copy_in": "a copy",
    }
    parts = [f"{word} {duration(rows[name]['block_seconds'])}" for name, word in words.items()]
    return f"Of 2 MiB {listed(parts)} on {result['machine']['gpu']['name']}."


def _median(row: Row) -> float:
    return common.summary(row["repeat_seconds"]).median


BENCH = common.Bench(
    "cuda_constants",
    __doc__,
    answer,
    (
        text("measure", lambda row: row["name"].replace("_", " ")),
        quantity("bytes", "nbytes", "MiB", per=MIB),
        quantity(
            "median", lambda row: common.summary(row["repeat_seconds"]).median, "ms", per=1e-3
        ),
        quantity("least", lambda row: min(row["repeat_seconds"]), "ms", per=1e-3),
        quantity("most", lambda row: max(row["repeat_seconds"]), "ms", per=1e-3),
        quantity("2 MiB", "block_seconds", "us", per=1e-6),
        quantity("rate", "bytes_per_second", "GiB/s", per=GIB),
    ),
)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--quick", is_flag=True, help="32 MiB, twice: to see that it runs.")
@common.json_option
def main(repeats: int, quick: bool, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    nbytes, repeats = (32 * MIB, 2) if quick else (256 * MIB, repeats)
    try:
        device = open_cuda()
        rows = measure(Bench(device, nbytes), repeats)
    except UmemError as error:
        raise click.ClickException(str(error)) from error
    gpu = {"name": device.name, "vram_bytes": device.vram_bytes}
    BENCH.finish(
        rows,
        path,
        simulated=device.simulated,
        options={"nbytes": nbytes, "repeats": repeats},
        gpu=gpu,
        budget_bytes=gpu_guard.guard(device).budget_bytes,
    )


if __name__ == "__main__":
    main()
