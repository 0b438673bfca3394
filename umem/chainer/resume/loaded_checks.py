"""Checks of what a snapshot restored, before the run goes on."""

from __future__ import annotations

import copy
import random
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from umem._common.printable import quoted
from umem.chainer.optimizers.quantized_state import CODES, SCALES
from umem.errors import SnapshotError

_POSITIONS = {"pos": 624, "buffer_pos": 4}
"""The buffer positions of Mersenne Twister and Philox, and their bounds: NumPy does not check them,
and would read beyond the buffer."""


def check_iterator(name: str, iterator: Any) -> None:
    """Check that a loaded iterator's position is inside its dataset.

    Raises:
        SnapshotError: it is not.
    """
    # Private of Chainer: the IteratorState of its plain iterators, which has no public name.
    state: Any = getattr(iterator, "_state", None)
    if not hasattr(state, "current_position") or not hasattr(iterator, "dataset"):
        return
    count, order = len(iterator.dataset), state.order
    if order is not None:
        check_order(name, order, count)
    length = count if order is None else len(order)
    if not _is_whole(state.current_position, length) or not _is_whole(state.epoch):
        raise SnapshotError(
            f"{name!r} would be at item {quoted(state.current_position)} of {length:,} in epoch "
            f"{quoted(state.epoch)}"
        )
    if not isinstance(state.is_new_epoch, (bool, np.bool_)):
        raise SnapshotError(f"{name!r} would say {quoted(state.is_new_epoch)} of a new epoch")


def check_order(name: str, order: Any, count: int) -> None:
    """Check that a loaded order indexes existing items only.

    Raises:
        SnapshotError: it has other indexes, or is not an order.
    """
    is_one = isinstance(order, np.ndarray) and order.ndim == 1 and order.dtype.kind in "iu"
    if not is_one or (order.size and not 0 <= order.min() <= order.max() < count):
        raise SnapshotError(f"{name!r} would have an order with more than indices of its items")


def check_optimizer(name: str, optimizer: Any, *, in_shards: bool = False) -> None:
    """Check that loaded loss scaling and update rules' states are of the optimizer's own kind.

    With ``in_shards`` a rank has a stretch of each state, whose length is looked at as it is read.

    Raises:
        SnapshotError: one is not; says which.
    """
    own = vars(getattr(optimizer, "actual_optimizer", optimizer))
    for key, value in own.items():
        if key.startswith("_loss_scal") and not _is_number(value):
            raise SnapshotError(f"{key!r} of {name!r} would be {quoted(value)}")
    for path, parameter in optimizer.target.namedparams():
        rule = getattr(parameter, "update_rule", None)
        if rule is not None and parameter.array is not None:
            _check_rule(f"{name}{path}", rule, None if in_shards else parameter.shape)


def _check_rule(name: str, rule: Any, shape: tuple[int, ...] | None) -> None:
    """Raise SnapshotError unless a rule's state and float32 master suit the parameter's shape."""
    # The float32 copy of use_fp32_update has no public name.
    master = rule._fp32_param
    if master is not None and shape not in (None, master.shape):
        raise SnapshotError(f"the master of {name!r} would be of shape {master.shape}")
    first = _first_state(rule)
    for key, found in (rule.state or {}).items():
        if key.endswith((CODES, SCALES)):  # of 8 bits: seen when they were read
            continue
        if key in first and np.ndim(first[key]) == 0:
            is_one = _is_number(found)
        else:
            is_one = (
                isinstance(found, chainer.get_array_types())
                and shape in (None, found.shape)
                and found.dtype.kind == "f"
            )
        if found is not None and not is_one:
            is_array = isinstance(found, chainer.get_array_types())
            raise SnapshotError(
                f"the state {key!r} of {name!r} would be "
                f"{f'{found.dtype} of shape {found.shape}' if is_array else quoted(found)}"
            )


def _first_state(rule: Any) -> dict[str, Any]:
    """Create the state of a one-element parameter, to learn the names that a rule uses."""
    if type(rule).__module__.startswith("umem"):  # has arrays alone
        return {}
    trial = copy.copy(rule)
    # As Chainer does before it calls init_state.
    trial._state = {}
    one = np.zeros(1, np.float32)
    trial.init_state(chainer.Variable(one, grad=one))
    return trial._state or {}


# -- generators ------------------------------------------------------------------------------------


def check_generator_state(state: Any, now: Any) -> None:
    """Check a generator's state; NumPy would read beyond its memory with a wrong one.

    Args:
        state: the loaded state; ``now`` is the generator's present one.

    Raises:
        SnapshotError: it is not valid for the generator.
    """
    if not _is_alike(state, now):
        raise SnapshotError("the state of a random generator is of another kind, or not valid")


def _is_alike(state: Any, now: Any) -> bool:
    """Tell whether a generator's state has the structure of the present one, with positions in
    range.
    """
    if isinstance(now, dict):
        is_dict = isinstance(state, dict) and state.keys() == now.keys()
        return is_dict and all(
            _is_alike(state[key], now[key]) and _is_whole(state[key], _POSITIONS.get(key))
            if key in _POSITIONS
            else _is_alike(state[key], now[key])
            for key in now
        )
    if isinstance(now, np.ndarray):
        is_array = isinstance(state, np.ndarray)
        return is_array and (state.shape, state.dtype) == (now.shape, now.dtype)
    if isinstance(now, str):
        return bool(state == now)
    if isinstance(now, (int, np.integer)):
        return _is_whole(state, 2**128)
    return _is_number(state)


def check_python_state(state: Any) -> None:
    """Check that a state is one of `random.Random`.

    Raises:
        SnapshotError: it is not valid.
    """
    try:
        random.Random().setstate(state)
        is_one = state[2] is None or type(state[2]) is float
    except Exception:  # whatever was put in its place
        is_one = False
    if not is_one:
        raise SnapshotError("the state of a generator of Python's random is not valid")


# -- numbers ---------------------------------------------------------------------------------------


def _is_whole(value: Any, most: int | None = 2**63 - 1) -> bool:
    is_one = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_one and 0 <= value and (most is None or value <= most)


def _is_number(value: Any) -> bool:
    """Tell whether a value is one finite number or bool."""
    if isinstance(value, cuda.ndarray):
        value = value.get()
    if np.ndim(value) or np.asarray(value).dtype.kind not in "biuf":
        return False
    return bool(np.isfinite(float(value)))
