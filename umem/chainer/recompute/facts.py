"""Facts on each class of functions: may its calls be recomputed, how far memory rises.

A graph that never comes back has no history of its own; its functions have one. The first calls of
a class are examined closely, as `umem.chainer.recompute.observing` does. The rise of memory while a
call runs is measured for the first calls of a class, and again for larger ones, by the
meter of its arrays' memory, around that call alone; other calls take their share of the bytes
that they work on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from umem.chainer.recompute.observing import Before, again_and_stash, look, meter_of
from umem.chainer.recompute.tape import STATISTICS
from umem.planner import DRAWS

LOOKS = 3
"""This many calls of a class are examined, and this many rises measured for each shape."""
OBJECTS = 4096
"""Bytes of a measured rise that are Python's own objects, which `tracemalloc` sees as well."""
SHAPES = 32
"""At most this many shapes of parameters are told apart for each class."""


def shape_of(leaves: Sequence[Any]) -> Any:
    """Return the shape of a call's second input if that is from outside, as weights are."""
    return None if len(leaves) < 2 or leaves[1] is None else leaves[1].shape


class Rise:
    """The rise of memory while calls of a class run, as a share of their inputs' bytes.

    In backward, the share is of inputs and outputs. The largest calls count; small ones have much
    beside their arrays.
    """

    __slots__ = ("_base", "_count", "_share")

    def __init__(self) -> None:
        self._share, self._base, self._count = 1.0, 0, 0

    def wants(self, base: int) -> bool:
        """Tell whether a call that works on so many bytes should be measured."""
        return self._count < LOOKS or base > 1.5 * self._base

    def learn(self, base: int, nbytes: int) -> None:
        """Record that memory rose by ``nbytes`` in a call that worked on ``base`` bytes."""
        self._count += 1
        share = max(0, nbytes - OBJECTS) / max(base, 1)
        if base > 2 * self._base:
            self._share, self._base = share, base
        elif 2 * base >= self._base:
            self._share, self._base = max(self._share, share), max(self._base, base)

    def nbytes(self, base: int) -> int:
        """Return the rise to expect of a call on so many bytes; as many if none was measured."""
        return int(self._share * base)


class FunctionKind:
    """The facts of one class of functions.

    Attributes:
        again: whether its calls may be recomputed.
        changes: whether they have running statistics, which they change.
        is_plain: whether enough calls were examined, may be recomputed and change nothing.
        draws: whether its function state is drawn at random.
        stash: names of the function state, the attributes that forward sets to arrays.
    """

    __slots__ = (
        "_backward", "_count", "_forward", "again", "changes", "draws", "is_plain", "stash",
    )  # fmt: skip

    def __init__(self, kind: type) -> None:
        self.again = True
        self.draws = kind.__name__ in DRAWS
        self.stash: tuple[str, ...] = ()
        self.changes = self.is_plain = False
        self._count = 0
        self._forward: dict[Any, Rise] = {}
        self._backward: dict[Any, Rise] = {}

    @property
    def is_known(self) -> bool:
        """True once enough calls were examined."""
        return self._count >= LOOKS

    def look(self, func: Any) -> Before | None:
        """Record the state that a forward may change; None if enough calls were examined."""
        return None if self.is_known else look(func)

    def learn(self, func: Any, before: Before) -> None:
        """Record the facts of a call that has just run, given the state before it."""
        again, stash = again_and_stash(func, before)
        self._count += 1
        self.again = self.again and again
        self.changes = self.changes or any(hasattr(func, name) for name in STATISTICS)
        kept = [name for name in stash if name not in STATISTICS]
        self.stash = tuple(dict.fromkeys((*self.stash, *kept)))
        self.is_plain = self.is_known and self.again and not self.changes

    def forward(self, shape: Any) -> Rise:
        """Return the rise of memory in forward for calls with a parameter of this shape."""
        return _of_shape(self._forward, shape)

    def backward(self, shape: Any) -> Rise:
        """Return the rise of memory in backward for calls with a parameter of this shape."""
        return _of_shape(self._backward, shape)


def _of_shape(rises: dict[Any, Rise], shape: Any) -> Rise:
    found = rises.get(shape)
    if found is None:
        if len(rises) >= SHAPES:
            shape = next(iter(rises))
        found = rises.setdefault(shape, Rise())
    return found


class Experience:
    """Facts from all passes without a plan so far.

    Attributes:
        kinds: the classes of functions that were seen.
        rise_bytes: the most that memory has risen in a call of forward.
        backward_share: the most that backward has held beside arrays of forward and the gradients
            of parameters, as a share of the former; None before a backward was followed.
        plain_bytes: the highest peak that a pass would have had with nothing evicted.
        peak_bytes: the highest peak of a pass, by account.
        count: passes that have gone backward.
        seconds, rerun_seconds: of functions in passes under pressure, and of recomputing there.
    """

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.rise_bytes = 0
        self.backward_share: float | None = None
        self.plain_bytes = self.peak_bytes = self.count = 0
        self.seconds = self.rerun_seconds = 0.0

    def rose(self, nbytes: int) -> None:
        """Record a rise of memory in a call of forward."""
        self.rise_bytes = max(self.rise_bytes, nbytes)

    def went_backward(self, share: float) -> None:
        """Record the share that a backward has held; see ``backward_share``."""
        self.backward_share = max(self.backward_share or 0.0, share)

    def ended(
        self, plain_bytes: int, peak_bytes: int, seconds: float, rerun_seconds: float
    ) -> None:
        """Count a pass that is over.

        Args:
            plain_bytes: its peak, had nothing been dropped.
            peak_bytes: its peak.
            seconds, rerun_seconds: of its functions under pressure, and of recomputing.
        """
        self.count += 1
        self.plain_bytes = max(self.plain_bytes, plain_bytes)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.seconds += seconds
        self.rerun_seconds += rerun_seconds


class Kinds(dict[type, FunctionKind]):
    """The classes of functions that were seen, by type."""

    def of(self, kind: type) -> FunctionKind:
        """Return the facts of a class, which is added if it is new."""
        found = self.get(kind)
        if found is None:
            found = self[kind] = FunctionKind(kind)
        return found


def rise_of(run: Callable[[], Any], arrays: Iterable[Any]) -> tuple[Any, int | None]:
    """Run a function, and measure the rise of memory; None if it cannot be measured.

    A peak that the user follows with `tracemalloc` stays as it was.
    """
    meter = meter_of(arrays)
    if meter.why_not() is not None:
        return run(), None
    with meter:
        before = meter.held().live
        made = run()
        return made, meter.held().peak - before
