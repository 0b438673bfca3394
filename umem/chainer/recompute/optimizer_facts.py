"""What optimizers take: what they keep for parameters, and what an update needs while it runs."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from umem.chainer.update_chunks import is_chunked
from umem.trace.analysis.updating import whole_workspace


def state_bytes(rule: Any) -> int:
    """Bytes of what an optimizer keeps for a parameter."""
    state = (getattr(rule, "state", None) or {}).values()
    full = getattr(getattr(rule, "_fp32_param", None), "array", None)  # a master copy, of mixed16
    return sum(getattr(value, "nbytes", 0) for value in (*state, full))


def update_workspace(update: Callable[[], None], parameter: Any) -> int:
    """Update a parameter; return the bytes that this needed beside what an optimizer keeps.

    Slow, and it sees what NumPy allocates only. Where `tracemalloc` is on already, its peak is
    reset.
    """
    is_ours = not tracemalloc.is_tracing()
    if is_ours:
        tracemalloc.start(1)
    else:
        tracemalloc.reset_peak()
    rule = parameter.update_rule
    kept, before = state_bytes(rule), tracemalloc.get_traced_memory()[0]
    try:
        update()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        if is_ours:
            tracemalloc.stop()
    return max(0, peak - before - (state_bytes(rule) - kept))


class _Updated(NamedTuple):
    parameter: weakref.ref[Any]
    state_bytes: int
    workspace_bytes: int
    whole_workspace_bytes: int


class OptimizerFacts:
    """The parameters that optimizers have updated, and what that takes; holds no parameter."""

    def __init__(self) -> None:
        self._updated: dict[int, _Updated] = {}
        self._has_new = False

    @property
    def parameters(self) -> list[Any]:
        """Those that are alive."""
        found = [one.parameter() for one in self._updated.values()]
        return [parameter for parameter in found if parameter is not None]

    @property
    def workspace_bytes(self) -> int:
        """What an update of one parameter needs only while it runs; the most of all."""
        return max((one.workspace_bytes for one in self._alive()), default=0)

    @property
    def whole_workspace_bytes(self) -> int:
        """The same where updates do not go in chunks."""
        return max((one.whole_workspace_bytes for one in self._alive()), default=0)

    def _alive(self) -> list[_Updated]:
        return [one for one in self._updated.values() if one.parameter() is not None]

    def take_new(self) -> bool:
        """Whether anything was noted since the last time."""
        new, self._has_new = self._has_new, False
        return new

    def _known(self, parameter: Any) -> _Updated | None:
        known = self._updated.get(id(parameter))
        return known if known is not None and known.parameter() is parameter else None

    def update(self, update: Callable[[], None], parameter: Any) -> None:
        """Update a parameter, and note what that takes; the first update of each is measured."""
        known, measured = self._known(parameter), 0
        if known is None and type(parameter.array) is np.ndarray:
            measured = update_workspace(update, parameter)
        else:
            update()
        if parameter.array is None:
            return
        nbytes = state_bytes(parameter.update_rule)
        if known is None:
            whole = _as_whole(measured, parameter)
            known = _Updated(weakref.ref(parameter), -1, measured, whole)
        if known.state_bytes != nbytes:
            self._updated[id(parameter)] = known._replace(state_bytes=nbytes)
            self._has_new = True


def _as_whole(workspace: int, parameter: Any) -> int:
    """What the update would have needed without chunks."""
    rule = parameter.update_rule
    if not is_chunked(rule):
        return workspace
    return whole_workspace(workspace, 2 * parameter.array.nbytes + state_bytes(rule))
