"""Restoring a model, its optimizer and the random generators after a trial step."""

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
def as_it_was(model: Any, optimizer: Any = None) -> Iterator[None]:
    """Run a block, then restore the model, its optimizer, and NumPy's and Python's random state.

    Parameters, gradients, running statistics, and the optimizer's states and counts are restored to
    the bit, also where the block raises. CuPy's random generator cannot be read: it continues from
    where the block left it.

    Args:
        model: a link.
        optimizer: its optimizer, set up; None: the block is a forward pass alone.

    Cost: a copy of parameters, gradients and states on the host while the block runs.
    """
    kept = [_Kept(owner) for owner in _owners(model, optimizer)]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for one in kept:
            one.put_back()
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _owners(model: Any, optimizer: Any) -> list[Any]:
    """Return the objects that a step changes: links, parameters, update rules, the optimizer."""
    tops = [model] if optimizer is None else [model, optimizer.target]
    links = {id(link): link for top in tops for link in top.links()}
    params = {id(param): param for top in links.values() for param in top.params()}
    rules = [param.update_rule for param in params.values() if param.update_rule is not None]
    owners = [*links.values(), *params.values(), *rules]
    return owners if optimizer is None else [*owners, optimizer]


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
