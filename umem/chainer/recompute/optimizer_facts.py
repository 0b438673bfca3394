"""Memory of optimizers: their state for each parameter, and the workspace of their updates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from umem.chainer.update_chunks import is_chunked
from umem.trace.analysis.updating import whole_workspace
from umem.trace.recording.meter import BlockMeter, HostMeter


def state_bytes(rule: Any) -> int:
    """Return the bytes of optimizer state for a parameter, a float32 master copy included."""
    full = getattr(getattr(rule, "_fp32_param", None), "array", None)  # a master copy, of mixed16
    return arrays_bytes(getattr(rule, "state", None)) + getattr(full, "nbytes", 0)


def arrays_bytes(state: Mapping[str, Any] | None) -> int:
    """Return the bytes of the arrays in a rule's state."""
    return sum(getattr(value, "nbytes", 0) for value in (state or {}).values())


class _Measurement:
    """Measures the workspace of one update, or hook, by the meter of its arrays' memory.

    The optimizer state that the update makes is not workspace.
    """

    def __init__(self, rule: Any, meter: BlockMeter) -> None:
        self._rule, self._kept = rule, state_bytes(rule)
        self._meter = meter
        self._meter.start()
        self._before = self._meter.held().live
        self._most = self._most_whole = 0

    def core(self, compute: Callable[[], None], parameter: Any) -> None:
        """Run the rule's computation between its hooks, perhaps in chunks, and measure it."""
        self._look()
        level = self._meter.held().live
        compute()
        inside = self._meter.held().peak - level
        if is_chunked(self._rule):
            arrays = 2 * parameter.array.nbytes + arrays_bytes(self._rule.state)
            inside = whole_workspace(inside, arrays)
        self._most_whole = max(self._most_whole, level - self._before + inside)
        self._look()

    def _look(self) -> None:
        self._most = max(self._most, self._meter.held().peak - self._before)
        self._meter.reset()

    def end(self) -> tuple[int, int]:
        """Return the workspace bytes as measured, and if the rule computed with whole arrays."""
        self._look()
        self.stop()
        grown = state_bytes(self._rule) - self._kept
        most = max(0, self._most - grown)
        return most, max(most, self._most_whole - grown)

    def end_of_hook(self) -> int:
        """Return the workspace bytes of a hook, without the gradients that it has made."""
        held = self._meter.held()
        self.stop()
        return max(0, held.peak - max(held.live, self._before))

    def stop(self) -> None:
        """Stop measuring."""
        self._meter.stop()


class _Updated(NamedTuple):
    parameter: weakref.ref[Any]
    state_bytes: int
    workspace_bytes: int
    whole_workspace_bytes: int


class OptimizerFacts:
    """Records the parameters that optimizers update, and the bytes of state and workspace.

    Parameters are held weakly.
    """

    def __init__(self) -> None:
        self._meter: Callable[[], BlockMeter] = HostMeter
        self._updated: dict[int, _Updated] = {}
        self._has_new = False
        self._measurement: _Measurement | None = None
        self._hooks: dict[int, tuple[Any, int]] = {}

    def measure_by(self, meter: Callable[[], BlockMeter]) -> None:
        """Measure workspace from now on by meters that this makes, of the memory of arrays."""
        self._meter = meter

    @property
    def parameters(self) -> list[Any]:
        """Return the updated parameters that are alive."""
        found = [one.parameter() for one in self._updated.values()]
        return [parameter for parameter in found if parameter is not None]

    @property
    def workspace_bytes(self) -> int:
        """Return the largest workspace of all updates of one parameter, and of all hooks."""
        return max([self._of_hooks, *(one.workspace_bytes for one in self._alive())])

    @property
    def whole_workspace_bytes(self) -> int:
        """Return the largest workspace if updates are not computed in chunks."""
        return max([self._of_hooks, *(one.whole_workspace_bytes for one in self._alive())])

    @property
    def _of_hooks(self) -> int:
        return max((nbytes for _, nbytes in self._hooks.values()), default=0)

    def _alive(self) -> list[_Updated]:
        return [one for one in self._updated.values() if one.parameter() is not None]

    def take_new(self) -> bool:
        """Tell whether anything was recorded since the last call."""
        new, self._has_new = self._has_new, False
        return new

    def _known(self, parameter: Any) -> _Updated | None:
        known = self._updated.get(id(parameter))
        return known if known is not None and known.parameter() is parameter else None

    def update(self, update: Callable[[], None], parameter: Any) -> None:
        """Update a parameter, and record its bytes; the workspace of its first update is measured.

        Where the allocator of its array cannot be measured, workspace is taken to be 0.
        """
        known = self._known(parameter)
        workspace = whole = 0
        if known is None and (meter := self._meter()).why_not() is None:
            self._measurement = _Measurement(parameter.update_rule, meter)
            try:
                update()
                workspace, whole = self._measurement.end()
            finally:
                self._measurement.stop()
                self._measurement = None
        else:
            update()
        if parameter.array is None:
            return
        nbytes = state_bytes(parameter.update_rule)
        if known is None:
            known = _Updated(weakref.ref(parameter), -1, workspace, whole)
        if known.state_bytes != nbytes:
            self._updated[id(parameter)] = known._replace(state_bytes=nbytes)
            self._has_new = True

    def compute(self, compute: Callable[[], None], parameter: Any) -> None:
        """Run the computation of a rule's update, measured if the update is being measured."""
        if self._measurement is None:
            compute()
        else:
            self._measurement.core(compute, parameter)

    def call_hook(self, call: Callable[[], None], hook: Any) -> None:
        """Call an optimizer's hook, and measure the workspace of each hook's first call."""
        if id(hook) in self._hooks:
            call()
            return
        meter = self._meter()
        if meter.why_not() is not None:
            call()
            return
        measurement = _Measurement(None, meter)
        try:
            call()
            nbytes = measurement.end_of_hook()
        finally:
            measurement.stop()
        self._hooks[id(hook)] = hook, nbytes
        self._has_new = True
