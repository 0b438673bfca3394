"""Which way is the quickest for plain CuPy programs whose data is larger than VRAM?

Five programs whose data begins and ends on the host, on the software GPU with its model on, with
data of 0.5 to 4 times VRAM: a product with a tall matrix, transforms of rows, k-means of five
rounds, a filter of an image, and a stencil of four rounds. Each runs in blocks (`umem.blocks`), in
managed memory as it is and with its order told (`umem.lookahead`), and in hybrid memory, where the
data is copied to the GPU in chunks first and back at the end. Results are compared. Blocks are held
against the larger of two bounds: one way over the link in each round, and the time of the same
launches and kernels on data that is on the GPU (at most 1.1 is wanted). What the host itself takes
to copy into pinned memory is not in the model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from report_tables import Row, figure, quantity, span, text

import umem
from umem.devices.open import current_device
from umem.devices.specs import gpu_spec
from umem.units import MIB

VRAM = 64 * MIB
TIMES = (0.5, 1.2, 2.0, 4.0)
ROOM = {"k-means": "20%"}
"""Of blocks, where it is not 80%: distances to four centres take eight times a block."""
WAYS = ("blocks", "managed", "managed, lookahead", "hybrid")
Uses = Callable[..., None]


# -- the programs ------------------------------------------------------------------------------
# ``body`` computes a chunk of the result from one of the data; a program is a number of rounds.


def product(cp: Any, rows: Any, to: Any, state: Any) -> None:
    """Multiply a tall matrix by a square one."""
    cp.matmul(rows, state, out=to)


def transform(cp: Any, rows: Any, to: Any, state: Any) -> None:
    """Filter rows by their Fourier transforms."""
    to[...] = cp.fft.irfft(cp.fft.rfft(rows, axis=1) * state, n=rows.shape[1], axis=1)


def sharpen(cp: Any, rows: Any, to: Any, state: Any) -> None:
    """Sharpen an image along its rows, and stretch its contrast."""
    blurred = rows.copy()
    blurred[:, 1:-1] = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 3
    to[...] = cp.clip(rows + (rows - blurred) * 2, 0, 1) ** 0.8


def assign(cp: Any, rows: Any, to: Any, state: Any) -> None:
    """Add up the points that are nearest to each centre, for k-means."""
    centres, sums, counts = state
    nearest = ((rows[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    for number in range(len(centres)):
        own = (nearest == number)[:, None]
        sums[number] += (rows * own).sum(axis=0)
        counts[number] += own.sum()


def smooth(cp: Any, rows: Any, to: Any, state: Any) -> None:
    """Smooth rows of a field, in place."""
    rows[:, 1:-1] = (rows[:, :-2] + rows[:, 1:-1] * 2 + rows[:, 2:]) * np.float32(0.25)


WIDTHS = {"product": 256, "transform": 1024, "image": 1024, "k-means": 8, "stencil": 1024}
ROUNDS = {"k-means": 5, "stencil": 4}
BODIES = {
    "product": product, "transform": transform, "image": sharpen, "k-means": assign,
    "stencil": smooth,
}  # fmt: skip
WITH_OUT = ("product", "transform", "image")


def state_of(cp: Any, name: str) -> Any:
    """Return what the bodies of a program share, on the GPU."""
    if name == "product":
        return cp.ones((256, 256), cp.float32) / 256
    if name == "transform":
        return cp.exp(-cp.arange(513, dtype=cp.float32) / 100)
    if name == "k-means":
        centres = cp.arange(32, dtype=cp.float32).reshape(4, 8) / 32
        return [centres, cp.zeros_like(centres), cp.zeros((4, 1), cp.float32)]
    return None


def end_round(cp: Any, name: str, state: Any) -> None:
    """Move the centres of k-means to the means of their points."""
    if name == "k-means":
        state[0] = state[1] / cp.maximum(state[2], 1)
        state[1], state[2] = cp.zeros_like(state[0]), cp.zeros((4, 1), cp.float32)


# -- a run -------------------------------------------------------------------------------------


def _blocks(name: str, x: Any, out: Any) -> Any:
    return umem.blocks(x, out=out, write=name == "stencil", room=ROOM.get(name, "80%"))


def in_blocks(cp: Any, name: str, x: Any, out: Any) -> Any:
    """Run a program on the host's array in blocks."""
    body, state = BODIES[name], state_of(cp, name)
    for _ in range(ROUNDS.get(name, 1)):
        for block in _blocks(name, x, out):
            rows, to = block if out is not None else (block, None)
            body(cp, rows, to, state)
        end_round(cp, name, state)
    return state


