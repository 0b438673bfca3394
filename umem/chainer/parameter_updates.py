"""Updates of parameters by Chainer's optimizers: chunk by chunk on NumPy, and the memory they take.

A rule of Chainer computes with whole arrays: its temporaries are as large as the parameter, and
each of its dozen operations reads and writes main memory. An elementwise rule gives the same bits
chunk by chunk, and chunks stay in the processor's cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from chainer import optimizers

from umem._common.switch import Switch
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.trace.recording import BlockMeter, HostMeter

CHUNK_BYTES = 512 << 10
"""Bytes of parameter, gradient and state together that are updated at once.

With the temporaries they stay in the cache of one core, one or two MiB on today's processors. With
smaller chunks, calling each operation costs more time than the cache saves (bench/updates.py).
"""
CHUNKED_RULES = (
    "SGD", "MomentumSGD", "CorrectedMomentumSGD", "NesterovAG", "AdaGrad", "AdaDelta", "Adam",
    "MSVAG", "RMSprop", "RMSpropGraves", "SMORMS3",
)  # fmt: skip
"""Chainer's elementwise update rules, which can run in chunks."""
_RULES: dict[type, Any] = {
    rule: rule.update_core_cpu
    for rule in (type(getattr(optimizers, name)().create_update_rule()) for name in CHUNKED_RULES)
}
"""The method of each of Chainer's update rules; subclasses may compute anything else."""
_OWN = ("update_core", "update_core_cpu")


def chunked_updates() -> ChunkedUpdates:
    """Make Chainer's optimizers update NumPy arrays in chunks that fit the cache, until closed.

    Close the returned handle with ``close()``, or use it in ``with``. `umem.chainer.Recompute`
    always updates in chunks.

    Supports SGD, MomentumSGD, CorrectedMomentumSGD, NesterovAG, AdaGrad, AdaDelta, Adam with all of
    its variants, MSVAG, RMSprop, RMSpropGraves and SMORMS3. Parameters and state are the same bits.
    Temporaries take at most 1.5 MiB instead of some times the largest parameter, and large
    parameters take less time (bench/updates.py). Other rules, such as your own or a subclass, rules
    with a replaced ``update_core_cpu``, hooks, and arrays that are not NumPy's run as before. State
    arrays are changed in place, also by SMORMS3, which makes new ones in Chainer.

    Cost: about 3 us more for each small parameter. Thread-safety: for the process; any thread may
    close it.
    """
    return ChunkedUpdates()


