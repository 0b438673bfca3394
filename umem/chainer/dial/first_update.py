"""`umem.chainer.diet` for a program that is not edited, from its first update on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from umem.chainer.dial.diets import Diet, batch_of, diet_of
from umem.chainer.dial.step_peak import StepPeak
from umem.chainer.dial.two_sizes import recorded_at_parts
from umem.chainer.step_state import StepState
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import (
    AccumulationError,
    BudgetError,
    GradientError,
    OutOfMemoryError,
    PrecisionError,
    RecomputeError,
    UmemError,
)
from umem.predict.dieting import WORDS
from umem.trace.recording.kept_steps import Keeper, Kept, Steps
from umem.trace.trace import Trace
from umem.units import parse_bytes

LEAST_BATCH = 4
"""The smallest batch of which a quarter and a half are recorded."""
LONGEST_TURN = 16
"""After this many updates since its first, a turn does not wait for other optimizers any more."""
_OF_ONE = ("accumulate", "8-bit states", "half precision")
"""Techniques that apply to a single optimizer: not used where a program has several."""
_BLAMED: tuple[tuple[type[UmemError] | None, str], ...] = (
    (AccumulationError, "accumulate"),
    (PrecisionError, "half precision"),
    (GradientError, "8-bit states"),
    (RecomputeError, "recompute"),
    (None, "workspace"),
)
"""The technique to blame for each class of error; any other error is blamed on the first one on."""


class FirstUpdate(Subscriber):
    """Records the step of an optimizer's first update, then turns on what keeps it to a budget.

    Where the update is given a loss function and the batch, as by Chainer's ``StandardUpdater``,
    the step is recorded at a quarter and half of that batch before it runs. Elsewhere the loop is
    the program's: its second step is recorded as it runs, and the techniques are on from the third.
    Where the program has set up several optimizers, a step is a whole turn of them.

    Where an update fails because of a technique, that technique is turned off, and the update runs
    again under the next choice.

    Args:
        budget: as `umem.chainer.diet` takes it.
        say: called with each line of text for the user.

    Raises:
        SizeError: the budget is no size.
    """

    place = -6  # around all that may be turned on, whose errors come out here

    def __init__(self, budget: int | str, say: Callable[[str], None]) -> None:
        self.budget_bytes = parse_bytes(budget, "budget")
        self._say = say
        self._keeper: Keeper | None = None
        self._optimizer: Any = None
        self._all: weakref.WeakSet[Any] = weakref.WeakSet()
        self._turn: _Turn | None = None
        self._period = 1
        self._why_later = (
            f"the first update is not given a batch of at least {LEAST_BATCH}, as in "
            "optimizer.update(lossfun, *arrays)"
        )
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside = self._has_updated = False
        self._recorded: tuple[Trace, int | None] | None = None
        self._without: tuple[str, ...] = ()
        self._peak: StepPeak | None = None
        self.diet: Diet | None = None

    def begin(self, stack: ExitStack) -> None:
        """Watch until the stack is left, which turns off the techniques that are on by then."""
        subscribe(self)
        stack.callback(self._end)

    def _end(self) -> None:
        unsubscribe(self)
        if self._peak is not None:
            self._peak.stop()
        if self._keeper is not None:
            self._keeper.finish()
        if self.diet is not None:
            self.diet.undo()

    def outcome(self) -> str:
        """Describe in a line whether the budget held, and recomputation so far."""
        if self._peak is None and self._recorded is not None:
            return "nothing keeps to it, and nothing was turned on"
        if self._peak is None:
            return "nothing was turned on: the script ended before there was a step to choose for"
        held = self._peak.against(self.budget_bytes)
        summary = "" if self.diet is None else self.diet.summary()
        return "; ".join(filter(None, (held, summary)))

    # -- Chainer's events ------------------------------------------------------------------

    def setup(self, proceed: Proceed, method: Any, link: Any) -> Any:
        """Handle ``optimizer.setup``: remember the optimizer as one of the program's."""
        found = proceed(method, link)
        if not self._inside:
            self._all.add(method)
        return found

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Handle an update: record and choose at the first one, run it, fall back where it fails.

        Raises what the update raises for reasons of its own; BudgetError where nothing fits.
        """
        if self._inside:
            proceed(method, *args, **kwargs)
            return
        is_first = self._optimizer is None
        if is_first:
            self._optimizer = method
            gc.collect()  # optimizers that the script has replaced
        self._all.add(method)
        if is_first and self._is_recorded_before(method, *args, **kwargs):
            self._choose(1)
        elif self.diet is None:
            proceed(method, *args, **kwargs)
            self._after(method, is_first)
            return
        elif self._is_done(proceed, method, *args, **kwargs):
            self._after(method, is_first)
            return
        method.update(*args, **kwargs)  # again, under the techniques that are on now

    def _after(self, method: Any, is_first: bool) -> None:
        """Handle the end of an update: measure the peak, count the turn, or begin to record."""
        if self._peak is not None:
            if method not in self._counted:
                self._on_another(method)
            self._peak.updated(self._all)
        elif self._turn is not None:
            period = self._turn.after(method)
            if period is not None:
                self._turn = None
                self._record(period)
        elif is_first:
            self._begin_by_hand(method)

    def _begin_by_hand(self, method: Any) -> None:
        """Prepare to record the program's own second step, where its first was not recorded ahead.

        With several optimizers the updates of a turn are counted first.
        """
        if len(self._all) == 1:
            self._say(
                f"{self._why_later}: the second step is recorded as it goes, and there are no "
                "micro-batches"
            )
            self._record(1)
            return
        self._say(
            f"the script has {len(self._all)} optimizers: a turn of all is recorded as it goes, "
            "and kept to the budget by recomputation and a cap on workspace"
        )
        self._without = _OF_ONE
        self._turn = _Turn(method, self._all)

    def _on_another(self, method: Any) -> None:
        """Report an optimizer that first updates after the choice, and measure the longer turn."""
        self._counted.add(method)
        self._say(
            f"another optimizer, {type(method).__name__}, came after the choice: it is as it was, "
            "and what it updates was not counted"
        )
        self._measure(len(self._counted))

    # -- the choice ------------------------------------------------------------------------

    def _is_recorded_before(self, optimizer: Any, *args: Any, **kwargs: Any) -> bool:
        """Record the first update at a quarter and half of its batch; return whether that worked.

        It is not tried with several optimizers, keyword arguments or a batch below `LEAST_BATCH`.
        Afterwards the model and the optimizer are as before. An Exception of the updates on parts
        is not raised, but kept as the reason to record later.
        """
        size = 0 if kwargs else batch_of(args)
        if len(self._all) > 1 or size < LEAST_BATCH:
            return False
        self._inside = True
        try:
            sizes = max(1, size // 4), max(2, size // 2)
            self._recorded = recorded_at_parts(optimizer, args, sizes), size
        except UmemError as error:
            self._why_later = f"no other size of the step can be told from its parts ({error})"
        except Exception as error:  # the script's own: it may need its whole batch
            what = f"{type(error).__name__}: {error}"
            self._why_later = f"the loss does not take a part of the batch ({what})"
        finally:
            self._inside = False
        return self._recorded is not None

    def _record(self, period: int) -> None:
        """Record the program's next ``period`` updates as one step, and choose at their end.

        Micro-batches are left out of that choice.
        """

        def complete(kept: Kept) -> None:
            self._recorded = kept.trace, None
            self._without = tuple(dict.fromkeys((*self._without, "accumulate")))
            self._choose(period)

        self._keeper = Keeper(Steps(1, period), complete=complete)
        self._keeper.start()

    def _choose(self, period: int) -> None:
        """Turn on the diet of the recorded step, if there is one, and measure peaks from here on.

        Raises:
            BudgetError: nothing fits.
        """
        if self._recorded is not None:
            self._inside = True
            try:
                self._turn_on(*self._recorded)
            finally:
                self._inside = False
        self._counted = weakref.WeakSet(self._all)
        self._measure(period)

    def _turn_on(self, trace: Trace, size: int | None) -> None:
        """Choose and turn on the diet for a trace at a size, and print its report.

        Where the trace allows no choice, none is turned on, and a line says so.

        Raises:
            BudgetError: nothing fits; nothing is turned on.
        """
        optimizer, without = self._optimizer, self._without
        try:
            self.diet = diet_of(
                trace, optimizer.target, optimizer, self.budget_bytes, size=size, without=without
            )
        except BudgetError:
            raise
        except UmemError as error:
            self._say(f"nothing could be chosen: {error}")
            return
        for line in self.diet.report().splitlines():
            self._say(line)

    def _measure(self, period: int) -> None:
        """Begin to measure the peak of steps of ``period`` updates."""
        if self._peak is not None:
            self._peak.stop()
        self._period, self._peak = period, StepPeak(period)

    # -- failing updates -------------------------------------------------------------------

    def _is_done(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> bool:
        """Update under the diet; return False if a technique failed: then repeat the update.

        By then the step's state is restored, and the next choice is on. Raises OutOfMemoryError,
        errors that are not the diet's, and any of another optimizer's update; BudgetError where
        nothing else fits and no update has succeeded under a diet.
        """
        is_on = self.diet is not None and bool(self.diet.chosen.best.parts)
        if method is not self._optimizer or not is_on:
            proceed(method, *args, **kwargs)
            return True
        state = StepState(method.target, holds_graphs=False)
        try:
            proceed(method, *args, **kwargs)
        except OutOfMemoryError:
            raise
        except UmemError as error:
            part = self._blamed(error)
            if part is None:
                raise
            reason = str(error)
        else:
            self._has_updated = True
            return True
        state.put_back()
        self._fall_back(part, reason)
        return False

    def _blamed(self, error: UmemError) -> str | None:
        """Return the technique of the diet to blame for an error; None if no technique is."""
        parts = () if self.diet is None else self.diet.chosen.best.parts
        for kind, part in _BLAMED:
            if kind is not None and isinstance(error, kind):
                return part if part in parts else None
        return next((part for _, part in _BLAMED if part in parts), None)

    def _fall_back(self, part: str, reason: str) -> None:
        """Turn the diet off, and choose anew without one technique.

        Where nothing fits, the program goes on without a diet; or BudgetError, as long as no update
        has succeeded under one.
        """
        if self.diet is not None:
            self.diet.undo()
            self.diet = None
        self._without = (*self._without, part)
        self._say(f"this script does not go with {WORDS[part]}: {reason}")
        self._say("that is off, and the update is repeated under the next choice")
        try:
            self._choose(self._period)
        except BudgetError as error:
            if not self._has_updated:
                self._peak = None
                raise
            self._say(f"{error}. The script goes on as it is")
            self._measure(self._period)


class _Turn:
    """Counts the updates of a turn: until all optimizers have updated and the first does again.

    Args:
        first: the optimizer whose first update has just run.
        all_of_them: the program's optimizers, held weakly.
    """

    def __init__(self, first: Any, all_of_them: Iterable[Any]) -> None:
        self._first = weakref.ref(first)
        self._wait = weakref.WeakSet(one for one in all_of_them if one is not first)
        self._count = self._last = 1

    def after(self, method: Any) -> int | None:
        """Count an update; return the updates of a turn if it makes them known, else None.

        They are known when the first optimizer updates again: once all others have updated too, as
        the updates before this one; else, after `LONGEST_TURN`, as those since its own last update.
        """
        self._count += 1
        self._wait.discard(method)
        if method is not self._first():
            return None
        last, self._last = self._last, self._count
        if not self._wait:
            return self._count - 1
        return self._count - last if self._count > LONGEST_TURN else None
