"""NumPy as a lent package sees it: NumPy's own attributes and the removed names."""

from __future__ import annotations

import warnings
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from umem.compat import removed_names


class _StandIn(ModuleType):
    """A module that equals NumPy and has its attributes; setting one sets it on NumPy."""

    # Each np.name of the package calls this, so it is a C function. It receives only the name, and
    # bypasses NumPy's own `__getattr__`, which warns of some removed names.
    __getattribute__ = staticmethod(partial(object.__getattribute__, np))

    def __getattr__(self, name: str) -> Any:
        """Return a removed name or a lazy attribute of NumPy; raises NumPy's AttributeError."""
        if name in removed_names.NAMES:
            return removed_names.find(name)
        return getattr(np, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(np, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(np, name)

    def __eq__(self, other: object) -> bool:
        return is_same(self, other)

    def __hash__(self) -> int:
        return hash(np)


STAND_IN = _StandIn("numpy")


def is_same(one: object, other: object) -> bool:
    """Tell whether two objects are the same, taking the stand-in for NumPy."""
    return (np if one is STAND_IN else one) is (np if other is STAND_IN else other)


def star() -> ModuleType:
    """Return the module for ``from numpy import *``.

    It never had the aliases of Python's own types, so it lacks them here too.
    """
    removed = [
        name
        for release, names in removed_names.REMOVED.items()
        for name in names
        if release != "1.24" and name not in vars(np)
    ]
    module = ModuleType("numpy")
    vars(module).update({name: getattr(np, name) for name in np.__all__})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 2.5 warns of chararray, even if it is not used
        vars(module).update({name: removed_names.find(name) for name in removed})
    vars(module)["__all__"] = [*np.__all__, *removed]
    return module
