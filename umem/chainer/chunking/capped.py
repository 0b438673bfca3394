"""A cap on the workspace of convolutions and poolings: `workspace`, for a block or the process.

Chainer makes the columns of a whole batch at once, nine times an image for a kernel of 3 by 3, and
`numpy.tensordot` copies them. Under a cap the same functions process the batch in parts.

Differs from Cho and Brand, "MEC: Memory-efficient Convolution for Deep Neural Network" (ICML 2017),
which makes the columns smaller: here they are made and used part by part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from chainer.backend import get_array_module

from umem._common.scopes import Scope, Scoped, derived
from umem.chainer.chunking.functions import RULES, Rule
from umem.chainer.chunking.normalizing import normalize, normalize_back
from umem.chainer.chunking.pieces import Cap
from umem.chainer.parameter_updates import update_in_chunks
from umem.chainer.tap import Proceed, SharedSubscriber
from umem.errors import StateError
from umem.memory import Decorator
from umem.units import format_bytes, parse_bytes

__all__ = ["workspace"]


class workspace(Decorator, Scoped[None]):
    """Cap the temporary arrays (workspace) of convolutions and poolings.

    ``with umem.chainer.workspace("16MiB"): ...`` caps a block, in the thread and the asyncio task
    that enter it; blocks nest, and it is also a decorator. `enable` caps the process, in all
    threads, until `disable`; a block takes precedence.

    Args:
        cap: the bytes that one call may take beside its inputs and its result, as an int or text:
            the columns and their copies. None: no cap, inside another cap.
        exact: compare the first call of each kind and shape with Chainer's own computation, which
            then takes its whole workspace. A kind that differs by one bit is left to Chainer.

    The cap applies to Chainer's convolutions, deconvolutions and their gradients (with groups,
    dilation and any number of dimensions), on CuPy where cuDNN does not compute them; and on NumPy
    to poolings. On CuPy Chainer computes a convolution itself if its columns, their copies and a
    copy of its outputs stay under the cap. A part is several samples, one sample, or a band of its
    output rows, at least one row. If one row exceeds the cap, one `WorkspaceWarning` is given. On
    NumPy batch normalisation is computed by channels, at least two at a time, and optimizers update
    as under `chunked_updates`, with at most 1.5 MiB: both to the bit.

    Results computed in parts equal Chainer's up to rounding. They are C-contiguous, which Chainer's
    are not always. They depend only on shapes, layouts and the cap, so that `Recompute` and
    `checkpoint` under the same cap change no bit. Second derivatives are computed the same way.
    Types and errors are Chainer's.

    Cost: mostly none. Most calls are faster than Chainer's, because columns stay in the processor's
    cache (bench/recompute.py --workspace). With a cap far below 1 MiB calls are slower.

    Raises:
        SizeError: on construction, if the cap is not a size above zero.

    Thread-safety: any number of threads, each with its own cap. While no cap is on anywhere,
    Chainer's own functions are in place.
    """

    def __init__(self, cap: int | str | None, *, exact: bool = False) -> None:
        nbytes = None if cap is None else parse_bytes(cap, "workspace")
        self._cap = None if nbytes is None else Cap(nbytes, exact)
        shown = "None" if nbytes is None else f'"{format_bytes(nbytes).replace(" ", "")}"'
        self.title = f"umem.chainer.workspace({shown})"

    def _recreate_cm(self) -> workspace:
        return under(self._cap)

    def _open(self, scope: Scope) -> None:
        scope.at_close(lambda: in_parts.release(scope))
        in_parts.hold(scope)
        scope.open(self)

    def enable(self) -> workspace:
        """Set the cap for the process, in all threads; blocks with their own cap take precedence.

        Raises:
            StateError: another cap is set for the process; it stays.
        """
        global _process
        if _process not in (None, self):
            raise StateError(f"{_process.title} is enabled for the process: disable that first")
        in_parts.hold(self)
        _process = self
        return self

    def disable(self) -> None:
        """Remove the process's cap.

        Raises:
            StateError: this cap is not set for the process; nothing has changed.
        """
        global _process
        if _process is not self:
            raise StateError(f"{self.title} is not enabled for the process")
        _process = None
        in_parts.release(self)


_process: Any = None


def cap_here() -> Cap | None:
    """Return the cap in force: the innermost block's, or the process's."""
    innermost = derived(_innermost) or _process
    return None if innermost is None else innermost._cap


def _innermost(payload: tuple[Any, ...]) -> workspace | None:
    return next((part for part in reversed(payload) if isinstance(part, workspace)), None)


def under(cap: Cap | None) -> workspace:
    """Return a block with an existing cap, to recompute earlier results to the bit."""
    block = workspace(None)
    block._cap = cap
    return block


# -- Chainer's functions under a cap --------------------------------------------------------------


class _InParts(SharedSubscriber):
    """The tap's subscriber that computes functions and update rules in parts. One for all caps."""

    place = 2

    def compute(self, proceed: Proceed, func: Any, *arrays: Any) -> Any:
        """Compute a function in parts if a cap is in force."""
        cap = cap_here()
        if cap is None:
            return proceed(func, *arrays)
        rule = _rule_of(func)
        if cap.exact:
            return _exactly(cap, rule, proceed, func, arrays)
        y = rule.compute(cap, func, *arrays)
        return proceed(func, *arrays) if y is None else (y,)

    def normalize(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """Compute batch normalisation by channels if a cap is in force."""
        cap = cap_here()
        computes = proceed if cap is None else partial(normalize, cap, proceed)
        return computes(*args, **kwargs)

    def normalize_back(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradient of batch normalisation by channels if a cap is in force."""
        cap = cap_here()
        computes = proceed if cap is None else partial(normalize_back, cap, proceed)
        return computes(*args, **kwargs)

    def update_core(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Update a parameter in chunks if a cap is in force."""
        (proceed if cap_here() is None else partial(update_in_chunks, proceed))(rule, parameter)


in_parts = _InParts()
"""Held by the open blocks, and by the process's setting."""


def _rule_of(func: Any) -> Rule:
    return next(RULES[kind] for kind in type(func).__mro__ if kind in RULES)


# -- exact=True ----------------------------------------------------------------------------------

_SETTINGS = (
    "sy", "sx", "ph", "pw", "dy", "dx", "kh", "kw", "stride", "pad", "dilate", "ksize", "groups",
    "cover_all", "outs", "outh", "outw", "pad_value",
)  # fmt: skip
"""Attributes of a function that determine its computation."""
ENOUGH_RESULTS, MOST_TRIALS = 1 << 16, 32
"""A kind of call is compared until this many numbers were equal, in at most this many trials.
Both are guesses, not measured."""


def _exactly(cap: Cap, rule: Rule, proceed: Proceed, func: Any, arrays: tuple[Any, ...]) -> Any:
    """Compute in parts only calls whose kind gave the same bits when it was first compared."""
    kind = _kind_of(func, arrays)
    if kind not in cap.layouts:
        mine = rule.compute(cap, func, *arrays)
        is_same = mine is not None and all(
            _same(rule.compute(cap, func, *others), proceed(func, *others)[0])
            for others in _others(arrays, mine.size)
        )
        (whole,) = proceed(func, *arrays)  # last, because the state it leaves on the function stays
        cap.layouts[kind] = whole.strides if is_same and _same(mine, whole) else None
        return (whole,)
    strides = cap.layouts[kind]
    if strides is None:
        return proceed(func, *arrays)
    return (_laid_out(rule.compute(cap, func, *arrays), strides),)


def _others(arrays: tuple[Any, ...], size: int) -> Iterator[tuple[Any, ...]]:
    """Make other inputs for a call with few results, where different orders of summing often
    agree.
    """
    xp = get_array_module(*(arrays[0] if isinstance(arrays[0], tuple) else arrays))
    rng = np.random.default_rng(0)

    def like(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(like, given))
        if not hasattr(given, "strides") or given.dtype.kind != "f":
            return given
        values = xp.asarray(rng.standard_normal(given.shape), given.dtype)
        return values if min(given.strides, default=0) < 0 else _laid_out(values, given.strides)

    for _ in range(min(MOST_TRIALS, ENOUGH_RESULTS // max(size, 1))):
        yield like(arrays)


def _kind_of(func: Any, arrays: tuple[Any, ...]) -> Any:
    """Return a key shared by calls that are computed alike: class, shapes, layouts, settings."""
    given = arrays[0] if isinstance(arrays[0], tuple) else arrays
    owner = getattr(func, "func", func)
    return (
        type(func),
        *((a.shape, a.strides, a.dtype) for a in given if hasattr(a, "strides")),
        *(_hashable(getattr(owner, name, None)) for name in _SETTINGS),
    )


def _hashable(setting: Any) -> Any:
    """Return a setting in hashable form: ``outsize=[8, 8]`` stays a list in Chainer."""
    return tuple(setting) if hasattr(setting, "__iter__") else setting


def _same(a: Any, b: Any) -> bool:
    """Tell whether two arrays are equal to the bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = np.dtype(f"u{a.itemsize}")
    return bool((a.copy(order="C").view(bits) == b.copy(order="C").view(bits)).all())


def _laid_out(y: Any, strides: tuple[int, ...]) -> Any:
    """Copy an array in one of Chainer's memory layouts, on which the bits of sums depend."""
    if y is None or y.strides == strides:
        return y
    xp = get_array_module(y)
    size = 1 + sum((n - 1) * step // y.itemsize for n, step in zip(y.shape, strides, strict=True))
    room = xp.lib.stride_tricks.as_strided(xp.empty(size, y.dtype), y.shape, strides)
    room[...] = y
    return room
