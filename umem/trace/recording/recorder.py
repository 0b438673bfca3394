"""Turns a running step into events.

A `Recorder` identifies arrays by their root (the end of the ``.base`` chain), so views are not
counted twice, and holds weak references, so lifetimes are unchanged. *Sources* call it with each
operation: the virtual GPU's array functions, and Chainer's functions once ``umem.chainer`` is
imported.

Thread-safety: a recorder follows the thread, and in it the asyncio task, that entered it, and the
tasks that this task creates. Any thread may leave it. Arrays may die in any thread; their deaths
are queued and become events before the next event of the recording thread.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Literal

import numpy as np

from umem._common import scopes
from umem._common.arithmetic import FLOAT32
from umem._common.scopes import Scope, Scoped, changed, derived
from umem._common.stacks import user_places
from umem.errors import OutOfMemoryError, StateError
from umem.trace.events import Alloc, Event, Hint, Kernels, Mark
from umem.trace.recording.buffer import Boundary, Raw, Store, decode_op
from umem.trace.recording.meter import HOST, HostMeter, Meter, of_gpu, running_meter
from umem.trace.recording.sources import start_sources, stop_sources
from umem.trace.recording.storage import (
    Lifetimes,
    MemoryBlock,
    Reach,
    RootRef,
    address_of,
    free_reporters,
    part_of,
    reporters,
    root_of,
)
from umem.trace.recording.thread import thread_state
from umem.trace.trace import Trace

Measure = Literal["time", "workspace"]


class Recorder(Scoped["Recorder"], Lifetimes):
    """Records the operations of the calling thread as events: stores them, and calls a listener.

    Used as a context manager; ``umem.record()`` makes one.

    Args:
        listener: called with each event; may raise OutOfMemoryError for an allocation.
        keep: whether events are stored, as a trace. If not, arrays that die after the end are still
            reported to the listener, at each call of `flush`.
        measure: "time", or "workspace" for a calibration pass: tracemalloc measures the workspace
            of each operation on NumPy, and no times are recorded, because tracemalloc slows
            everything down. On CuPy, workspace is measured in both, and times in neither: the host
            does not wait for the GPU.
        stacks: whether the lines of the user's code are stored with each allocation.
        limit: at most about this many events are stored; arrays are followed beyond that.
        marked: called with each mark, after it is stored.
        renamed: called with a tensor of CuPy's pools and its kind once an operation shows the kind;
            until then the listener knows it as an "array".

    Cost: see bench/overhead.py; none while no recorder is active.
    """

    def __init__(
        self,
        listener: Callable[[Event], None] | None = None,
        *,
        keep: bool = True,
        measure: Measure = "time",
        stacks: bool = False,
        limit: int = sys.maxsize,
        marked: Callable[[Mark], None] | None = None,
        renamed: Callable[[int, str], None] | None = None,
    ) -> None:
        self.measure = measure
        self.backend = "numpy"
        self._listener = listener
        self._marked, self._renamed = marked, renamed
        self._stacks, self._limit = stacks, limit
        self._last_stack: tuple[Any, ...] = ()
        self._store = Store() if keep else None
        self._raw: list[Raw] | None = None if self._store is None else self._store.raw
        self._known: dict[int, RootRef | MemoryBlock] = {}
        self._dead: deque[RootRef | MemoryBlock] = deque()
        self._note_death = self._dead.append
        self._count = 0
        self._entered = False
        self._meter = HostMeter()

    title = "a recorder"

    # -- context ---------------------------------------------------------------------------

    def _open(self, scope: Scope) -> Recorder:
        self.join(scope)
        scope.open(self)
        stacks, self._stacks = self._stacks, False  # no line of this block made them
        for reporter in reporters:
            reporter.entered(self)
        self._stacks = stacks
        return self

    def _not_inside(self) -> str:
        return "not inside this recorder's block"

    def join(self, scope: Scope) -> None:
        """Start the sources and the meter for a scope that is to be opened with this recorder.

        Raises:
            StateError: the recorder was used before.
        """
        if self._entered:
            raise StateError("this recorder was used before; make a new one for each recording")
        self._entered = True
        scope.at_close(forget_operation)
        scope.at_close(self._forget)
        scope.at_close(self.flush)
        scope.at_close(self._meter.stop)
        scope.at_close(lambda: stop_sources(scope))
        start_sources(scope)
        if not of_gpu:
            self.measure_host()

    def _forget(self) -> None:
        if self._store is not None:
            self._known.clear()

    @property
    def trace(self) -> Trace:
        """Return the trace of the events stored so far.

        Raises:
            StateError: the recorder stores no events: it was made with ``keep=False``.
        """
        return Trace(self._stored.events(), self.backend)

    @property
    def _stored(self) -> Store:
        if self._store is None:
            raise StateError("this recorder keeps no events: it only feeds a virtual GPU")
        return self._store

    # -- parts of a recording --------------------------------------------------------------

    def switch(self, measure: Measure) -> None:
        """Measure time or workspace from now on; to be called between operations only."""
        self.measure = measure
        self._meter.stop()
        if not of_gpu:
            self.measure_host()
        changed()

    def measure_host(self) -> None:
        """Turn tracemalloc on for workspace; beside CuPy at the first operation on NumPy."""
        if self.measure == "workspace" and not self._meter.is_ours:
            self._meter.start()

    @property
    def stored_count(self) -> int:
        """Return the number of events stored."""
        return len(self._stored)

    @property
    def tensor_count(self) -> int:
        """Return the number of tensors allocated so far."""
        return self._count

    @property
    def is_full(self) -> bool:
        """True if the limit was reached, so that events at the end are missing."""
        return self._raw is None

    def boundary(self) -> Boundary:
        """Return the current position, from which a part of the recording can begin."""
        self.flush()
        known = reversed(list(self._known.values()))  # a block comes before the arrays on it
        found = sorted({ref.whole[0]: ref.whole for ref in known}.values())
        alive = tuple((*whole[:5], True, *whole[6:]) for whole in found)  # uploaded
        return Boundary(len(self._stored), (*alive, Mark("start")))

    def drop_before(self, boundary: Boundary) -> None:
        """Drop the events before a boundary; tensors alive there count as uploaded at its start."""
        if boundary.position == len(self._stored):  # nothing is missing
            self._raw = self._stored.raw
        self._stored.drop_before(boundary)

    # -- called by sources -----------------------------------------------------------------

    def known(self, array: Any) -> Reach | None:
        """Return the access to an array; None if it is not followed."""
        return (self._find_one(array) or ())[:3] or None

    def _find_one(self, array: Any) -> Reach | None:
        """Return the access to an array; for a whole tensor, its stored allocation."""
        ref = self._known.get(id(array))
        if ref is not None and ref() is array:
            return ref.whole
        if array.base is None:
            return None
        root = root_of(array)
        ref = self._known.get(id(root))
        if ref is None or ref() is not root:
            return None
        if ref.address is None:
            ref.address = address_of(root)
        return part_of(array, root, ref.whole, ref.address)

    def access(self, array: Any, kind: str, label: str, uploaded: bool = False) -> Reach:
        """Return the access to an array; allocate a tensor for it first if it is not followed.

        Raises:
            OutOfMemoryError: the listener has no room, even after garbage collection; the array is
                still not followed.
        """
        found = self._find_one(array)
        if found is not None:
            return found[:3]
        root = root_of(array)
        whole = self._allocate(root, kind, label, uploaded)
        return (whole if root is array else part_of(array, root, whole, address_of(root)))[:3]

    def find(self, arrays: list[Any]) -> list[Any]:
        """Return the access to each array; None if the array is not followed, or None itself."""
        found: list[Any] = []
        table = self._known
        for array in arrays:
            ref = table.get(id(array))
            if ref is not None and ref() is array:
                found.append(ref.whole)
            else:
                found.append(None if array is None else self._find_one(array))
        return found

    def unseen(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays that are not followed."""
        reaches = self.find(arrays)
        return [array for array, reach in zip(arrays, reaches, strict=True) if reach is None]

    def follow(self, arrays: list[Any], kind: str, label: str) -> list[Any]:
        """Return the access to each array, allocated if it is not followed; None for None.

        Raises:
            OutOfMemoryError: as `access`; the arrays before are followed.
        """
        found: list[Any] = []
        table = self._known
        for array in arrays:
            ref = table.get(id(array))
            if ref is not None and ref() is array:
                found.append(ref.whole)
            elif array is None:
                found.append(None)
            elif array.base is None:
                found.append(self._allocate(array, kind, label, False))
            else:
                found.append(self.access(array, kind, label))
        return found

    def emit(self, event: Hint | Mark) -> None:
        """Record a hint or a mark; a hint's accesses come from `access`."""
        if self._dead:
            self.flush()
        if self._listener is not None:
            self._listener(event)
        if self._raw is not None:
            self._raw.append(event)
        if self._marked is not None and isinstance(event, Mark):
            self._marked(event)

    def emit_op(
        self,
        name: str,
        phase: str,
        reads: list[Any],
        writes: list[Any],
        flops: int,
        traffic_bytes: int | None,
        pattern: str,
        host_seconds: float | None,
        workspace_bytes: int | None,
        kernels: Kernels | None = None,
        arithmetic: str = FLOAT32,
    ) -> None:
        """Record an operation that has run; see `Op` for the arguments.

        An access of None stands for an argument that was None. ``traffic_bytes`` of None is every
        byte of the accesses once.
        """
        for report_frees in free_reporters:
            report_frees()
        if self._dead:
            self.flush()
        stored = (
            len(reads), name, phase, flops, traffic_bytes, pattern, host_seconds, workspace_bytes,
            kernels, arithmetic, *reads, *writes,
        )  # fmt: skip
        if self._listener is not None:
            self._listener(decode_op(stored))
        raw = self._raw
        if raw is not None:
            raw.append(stored)
            if len(raw) >= self._limit:
                self._raw = None

    # -- inside ----------------------------------------------------------------------------

    def _allocate(self, root: Any, kind: str, label: str, uploaded: bool) -> Reach:
        """Allocate a tensor for a root array, or, with a reporter, for the CuPy memory it is on.

        Raises:
            OutOfMemoryError: as `access`.
        """
        if self._dead:
            self.flush()
        if type(root) is not np.ndarray and type(root).__module__.startswith("cupy"):
            self.backend = "cupy"
            for reporter in reporters:
                return self._on_block(root, reporter.block_of(root), kind, label, uploaded)
        ref = RootRef(root, self._note_death)
        ref.key, ref.address = id(root), None
        return self.add(ref, int(root.nbytes), kind, label, uploaded)

    def add(
        self, ref: RootRef | MemoryBlock, nbytes: int, kind: str, label: str, uploaded: bool
    ) -> Reach:
        """Allocate the next tensor, for an array or a block; return the access to all of it.

        Raises:
            OutOfMemoryError: the listener has no room; nothing was allocated.
        """
        count = self._count
        self._count = count + 1
        whole: Reach = (count, 0, nbytes, kind, label, uploaded)
        ref.whole = whole
        if self._listener is not None:
            self._known[ref.key] = ref  # before the listener: a signal may interrupt it
            try:
                self._announce(Alloc(count, nbytes, kind, label, uploaded))
            except OutOfMemoryError as error:
                self._count = count
                del self._known[ref.key]
                raise error.with_traceback(None)  # noqa: B904 (the same error, without our frames)
        if self._stacks:
            stack = user_places(4)  # what called follow, access or memory
            if stack == self._last_stack:  # often so: one tuple fewer for the garbage collector
                stack = self._last_stack
            self._last_stack = stack
            ref.whole = whole = (*whole, stack)
        self._known[ref.key] = ref
        if self._raw is not None:
            self._raw.append(whole)
        return whole

    def _announce(self, alloc: Alloc) -> None:
        """Call the listener with an allocation; if it has no room, collect garbage and retry."""
        assert self._listener is not None
        try:
            self._listener(alloc)
        except OutOfMemoryError:
            gc.collect()
            self.flush()
            self._listener(alloc)


