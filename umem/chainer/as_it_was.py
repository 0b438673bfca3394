"""Restoring a model and the random generators after a trial pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import chainer
import numpy as np
from chainer import backend

from umem.chainer.function_facts import is_array


@contextmanager
def as_it_was(model: Any) -> Iterator[None]:
    """Run a forward pass as a block, then restore the model, and NumPy's and Python's random state.

    Parameters, gradients and running statistics are restored to the bit, also where the block
    raises. CuPy's random generator cannot be read: it continues from where the block left it.

    Args:
        model: a link.

    Cost: a copy of parameters and gradients on the host while the block runs.
    """
    kept = [_Kept(owner) for owner in (*model.links(), *model.params())]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for one in kept:
            one.put_back()
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class _Kept:
    """A snapshot of an object: its attributes, with copies of the arrays and containers in them."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._attributes = dict(vars(owner))
        self._inside = {
            name: (type(value)(value), value)
            for name, value in vars(owner).items()
            if type(value) in (dict, list, set)
        }
        self._copies = [(array, _on_host(array)) for array in self._arrays()]

    def _arrays(self) -> Iterator[Any]:
        """Yield the arrays in the attributes, one container deep, and a parameter's gradient."""
        for value in self._attributes.values():
            values = value.values() if type(value) is dict else value if _is_row(value) else [value]
            yield from (one for one in values if is_array(one))
        if isinstance(self._owner, chainer.Parameter) and self._owner.array is not None:
            if self._owner.grad is not None:
                yield self._owner.grad

    def put_back(self) -> None:
        """Restore attributes, containers and contents of arrays, in the same objects as before."""
        for array, copy in self._copies:
            array[...] = backend.get_array_module(array).asarray(copy)
        attributes = vars(self._owner)
        attributes.clear()
        attributes.update(self._attributes)
        for content, value in self._inside.values():
            _refill(value, content)


def _on_host(array: Any) -> Any:
    """Copy an array into the host's memory: a GPU may have no room for a second one."""
    return array.copy() if isinstance(array, np.ndarray) else array.get()


def _is_row(value: Any) -> bool:
    return type(value) in (list, tuple)


def _refill(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(content)
    else:
        value.update(content)