def on_gpu(cp: Any, name: str, x: Any, out: Any, look: Any) -> Any:
    """Run a program on chunks, as many as there are blocks, in the current mode's memory."""
    body, state = BODIES[name], state_of(cp, name)
    uses: Uses = look.uses if look is not None else lambda *arrays: None
    count = len(_blocks(name, x, out))
    chunks = [cp.asarray(part) for part in np.array_split(x, count)]
    results = [None if out is None else cp.empty_like(chunk) for chunk in chunks]
    for _ in range(ROUNDS.get(name, 1)):
        for rows, to in zip(chunks, results, strict=True):
            uses(*(array for array in (rows, to) if array is not None))
            body(cp, rows, to, state)
        if look is not None:
            look.step()
        end_round(cp, name, state)
    if out is not None or name == "stencil":
        parts = np.array_split(x if out is None else out, count)
        for part, to in zip(parts, chunks if out is None else results, strict=True):
            part[...] = to.get()
    return state


def data(name: str, times: float) -> tuple[Any, Any]:
    """Return the host's arrays of a program, of so many times VRAM together; the second or None."""
    halves = 2 if name in WITH_OUT else 1
    rows = round(times * VRAM) // halves // (4 * WIDTHS[name])
    x = np.random.default_rng(0).random((rows, WIDTHS[name]), np.float32)
    return x, np.empty_like(x) if name in WITH_OUT else None


def run(gpu: Any, name: str, times: float, way: str) -> tuple[float, Any]:
    """Run a program one way; return its simulated seconds and its result."""
    import cupy as cp

    x, out = data(name, times)
    current_device().give_back()
    cp.get_default_memory_pool().free_all_blocks()
    mode = {"blocks": umem.unmanaged, "hybrid": umem.hybrid}.get(way, umem.managed)
    with mode():
        before = gpu.figures.seconds
        if way == "blocks":
            state = in_blocks(cp, name, x, out)
        else:
            state = on_gpu(cp, name, x, out, umem.lookahead() if "lookahead" in way else None)
        seconds = gpu.figures.seconds - before
        result = cp.asnumpy(state[0]) if name == "k-means" else x if out is None else out
    return seconds, result


def bound(gpu: Any, name: str, times: float) -> float:
    """Return the larger of the link's seconds and those of all bodies on one and the same block."""
    import cupy as cp

    x, out = data(name, times)
    parts = _blocks(name, x, out)
    rounds, count = ROUNDS.get(name, 1), len(parts)
    link = rounds * x.nbytes / gpu_spec("t4").host_in_bandwidth
    state, rows = state_of(cp, name), cp.asarray(x[: parts.length])
    to = None if out is None else cp.empty_like(rows)
    BODIES[name](cp, rows, to, state)  # fills the pool
    before = gpu.figures.seconds
    for _ in range(rounds):
        for _ in range(count):
            BODIES[name](cp, rows, to, state)
    return max(link, gpu.figures.seconds - before)


def measure(names: list[str], all_times: tuple[float, ...]) -> list[Row]:
    """A row a program and size, with the time of each way."""
    gpu = umem.software_gpu("t4", vram=VRAM, force=True)
    rows: list[Row] = []
    for name in names:
        for times in all_times:
            found = {way: run(gpu, name, times, way) for way in WAYS}
            same = found["managed"][1]
            assert all(np.allclose(one, same, 1e-4, 1e-5) for _, one in found.values()), name
            seconds = {way: one for way, (one, _) in found.items()}
            best = min(seconds, key=lambda way: seconds[way])
            of_bound = seconds["blocks"] / bound(gpu, name, times)
            row: Row = {
                "program": name, "of_vram": times, "best": best, "of_bound": of_bound, **seconds,
            }  # fmt: skip
            rows.append(row)
            click.echo(f"{name}, {times}: {row}", err=True)
    return rows


def answer(result: common.Result) -> str:
    large = [row for row in result["rows"] if row["of_vram"] > 1]
    ahead = [row for row in large if row["blocks"] <= 1.1 * row[row["best"]]]
    return (
        f"With more data than VRAM, blocks of the host's array are the quickest way or within 10% "
        f"of it in {len(ahead)} of {len(large)} cases, in {span(row['of_bound'] for row in large)} "
        f"of the larger of link and compute (at most {figure(1.1)} is wanted)."
    )


BENCH = common.Bench(
    "recipes",
    __doc__,
    answer,
    (
        text("program", "program"),
        quantity("of VRAM", "of_vram"),
        *(quantity(way, way, "ms", per=1e-3) for way in WAYS),
        text("quickest", "best"),
        quantity("blocks, of the bound", "of_bound"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two programs at one size.")
@click.option("--only", "names", multiple=True, type=click.Choice([*BODIES]))
@common.json_option
def main(quick: bool, names: tuple[str, ...], path: Path | None) -> None:
    common.writable(path)
    chosen = ["product", "stencil"] if quick else list(names or BODIES)
    all_times = (1.2,) if quick else TIMES
    options = {"programs": chosen, "of_vram": list(all_times), "vram_bytes": VRAM}
    BENCH.finish(measure(chosen, all_times), path, simulated=True, options=options)


if __name__ == "__main__":
    main()