# -- the calling code -------------------------------------------------------------------------


class Audience:
    """The recorders that follow the calling code, outermost first, and the state of its thread.

    ``is_traced`` says whether tracemalloc measures the workspace of its operations on NumPy.
    """

    __slots__ = ("is_traced", "recorders", "state")

    def __init__(self, payload: tuple[Any, ...]) -> None:
        self.recorders = tuple(part for part in payload if isinstance(part, Recorder))
        self.is_traced = any(recorder.measure == "workspace" for recorder in self.recorders)
        self.state = thread_state()  # an Audience with recorders is derived for one thread alone


def active() -> tuple[Recorder, ...]:
    """Return the recorders that follow the calling code, outermost first."""
    return derived(Audience).recorders


def follow_last(recorder: Recorder) -> None:
    """Make this recorder the last of the calling code's to receive operations."""
    scopes.move_last(tuple(scope for scope in scopes.inside() if recorder in scope.payload))


def forget_operation() -> None:
    """Stop measuring the thread's current operation if no recorder follows it any more."""
    if not active():
        thread_state().operation = None


class Measured:
    """The measurement of one operation, from construction to `stop`; `close` must follow.

    ``seconds`` is the operation's own time, without nested operations; None when workspace is
    measured. ``workspace_bytes`` is the peak, nested operations included, minus the live bytes when
    the operation returns; None when time is measured, or no meter can measure it.

    Args:
        audience: the recorders; by default all that follow the calling code.
        arrays: the operation's arrays, or objects that have them as ``array``; their memory is
            measured.
    """

    __slots__ = (
        "__weakref__", "_meter", "_outer", "_outer_operation", "_outer_peak", "_start", "_state",
        "seconds", "workspace_bytes",
    )  # fmt: skip

    def __init__(self, audience: Audience | None = None, arrays: Iterable[Any] = ()) -> None:
        if audience is None:
            audience = derived(Audience)
        self._state = state = audience.state if audience.recorders else thread_state()
        self._outer = state.nested_seconds
        state.nested_seconds = 0.0
        self._outer_operation = state.operation
        state.operation = weakref.ref(self)
        self._outer_peak = -1
        self.seconds: float | None = None
        self.workspace_bytes: int | None = None
        meter: Meter = HOST
        if of_gpu:
            meter = running_meter(arrays)
        if audience.recorders and (meter is not HOST or audience.is_traced):
            if meter is HOST:
                for recorder in audience.recorders:
                    recorder.measure_host()
            self._outer_peak = max(state.peak_bytes, meter.held().peak)
            state.peak_bytes = 0
            meter.reset()
        self._meter = meter
        self._start = perf_counter()

    def stop(self) -> None:
        """Record that the operation has returned: time after this belongs to the recording."""
        own = perf_counter() - self._start - self._state.nested_seconds
        if self._outer_peak < 0:
            self.seconds = own if own > 0.0 else 0.0
        else:
            if self._meter.is_blind:
                return
            held = self._meter.held()
            self.workspace_bytes = max(held.workspace, self._state.peak_bytes - held.live)

    def close(self) -> None:
        """Count the time since construction as nested in the enclosing operation, and the peak."""
        state = self._state
        state.operation = self._outer_operation
        state.nested_seconds = self._outer + perf_counter() - self._start
        if self._outer_peak >= 0:
            state.peak_bytes = max(state.peak_bytes, self._outer_peak)
