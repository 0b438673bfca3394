"""What does `umem.lookahead` save plain CuPy programs whose data is larger than VRAM?

Three loops over managed memory on the software GPU with its model on, at 1.5 and 3 times VRAM: a
stencil over blocks, k-means over chunks of points, and conjugate gradients with a sparse matrix in
blocks of rows. Each runs as it is, with the driver's own paging, and with its order told. The bound
is the least that the link can carry for all blocks of a recorded round, those of temporary arrays
included (`bench/paging_bound.py`). Counted are the rounds after the first two, in which the order
is learned. Results are compared by their bits.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import common
from paging_bound import footprint, least_moves
from report_tables import figure, quantity, span, text

import umem
from umem._common.specs import gpu_spec
from umem.devices import current_device
from umem.memory import Lookahead
from umem.trace import Mark, Trace
from umem.units import BLOCK_BYTES, MIB

GPU, VRAM = "t4", 256 * MIB
TIMES = (1.5, 3.0)
MANAGED, LOOKAHEAD = WAYS = "managed", "managed, lookahead"
ROUNDS, LEARNED = 6, 2
Uses = Callable[..., None]


# -- the programs ------------------------------------------------------------------------------
# Each yields after a round, and tells what it uses.


def stencil(cp: Any, nbytes: int, uses: Uses) -> Iterator[Any]:
    """Smooth a vector in blocks, from one copy into another and back."""
    count = 48
    shape = (nbytes // (2 * count) // 4,)
    one = [cp.arange(shape[0], dtype=cp.float32) % (7 + i) for i in range(count)]
    other = [cp.zeros(shape, cp.float32) for _ in range(count)]
    while True:
        for old, new in ((one, other), (other, one)):
            for i in range(count):
                left, right = old[i - 1], old[(i + 1) % count]
                uses(left, old[i], right, new[i])
                new[i][:] = old[i] * cp.float32(0.5)
                new[i][0] += cp.float32(0.25) * left[-1]
                new[i][-1] += cp.float32(0.25) * right[0]
        yield one


def k_means(cp: Any, nbytes: int, uses: Uses) -> Iterator[Any]:
    """Assign points in chunks to the nearest of four centres, which move to their means."""
    count, width = 48, 8
    rows = nbytes // count // (4 * width)
    points = [
        (cp.arange(rows * width, dtype=cp.float32).reshape(rows, width) * (i + 1)) % 17
        for i in range(count)
    ]
    centres = cp.arange(4 * width, dtype=cp.float32).reshape(4, width)
    while True:
        sums, counts = cp.zeros_like(centres), cp.zeros((4, 1), cp.float32)
        for chunk in points:
            uses(chunk)
            nearest = ((chunk - centres[0]) ** 2).sum(axis=1)
            for number in range(1, 4):
                nearest = cp.minimum(nearest, ((chunk - centres[number]) ** 2).sum(axis=1))
            for number in range(4):
                own = (((chunk - centres[number]) ** 2).sum(axis=1) <= nearest)[:, None]
                sums[number] += (chunk * own).sum(axis=0)
                counts[number] += own.sum()
        centres = sums / cp.maximum(counts, 1)
        yield [centres]


def conjugate_gradients(cp: Any, nbytes: int, uses: Uses) -> Iterator[Any]:
    """Solve with a matrix of five diagonals, in blocks of rows."""
    from cupyx.scipy import sparse

    count, per_row = 48, 5 * (4 + 4) + 4
    rows = nbytes // count // per_row
    size = rows * count
    blocks = []
    for i in range(count):
        columns = (cp.arange(rows) + i * rows)[:, None] + cp.arange(-2, 3)[None]
        inside = cp.clip(columns, 0, size - 1).astype(cp.int32)
        values = cp.where(columns == inside, cp.float32(-1), cp.float32(0))
        values[:, 2] = 6
        starts = cp.arange(0, 5 * rows + 1, 5, dtype=cp.int32)
        triple = (values.ravel().astype(cp.float32), inside.ravel(), starts)
        blocks.append(sparse.csr_matrix(triple, shape=(rows, size)))
        del columns, inside, values
    x, q = cp.zeros(size, cp.float32), cp.zeros(size, cp.float32)
    r = cp.ones(size, cp.float32)
    p, rho = r.copy(), cp.vdot(r, r)
    while True:
        for i, block in enumerate(blocks):
            uses(block, p, q)
            q[i * rows : (i + 1) * rows] = block @ p
        uses(p, q)
        alpha = rho / cp.vdot(p, q)
        uses(x, p)
        x += alpha * p
        uses(r, q)
        r -= alpha * q
        rho, old = cp.vdot(r, r), rho
        uses(p, r)
        p *= rho / old
        p += r
        yield [x]


PROGRAMS = {"stencil": stencil, "k-means": k_means, "conjugate gradients": conjugate_gradients}


# -- a run -------------------------------------------------------------------------------------


@functools.cache
def recorded(vram: int, name: str, times: float) -> Trace:
    """Return a recording of a program from its start, with three rounds."""
    import cupy as cp

    current_device().give_back()  # what the run before has left
    with umem.managed():
        rounds = PROGRAMS[name](cp, round(times * vram), _nothing)
        with umem.record() as recorder:
            for _ in range(3):
                next(rounds)
                recorder.emit(Mark("step"))
        del rounds
    return recorder.trace


def bound(trace: Trace, vram: int) -> int:
    """Return the least bytes that the link carries in a round."""
    period = footprint(trace, gpu_spec(GPU), repeats=False)
    return sum(least_moves(period, vram // BLOCK_BYTES)) * BLOCK_BYTES


def run(gpu: Any, vram: int, name: str, times: float, way: str) -> dict[str, Any]:
    """Run a program for some rounds; return what it cost after those that are learned."""
    import cupy as cp

    current_device().give_back()  # what the run before has left
    with umem.managed():
        look: Lookahead[Any] = umem.lookahead()
        uses = look.uses if way == LOOKAHEAD else _nothing
        rounds = PROGRAMS[name](cp, round(times * vram), uses)
        start: Any = None
        for number in range(ROUNDS):
            if number == LEARNED:
                start = gpu.figures
            result = next(rounds)
            look.step()
        end = gpu.figures
        digest = hashlib.sha1(b"".join(array.get().tobytes() for array in result)).hexdigest()
        count = ROUNDS - LEARNED
        moved = sum(
            getattr(end, key) - getattr(start, key)
            for key in ("migrated_in_bytes", "migrated_out_bytes")
        )
        return {
            "moved_bytes": moved / count,
            "seconds": (end.seconds - start.seconds) / count,
            "digest": digest,
        }


def _nothing(*arrays: Any) -> None:
    """Tell nothing."""


def as_script(name: str, times: float, vram: int) -> None:
    """Run a program as its user would, without a mode; `umem.choose` runs this dry."""
    import cupy as cp

    rounds = PROGRAMS[name](cp, round(times * vram), _nothing)
    for _ in range(ROUNDS):
        next(rounds)
        umem.mark("step")


def advice(name: str, times: float, vram: int) -> dict[str, Any]:
    """Return the first line of `umem.choose` for a program, and the time of its step, dry."""
    given = "--program", name, "--of-vram", str(times), "--vram", str(vram)
    choice = umem.choose(__file__, *given, gpu=GPU, vram=vram)
    best = choice.best
    return {"advice": best and best.name, "advice_ms": best and 1e3 * best.seconds}


def measure(names: list[str], sizes: Sequence[float], vram: int) -> list[dict[str, Any]]:
    """A row a program and size."""
    cases = [(name, times) for name in names for times in sizes]
    chosen = {case: advice(*case, vram) for case in cases}  # before CuPy is imported here
    gpu = umem.software_gpu(GPU, vram=vram, force=True)
    rows = []
    for name in names:
        for times in sizes:
            trace = recorded(vram, name, times)
            live = {way: run(gpu, vram, name, times, way) for way in WAYS}
            assert len({one["digest"] for one in live.values()}) == 1, name
            plain, looked_ahead = live[MANAGED], live[LOOKAHEAD]
            bytes_of_bound = bound(trace, vram)
            rows.append(
                {
                    "program": name,
                    "of_vram": times,
                    "bound_bytes": bytes_of_bound,
                    "managed_bytes": plain["moved_bytes"],
                    "told_bytes": looked_ahead["moved_bytes"],
                    "of_bound": looked_ahead["moved_bytes"] / bytes_of_bound,
                    "managed_ms": plain["seconds"] * 1e3,
                    "told_ms": looked_ahead["seconds"] * 1e3,
                    "of_managed": looked_ahead["seconds"] / plain["seconds"],
                    **chosen[name, times],
                }
            )
            click.echo(f"{name}, {times}: {rows[-1]}", err=True)
    return rows


def answer(result: common.Result) -> str:
    rows = result["rows"]
    return (
        f"With its order told a loop moves {span(row['of_bound'] for row in rows)} times the least "
        f"that is possible (at most {figure(1.15)} is wanted), in "
        f"{span(row['of_managed'] for row in rows)} of managed memory's time (at most "
        f"{figure(0.8)})."
    )


BENCH = common.Bench(
    "lookahead",
    __doc__,
    answer,
    (
        text("program", "program"),
        quantity("of VRAM", "of_vram"),
        quantity("bound", "bound_bytes", "MiB", per=MIB),
        quantity("managed moves", "managed_bytes", "MiB", per=MIB),
        quantity("told moves", "told_bytes", "MiB", per=MIB),
        quantity("of bound", "of_bound"),
        quantity("managed", "managed_ms", "ms"),
        quantity("told", "told_ms", "ms"),
        quantity("of managed", "of_managed"),
        text("choose's first line", "advice"),
        quantity("its time", "advice_ms", "ms"),
    ),
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One program and size, and a quarter of the VRAM.")
@click.option("--program", type=click.Choice(list(PROGRAMS)), help="Run this one, as a script.")
@click.option("--of-vram", default=TIMES[0], show_default=True, help="With --program: its bytes.")
@click.option("--vram", default=VRAM, show_default=True, help="With --program: bytes.")
@common.json_option
def main(quick: bool, program: str | None, of_vram: float, vram: int, path: Path | None) -> None:
    if program is not None:
        return as_script(program, of_vram, vram)
    common.writable(path)
    names, sizes, vram = (
        (["k-means"], TIMES[:1], VRAM // 4) if quick else ([*PROGRAMS], TIMES, VRAM)
    )
    options = {"programs": names, "vram_bytes": vram}
    BENCH.finish(measure(names, sizes, vram), path, simulated=True, options=options)


if __name__ == "__main__":
    main()
