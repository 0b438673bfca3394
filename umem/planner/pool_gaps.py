"""The gaps between arrays in a GPU's pool, for which a budget in bytes must have room."""

from __future__ import annotations

FIRST_GAPS, LEAST_GAPS, PLAIN_GAPS = 1.25, 1.1, 1.15
"""Reserved bytes over the peak of bytes in use: for planned passes until they are measured, the
least for measured ones, and for plain passes.

Planned passes of a residual network and of a transformer need pools of 1.05 to 1.22 times their
peak, and plain ones 1.07 to 1.1 times (software GPU). A plain pass has nothing to drop if memory
runs out.
"""
SETTLED = 4
"""The gaps of a training run are corrected at most this many times."""


class PoolGaps:
    """The gaps between arrays in a GPU's pool, which a budget in bytes includes.

    Attributes:
        planned, plain: reserved bytes over the peak of bytes in use, in passes that follow a plan
            and in others; 1 on the host.
        measured: the same for the last measured planned pass; None before.
        card_bytes: the most bytes that the pool can have; None if unknown or unlimited.
        are_expected: whether the arrays of the training run are in a pool.
    """

    def __init__(self) -> None:
        self.planned = self.plain = 1.0
        self.are_expected = False
        self.measured: float | None = None
        self.card_bytes: int | None = None
        self._corrections = 0

    def expect(self) -> None:
        """Expect gaps, because the arrays of the training run are in a pool."""
        if not self.are_expected:
            self.planned, self.plain, self.are_expected = FIRST_GAPS, PLAIN_GAPS, True

    def keep_to_card(self, nbytes: int) -> None:
        """Set the most bytes that the pool can have."""
        self.card_bytes = nbytes

    def room(self, budget: int, *, plain: bool = False) -> int:
        """Return the bytes of a budget that arrays may use, in a planned or in a plain pass."""
        most = budget if self.card_bytes is None else min(budget, self.card_bytes)
        return int(most / (self.plain if plain else self.planned))

    def learn(self, measured: float) -> bool:
        """Record the gaps of a planned pass; tell whether plans must be made anew.

        The first measurement replaces the expectation; later ones only raise it.
        """
        is_first, self.measured = self.measured is None, measured
        if not is_first and measured <= 1.02 * self.planned:
            return False
        return self._correct(max(LEAST_GAPS, measured))

    def run_out(self) -> bool:
        """Raise the gaps after a pass ran out of memory; tell whether plans must be made anew."""
        self.plain = max(1.1 * self.plain, self.planned)  # it may have been a plain pass
        return self._correct(max(FIRST_GAPS, 1.1 * self.planned))

    def _correct(self, planned: float) -> bool:
        if self._corrections == SETTLED:
            return False
        self._corrections += 1
        self.planned = planned
        return True
