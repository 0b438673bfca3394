"""Steps of a dry run: the figures of each, and the end of the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from umem.errors import SizeError

LEAST_STEPS = 3
"""The first step allocates gradients and optimizer state, so the two after it are compared."""
MOST_STEPS = 20
"""Steps after which a run ends if no two agree, for example because texts differ in length. A
choice that no measurement supports."""
MOVED_TOLERANCE = 0.01
"""Relative difference of moved bytes at which steps still agree: addresses differ by a few blocks
from step to step, and with them the blocks that the driver moves. A guess: no bench varies it."""
TIME_TOLERANCE = 0.05
"""Relative difference of time at which steps still agree: while the GPU still copies uploads, the
first steps seem short, because they hide the host's time. A guess: no bench varies it."""


GROWING_STEPS = 5
"""Consecutive steps that each hold more than the one before: too many to be an accident of the
garbage collector. A choice that no measurement supports."""


class StepsOver(SystemExit):
    """Ends a program once enough steps have run; ``except Exception`` does not catch it."""


class GpuReading(NamedTuple):
    """The GPU's figures at a moment; ``peak_bytes`` is the most in use since the reading before."""

    seconds: float
    peak_bytes: int
    held_bytes: int
    moved_bytes: int
    uploaded_bytes: int


class DryStep(GpuReading):
    """The figures of a step (simulated).

    Attributes:
        peak_bytes, held_bytes: the bytes that arrays used of the pools, at most and at the step's
            end.
        moved_bytes: bytes moved over the bus, without uploads.
        uploaded_bytes: bytes that the program copied from the host.
    """

    def agrees(self, other: DryStep) -> bool:
        """Tell whether two steps agree in peak, moved bytes and time."""
        return (
            self.peak_bytes == other.peak_bytes
            and _are_near(self.moved_bytes, other.moved_bytes, MOVED_TOLERANCE)
            and _are_near(self.seconds, other.seconds, TIME_TOLERANCE)
        )


def _are_near(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(one, other)


@dataclass(frozen=True)
class StepLimit:
    """The number of steps to run: ``count``, all, or until two agree.

    Args:
        count: the number of steps; None: until two agree.
        is_all: run the program to its end.
        least: the number of steps before two are compared.
    """

    count: int | None = None
    is_all: bool = False
    least: int = LEAST_STEPS

    @classmethod
    def parse(cls, text: str | None, least: int = LEAST_STEPS) -> StepLimit:
        """Read the value of ``--dry-steps``: a number, or ``all``; None: until two agree.

        Raises:
            SizeError: the text is neither.
        """
        if text is None:
            return cls(least=least)
        if text == "all":
            return cls(is_all=True)
        if not (text.isdecimal() and int(text)):
            raise SizeError(f"steps must be a number of at least 1, or all; got {text!r}")
        return cls(int(text))


class DrySteps:
    """The steps of a run, as they end.

    Args:
        read: reads the GPU's figures, and resets the peak.
        limit: the number of steps to run.
        ended: called with each step.

    Attributes:
        steps: the steps that have ended.
        peak_bytes: the most bytes in use at any time.
    """

    def __init__(
        self, read: Callable[[], GpuReading], limit: StepLimit, ended: Callable[[], None]
    ) -> None:
        self._read, self._limit, self._ended = read, limit, ended
        self.steps: list[DryStep] = []
        self.peak_bytes = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step; the work since the last one ended belongs to none."""
        self._start = self._read()
        self.peak_bytes = max(self.peak_bytes, self._start.peak_bytes)

    def end(self) -> None:
        """Add the step that ends here, from its two readings, and begin the next one."""
        start = self._start
        self.begin()
        now = self._start
        self.steps.append(
            DryStep(
                now.seconds - start.seconds,
                now.peak_bytes,
                now.held_bytes,
                now.moved_bytes - start.moved_bytes,
                now.uploaded_bytes - start.uploaded_bytes,
            )
        )
        self._ended()

    def wait_for(self, least: int) -> None:
        """Compare steps only once so many have run."""
        if least > self._limit.least:
            self._limit = replace(self._limit, least=least)

    @property
    def count(self) -> int:
        """Return the number of steps that have ended."""
        return len(self.steps)

    @property
    def growth_bytes(self) -> int:
        """Return the bytes by which the held memory grew in each of the last steps."""
        held = [step.held_bytes for step in self.steps[-GROWING_STEPS - 1 :]]
        grows = all(one < other for one, other in itertools.pairwise(held))
        if len(held) <= GROWING_STEPS or not grows:
            return 0
        return (held[-1] - held[0]) // GROWING_STEPS

    @property
    def batches(self) -> tuple[int, int] | None:
        """Return the least and the most bytes that a step copied from the host, if they differ.

        Ignores the first step, which may copy parameters.
        """
        copied = [step.uploaded_bytes for step in self.steps[1:]]
        return (min(copied), max(copied)) if len(set(copied)) > 1 else None

    @property
    def is_steady(self) -> bool:
        """Tell whether the last two steps agree."""
        return len(self.steps) > 1 and self.steps[-1].agrees(self.steps[-2])

    @property
    def is_over(self) -> bool:
        """Tell whether enough steps have run."""
        limit = self._limit
        if limit.is_all:
            return False
        if limit.count is not None:
            return self.count >= limit.count
        most = max(MOST_STEPS, limit.least)
        return self.count >= most or (self.count >= limit.least and self.is_steady)

    @property
    def why_over(self) -> Literal["steady", "steps"]:
        """Return why no more steps run: "steady" if two should agree and do, otherwise "steps"."""
        return "steady" if self._limit.count is None and self.is_steady else "steps"


class Turns:
    """Turns of optimizers: a step of a program with several ends once each has updated.

    For example, five updates of a critic and one of a generator are one turn of six.
    """

    patience = 100
    """Updates without a turn after which the program stops waiting for an optimizer that has never
    updated; more updates before its first one count as steps of their own. WGAN's critic makes 100
    updates before each of the generator's first 25 (Arjovsky et al. 2017)."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}  # by id: whether it has ever updated
        self._updated: set[int] = set()
        self._count = 0
        self.is_complete = False

    def set_up(self, optimizer: object) -> None:
        """Wait for an optimizer, from now on."""
        self._known.setdefault(id(optimizer), False)

    def updated(self, optimizer: object) -> None:
        """Note an update."""
        self._known[id(optimizer)] = True
        self._updated.add(id(optimizer))
        self._count += 1
        if self._count > self.patience:
            self._known = {key: True for key, has_updated in self._known.items() if has_updated}
        self.is_complete = self._updated >= self._known.keys()

    @property
    def has_optimizers(self) -> bool:
        """Tell whether there are optimizers to wait for."""
        return bool(self._known)

    @property
    def has_begun(self) -> bool:
        """Tell whether an optimizer has updated in this turn."""
        return bool(self._count)

    def begin(self) -> None:
        """Begin the next turn."""
        self._updated, self._count, self.is_complete = set(), 0, False
