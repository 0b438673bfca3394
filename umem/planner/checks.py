"""Checks of what a user gives a planner: taken as it is meant, or refused in words."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from umem.errors import BudgetError, GraphError

SHOWN = 60
"""The most letters of a wrong value that a message repeats."""


def whole_number(value: Any) -> int | None:
    """A whole number of Python or NumPy as an int, None where it is none; truth values are not."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def shown(value: object) -> str:
    """A value in a message, shortened; a number of thousands of digits has no text at all."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def each_of(items: Any, what: str, of: str) -> Iterator[Any]:
    """An iterator over what a user gave for a list of something."""
    try:
        return iter(items)
    except TypeError:
        raise GraphError(f"{what} is a list of {of}; got {shown(items)}") from None


def are_names(items: Any) -> bool:
    """Tell whether this is a collection of texts."""
    try:
        return all(isinstance(name, str) for name in items)
    except TypeError:
        return False


def checked_budget(budget_bytes: int | None) -> int | None:
    """A budget as an int; None is none.

    Raises:
        BudgetError: it is no whole number of zero or more.
    """
    if budget_bytes is None:
        return None
    found = whole_number(budget_bytes)
    if found is None or found < 0:
        raise BudgetError(
            f"budget_bytes is bytes as an int, zero or more; got {shown(budget_bytes)}"
        )
    return found
