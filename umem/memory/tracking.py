"""Allocations by the code that holds them, and a check for leaks.

Watches the same allocations and threads as `umem.memory.counts`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from umem._common.scopes import Scope
from umem._common.stacks import Frame, Places, Reader, places
from umem.errors import LeakError
from umem.memory.counts import WatchingBlock, format_in
from umem.units import format_bytes


def track(stacks: bool = True, *, check: bool = False) -> Tracker:
    """Track which code holds the allocations of a block: ``with umem.track() as t: step()``.

    Args:
        stacks: keep the stack of each allocation; otherwise only the device's label for it.
        check: at the end of the block, raise LeakError if memory allocated in it is still held
            after a garbage collection. An exception that leaves the block takes precedence. Run
            one step before the block: memory that only the first step allocates (optimizer state,
            caches) would be reported.
    """
    return Tracker(stacks, check)


@dataclass(frozen=True)
class Holding:
    """Memory held by one place in the code: ``count`` allocations of ``nbytes`` together.

    ``stack`` has the innermost frame first, and is empty if stacks were not kept. ``label`` is the
    device's label for the memory: the operation that made it, or its mode.
    """

    nbytes: int
    count: int
    label: str
    stack: tuple[Frame, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the holding for JSON."""
        stack = [frame._asdict() for frame in self.stack]
        return {"nbytes": self.nbytes, "count": self.count, "label": self.label, "stack": stack}


class _Allocation(NamedTuple):
    nbytes: int
    label: str
    places: Places


class Tracker(WatchingBlock["Tracker"]):
    """Tracks the live allocations of a block by call stack; `umem.track` makes one.

    A stack omits the frames of umem, Chainer, CuPy and NumPy at its inner end. Arrays may outlive
    the block; `outstanding` then still reports them as they were at its end.

    Cost: a walk over the stack's frames per allocation; lines are looked up when they are read.
    """

    title = "umem.track()"

    def __init__(self, stacks: bool, check: bool) -> None:
        super().__init__()
        self._stacks, self._check = stacks, check
        self._live: dict[int, _Allocation] = {}
        self._next = 0

    def _close(self, scope: Scope, kind: type[BaseException] | None) -> None:
        checked = self._check and kind is None
        if checked and self.outstanding():
            gc.collect()
        scope.close()
        if checked and self._live:
            raise LeakError(_leak_text(self.outstanding(), self._where()))

    def allocated(self, nbytes: int, label: str, address: int) -> int:
        """Record an allocation and its stack; see `Watcher`."""
        stack = places() if self._stacks else ()
        with self._lock:
            if self._dead:
                self._count_dead()
            self._next = ticket = self._next + 1
            self._live[ticket] = _Allocation(nbytes, label, stack)
        return ticket

    def _count_dead(self) -> None:
        with self._lock:
            while self._dead:
                del self._live[self._dead.popleft()]

    def outstanding(self) -> list[Holding]:
        """List live allocations grouped by stack, or by label without a stack, largest first."""
        self._count_frees()
        with self._lock:
            live = list(self._live.values())
        return _grouped(live)

    def to_json(self) -> dict[str, Any]:
        """Return the holdings and the device for JSON."""
        holdings = [holding.to_json() for holding in self.outstanding()]
        return {**self._where_json(), "outstanding": holdings}

    def print_report(
        self, file: TextIO | None = None, unit: str = "auto", *, count: int = 10
    ) -> None:
        """Print the ``count`` largest holdings with their stacks; see `Statistics.print_report`."""
        found = self.outstanding()
        total = format_in(sum(holding.nbytes for holding in found), unit)
        lines = [f"{total} held on {self._where()}", *_lines(found, unit, count)]
        print("\n".join(lines), file=file)

    def __repr__(self) -> str:
        found = self.outstanding()
        total = format_bytes(sum(holding.nbytes for holding in found))
        return f"<tracker: {total} held by {_counted(len(found), 'place')}>"


def _grouped(live: Iterable[_Allocation]) -> list[Holding]:
    """Group live allocations by stack or label, largest first."""
    reader = Reader()
    groups: dict[Any, list[_Allocation]] = {}
    for allocation in live:
        key = reader.read(allocation.places) or allocation.label
        groups.setdefault(key, []).append(allocation)
    found = [
        Holding(
            nbytes=sum(allocation.nbytes for allocation in group),
            count=len(group),
            label=_label(group),
            stack=() if isinstance(key, str) else key,
        )
        for key, group in groups.items()
    ]
    return sorted(found, key=lambda holding: (-holding.nbytes, -holding.count))


def _label(group: list[_Allocation]) -> str:
    labels = list(dict.fromkeys(allocation.label for allocation in group))
    return ", ".join(labels[:3]) + (", ..." if len(labels) > 3 else "")


def _lines(holdings: list[Holding], unit: str, count: int, depth: int | None = None) -> list[str]:
    """Format the largest holdings with their stacks, and a line for the rest."""
    lines = []
    for holding in holdings[:count]:
        lines.append(f"{format_in(holding.nbytes, unit)} in {holding.count}: {holding.label}")
        lines += [f"    {frame}" for frame in holding.stack[:depth]]
    if len(holdings) > count:
        rest = sum(holding.nbytes for holding in holdings[count:])
        places = _counted(len(holdings) - count, "more place")
        lines.append(f"{format_in(rest, unit)} held by {places}")
    return lines


def _leak_text(holdings: list[Holding], device: str) -> str:
    total = format_bytes(sum(holding.nbytes for holding in holdings))
    made = _counted(sum(holding.count for holding in holdings), "allocation")
    lines = [f"{total} in {made} on {device}, made in this block, are still held at its end:"]
    lines += _lines(holdings, "auto", count=5, depth=6)
    lines.append("Drop what holds them, or make them before the block.")
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
