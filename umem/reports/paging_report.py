"""Moves of managed memory's pages in a block, by the line that allocated the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from umem._common.files import whole
from umem._common.scopes import Scope
from umem._common.stacks import Places, places
from umem.devices import Device, Now, PageMove
from umem.memory import WatchingBlock
from umem.reports.page_owners import OwnedRange, PagePart, divided
from umem.units import format_bytes

ROWS = 10


def paging() -> PageTracker:
    """Report which pages of managed memory move in a block: ``with umem.paging() as p: step()``.

    On a GPU the moves come from CUPTI's counters of unified memory, for the whole process. This
    needs cupti-python, and no other profiler may be active; it has never run on a GPU. On a virtual
    or software GPU the moves come from the model (*simulated*).

    >>> import umem
    >>> with umem.virtual_gpu("t4", vram="8MiB"), umem.managed() as memory, umem.paging() as p:
    ...     x = memory.xp.ones((4, 1 << 20), "float32")
    ...     total = x.sum()
    >>> p.gpu_faults, p.in_bytes >> 20, p.out_bytes >> 20
    (17, 16, 26)
    """
    return PageTracker()


@dataclass(frozen=True)
class PagedMemory:
    """Moves of the memory that one line allocated.

    Attributes:
        place: the line, or `ELSEWHERE`.
        in_bytes, out_bytes: bytes moved into VRAM, and out of it.
        new_bytes: bytes written in VRAM for the first time, without a copy.
        gpu_faults, host_faults: faults on the memory, as in `PageTracker`.
    """

    place: str
    in_bytes: int = 0
    out_bytes: int = 0
    new_bytes: int = 0
    gpu_faults: int = 0
    host_faults: int = 0

    @property
    def moved_bytes(self) -> int:
        """Return the bytes moved in both directions."""
        return self.in_bytes + self.out_bytes


class PageTracker(WatchingBlock["PageTracker"]):
    """Records the moves of pages in a block; `umem.paging` makes one.

    ``moves`` has all moves in the order in which they were reported; a GPU reports them after its
    work. A line is known for arrays that the block's own thread allocates in the block. The bytes
    of a page that several arrays share are divided among them; the last array also gets the unused
    bytes.

    Cost: a walk over the frames at each allocation, and some 200 bytes of host memory for each
    allocation and move, kept as long as the tracker. Use it for some steps, not for a whole
    training.
    """

    title = "umem.paging()"

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[PageMove] = []
        self._arrays: list[OwnedRange] = []
        self._stacks: dict[Places, Places] = {}  # one of each
        self._now: Now | None = None
        self._begun = self._before = 0.0

    def _open(self, scope: Scope) -> PageTracker:
        super()._open(scope)
        device: Device | None = self._device
        assert device is not None
        self._now = device.watch_pages(self.moves.append, scope)
        self._begun = self._before = self._now()
        return self

    def _watch(self, device: Device, scope: Scope) -> None:
        watcher: Any = self
        device.follow(scope, watcher)

    def begin(self) -> None:
        """Note the time: moves during an allocation belong to the new array; see `Watcher`."""
        if self._now is not None:
            self._before = self._now()

    def allocated(self, nbytes: int, label: str, address: int) -> None:
        """Record an allocation, its address and stack; see `Watcher`."""
        if address:
            stack = places()
            stack = self._stacks.setdefault(stack, stack)
            self._arrays.append(OwnedRange(self._before, address, nbytes, stack))

    def freed(self, ticket: Any) -> None:
        """Keep the array: its pages may move until another array has the memory; see `Watcher`."""

    def _count_dead(self) -> None:
        pass

    # -- figures -------------------------------------------------------------------------------

    def _sum(self, *ways: str, cause: str | None = None) -> int:
        return sum(
            move.nbytes
            for move in self.moves
            if move.way in ways and (cause is None or move.cause == cause)
        )

    @property
    def gpu_faults(self) -> int:
        """Return the GPU's faults: blocks of 2 MiB in the model, groups of faults from CUPTI."""
        return sum(move.gpu_faults for move in self.moves)

    @property
    def host_faults(self) -> int:
        """Return the host's faults; the model has none."""
        return sum(move.host_faults for move in self.moves)

    @property
    def in_bytes(self) -> int:
        """Return the bytes that moved into VRAM."""
        return self._sum("in")

    @property
    def out_bytes(self) -> int:
        """Return the bytes that moved out of VRAM, evicted ones included."""
        return self._sum("out")

    @property
    def new_bytes(self) -> int:
        """Return the bytes written in VRAM for the first time; a GPU does not report them."""
        return self._sum("new")

    @property
    def evicted_bytes(self) -> int:
        """Return the bytes that moved out to make room."""
        return self._sum("out", cause="eviction")

    @property
    def prefetched_bytes(self) -> int:
        """Return the bytes that the program's prefetches moved, in both directions."""
        return self._sum("in", "out", cause="prefetch")

    def parts(self) -> Iterator[PagePart]:
        """Divide the moves among the arrays, by time."""
        return divided(self.moves, self._arrays)

    def by_line(self) -> list[PagedMemory]:
        """List the lines that allocated memory whose pages moved or faulted, the most moved
        first.
        """
        sums: dict[str, list[int]] = {}
        for move, place, nbytes, _, _ in self.parts():
            row = sums.setdefault(place, [0] * 5)
            if move.way:
                row[("in", "out", "new").index(move.way)] += nbytes
            row[3] += move.gpu_faults
            row[4] += move.host_faults
        found = [PagedMemory(place, *row) for place, row in sums.items()]
        return sorted(found, key=lambda one: (-one.moved_bytes, -one.gpu_faults, one.place))

    # -- output --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the figures and the lines for JSON."""
        names = (
            "gpu_faults", "host_faults", "in_bytes", "out_bytes", "new_bytes", "evicted_bytes",
            "prefetched_bytes",
        )  # fmt: skip
        lines = [vars(one) for one in self.by_line()]
        figures = {name: getattr(self, name) for name in names}
        return {**self._where_json(), **figures, "lines": lines}

    def __str__(self) -> str:
        """Format the figures, and the lines with the most moved bytes."""
        lines = [f"pages on {self._where()}: {self._summary()}"]
        rows = [one for one in self.by_line() if one.moved_bytes or one.new_bytes]
        if rows:
            lines.append(f"{'in':>12}{'out':>12}{'new':>12}  memory allocated at")
        for one in rows[:ROWS]:
            sizes = (one.in_bytes, one.out_bytes, one.new_bytes)
            lines.append("".join(f"{format_bytes(n):>12}" for n in sizes) + f"  {one.place}")
        if len(rows) > ROWS:
            rest = format_bytes(sum(one.moved_bytes for one in rows[ROWS:]))
            lines.append(f"{len(rows) - ROWS} more lines: {rest} moved")
        return "\n".join(lines)

    def _summary(self) -> str:
        host = f" and {self.host_faults:,} of the host" if self.host_faults else ""
        sizes = (self.in_bytes, self.out_bytes, self.evicted_bytes)
        came, left, evicted = map(format_bytes, sizes)
        return (
            f"{self.gpu_faults:,} faults of the GPU{host}; {came} into VRAM, {left} out of it "
            f"({evicted} evicted)"
        )

    def __repr__(self) -> str:
        return f"<page tracker: {self._summary()}>"

    def print_report(self, file: TextIO | None = None) -> None:
        """Print the report."""
        print(self, file=file)

    def draw(self, file: str | PathLike[str], *, force: bool = False) -> None:
        """Write a PNG of the moves over time: a band a line, from an array's first byte to its
        last.

        Args:
            file: the file's name.
            force: replace an existing file.

        Raises:
            FileError: the file exists, and ``force`` is False.
            MissingDependencyError: matplotlib is not installed. OSError: it cannot be written.
        """
        from umem.reports.pictures.moves_picture import draw_pages

        seconds = "simulated seconds" if self._where_json()["simulated"] else "seconds"
        with whole(Path(file), force=force) as picture:
            draw_pages(
                list(self.parts()), self._begun, f"pages on {self._where()}", seconds, picture
            )
