"""Counting allocations: how many, how large, and the most at once.

A block watches one device: the one that is current when it is entered, which is the innermost
virtual GPU or else the GPU that CuPy uses. It counts the allocations of the thread that entered it;
among asyncio tasks, those of the task that entered it and of its child tasks. Any thread may free
the memory. Outside of a block, allocations have no extra cost; bench/allocation.py measures the
cost inside.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TextIO, TypeVar

from umem._common.locks import safe_lock
from umem._common.scopes import Scope, Scoped
from umem.devices import Device, current_device
from umem.errors import SizeError, StateError
from umem.units import GIB, KIB, MIB, TIB, format_bytes

_Entered = TypeVar("_Entered", covariant=True)
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_FIGURES = (
    "current_bytes",
    "peak_bytes",
    "total_bytes",
    "current_count",
    "peak_count",
    "total_count",
)


def statistics() -> Statistics:
    """Count the allocations of a block: ``with umem.statistics() as s: step()``.

    >>> import umem
    >>> with umem.virtual_gpu("v100-16gb") as gpu, umem.statistics() as s:
    ...     total = gpu.xp.ones((256, 1024), "float32").sum()
    >>> s.peak_bytes, s.total_count, s.current_bytes
    (1048580, 2, 4)
    """
    return Statistics()


class WatchingBlock(Scoped[_Entered]):
    """Base of blocks that watch the allocations of one device.

    A subclass is the `Watcher`. Its `_count_dead` counts the freed tickets in `_dead`, under
    `_lock`.
    """

    def __init__(self) -> None:
        self._device: Device | None = None
        self._scope = Scope()
        self._lock = safe_lock()
        self._dead: deque[Any] = deque()

    def _open(self, scope: Scope) -> _Entered:
        if self._device is not None:
            raise StateError("this block was used before; make a new one for each time")
        self._device = device = current_device()
        self._scope = scope
        scope.at_close(self._count_dead)
        watcher: Any = self
        self._watch(device, scope)
        return watcher  # type: ignore[no-any-return]

    def _watch(self, device: Device, scope: Scope) -> None:
        watcher: Any = self
        device.watch(scope, watcher)

    def _not_inside(self) -> str:
        return "this block was left before, or never entered"

    def begin(self) -> None:
        """Do nothing; see `Watcher`."""

    def freed(self, ticket: Any) -> None:
        """Record a freed allocation; see `Watcher`."""
        self._dead.append(ticket)

    def _count_dead(self) -> None:
        raise NotImplementedError

    def _count_frees(self) -> None:
        """Count everything that was freed before the block's end."""
        if self._scope.is_open and self._device is not None:
            self._device.report_frees()
            self._count_dead()

    def _where(self) -> str:
        """Name the device, and say whether it is a model."""
        if self._device is None:
            return "no device yet"
        return f"{self._device.name}{' (simulated)' if self._device.simulated else ''}"

    def _where_json(self) -> dict[str, Any]:
        if self._device is None:
            return {"device": None, "simulated": None}
        return {"device": self._device.name, "simulated": self._device.simulated}


class Statistics(WatchingBlock["Statistics"]):
    """Bytes and counts of a block's allocations; made by `umem.statistics`.

    Bytes are as requested, before any rounding. Arrays that existed before the block do not count.
    On a virtual GPU a replayed workspace counts as an allocation that is freed at once.

    Blocks nest: an outer block also counts the allocations of inner ones. The figures may be read
    inside the block, from any thread, and after it; then they stay as they were at its end.
    """

    title = "umem.statistics()"

    def __init__(self) -> None:
        super().__init__()
        self._figures = dict.fromkeys(_FIGURES, 0)

    def allocated(self, nbytes: int, label: str, address: int) -> int:
        """Record an allocation; see `Watcher`."""
        with self._lock:
            if self._dead:
                self._count_dead()
            found = self._figures
            found["total_bytes"] += nbytes
            found["total_count"] += 1
            found["current_count"] = count = found["current_count"] + 1
            found["current_bytes"] = held = found["current_bytes"] + nbytes
            if held > found["peak_bytes"]:
                found["peak_bytes"] = held
            if count > found["peak_count"]:
                found["peak_count"] = count
        return nbytes

    def _count_dead(self) -> None:
        with self._lock:
            while self._dead:
                self._figures["current_bytes"] -= self._dead.popleft()
                self._figures["current_count"] -= 1

    def summary(self) -> dict[str, int]:
        """Return all six figures."""
        self._count_frees()
        with self._lock:
            return dict(self._figures)

    @property
    def current_bytes(self) -> int:
        """Return the bytes allocated in this block and not freed."""
        return self.summary()["current_bytes"]

    @property
    def peak_bytes(self) -> int:
        """Return the largest value of ``current_bytes``."""
        return self.summary()["peak_bytes"]

    @property
    def total_bytes(self) -> int:
        """Return the summed bytes of all allocations."""
        return self.summary()["total_bytes"]

    @property
    def current_count(self) -> int:
        """Return the number of allocations of this block that are not freed."""
        return self.summary()["current_count"]

    @property
    def peak_count(self) -> int:
        """Return the largest value of ``current_count``."""
        return self.summary()["peak_count"]

    @property
    def total_count(self) -> int:
        """Return the number of all allocations."""
        return self.summary()["total_count"]

    def to_json(self) -> dict[str, Any]:
        """Return the figures and their device for JSON."""
        return {**self._where_json(), **self.summary()}

    def print_report(self, file: TextIO | None = None, unit: str = "auto") -> None:
        """Print a table.

        Args:
            file: the file to print to; None is ``sys.stdout``.
            unit: the unit of bytes: "auto", "B", "KiB", "MiB", "GiB" or "TiB".
        """
        found = self.summary()
        lines = [f"allocations on {self._where()}", f"{'':<8}{'bytes':>12}{'count':>10}"]
        for name in ("current", "peak", "total"):
            size = format_in(found[f"{name}_bytes"], unit)
            lines.append(f"{name:<8}{size:>12}{found[f'{name}_count']:>10}")
        print("\n".join(lines), file=file)

    def __repr__(self) -> str:
        found = self.summary()
        current, peak = format_bytes(found["current_bytes"]), format_bytes(found["peak_bytes"])
        return f"<statistics of {found['total_count']} allocations: {current} now, {peak} at most>"


def format_in(nbytes: int, unit: str) -> str:
    """Format a size in a given unit, or in a suitable one ("auto").

    Raises:
        SizeError: the unit is unknown.
    """
    if unit == "auto":
        return format_bytes(nbytes)
    if unit not in _UNITS:
        raise SizeError(f"unit must be 'auto' or one of {', '.join(_UNITS)}; got {unit!r}")
    return f"{nbytes / _UNITS[unit]:.{0 if unit == 'B' else 1}f} {unit}"
