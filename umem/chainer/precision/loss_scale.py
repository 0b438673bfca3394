"""A dynamic loss scale that can be saved."""

from __future__ import annotations

from math import inf
from typing import TypedDict

from umem._common.printable import quoted
from umem.errors import PrecisionError, SizeError

LEAST = 1.0
"""The least scale: if gradients overflow without scaling, a smaller scale does not help."""


class ScaleState(TypedDict):
    """The state of a `LossScale`, in JSON types."""

    scale: float
    good_steps: int
    skipped_steps: int


class LossScale:
    """A factor for losses that doubles after many good steps, and halves if gradients overflow.

    Differs from Chainer's, which starts at 1, doubles every step until the first overflow, and is
    not saved. See Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

    Args:
        scale: the first scale.
        interval: good steps in a row after which the scale doubles.

    Attributes:
        scale: the factor.
        good_steps: steps in a row without an overflow, since the scale last changed.
        skipped_steps: all steps that were skipped for an overflow.
    """

    def __init__(self, scale: float, interval: int) -> None:
        self.scale, self._interval = scale, interval
        self.good_steps = self.skipped_steps = 0

    def succeeded(self) -> None:
        """Count a step whose gradients were finite, and double the scale after enough of them."""
        self.good_steps += 1
        if self.good_steps >= self._interval:
            self.scale, self.good_steps = 2 * self.scale, 0

    def overflowed(self, names: list[str]) -> None:
        """Count a skipped step, and halve the scale.

        Args:
            names: the parameters whose gradients are not finite.

        Raises:
            PrecisionError: the scale is at its least, and stays there; the step is counted.
        """
        self.skipped_steps += 1
        self.good_steps = 0
        if self.scale <= LEAST:
            shown = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
            raise PrecisionError(
                f"the gradient of {shown} is not finite at a loss scale of {self.scale:g}, the "
                f"least, after {self.skipped_steps:,} skipped steps: it is no overflow of halves. "
                "Look for NaN or infinity in the inputs and the loss, in float32 and with "
                "chainer.set_debug(True), or use a lower learning rate. Parameters are as they "
                "were before the step"
            )
        self.scale = max(LEAST, self.scale / 2)

    def state(self) -> ScaleState:
        """Return the state from which a resumed run continues."""
        return {
            "scale": float(self.scale),
            "good_steps": int(self.good_steps),
            "skipped_steps": int(self.skipped_steps),
        }

    def restore(self, state: ScaleState) -> None:
        """Set the scale and its counts to a state.

        Raises:
            SizeError: the scale is not positive and finite, or a count is negative; nothing has
                changed.
        """
        counts = int(state["good_steps"]), int(state["skipped_steps"])
        if not 0 < float(state["scale"]) < inf or min(counts) < 0:
            raise SizeError(
                "a loss scale must be a number above 0, with counts of steps from 0 on; got "
                f"{quoted(state)}"
            )
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped_steps = int(state["skipped_steps"])
