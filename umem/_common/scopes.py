"""Scopes: the open blocks around the calling code.

Entering a block opens a `Scope` in the calling thread and context (`contextvars`). An asyncio task
starts with the scopes of the code that created it, and then has its own; a generator shares its
caller's. Closing a scope is one assignment, so scopes may be closed in any order, in any thread and
by the garbage collector, without closing others. Every step that changes outside state first
records how to undo it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, TypeVar

from umem.errors import StateError

_Value = TypeVar("_Value")
_Entered = TypeVar("_Entered", covariant=True)


class _Here(threading.local):
    """Represents the calling thread."""

    def __init__(self) -> None:
        self.thread = object()


class Epoch:
    """Holds an object that is replaced whenever a scope closes or `changed` is called; caches
    compare it.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = object()


class View:
    """The scopes of one context, outermost first, and values derived from them.

    ``payload`` has the payloads of the open scopes of one thread in one epoch.
    """

    __slots__ = ("epoch", "found", "payload", "scopes", "thread")

    def __init__(self, scopes: tuple[Scope, ...]) -> None:
        self.epoch, self.thread, self.scopes = epoch.now, _here.thread, scopes
        self.payload = tuple(part for scope in scopes if scope.is_on() for part in scope.payload)
        self.found: dict[Any, Any] = {}


class Scope:
    """One entry into a block: on from `open` until `close` begins.

    ``payload`` describes the block's effect; `derived` combines the payloads of all scopes.
    """

    __slots__ = ("__weakref__", "_undo", "is_open", "is_over", "payload", "thread", "title")

    def __init__(self, title: str = "a block of umem") -> None:
        self.title = title
        self.payload: tuple[Any, ...] = ()
        self.thread = _here.thread
        self.is_open = self.is_over = False
        self._undo: list[Callable[[], None]] = []

    def is_on(self) -> bool:
        """Tell whether the scope is open, and belongs to the calling thread."""
        return self.is_open and self.thread is _here.thread

    def at_close(self, step: Callable[[], None]) -> None:
        """Register an undo step; steps run in reverse order, and again if they were interrupted.

        Register it before the change that it undoes.
        """
        self._undo.append(step)

    def open(self, *payload: Any) -> None:
        """Enter the scope in the calling context."""
        self.payload = payload
        self.is_open = True
        _entered.set(View((*(s for s in _entered.get().scopes if s.is_open), self)))

    def close(self) -> None:
        """Leave the scope from any context; a second call finishes an interrupted one.

        Raises:
            the first exception of a step, after all steps have run.
        """
        changed()
        self.is_open = False
        changed()  # for a thread that has cached values in between
        error = self._take_back()
        self.payload = ()
        if self in (view := _entered.get()).scopes:
            _refreshed(view)
        self.is_over = True
        if error is not None:
            raise error

    def _take_back(self) -> Exception | None:
        """Run the undo steps in reverse order; returns the first exception."""
        first = None
        while self._undo:
            step = self._undo[-1]
            try:
                step()
            except Exception as error:
                first = first or error
            if self._undo[-1:] == [step]:
                self._undo.pop()
        return first


_here = _Here()
epoch = Epoch()
_nothing = View(())
_entered: ContextVar[View] = ContextVar("umem", default=_nothing)
view_of_context = _entered.get
"""The calling context's view, replaced by every `Scope.open` in it."""


def changed() -> None:
    """Invalidate all derived values."""
    epoch.now = object()


def derived(rule: Callable[[tuple[Any, ...]], _Value]) -> _Value:
    """Apply ``rule`` to the payloads of the caller's scopes, outermost first, and cache the result
    until a scope changes.
    """
    view = _entered.get()
    if view.scopes and (view.epoch is not epoch.now or view.thread is not _here.thread):
        view = _refreshed(view)
    value = view.found.get(rule, _nothing)  # a value that no rule returns
    if value is _nothing:
        view.found[rule] = value = rule(view.payload)
    return value  # type: ignore[no-any-return]


def inside() -> tuple[Scope, ...]:
    """List the open scopes of the calling context and thread, outermost first."""
    return tuple(scope for scope in _entered.get().scopes if scope.is_on())


def move_last(scopes: tuple[Scope, ...]) -> None:
    """Reorder the calling context's scopes as if these had been opened last."""
    others = tuple(scope for scope in _entered.get().scopes if scope not in scopes)
    _entered.set(View((*others, *scopes)))


def _refreshed(view: View) -> View:
    scopes = tuple(scope for scope in view.scopes if scope.is_open)
    view = View(scopes) if scopes else _nothing
    _entered.set(view)
    return view


class Scoped(Generic[_Entered]):
    """Base of context managers whose effects end with the with statement, however that ends.

    A subclass implements entering in `_open`, and may extend leaving in `_close`. ``__enter__`` and
    ``__exit__`` may also be called directly, and in different threads or tasks: the scope belongs
    to the code that entered it, and leaving in any thread ends it. After several entries, leaving
    ends the calling code's last scope, or else the last of all. Leaving a scope that has already
    ended, with the block around it, has no effect.
    """

    title = "a block of umem"
    _mine: tuple[Scope, ...] = ()

    def _open(self, scope: Scope) -> _Entered:
        raise NotImplementedError

    def _close(self, scope: Scope, kind: type[BaseException] | None) -> None:
        scope.close()

    def _seen(self, error: BaseException) -> None:
        """Handle the exception that leaves the block, after the block is closed."""

    def _not_inside(self) -> str:
        return f"{self.title} was left more often than it was entered"

    def __enter__(self) -> _Entered:
        scope = Scope(self.title)
        try:
            entered = self._open(scope)
        except BaseException:
            scope.close()
            raise
        self._mine = (*self._mine, scope)
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Close this object's last scope around the calling code, or else its last of all.

        Has no effect if that scope has already ended. If KeyboardInterrupt or another exception
        that is not an Exception leaves the block, an Exception raised by closing is dropped.

        Raises:
            StateError: this object has no open scope, and no exception leaves the block.
            any exception of closing.
        """
        mine = self._mine
        if not mine:
            if kind is None:
                raise StateError(self._not_inside())
            return
        on = [scope for scope in mine if not scope.is_over]
        here = [scope for scope in on if scope in inside()]
        scope = (here or on or mine)[-1]
        self._mine = tuple(other for other in mine if other is not scope)
        if scope.is_over:
            return
        try:
            self._close(scope, kind)
            if error is not None:
                self._seen(error)
        except Exception:
            if kind is None or issubclass(kind, Exception):
                raise  # but never replace a KeyboardInterrupt
