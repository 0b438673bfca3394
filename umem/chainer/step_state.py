"""State that a loss function changes beside gradients: random generators and links' attributes."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import chainer
import numpy as np

from umem.chainer.function_facts import is_array


@contextmanager
def cupy_generator(random: Any, generator: Callable[[], Any]) -> Iterator[None]:
    """Make another generator CuPy's current one in the block.

    Args:
        random: CuPy's random module; None: nothing is changed.
        generator: returns the generator.
    """
    if random is None:
        yield
        return
    before = random.get_random_state()
    random.set_random_state(generator())
    try:
        yield
    finally:
        random.set_random_state(before)


@contextmanager
def numpy_generator_restored() -> Iterator[None]:
    """Restore NumPy's global generator after the block."""
    before = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        np.random.set_state(before)


def restore_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Restore an object's former attributes, and remove all others."""
    now = vars(value)
    for name in now.keys() - attributes.keys():
        del now[name]
    now.update(attributes)


class StepState:
    """Saved state of random generators and links, to rerun a loss function without side effects.

    It has NumPy's global generator and Python's; links' attributes, with copies of the arrays that
    Chainer saves with a link beside its parameters (running statistics). CuPy's generator cannot be
    read.

    Args:
        model: the link whose links are saved.
        holds_graphs: whether the graphs of variables among the attributes, such as the previous
            step's loss, are kept alive. False: a variable is restored without the graph that led
            to it, if that was freed.

    Cost: those copies, and a walk over the links. Thread-safety: none.
    """

    def __init__(self, model: Any, *, holds_graphs: bool = True) -> None:
        self._numpy: Any = np.random.get_state(legacy=False)
        self._python = random.getstate()
        kept = dict if holds_graphs else _without_graphs
        self._links = [(link, kept(vars(link)), _persistent(link)) for link in model.links()]

    def restore(self) -> None:
        """Restore the random generators, and the links' attributes and running statistics.

        Attributes that were added since are removed. Other in-place changes are not undone:
        parameters' arrays and gradients stay as they are.
        """
        self.restore_random()
        # All variables first: a new attribute may hold the graph of an old one.
        links = [(link, _with_variables(kept), arrays) for link, kept, arrays in self._links]
        for link, attributes, arrays in links:
            restore_attributes(link, attributes)
            for array, values in arrays:
                array[...] = values

    def has_drawn(self) -> bool:
        """Tell whether NumPy's or Python's generator has another state now."""
        now = np.random.get_state(legacy=False)
        is_same = all(np.array_equal(now["state"][n], x) for n, x in self._numpy["state"].items())
        return not is_same or random.getstate() != self._python

    def restore_random(self) -> None:
        """Restore NumPy's global generator and Python's."""
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class _Variable:
    """A variable that a function made: its array, and its node while others refer to it."""

    def __init__(self, variable: Any) -> None:
        self._node, self._array = weakref.ref(variable.node), variable.array

    def again(self) -> Any:
        """Return the variable; without a graph if its node was freed."""
        node = self._node()
        if node is None:
            return chainer.Variable(self._array)
        variable = node.get_variable()
        if variable.array is None:  # the node's array was dropped, to be recomputed
            variable.array = self._array
        return variable


def _without_graphs(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _Variable(value) if getattr(value, "creator_node", None) is not None else value
        for name, value in attributes.items()
    }


def _with_variables(kept: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.again() if isinstance(value, _Variable) else value
        for name, value in kept.items()
    }


def _persistent(link: Any) -> list[tuple[Any, Any]]:
    # Chainer has no public list of a link's persistent values.
    values = [getattr(link, name) for name in link._persistent]
    return [(value, value.copy()) for value in values if is_array(value)]
