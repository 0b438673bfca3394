"""Scopes: the open blocks that the calling code is inside of.

A block that is entered opens a `Scope`. It concerns the thread and the context (`contextvars`) in
which it was opened: an asyncio task has its own, and begins with those of the code that made it; a
generator shares its caller's. Closing one is one assignment, so it may be closed in any order, in
any thread and by the garbage collector, and takes nobody else's with it. Every step that changes
something outside records first how to undo it.
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
    """An object that is replaced whenever a scope closes or `changed` is called, to date caches."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = object()


class View:
    """The scopes of one context, outermost first, and values derived from them.

    ``payload`` is what the open ones of one thread hold, as of one epoch.
    """

    __slots__ = ("epoch", "found", "payload", "scopes", "thread")

    def __init__(self, scopes: tuple[Scope, ...]) -> None:
        self.epoch, self.thread, self.scopes = epoch.now, _here.thread, scopes
        self.payload = tuple(part for scope in scopes if scope.is_on() for part in scope.payload)
        self.found: dict[Any, Any] = {}


class Scope:
    """One entry into a block: on from `open` until `close` begins.

    ``payload`` says what the block does; `derived` combines those of all scopes.
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

        To be given before what it undoes is done.
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
            whatever a step raised first, after the others.
        """
        changed()
        self.is_open = False
        changed()  # for a thread that has looked in between
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
    value = view.found.get(rule, _nothing)  # which no rule gives
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

    A subclass says what entering does in `_open`, and may say more of leaving in `_close`.
    ``__enter__`` and ``__exit__`` may be called by hand too, and in different threads or tasks: the
    scope is that of the code that entered it, and over for it when anybody has left. Where one is
    entered several times, leaving ends the last scope of the calling code, else the last of all. A
    scope that is over already, with the block around it, is left without effect.
    """

    title = "a block of umem"
    _mine: tuple[Scope, ...] = ()

    def _open(self, scope: Scope) -> _Entered:
        raise NotImplementedError

    def _close(self, scope: Scope, kind: type[BaseException] | None) -> None:
        scope.close()

    def _seen(self, error: BaseException) -> None:
        """Handle the exception that leaves the block, which is closed."""

    def _not_inside(self) -> str:
        return f"{self.title} is left once for each time that it was entered"

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
        """Close this object's last scope that the calling code is inside of, else its last of all.

        A scope that is over already is left without effect. While an exception that is no
        Exception, such as KeyboardInterrupt, leaves the block, an Exception raised in closing is
        dropped.

        Raises:
            StateError: this object has no scope left, and no exception leaves the block.
            whatever closing raises.
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
                raise  # but nothing takes the place of a KeyboardInterrupt
