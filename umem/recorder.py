"""Turns a running step into events.

A `Recorder` knows arrays by their root (the end of the ``.base`` chain), so that views are not
counted twice, and by weak reference, so that lifetimes are real. *Sources* tell it what runs: the
virtual GPU's array functions, and Chainer's functions once ``umem.chainer`` is imported.

Thread-safety: a recorder sees the thread that entered it. Arrays may die in any thread; their
deaths are queued and become events before the next event of the recording thread.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np

from umem.errors import OutOfMemoryError, StateError
from umem.events import CODES, Alloc, Event, Free, Hint, Mark, Op, decode
from umem.forking import safe_lock
from umem.measuring import Measured, active, follow, inside, paused
from umem.roots import Reach, address_of, part_of, root_of
from umem.trace import Trace

__all__ = [
    "Measured", "Reach", "Recorder", "Source", "active", "add_source", "address_of", "inside",
    "paused", "record", "root_of",
]  # fmt: skip

Measure = Literal["time", "workspace"]


class Source(Protocol):
    """Something that can be instrumented while recorders are active."""

    def start(self) -> None:
        """Instrument; called when the first recorder of any thread is entered."""

    def stop(self) -> None:
        """Restore exactly what was there; called when the last recorder is left."""


class _Ref(weakref.ref[Any]):
    """A weak reference to a root array that knows its tensor."""

    __slots__ = ("access", "key")
    key: int
    access: Reach


_sources: list[Source] = []
_started_count = 0
_lock = safe_lock()


def add_source(source: Source) -> None:
    """Instrument ``source`` whenever a recorder is active, from now on."""
    with _lock:
        _sources.append(source)
        if _started_count:
            source.start()


def record(*, measure: Measure = "time") -> Recorder:
    """Record the operations of a block: ``with umem.record() as recorder: step()``.

    Args:
        measure: ``"time"``; or ``"workspace"``, a calibration pass of its own whose measured
            workspace `Trace.with_workspace` adds to a trace of the same step.

    The trace is at ``recorder.trace``, during the block and after it.
    """
    if measure not in ("time", "workspace"):
        raise StateError(f"measure is 'time' or 'workspace'; got {measure!r}")
    return Recorder(measure=measure)


class Recorder:
    """Events of the calling thread's operations, kept as a trace and sent to a listener.

    Use it as a context manager; ``umem.record()`` makes one. With ``measure="workspace"`` it is
    a calibration pass: tracemalloc measures what each operation needs only while it runs, and no
    times are kept, because tracemalloc slows everything down.

    Cost: bench/overhead.py measures it; nothing when no recorder is active.
    """

    def __init__(
        self,
        listener: Callable[[Event], None] | None = None,
        *,
        keep: bool = True,
        measure: Measure = "time",
    ) -> None:
        self.measure = measure
        self.backend = "numpy"
        self._listener = listener
        # Plain tuples, as in a file: the garbage collector soon leaves them alone, while to walk
        # through a hundred thousand named ones costs more than the rest of recording.
        self._raw: list[tuple[Any, ...]] | None = [] if keep else None
        self._decoded: list[Event] = []
        self._known: dict[int, _Ref] = {}
        self._dead: deque[_Ref] = deque()
        self._count = 0
        self._owns_tracemalloc = False
        self._entered = False
        self._inside = False

    # -- context ---------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        global _started_count
        if self._entered:
            raise StateError("this recorder was used before; make a new one for each recording")
        self._entered = True
        if self.measure == "workspace" and not tracemalloc.is_tracing():
            tracemalloc.start(1)
            self._owns_tracemalloc = True
        with _lock:
            if _started_count == 0:
                for source in _sources:
                    source.start()
            _started_count += 1
        follow((*active(), self))
        self._inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _started_count
        if not self._inside:
            raise StateError("not inside this recorder's block")
        self._inside = False
        follow(tuple(r for r in active() if r is not self))
        with _lock:
            _started_count -= 1
            if _started_count == 0:
                for source in reversed(_sources):
                    source.stop()
        if self._owns_tracemalloc:
            tracemalloc.stop()
        self.flush()
        self._known.clear()

    @property
    def trace(self) -> Trace:
        """What was recorded so far."""
        if self._raw is None:
            raise StateError("this recorder keeps no events: it only feeds a virtual GPU")
        self._decoded += [decode(*raw) for raw in self._raw[len(self._decoded) :]]
        return Trace(list(self._decoded), self.backend)

    # -- what sources call -----------------------------------------------------------------

    def known(self, array: Any) -> Reach | None:
        """The access to an array that is followed, None for one never seen."""
        ref = self._known.get(id(array))
        if ref is not None and ref() is array:
            return ref.access
        if array.base is None:
            return None
        root = root_of(array)
        ref = self._known.get(id(root))
        if ref is None or ref() is not root:
            return None
        return part_of(array, root, ref.access)

    def access(self, array: Any, kind: str, label: str, uploaded: bool = False) -> Reach:
        """The access to an array; one that was never seen is allocated first.

        Raises:
            OutOfMemoryError: the listener has no room, even after the garbage was collected;
                the array stays unknown.
        """
        if array.base is None:
            ref = self._known.get(id(array))
            if ref is not None and ref() is array:
                return ref.access
            return self._allocate(array, kind, label, uploaded)
        found = self.known(array)
        if found is not None:
            return found
        root = root_of(array)
        return part_of(array, root, self._allocate(root, kind, label, uploaded))

    def find(self, arrays: list[Any]) -> list[Any]:
        """The access to each array; None where it was never seen, or there is no array."""
        found: list[Any] = []
        table = self._known
        for array in arrays:
            ref = table.get(id(array))
            if ref is not None and ref() is array:
                found.append(ref.access)
            else:
                found.append(None if array is None else self.known(array))
        return found

    def follow(self, arrays: list[Any], kind: str, label: str) -> list[Any]:
        """The access to each array, allocated where it was never seen; None stays None."""
        found: list[Any] = []
        table = self._known
        for array in arrays:
            ref = table.get(id(array))
            if ref is not None and ref() is array:
                found.append(ref.access)
            elif array is None:
                found.append(None)
            elif array.base is None:
                found.append(self._allocate(array, kind, label, False))
            else:
                found.append(self.access(array, kind, label))
        return found

    def emit(self, event: Hint | Mark) -> None:
        """Something has happened; its accesses come from `access`."""
        if self._dead:
            self.flush()
        if self._listener is not None:
            self._listener(event)
        if self._raw is not None:
            self._raw.append((CODES[type(event)], *event))

    def emit_op(
        self, name: str, phase: str, reads: list[Any], writes: list[Any], flops: int,
        traffic_bytes: int | None, pattern: str, host_seconds: float | None,
        workspace_bytes: int | None,
    ) -> None:  # fmt: skip
        """An operation has run, see `Op`; None among the accesses is an array that was not there.

        ``traffic_bytes`` of None is every byte of the accesses once.
        """
        if None in reads or None in writes:
            reads = [access for access in reads if access is not None]
            writes = [access for access in writes if access is not None]
        if traffic_bytes is None:
            traffic_bytes = 0
            for _, start, stop in reads:
                traffic_bytes += stop - start
            for _, start, stop in writes:
                traffic_bytes += stop - start
        if self._dead:
            self.flush()
        fields = (
            "op", name, phase, tuple(reads), tuple(writes), flops, traffic_bytes, pattern,
            host_seconds, workspace_bytes,
        )  # fmt: skip
        if self._listener is not None:
            self._listener(tuple.__new__(Op, fields[1:]))
        if self._raw is not None:
            self._raw.append(fields)

    def flush(self) -> None:
        """Turn the deaths of arrays so far into events."""
        dead, known, raw = self._dead, self._known, self._raw
        while dead:
            try:
                ref = dead.popleft()
            except IndexError:  # another thread, which asks for figures, was faster
                return
            if known.get(ref.key) is ref:
                del known[ref.key]
                if self._listener is not None:
                    self._listener(Free(ref.access[0]))
                if raw is not None:
                    raw.append(("free", ref.access[0]))

    def adopt(self, arrays: Iterable[tuple[Any, str, str]]) -> None:
        """Follow arrays (array, kind, label) that exist already, as if uploaded from the host."""
        for array, kind, label in arrays:
            self.access(array, kind, label, uploaded=True)

    # -- inside ----------------------------------------------------------------------------

    def _allocate(self, root: Any, kind: str, label: str, uploaded: bool) -> Reach:
        if self._dead:
            self.flush()
        nbytes = int(root.nbytes)
        if type(root) is not np.ndarray and type(root).__module__.startswith("cupy"):
            self.backend = "cupy"
        count = self._count
        if self._listener is not None:
            self._announce(Alloc(count, nbytes, kind, label, uploaded))
        if self._raw is not None:
            self._raw.append(("alloc", count, nbytes, kind, label, uploaded))
        ref = _Ref(root, self._dead.append)
        ref.key = id(root)
        ref.access = access = (count, 0, nbytes)
        self._count = count + 1
        self._known[ref.key] = ref
        return access

    def _announce(self, alloc: Alloc) -> None:
        """Ask the listener for room, once more after the garbage was collected."""
        assert self._listener is not None
        try:
            self._listener(alloc)
        except OutOfMemoryError:
            gc.collect()
            self.flush()
            self._listener(alloc)
