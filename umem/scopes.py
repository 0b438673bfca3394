"""What the calling code is inside of: the blocks that were entered and are not over.

A block that is entered opens a `Scope`. It concerns the thread and the context (`contextvars`) in
which it was opened: an asyncio task has its own, and begins with those of the code that made it; a
generator shares its caller's. Closing one is one assignment, so it may be closed in any order, in
any thread and by the garbage collector, and takes nobody else's with it.

A signal may raise KeyboardInterrupt after nearly every instruction, in ``__enter__`` and
``__exit__`` too. So the object that a with statement holds until it is over (what looking up
``__exit__`` gives) is made for that statement alone: when it dies, the scope is closed, if it is
not closed by then. Every step that changes something outside records first how to undo it.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dis import opname
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from umem.errors import LeftOnWarning, StateError

_Value = TypeVar("_Value")
_Entered = TypeVar("_Entered", covariant=True)
Exit = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]


class _Here(threading.local):
    """The state of one thread: an object that stands for it, and the last ``__exit__``."""

    def __init__(self) -> None:
        self.thread = object()
        self.pending: Callable[[], Any] = lambda: None


class Epoch:
    """Another object whenever a scope has been closed, or `changed` was called."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = object()


class View:
    """The scopes of one context, outermost first, and what was derived of them.

    ``payload`` is what the open ones of one thread hold, as of one epoch.
    """

    __slots__ = ("epoch", "found", "payload", "scopes", "thread")

    def __init__(self, scopes: tuple[Scope, ...]) -> None:
        self.epoch, self.thread, self.scopes = epoch.now, _here.thread, scopes
        self.payload = tuple(part for scope in scopes if scope.is_on() for part in scope.payload)
        self.found: dict[Any, Any] = {}


class Scope:
    """One time inside a block: off before `open`, and from the first moment of `close` on.

    ``payload`` is what the block stands for; `derived` makes something of it.
    """

    __slots__ = (
        "__weakref__", "_undo", "handle", "is_open", "is_over", "is_used", "payload", "thread",
        "title",
    )  # fmt: skip

    def __init__(self, title: str = "a block of umem") -> None:
        self.title = title
        self.payload: tuple[Any, ...] = ()
        self.thread = _here.thread
        self.handle: weakref.ref[Any] | None = None
        self.is_used = self.is_open = self.is_over = False
        self._undo: list[Callable[[], None]] = []

    def is_on(self) -> bool:
        """Tell whether it is open, and the calling thread's."""
        return self.is_open and self.thread is _here.thread

    def at_close(self, step: Callable[[], None]) -> None:
        """Do ``step`` when it is closed, the last given first; more than once where interrupted.

        To be given before what it undoes is done.
        """
        self._undo.append(step)

    def open(self, *payload: Any) -> None:
        """Put the calling context inside from now on."""
        self.payload = payload
        self.is_open = True
        _entered.set(View((*(s for s in _entered.get().scopes if s.is_open), self)))

    def close(self) -> None:
        """End it, wherever it was opened; once more does what an interrupted close has not.

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
        unfinished.discard(self)
        self.is_over = True
        self.handle = None
        if error is not None:
            raise error

    def _take_back(self) -> Exception | None:
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

    def _abandoned(self, _: Any) -> None:
        """The with statement is gone."""
        if not self.is_over:
            self.close()

    def is_left(self) -> bool:
        """Tell whether its with statement, of this thread, is gone while it is not over."""
        gone = self.handle is not None and self.handle() is None
        return gone and not self.is_over and self.thread is _here.thread


_here = _Here()
epoch = Epoch()
unfinished: set[Scope] = set()
"""Those whose with statement has begun, in any thread, and that are not over."""
_nothing = View(())
_entered: ContextVar[View] = ContextVar("umem", default=_nothing)
view_of_context = _entered.get
"""The calling context's view; another object after every `Scope.open` there."""


def changed() -> None:
    """Say that what was derived so far may not hold any more."""
    epoch.now = object()


def derived(rule: Callable[[tuple[Any, ...]], _Value]) -> _Value:
    """Find what ``rule``, a function of a module, makes of the payload of all the caller is inside
    of, outermost first; computed again only when that has changed."""
    view = _entered.get()
    if view.scopes and (view.epoch is not epoch.now or view.thread is not _here.thread):
        view = _refreshed(view)
    value = view.found.get(rule, _nothing)  # which no rule gives
    if value is _nothing:
        view.found[rule] = value = rule(view.payload)
    return value  # type: ignore[no-any-return]


def inside() -> tuple[Scope, ...]:
    """List the scopes that the calling code is inside of, outermost first."""
    return tuple(scope for scope in _entered.get().scopes if scope.is_on())


def move_last(scopes: tuple[Scope, ...]) -> None:
    """Have the calling context inside of these as if they had been opened last."""
    others = tuple(scope for scope in _entered.get().scopes if scope not in scopes)
    _entered.set(View((*others, *scopes)))


def _refreshed(view: View) -> View:
    scopes = tuple(scope for scope in view.scopes if scope.is_open)
    view = View(scopes) if scopes else _nothing
    _entered.set(view)
    return view