class ChunkedUpdates(Subscriber, Switch):
    """The handle of `chunked_updates`."""

    def __init__(self) -> None:
        subscribe(self)

    def close(self) -> None:
        """Restore Chainer's own updates, as `undo` does; a second call does nothing."""
        self.undo()

    def _take_back(self) -> None:
        unsubscribe(self)

    def update_core(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Update a parameter in chunks where that gives the same bits."""
        update_in_chunks(proceed, rule, parameter)


def update_in_chunks(proceed: Proceed, rule: Any, parameter: Any) -> None:
    """Update one parameter by its rule, in chunks if that gives the same bits.

    Raises the rule's own errors, which are the same for each element, before anything has changed.
    """
    arrays = _arrays_of(rule, parameter)
    if _goes_in_chunks(rule, arrays):
        _update(rule, arrays, rule.state or {})
    else:
        proceed(rule, parameter)


def _arrays_of(rule: Any, parameter: Any) -> list[Any]:
    """Return the arrays of an update: parameter, gradient and state."""
    return [parameter.array, parameter.grad, *(rule.state or {}).values()]


def _goes_in_chunks(rule: Any, arrays: list[Any]) -> bool:
    """Tell whether an update of some arrays runs in chunks.

    They are large and distinct, and the rule is Chainer's own: an overridden one may do anything.
    """
    if not _are_alike(arrays) or sum(array.nbytes for array in arrays) <= CHUNK_BYTES:
        return False
    kind = type(rule)
    if kind not in _RULES or kind.update_core_cpu is not _RULES[kind]:
        return False
    if not vars(rule).keys().isdisjoint(_OWN):
        return False
    if not all(np.ndim(value) == 0 for value in rule.hyperparam.get_dict().values()):
        return False
    return not any(np.may_share_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def _are_alike(arrays: list[Any]) -> bool:
    """Tell whether all are plain NumPy arrays of one shape."""
    return all(type(array) is np.ndarray and array.shape == arrays[0].shape for array in arrays)


class _SliceOfParameter:
    """A slice of a parameter, with the attributes that an update rule uses."""

    __slots__ = ("data", "dtype", "grad")

    def __init__(self, data: Any, grad: Any) -> None:
        self.data, self.grad, self.dtype = data, grad, data.dtype


class _RuleOfSlice:
    """A rule with a slice of its state; ``made`` collects the attributes set on it."""

    def __init__(self, rule: Any, state: dict[str, Any]) -> None:
        self._rule, self.state = rule, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    @property
    def made(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_SLICE}


_OF_SLICE = ("_rule", "state")


def _update(rule: Any, arrays: list[Any], state: dict[str, Any]) -> None:
    """Update a parameter chunk by chunk, with slices of gradient and state."""
    is_flat = all(array.flags.c_contiguous for array in arrays)
    if is_flat:
        arrays = [array.reshape(-1) for array in arrays]
    new = dict(zip(state, arrays[2:], strict=True))
    for where in _slices(arrays):
        x, grad, *values = (array[where] for array in arrays)
        part = _RuleOfSlice(rule, dict(zip(state, values, strict=True)))
        _RULES[type(rule)](part, _SliceOfParameter(x, grad))
        for name, before in zip(state, values, strict=True):
            if part.state[name] is not before:  # it has made another array
                if new[name].dtype != part.state[name].dtype:
                    new[name] = np.empty(new[name].shape, part.state[name].dtype)
                new[name][where] = part.state[name]
    for name, before in list(state.items()):
        if new[name].dtype != before.dtype:
            state[name] = new[name].reshape(before.shape)
    for name, value in part.made.items():
        setattr(rule, name, value)


def _slices(arrays: list[Any]) -> Iterator[slice]:
    """Split the first axis so that a chunk of all arrays has `CHUNK_BYTES`, or one row."""
    count = len(arrays[0])
    step = max(1, CHUNK_BYTES * count // sum(array.nbytes for array in arrays))
    return (slice(start, start + step) for start in range(0, count, step))


# -- the memory of optimizers ---------------------------------------------------------------------


def state_bytes(rule: Any) -> int:
    """Return the bytes of optimizer state for a parameter, a float32 master copy included."""
    full = getattr(getattr(rule, "_fp32_param", None), "array", None)  # a master copy, of mixed16
    arrays = (getattr(rule, "state", None) or {}).values()
    return sum(getattr(value, "nbytes", 0) for value in (*arrays, full))


class _Measurement:
    """Measures the workspace of one update, or hook, by the meter of its arrays' memory.

    Optimizer state that the update creates is not workspace.
    """

    def __init__(self, rule: Any, meter: BlockMeter) -> None:
        self._rule, self._kept = rule, state_bytes(rule)
        self._meter = meter
        self._meter.start()
        self._before = self._meter.held().live
        self._most = self._most_whole = 0

    def core(self, compute: Callable[[], None], parameter: Any) -> None:
        """Run the rule's computation between its hooks, perhaps in chunks, and measure it."""
        self._sample()
        level = self._meter.held().live
        compute()
        inside = self._meter.held().peak - level
        arrays = _arrays_of(self._rule, parameter)
        if _goes_in_chunks(self._rule, arrays):  # up to half too much for RMSprop
            inside = inside * sum(array.nbytes for array in arrays) // CHUNK_BYTES
        self._most_whole = max(self._most_whole, level - self._before + inside)
        self._sample()

    def _sample(self) -> None:
        self._most = max(self._most, self._meter.held().peak - self._before)
        self._meter.reset()

    def end(self) -> tuple[int, int]:
        """Return the workspace bytes as measured, and if the rule computed with whole arrays."""
        self._sample()
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
        """Update a parameter, and record its bytes and the workspace of its first update.

        If the allocator of its array cannot be measured, workspace counts as 0.
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
