"""The states that a beam search looks at side by side: one row each, in columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.beam_facts import Floats, Masks

DOMINATED = 2000
"""With more rows than that, nobody compares each with each other."""


class Rows(NamedTuple):
    """States of a step, at the same moment of it.

    Attributes:
        values, stashes: what is there.
        pending: what has still to run again before the next step of backward.
        ran: what has run again before it already.
        cost: of all that has run again.
        used: the bytes of what is there.
        origin: the row of the step before that it comes from.
    """

    values: Masks
    stashes: Masks
    pending: Masks
    ran: Masks
    cost: Floats
    used: npt.NDArray[np.int64]
    origin: npt.NDArray[np.int64]

    def some(self, which: Any) -> Rows:
        """The rows of an index."""
        return Rows(*(column[which] for column in self))

    def distinct(self) -> Rows:
        """Of the rows in the same state, the one of least cost."""
        order = np.lexsort((self.cost, self.pending, self.stashes, self.values))
        rows = self.some(order)
        same = np.ones(len(order), bool)
        same[:1] = False
        for column in (rows.values, rows.stashes, rows.pending):
            same[1:] &= column[1:] == column[:-1]
        return rows.some(~same)

    def undominated(self) -> Rows:
        """Without the rows that hold no more than another one, and cost no less."""
        count = len(self.cost)
        if not 1 < count <= DOMINATED:
            return self
        rows = self.some(np.lexsort((-self.used, self.cost)))
        within = (rows.values[:, None] & ~rows.values) == 0
        within &= (rows.stashes[:, None] & ~rows.stashes) == 0
        return rows.some(~np.tril(within, -1).any(axis=1))


def one_row() -> Rows:
    """The state before forward."""
    none, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    return Rows(none, none, none, none, np.zeros(1), zero, zero)


def joined(parts: list[Rows]) -> Rows:
    """All rows of some parts."""
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
