"""How near do loops over `umem.blocks` come to the larger of link and compute?

A sum, a map and a stencil over a host array, on the software GPU with its model on, at 0.5 to 4
times VRAM. The bound is the larger of one way over the link and the time of the same launches and
kernels on data that is on the GPU; at most 1.1 times that is wanted. What the host itself takes to
copy into pinned memory is not in the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, figure, quantity, span, text

import umem
from umem._common.specs import gpu_spec
from umem.devices import current_device
from umem.units import MIB

VRAM, WIDTH = 64 * MIB, 1024
TIMES = (0.5, 1.2, 2.0, 4.0)
LOOPS = ("sum", "map", "stencil")
WANTED = 1.1


def body(cp: Any, name: str, block: Any, to: Any) -> None:
    """Work on a block, which for the stencil has a row more on each side."""
    if name == "sum":
        block.sum()
    elif name == "map":
        cp.multiply(block, 2, out=to)
    else:
        cp.add(block[:-2], block[2:], out=to)


def seconds(gpu: Any, name: str, times: float) -> tuple[float, float, float]:
    """Return the simulated seconds of a loop, of one way over the link, and of its compute."""
    import cupy as cp

    x = np.random.default_rng(0).random((round(times * VRAM) // (4 * WIDTH), WIDTH), np.float32)
    out = np.empty_like(x) if name == "map" else None
    halo = 1 if name == "stencil" else 0
    y = np.empty_like(x) if out is None and halo else out
    current_device().give_back()
    cp.get_default_memory_pool().free_all_blocks()
    loop = umem.blocks(x, out=y, halo=halo)
    before = gpu.figures.seconds
    for item in loop:
        block, to = item if y is not None else (item, None)
        if halo:  # the first and the last block lack a row
            block, to = block[: len(to) + 2], to[: len(block) - 2]
        body(cp, name, block, to)
    took = gpu.figures.seconds - before
    block = cp.asarray(x[: loop.length + 2 * halo])
    to = cp.empty((loop.length, WIDTH), cp.float32)
    body(cp, name, block, to)  # fills the pool
    before = gpu.figures.seconds
    for _ in range(len(loop)):
        body(cp, name, block, to)
    return took, x.nbytes / gpu_spec("t4").host_in_bandwidth, gpu.figures.seconds - before


def measure(all_times: tuple[float, ...]) -> list[Row]:
    """A row a loop and size."""
    gpu = umem.software_gpu("t4", vram=VRAM, force=True)
    rows: list[Row] = []
    for name in LOOPS:
        for times in all_times:
            took, link, compute = seconds(gpu, name, times)
            bound = max(link, compute)
            rows.append({
                "loop": name, "of_vram": times, "seconds": took, "link_seconds": link,
                "compute_seconds": compute, "of_bound": took / bound,
            })  # fmt: skip
    return rows


def answer(result: common.Result) -> str:
    large = [row["of_bound"] for row in result["rows"] if row["of_vram"] > 1]
    return (
        f"With more data than VRAM a loop over blocks takes {span(large)} of the larger of link "
        f"and compute (at most {figure(WANTED)} is wanted)."
    )


BENCH = common.Bench(
    "blocks",
    __doc__,
    answer,
    (
        text("loop", "loop"),
        quantity("of VRAM", "of_vram"),
        quantity("blocks", "seconds", "ms", per=1e-3),
        quantity("link", "link_seconds", "ms", per=1e-3),
        quantity("compute", "compute_seconds", "ms", per=1e-3),
        quantity("of the bound", "of_bound"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One size.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    all_times = (1.2,) if quick else TIMES
    options = {"loops": list(LOOPS), "of_vram": list(all_times), "vram_bytes": VRAM}
    BENCH.finish(measure(all_times), path, simulated=True, options=options)


if __name__ == "__main__":
    main()
