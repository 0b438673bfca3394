"""Conversion and checks of the arguments that a user passes to planners."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from umem.errors import BudgetError, GraphError

SHOWN = 60
"""At most this many letters of a wrong value are repeated in an error message."""


def whole_number(value: Any) -> int | None:
    """Convert an integer of Python or NumPy to an int; None for other values and for booleans."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def shown(value: object) -> str:
    """Shorten the repr of a value for a message; describe an int too long to be printed."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def each_of(items: Any, what: str, of: str) -> Iterator[Any]:
    """Iterate over an argument that must be a list.

    Raises:
        GraphError: the argument is not iterable; names it (``what``) and its elements (``of``).
    """
    try:
        return iter(items)
    except TypeError:
        raise GraphError(f"{what} must be a list of {of}; got {shown(items)}") from None


def are_names(items: Any) -> bool:
    """Tell whether an argument is an iterable of strings, which includes a string itself."""
    try:
        return all(isinstance(name, str) for name in items)
    except TypeError:
        return False


def checked_budget(budget_bytes: int | None) -> int | None:
    """Convert a budget in bytes to an int; None stays None.

    Raises:
        BudgetError: the budget is not a whole number of zero or more.
    """
    if budget_bytes is None:
        return None
    found = whole_number(budget_bytes)
    if found is None or found < 0:
        raise BudgetError(
            f"budget_bytes must be bytes as an int, zero or more; got {shown(budget_bytes)}"
        )
    return found
