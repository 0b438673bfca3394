"""When a pass is decided on as it goes, and under which budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from umem.chainer.recompute.carrying import Target
from umem.chainer.recompute.lower import Lower
from umem.chainer.recompute.online.evict_online import EvictOnline
from umem.chainer.recompute.online.kinds import Experience
from umem.chainer.recompute.online.room import Room
from umem.chainer.recompute.passes import Pass
from umem.errors import RecomputeError
from umem.units import format_bytes

AGAIN = "it goes backward again after an update"


class Remembers(Protocol):
    """What is remembered of a training run, as far as passes without a plan ask for it."""

    def say(self, text: str) -> None:
        """Tell the user, once."""

    def beside(self) -> tuple[list[Any], int]:
        """Parameters that optimizers have updated; the bytes of their state and gradients."""


class OnlinePasses:
    """Begins passes whose graph is not expected back.

    Args:
        target: the budget.
        graphs: what is remembered.
        prepare: see `EvictOnline`.
        lower: where what is moved goes.
        debug: whether passes keep checksums.

    Attributes:
        experience: what such passes have shown.
    """

    def __init__(
        self,
        target: Target,
        graphs: Remembers,
        prepare: Callable[[Any, Any], None],
        lower: Lower,
        *,
        debug: bool,
    ) -> None:
        self.experience = Experience()
        self._target, self._graphs = target, graphs
        self._prepare, self._lower, self._debug = prepare, lower, debug
        self._keeps = False
        self._told: set[bool] = set()

    def begin(self, number: int) -> Pass | None:
        """The pass that begins; None where it is to be learned for a plan."""
        if self._target.budget is None or not self.experience.is_strange:
            return None
        is_wish = isinstance(self._target.budget, float) and not self._target.strict
        room = Room(self._budget(), *self._graphs.beside(), is_wish=is_wish)
        rule = EvictOnline(
            room, self.experience, self._debug, self._prepare, self._tell, self._lower
        )
        now = Pass(number, rule, self._debug, self._goes_again)
        if self._keeps:
            now.keep_everything(AGAIN)
        return now

    def _budget(self) -> int | None:
        """Bytes; a share is one of the most that a plain pass would have taken so far."""
        budget = self._target.budget
        if isinstance(budget, float):
            budget = round(budget * self.experience.plain_bytes) or None
        return budget

    def _goes_again(self, signatures: Sequence[Any]) -> None:
        """A graph went backward once more after an update."""
        self._keeps = True
        self._graphs.say(f"graphs that do not come back keep everything from now on: one {AGAIN}")

    def _tell(self, text: str, thrashes: bool) -> None:
        """Tell the user of what goes wrong, once of each kind."""
        if thrashes and self._target.thrash == "error":
            raise RecomputeError(f"{text}. Nothing is lost; leave the block, and train without it")
        if thrashes not in self._told:
            self._told.add(thrashes)
            self._graphs.say(text)

    def describe(self) -> list[str]:
        """The lines of a report."""
        found = self.experience
        if not found.count:
            return []
        again = found.rerun_seconds / found.seconds if found.seconds else 0.0
        moved = f", and {format_bytes(found.sent_bytes)} were moved" if found.sent_bytes else ""
        return [
            f"{found.count} passes whose graph had not come back went without a plan: what to let "
            f"go was decided call by call; peak {format_bytes(found.peak_bytes)} by account, and "
            f"{again:.0%} of the time of those that had to let something go ran again{moved}"
        ]
