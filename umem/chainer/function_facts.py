"""A function of Chainer, as a trace and a running pass see it: what it holds, how it may run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from gc import get_referents
from typing import Any

import chainer
import numpy as np
from chainer.function import FunctionAdapter

from umem.planner.from_trace import NOT_AGAIN
from umem.trace.events import LEAF, OUTSIDE
from umem.trace.recording.storage import root_of
from umem.trace.recording.thread import ThreadState

_KEEP_THEIR_PLACE = ("Forget", "Checkpoint", "PartAggregation", "ToParts")
"""Functions that run a backward inside of their own, or exchange gradients with other ranks in it,
so that their order must not change."""
_PLAIN = frozenset((
    int, float, bool, str, type(None), type, *(type(np.dtype(code)) for code in np.typecodes["All"])
))  # fmt: skip
"""Classes whose instances hold no arrays."""
_PLAIN_OR_TUPLE = _PLAIN | {tuple}
NODE_ATTRIBUTES = frozenset((
    "inputs", "outputs", "rank", "stack", "lazy_grad_sum", "_input_layouts", "_output_layouts",
    "_input_indexes_to_retain", "_output_indexes_to_retain", "_output_count",
    "_retained_output_data", "_use_cudnn", "_local_function_hooks", "_n_local_function_hooks",
))  # fmt: skip
"""Attributes that function nodes have anyway, Chainer's private ones too: graph, layouts, retained
arrays, which are inputs and outputs and followed as those."""


def values_on(func: Any) -> list[Any]:
    """Return the values of a function's attributes, perhaps with its class.

    To ask for ``__dict__`` makes a dictionary of what Python up to 3.12 keeps without one, and
    Chainer's own use of the function slower from then on: about a microsecond an operation.
    """
    values = get_referents(func)
    if dict in map(type, values):  # it has a dictionary already
        values = list(func.__dict__.values())
    return values


def holds_nothing(func: Any) -> bool:
    """Tell cheaply that a function certainly holds no arrays in attributes of its own.

    It is where all that is on it is plain, but for the tuples that `FunctionNode.apply` makes: two
    of layouts, two of a graph, and what was retained, of which indexes may be None.
    """
    kinds = [*map(type, get_referents(func))]
    # Chainer's privates, read because each may be one more tuple; there is no public way to ask.
    tuple_count = 2 if func.inputs is None else 4
    if func._input_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._output_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._retained_output_data is not None:
        tuple_count += 1
    return kinds.count(tuple) == tuple_count and _PLAIN_OR_TUPLE.issuperset(kinds)


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of NumPy or CuPy."""
    return isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__")


def arrays_on(func: Any) -> list[tuple[str, Any]]:
    """Return the arrays that a function holds as attributes; sparse matrices are taken apart."""
    found: list[tuple[str, Any]] = []
    for key, value in func.__dict__.items():
        if key not in NODE_ATTRIBUTES and value.__class__ not in _PLAIN:
            find_arrays(key, value, found)
    return found


def arrays_in(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the arrays in named values."""
    found: list[tuple[str, Any]] = []
    for key, value in items:
        find_arrays(key, value, found)
    return found


def find_arrays(key: str, value: Any, found: list[tuple[str, Any]]) -> None:
    """Append the arrays in a value to a list, each with its path."""
    if is_array(value):
        found.append((key, value))
    elif isinstance(value, (list, tuple)):
        found += [(key, item) for item in value if item.__class__ not in _PLAIN and is_array(item)]
    elif hasattr(value, "indptr") and hasattr(value, "indices"):
        parts = ("data", "indices", "indptr")
        found += [(f"{key}.{part}", getattr(value, part)) for part in parts]
    elif isinstance(value, chainer.Function):  # an old-style function behind its adapter
        found += arrays_on(value)
    elif isinstance(value, chainer.FunctionNode):  # max pooling, whose gradient reads its indexes
        held = value.__dict__.items()
        found += [
            (name, item) for name, item in held if name not in NODE_ATTRIBUTES and is_array(item)
        ]


# -- for a planner -------------------------------------------------------------------------------


def owner_of(func: Any) -> Any:
    """Return the object that a function's state is on: for an old-style function, not its node."""
    return func.function if isinstance(func, FunctionAdapter) else func


def running_rules(func: Any) -> tuple[bool, bool]:
    """Tell whether a function may be recomputed, and whether its backward must keep its order.

    Nobody can see what else a user's function does: it may run twice, and in another order, where
    its class says so by ``umem_recomputable``.
    """
    return rules_of(owner_of(func).__class__)


@cache
def rules_of(kind: Any) -> tuple[bool, bool]:
    """Return `running_rules` for the class that holds a function's state."""
    if kind.__module__.startswith(("chainer.", "umem.")):
        return kind.__name__ not in NOT_AGAIN, kind.__name__ in _KEEP_THEIR_PLACE
    is_pure = bool(getattr(kind, "umem_recomputable", False))
    return is_pure and kind.__name__ not in NOT_AGAIN, not is_pure


def output_gradient_bytes(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return the bytes of the gradients of a call's outputs.

    The gradient of a view of all of one input is a view of that input's.
    """
    size = 0
    for y in outputs:
        size += y.nbytes
    if len(outputs) == 1 == len(inputs) and outputs[0].base is not None:
        x = inputs[0]
        if x.nbytes == size and root_of(outputs[0]) is root_of(x):
            return 0
    return size


def enter(state: ThreadState, func: Any, ins: list[Any], outs: list[Any]) -> tuple[Any, ...]:
    """Give a call its number, and return the fields of its `TapeEntry`.

    Chainer's privates say what it retains, and where an input comes from: there is no public way.
    """
    number = state.entry_count
    state.entry_count = number + 1
    func._umem_entry = number
    sources = []
    for node in func.inputs:
        creator = node._creator_node
        if creator is None:
            sources.append(LEAF if node._requires_grad else OUTSIDE)
        else:
            sources.append(getattr(creator, "_umem_entry", OUTSIDE))
    return (
        number,
        tuple(sources),
        tuple(func._input_indexes_to_retain or ()),
        bool(func._output_indexes_to_retain),
        *running_rules(func),
        output_gradient_bytes(ins, outs),
    )
