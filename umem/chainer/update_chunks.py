"""Chainer's update rules on NumPy arrays, chunk by chunk, with the bits of the whole update.

A rule of Chainer computes with whole arrays: its temporaries are as large as the parameter, and
each of its dozen operations reads and writes main memory. An elementwise rule gives the same bits
on one chunk after another, which stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from chainer import optimizers

from umem.chainer.switch import Switch
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.trace.analysis.updating import CHUNK_BYTES, CHUNKED_RULES

_RULES: dict[type, Any] = {
    rule: rule.update_core_cpu
    for rule in (type(getattr(optimizers, name)().create_update_rule()) for name in CHUNKED_RULES)
}
"""For each of Chainer's update rules, its method; subclasses may compute anything else."""
_OWN = ("update_core", "update_core_cpu")


def chunked_updates() -> ChunkedUpdates:
    """Make Chainer's optimizers update NumPy arrays in chunks that fit the cache, until closed.

    It is on until ``close()`` of what is returned, or until the end of ``with`` it. Under
    `umem.chainer.Recompute` it is on anyway.

    For SGD, MomentumSGD, CorrectedMomentumSGD, NesterovAG, AdaGrad, AdaDelta, Adam with all of its
    variants, MSVAG, RMSprop, RMSpropGraves and SMORMS3: parameters and state are the same bits,
    temporaries at most 1.5 MiB instead of some times the largest parameter, and large parameters
    take less time (bench/updates.py). Other rules, such as one of your own or a subclass, rules
    that were given another ``update_core_cpu``, hooks, and arrays that are not NumPy's are left as
    they are. State arrays are changed in place, also by SMORMS3, which makes new ones in Chainer.

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

    Raises what the rule raises, which is the same for each element, before anything has changed.
    """
    data, grad, state = parameter.array, parameter.grad, rule.state or {}
    arrays = [data, grad, *state.values()]
    if not _are_alike(arrays) or sum(array.nbytes for array in arrays) <= CHUNK_BYTES:
        proceed(rule, parameter)
    elif not is_chunked(rule) or _overlap(arrays):
        proceed(rule, parameter)
    else:
        _update(rule, arrays, state)


def is_chunked(rule: Any) -> bool:
    """Tell whether a rule can update in chunks: one of Chainer's own that is not overridden."""
    kind = type(rule)
    if kind not in _RULES or kind.update_core_cpu is not _RULES[kind]:
        return False
    if not vars(rule).keys().isdisjoint(_OWN):
        return False
    return all(np.ndim(value) == 0 for value in rule.hyperparam.get_dict().values())


def _are_alike(arrays: list[Any]) -> bool:
    """Tell whether all are plain NumPy arrays of one shape."""
    return all(type(array) is np.ndarray and array.shape == arrays[0].shape for array in arrays)


def _overlap(arrays: list[Any]) -> bool:
    """Tell whether any two arrays may share memory."""
    return any(np.may_share_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


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
