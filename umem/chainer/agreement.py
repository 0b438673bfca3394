"""Decisions that ranks of one model must make alike: whether a step fails.

Each rank checks its own part of the gradients, so that one may find NaN and the others none. Each
has only its own part of the state, which must not be mistaken for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from umem.errors import StateError

Result = TypeVar("Result")
Gather = Callable[[Any], list[Any]]
"""A collective that returns every rank's value, in the order of ranks (allgather)."""

_together: MutableMapping[Any, Gather] = WeakKeyDictionary()
_cut: MutableMapping[Any, Callable[[], bool]] = WeakKeyDictionary()


def register_gather(optimizer: Any, gather: Gather, is_cut: Callable[[], bool]) -> None:
    """Register a collective, so that a step of the optimizer fails on all ranks or on none.

    Args:
        is_cut: tells whether the optimizer's state is in shards now.
    """
    _together[optimizer], _cut[optimizer] = gather, is_cut


def refuse_in_shards(optimizer: Any, what: str) -> None:
    """Raise StateError if the optimizer's state is sharded.

    Args:
        what: the name of the function that would change the state.

    Raises:
        StateError: it is sharded; nothing has changed.
    """
    is_cut = _cut.get(optimizer)
    if is_cut is not None and is_cut():
        raise StateError(
            f"{what} needs a whole state, but the state of this {type(optimizer).__name__} is in "
            f"shards since its first update: call {what} before that, or before "
            "umem.chainer.sharded"
        )


def of_all_ranks(optimizer: Any, value: Any) -> list[Any]:
    """Gather a value from all ranks; with one rank, a list of its own."""
    gather = _together.get(optimizer)
    return [value] if gather is None else gather(value)


def raise_on_all(optimizer: Any, check: Callable[[], None]) -> None:
    """Run a check; if it raises on one rank, every rank raises that error."""
    on_all(lambda error: of_all_ranks(optimizer, error), check)


def on_all(gather: Gather, work: Callable[[], Result]) -> Result:
    """Run an action on every rank; if one raises, every rank raises that error."""
    result, mine = None, None
    try:
        result = work()
    except Exception as error:
        mine = error
    found = [error for error in gather(mine) if error is not None]
    if found:
        raise found[0]
    return result  # type: ignore[return-value]