def tidy() -> None:
    """Take off what with statements of this thread have left on, with a `LeftOnWarning`.

    That takes two signals: one during the end of a block, one while that is being made good.
    """
    for scope in tuple(unfinished):
        if scope.is_left():
            scope.close()
            text = "was still on after its with statement, whose end was interrupted twice"
            warnings.warn(f"{scope.title} {text}; it is off now", LeftOnWarning, stacklevel=3)


class _Exit:
    """``__exit__``, another object each time that it is looked up on a manager.

    A with statement looks it up once, before it calls ``__enter__``, and holds it until the end.
    """

    def __get__(self, manager: Scoped[Any] | None, owner: type[Scoped[Any]]) -> Exit:
        if manager is None:  # an ExitStack asks the class, and binds it itself
            return owner._leave  # type: ignore[return-value]
        ready = manager._ready
        if ready is not None:
            manager._ready = None  # what asks is alone in holding it now
            if _is_with_statement(sys._getframe(1)):
                _here.pending = weakref.ref(ready)
                return ready
            manager._ready = ready
        handle = functools.partial(manager._left_by, Scope(manager.title))
        _here.pending = weakref.ref(handle)
        return handle


def _is_with_statement(frame: FrameType) -> bool:
    """Tell whether a frame is about to enter a with statement, not just to read an attribute."""
    return opname[frame.f_code.co_code[frame.f_lasti]] in _WITH


def is_entered_next(frame: FrameType) -> bool:
    """Tell whether what a frame's call returns goes into a with statement, and nowhere else."""
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while opname[code[at]] == "CACHE":  # room that Python 3.11 keeps (no generator: signals)
        at += 2
    return opname[code[at]] in _WITH


_WITH = ("SETUP_WITH", "BEFORE_WITH", "LOAD_SPECIAL")  # in Python 3.10, from 3.11, from 3.14 on


class Scoped(Generic[_Entered]):
    """A context manager whose effects are over when its with statement is, however that ends.

    A subclass says what entering does in `_open`, and may say more of leaving in `_close`.
    ``__enter__`` and ``__exit__`` may be called by hand too, and in different threads or tasks: the
    scope is that of the code that entered it, and over for it when anybody has left.
    """

    title = "a block of umem"
    _mine: tuple[Scope, ...] = ()
    _ready: functools.partial[None] | None = None

    def _begin(self) -> Scope:
        """A scope for what is on before the with statement has entered this, and off with it."""
        scope = Scope(self.title)
        self._ready = functools.partial(self._left_by, scope)
        scope.handle = weakref.ref(self._ready, scope._abandoned)
        return scope

    def _open(self, scope: Scope) -> _Entered:
        raise NotImplementedError

    def _close(self, scope: Scope, kind: type[BaseException] | None) -> None:
        scope.close()

    def _seen(self, error: BaseException) -> None:
        """This error leaves the block, which is over."""

    def _not_inside(self) -> str:
        return f"{self.title} is left once for each time that it was entered"

    def __enter__(self) -> _Entered:
        tidy()
        scope = self._claimed()
        try:
            return self._open(scope)
        except BaseException:
            scope.close()
            raise

    __exit__ = _Exit()

    def _claimed(self) -> Scope:
        """The scope of the with statement that enters this; a new one where it is done by hand."""
        handle = _here.pending()
        if handle is None or handle.func.__self__ is not self or handle.args[0].is_used:
            scope = Scope(self.title)
        else:
            scope = handle.args[0]
            scope.handle = weakref.ref(handle, scope._abandoned)
            unfinished.add(scope)
        scope.is_used = True
        self._mine = (*(mine for mine in self._mine if not mine.is_over), scope)
        return scope

    def _left_by(
        self,
        scope: Scope,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if not scope.is_used:  # looked up by hand, and maybe not when it was entered
            self._leave(kind, error, traceback)
        elif not scope.is_over:
            self._end(scope, kind, error)

    def _leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        mine = [scope for scope in self._mine if not scope.is_over]
        here = [scope for scope in mine if scope in inside()]
        if mine:
            self._end((here or mine)[-1], kind, error)
        elif kind is None:
            raise StateError(self._not_inside())

    def _end(
        self, scope: Scope, kind: type[BaseException] | None, error: BaseException | None
    ) -> None:
        try:
            self._close(scope, kind)
            if error is not None:
                self._seen(error)
        except Exception:
            if kind is None or issubclass(kind, Exception):
                raise  # but nothing takes the place of a KeyboardInterrupt


class _ExitOfEntering:
    """``__exit__`` of an `Entering`: the object that its with statement is to hold."""

    def __get__(self, entering: Entering, owner: type[Entering]) -> Exit:
        _here.pending = weakref.ref(entering.ready)
        return entering.ready


class Entering:
    """A manager on its way into a with statement; where it dies on the way, it is off."""

    __slots__ = ("manager", "ready")

    def __init__(self, manager: Scoped[Any]) -> None:
        assert manager._ready is not None
        self.manager, self.ready = manager, manager._ready
        manager._ready = None

    def __enter__(self) -> Any:
        return self.manager.__enter__()

    __exit__ = _ExitOfEntering()
