"""What ranks that update one model together have to decide alike: whether a step goes wrong.

Each looks at its own part of the gradients, so that one may find NaN where the others find none.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

Gather = Callable[[Any], list[Any]]
"""Gives every rank what each of them has, in the order of ranks; called by all."""

_together: MutableMapping[Any, Gather] = WeakKeyDictionary()


def decide_together(optimizer: Any, gather: Gather) -> None:
    """Have the optimizer's steps go wrong on all ranks or on none, from now on."""
    _together[optimizer] = gather


def of_all_ranks(optimizer: Any, value: Any) -> list[Any]:
    """Return what each rank has, in the order of ranks; on one rank alone, that one's."""
    gather = _together.get(optimizer)
    return [value] if gather is None else gather(value)


def raise_on_all(optimizer: Any, check: Callable[[], None]) -> None:
    """Carry out a check; where it raises on one rank, each raises that rank's error."""
    mine: Exception | None = None
    try:
        check()
    except Exception as error:
        mine = error
    found = [error for error in of_all_ranks(optimizer, mine) if error is not None]
    if found:
        raise found[0]
