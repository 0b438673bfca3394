"""State that a loss function changes beside gradients: random generators and links' attributes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from umem.chainer.function_facts import is_array


class StepState:
    """Saved state of random generators and links, to rerun a loss function without side effects.

    NumPy's global generator and Python's; links' attributes, with copies of the arrays that Chainer
    saves with a link beside its parameters (running statistics). CuPy's generator cannot be read.

    Cost: those copies, and a walk over the links. Thread-safety: none.
    """

    def __init__(self, model: Any) -> None:
        self._numpy: Any = np.random.get_state(legacy=False)
        self._python = random.getstate()
        self._links = [(link, dict(vars(link)), _persistent(link)) for link in model.links()]

    def put_back(self) -> None:
        """Restore the random generators, and the links' attributes and running statistics.

        Attributes that were added since are removed. Of what was changed in place, nothing else is
        restored: parameters' arrays and gradients stay as they are.
        """
        self.put_back_random()
        for link, attributes, arrays in self._links:
            now = vars(link)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            for array, values in arrays:
                array[...] = values

    def put_back_random(self) -> None:
        """Restore NumPy's global generator and Python's."""
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _persistent(link: Any) -> list[tuple[Any, Any]]:
    # Chainer has no public list of a link's persistent values.
    values = [getattr(link, name) for name in link._persistent]
    return [(value, value.copy()) for value in values if is_array(value)]


def numpy_position() -> Any:
    """Return a value that changes when NumPy's global generator is drawn from.

    The second of two normal draws does not change it, as NumPy makes both at the first.
    """
    state = np.random.get_state(legacy=False)["state"]
    return state["pos"], state["key"][:4].tobytes() if "key" in state else None
