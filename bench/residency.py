"""How many block touches a second does the virtual GPU handle on one core?

Tensors are walked in a cycle, again and again: with room for all of them (`hits`), or with room for
half, so that every touch of a block misses and evicts another (`misses`). They have 1 to 3 blocks
(`small`, where the cost of a call weighs most) or 32 (`large`); every second one is advised
read_mostly, or none. `touch` asks the residency table alone, `event` feeds the whole model with
operations that read two tensors and write one, clock and timeline included.

Counted is the processor time of the one thread, not the wall's: a busy machine slows it less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
import common
from report_tables import quantity, span, text

from umem._common.specs import COSTS, gpu_spec
from umem.devices import Policy
from umem.devices.virtual import READ_MOSTLY, Model, Residency
from umem.trace import Access, Alloc, Hint, Op
from umem.units import BLOCK_BYTES

WANTED = 1_000_000
BLOCKS = 3_000
SIZES = {"small": (1, 2, 3), "large": (32,)}

Walk = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """What is touched, and how."""

    through: str
    tensors: str
    work: str
    advised: bool

    @property
    def sizes(self) -> list[int]:
        """Blocks of each tensor; a multiple of three tensors, for the operations."""
        sizes = SIZES[self.tensors]
        count = BLOCKS * len(sizes) // sum(sizes) // 6 * 6
        return list(islice(cycle(sizes), count))

    @property
    def capacity(self) -> int:
        """Blocks of VRAM."""
        return sum(self.sizes) // (1 if self.work == "hits" else 2)

    def walk(self) -> Walk:
        """Touches every block once."""
        return touches(self) if self.through == "touch" else events(self)


CASES = [
    Case(through, tensors, work, advised)
    for through in ("touch", "event")
    for tensors in SIZES
    for work in ("hits", "misses")
    for advised in (False, True)
]


def touches(case: Case) -> Walk:
    """Each tensor in turn, asked of the residency table."""
    residency = Residency(case.capacity)
    residency.grow(sum(case.sizes))
    ranges, stop = [], 0
    for number, size in enumerate(case.sizes):
        start, stop = stop, stop + size
        ranges.append((start, stop, number % 3 == 2))
        if case.advised and number % 2:
            residency.advise(start, stop, READ_MOSTLY, unset=False)

    def walk() -> None:
        for start, stop, write in ranges:
            residency.touch(start, stop, write=write)

    return walk


def events(case: Case) -> Walk:
    """Operations that read two tensors and write the next, fed to the model."""
    spec = gpu_spec("v100-16gb").with_vram(case.capacity * BLOCK_BYTES)
    policy = Policy("managed")
    model = Model(spec, COSTS, "caching", "numpy", lambda: policy)
    parts = []
    for number, size in enumerate(case.sizes):
        part = Access(number, 0, size * BLOCK_BYTES)
        model.on_event(Alloc(number, part.stop, "array", "x"))
        if case.advised and number % 2:
            model.on_event(Hint("read_mostly", (part,)))
        parts.append(part)
    ops = [
        Op("op", "forward", (a, b), (c,), 1000, 1000)
        for a, b, c in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]

    def walk() -> None:
        for op in ops:
            model.on_event(op)

    return walk


def measure(cases: list[Case], repeats: int, seconds: float) -> list[list[float]]:
    """Touches a second of every case, every repeat; cases take turns."""
    walks = [case.walk() for case in cases]
    for walk in walks:
        walk()  # what was never written is populated
        walk()
    rates: list[list[float]] = [[] for _ in cases]
    for _ in range(repeats):
        for case, walk, found in zip(cases, walks, rates, strict=True):
            found.append(rate(walk, sum(case.sizes), seconds))
    return rates


def rate(walk: Walk, blocks: int, seconds: float) -> float:
    """Touches a second over about so many seconds."""
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        walk()
        count += blocks
    return count / spent


def answer(result: common.Result) -> str:
    rates = [row["median_touches_per_second"] for row in result["rows"]]
    return (
        f"{span(rate / 1e6 for rate in rates)} million, by how large tensors are and whether they "
        f"fit; {sum(rate >= WANTED for rate in rates)} of {len(rates)} cases reach the "
        f"{WANTED / 1e6:g} million that is wanted."
    )


BENCH = common.Bench(
    "residency",
    __doc__,
    answer,
    (
        text("through", "through"),
        text("tensors", "tensors"),
        text("work", "work"),
        text("advised", lambda row: "half" if row["advised"] else "none"),
        quantity("median", "median_touches_per_second", "million touches a s", per=1e6),
        quantity("least", lambda row: min(row["touches_per_second"]), "million a s", per=1e6),
        quantity("most", lambda row: max(row["touches_per_second"]), "million a s", per=1e6),
    ),
)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
@click.option("--quick", is_flag=True, help="Two short repeats.")
@common.json_option
def main(repeats: int, quick: bool, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    repeats, seconds = (2, 0.01) if quick else (repeats, 0.2)
    rows: list[dict[str, Any]] = [
        {
            **asdict(case),
            "median_touches_per_second": common.summary(found).median,
            "touches_per_second": found,
        }
        for case, found in zip(CASES, measure(CASES, repeats, seconds), strict=True)
    ]
    options = {"repeats": repeats, "quick": quick, "seconds_a_repeat": seconds}
    BENCH.finish(rows, path, simulated=False, options=options, wanted_touches_per_second=WANTED)


if __name__ == "__main__":
    main()
