"""A diet for a program that is not edited, chosen and turned on at its first update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import umem
from umem.chainer.dial.as_it_was import as_it_was
from umem.chainer.dial.diets import Diet, batch_of, diet_of
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import BudgetError, UmemError
from umem.trace.recording.kept_steps import Keeper, Kept, Steps
from umem.units import parse_bytes

LEAST_BATCH = 4
"""The smallest batch that two smaller ones are recorded for."""


class FirstUpdate(Subscriber):
    """Watches for the first update of an optimizer, records its step and turns on what it needs.

    Where the update is given a loss function and the batch, as by Chainer's ``StandardUpdater``,
    the step is recorded at a quarter and half of that batch before it runs. Elsewhere the loop is
    the program's: its second step is recorded as it goes, and what follows is dieted.

    Args:
        budget: as `umem.chainer.diet` takes it.
        say: takes each line for a person.

    Raises:
        SizeError: the budget is no size.
    """

    place = -1

    def __init__(self, budget: int | str, say: Callable[[str], None]) -> None:
        self.budget_bytes = parse_bytes(budget, "budget")
        self._say = say
        self._keeper: Keeper | None = None
        self._optimizer: Any = None
        self._others: set[int] = set()
        self._inside = False
        self.diet: Diet | None = None

    def begin(self, stack: ExitStack) -> None:
        """Watch until the stack is left; what is on by then is taken off."""
        subscribe(self)
        stack.callback(self._end)

    def _end(self) -> None:
        unsubscribe(self)
        if self._keeper is not None:
            self._keeper.finish()
        if self.diet is not None:
            self.diet.undo()

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """An optimizer updates."""
        if self._inside or method is self._optimizer:
            proceed(method, *args, **kwargs)
            return
        if self._optimizer is not None:
            self._on_another(method)
            proceed(method, *args, **kwargs)
            return
        self._optimizer = method
        if not kwargs and batch_of(args) >= LEAST_BATCH:
            self._choose_before(method, *args)
            method.update(*args)  # anew: what is on now has its say
            return
        proceed(method, *args, **kwargs)
        self._say(
            f"the first update is not given a batch of at least {LEAST_BATCH}, as in "
            "optimizer.update(lossfun, *arrays): the second step is recorded as it goes"
        )
        self._keeper = Keeper(Steps(1, 1), complete=self._choose_after)
        self._keeper.start()

    def _on_another(self, method: Any) -> None:
        if id(method) not in self._others:
            self._others.add(id(method))
            self._say(
                f"another optimizer, {type(method).__name__}, is as it was, and what it updates "
                "is not counted: the diet is of the first one's step"
            )

    def _choose_before(self, optimizer: Any, loss: Any, *arrays: Any) -> None:
        size = batch_of((loss, *arrays))

        def step(part: int) -> None:
            optimizer.update(loss, *(array[:part] for array in arrays))

        self._inside = True
        try:
            model, sizes = optimizer.target, (max(1, size // 4), max(2, size // 2))
            with as_it_was(model, optimizer):
                trace = umem.record_at(step, sizes)
            self._turned_on(diet_of(trace, model, optimizer, self.budget_bytes, size=size))
        except BudgetError:
            raise
        except UmemError as error:
            self._say(f"nothing could be chosen: {error}")
        finally:
            self._inside = False

    def _choose_after(self, kept: Kept) -> None:
        self._say("micro-batches need a loop that calls optimizer.update(lossfun, *arrays)")
        optimizer = self._optimizer
        try:
            found = diet_of(
                kept.trace, optimizer.target, optimizer, self.budget_bytes, without=("accumulate",)
            )
            self._turned_on(found)
        except BudgetError:
            raise
        except UmemError as error:
            self._say(f"nothing could be chosen: {error}")

    def _turned_on(self, found: Diet) -> None:
        self.diet = found
        for line in found.report().splitlines():
            self._say(line)
