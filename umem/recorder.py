"""Turns a running step into events.

A `Recorder` knows arrays by their root (the end of the ``.base`` chain), so that views are not
counted twice, and by weak reference, so that lifetimes are real. *Sources* tell it what runs: the
virtual GPU's array functions, and Chainer's functions once ``umem.chainer`` is imported.

Thread-safety: a recorder sees the thread that entered it. Arrays may die in any thread; their
deaths are queued and become events before the next event of the recording thread.
"""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from tracemalloc import get_traced_memory, reset_peak
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np

from umem.errors import OutOfMemoryError, StateError
from umem.events import CODES, Alloc, Event, Free, Hint, Mark, Op, decode
from umem.forking import safe_lock
from umem.trace import Trace

Measure = Literal["time", "workspace"]
Reach = tuple[int, int, int]
"""An `Access` while recording: a plain tuple, which the garbage collector soon leaves alone."""


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


class _State:
    """What concerns one thread."""

    __slots__ = ("depth", "nested_seconds", "peak_bytes", "recorders", "traced")

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.recorders: tuple[Recorder, ...] = ()
        self.traced = False
        self.nested_seconds = 0.0
        self.depth = 0


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_local = _Local()
_sources: list[Source] = []
_started_count = 0
_lock = safe_lock()


def active() -> tuple[Recorder, ...]:
    """The recorders that follow the calling thread, outermost first."""
    return _local.state.recorders


def _follow(recorders: tuple[Recorder, ...]) -> None:
    state = _local.state
    state.recorders = recorders
    state.traced = any(recorder.measure == "workspace" for recorder in recorders)


def inside() -> bool:
    """Whether the calling thread is inside an operation that is being measured."""
    return _local.state.depth > 0


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


def root_of(array: Any) -> Any:
    """The array at the end of the ``.base`` chain: the one whose death frees the memory."""
    kinds = (np.ndarray, type(array))
    base = getattr(array, "base", None)
    while base is not None:
        if isinstance(base, kinds):  # as_strided puts an object of its own in between
            array = base
        base = getattr(base, "base", None)
    return array


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
        _follow((*active(), self))
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
        _follow(tuple(r for r in active() if r is not self))
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
        return _part(array, root, ref.access)

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
        return _part(array, root, self._allocate(root, kind, label, uploaded))

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


def _part(array: Any, root: Any, whole: Reach) -> Reach:
    """The byte range of a view; the whole root when the view has as many bytes."""
    if array.nbytes == root.nbytes:
        return whole
    if not array.size:
        return whole[0], 0, 0
    low = address_of(array) - address_of(root)
    high = low + array.itemsize
    for count, step in zip(array.shape, array.strides, strict=True):
        if count > 1 and step < 0:
            low += (count - 1) * step
        elif count > 1:
            high += (count - 1) * step
    low = min(max(low, 0), root.nbytes)  # memory of others may have gaps that nbytes leaves out
    return whole[0], low, max(low, min(high, root.nbytes))


def address_of(array: Any) -> int:
    """Where an array's first element is."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


@contextmanager
def paused() -> Iterator[None]:
    """Run a block that no recorder sees: the library's own arithmetic."""
    before = active()
    _follow(())
    try:
        yield
    finally:
        _follow(before)


class Measured:
    """One operation being measured: its own seconds, without those of operations inside it.

    ``workspace_bytes`` is the traced peak, that of operations inside it included, above what was
    left when the operation returned; None when time is measured instead.
    """

    __slots__ = ("_outer", "_outer_peak", "_start", "_state", "seconds", "workspace_bytes")

    def __init__(self) -> None:
        self._state = state = _local.state
        self._outer = state.nested_seconds
        state.nested_seconds = 0.0
        state.depth += 1
        self._outer_peak = -1
        self.seconds: float | None = None
        self.workspace_bytes: int | None = None
        if state.traced:
            self._outer_peak = max(state.peak_bytes, get_traced_memory()[1])
            state.peak_bytes = 0
            reset_peak()
        self._start = perf_counter()

    def stop(self) -> None:
        """The operation has returned; what follows is recording."""
        own = perf_counter() - self._start - self._state.nested_seconds
        if self._outer_peak < 0:
            self.seconds = own if own > 0.0 else 0.0
        else:
            left, peak = get_traced_memory()
            self.workspace_bytes = max(0, peak - left, self._state.peak_bytes - left)

    def close(self) -> None:
        """Hand the time of this operation and of its recording to the enclosing one."""
        state = self._state
        state.depth -= 1
        state.nested_seconds = self._outer + perf_counter() - self._start
        if self._outer_peak >= 0:
            state.peak_bytes = max(state.peak_bytes, self._outer_peak)
