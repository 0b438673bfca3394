"""Who records a thread, the operation that it is inside of, and what is instrumented for that."""

from __future__ import annotations

import threading
import weakref
from time import perf_counter
from tracemalloc import get_traced_memory, reset_peak
from typing import TYPE_CHECKING, Any

from umem import scopes
from umem.scopes import Scope, Scoped, derived

if TYPE_CHECKING:
    from umem.trace.recording.recorder import Recorder
from typing import Literal, Protocol

from umem.locks import safe_lock


class Following:
    """Something that is told of operations while the scope that holds it is open: a recorder."""

    measure: str


class _State:
    """The operation that a thread is inside of; a dead one was interrupted."""

    __slots__ = ("nested_seconds", "operation", "peak_bytes")

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.nested_seconds = 0.0
        self.operation: weakref.ref[Measured] | None = None


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_local = _ThreadState()
_PAUSE = object()


def active() -> tuple[Recorder, ...]:
    """The recorders that follow the calling code, outermost first."""
    return derived(_followers)


def _followers(payload: tuple[Any, ...]) -> tuple[Any, ...]:
    found: list[Any] = []
    for part in payload:
        if part is _PAUSE:
            found.clear()
        elif isinstance(part, Following):
            found.append(part)
    return tuple(found)


def _is_traced(payload: tuple[Any, ...]) -> bool:
    return "workspace" in [follower.measure for follower in _followers(payload)]


def follow_last(recorder: Recorder) -> None:
    """Have this recorder told after all others of the calling code."""
    scopes.move_last(tuple(scope for scope in scopes.inside() if recorder in scope.payload))


def forget_operation() -> None:
    """Measure no operation of the calling code any more, where nobody follows it."""
    if not active():
        _local.state.operation = None


def inside() -> bool:
    """Tell whether the calling thread is inside an operation that is being measured."""
    operation = _local.state.operation
    return operation is not None and operation() is not None


class paused(Scoped[None]):
    """Run a block that no recorder sees: the library's own arithmetic."""

    title = "a pause of recording"

    def _open(self, scope: Scope) -> None:
        scope.open(_PAUSE)


class Measured:
    """One operation being measured: its own seconds, without those of operations inside it.

    ``workspace_bytes`` is the traced peak, that of operations inside it included, above what was
    left when the operation returned; None when time is measured instead.
    """

    __slots__ = (
        "__weakref__", "_outer", "_outer_operation", "_outer_peak", "_start", "_state", "seconds",
        "workspace_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self._state = state = _local.state
        self._outer = state.nested_seconds
        state.nested_seconds = 0.0
        self._outer_operation = state.operation
        state.operation = weakref.ref(self)
        self._outer_peak = -1
        self.seconds: float | None = None
        self.workspace_bytes: int | None = None
        if derived(_is_traced):
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
        state.operation = self._outer_operation
        state.nested_seconds = self._outer + perf_counter() - self._start
        if self._outer_peak >= 0:
            state.peak_bytes = max(state.peak_bytes, self._outer_peak)


# -- what is instrumented while recorders are active ----------------------------------------------


class Source(Protocol):
    """Something that can be instrumented while recorders are active.

    A signal may interrupt both methods: then `stop` comes next, and `start` may after that.
    """

    def start(self) -> None:
        """Instrument; called when the first recorder of any thread is entered."""

    def stop(self) -> None:
        """Restore exactly what was there; called when the last recorder is left."""


_sources: list[Source] = []
_users: set[object] = set()
_state: Literal["off", "changing", "on"] = "off"
_lock = safe_lock()


def add_source(source: Source) -> None:
    """Instrument ``source`` whenever a recorder is active, from now on."""
    with _lock:
        _sources.append(source)
        if _state == "on":
            source.start()


def start_sources(user: object) -> None:
    """A recorder is entered, for which there is this object."""
    global _state
    with _lock:
        _users.add(user)
        if _state == "on":
            return
        _stop_all()  # what an interrupted start has left
        _state = "changing"
        for source in _sources:
            source.start()
        _state = "on"


def stop_sources(user: object) -> None:
    """That recorder is left; once more changes nothing."""
    with _lock:
        _users.discard(user)
        if not _users:
            _stop_all()


def _stop_all() -> None:
    global _state
    if _state == "off":
        return
    _state = "changing"
    for source in reversed(_sources):
        source.stop()
    _state = "off"
