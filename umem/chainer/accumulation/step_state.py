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
        """Restore everything, except parameters that were initialised since."""
        self.put_back_random()
        for link, attributes, arrays in self._links:
            now = vars(link)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            for array, values in arrays:
                array[...] = values

    def put_back_random(self) -> None:
        """Restore the random generators."""
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _persistent(link: Any) -> list[tuple[Any, Any]]:
    # Chainer has no public list of a link's persistent values.
    values = [getattr(link, name) for name in link._persistent]
    return [(value, value.copy()) for value in values if is_array(value)]


def numpy_position() -> Any:
    """Return a value that changes whenever NumPy's global generator is drawn from."""
    state = np.random.get_state(legacy=False)["state"]
    return state["pos"], state["key"][:4].tobytes() if "key" in state else None
