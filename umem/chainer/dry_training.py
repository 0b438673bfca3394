"""A dry run of Chainer's training: the ends of steps, and a Trainer's unused extensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

import numpy
from chainer.training import extensions as chainers

from umem.chainer.tap import Proceed, Subscriber, is_subscribed, subscribe, unsubscribe
from umem.errors import is_cupys_out_of_memory

EVALUATED_BATCHES = 2
"""Batches of an evaluator that is called for its memory: the second is allocated while the remains
of the first are still alive."""


_PLANNED_STEPS = 5
"""Under `Recompute` the first three steps are learned from; the next two follow a plan."""


class TrainerFacts(NamedTuple):
    """The lengths of an epoch and of a Trainer's run, in steps; None if unknown.

    ``evaluates``: whether it has an evaluator.
    """

    epoch_steps: int | None
    run_steps: int | None
    evaluates: bool


class _CarriedOut(Subscriber):
    """Notes the updates that are carried out; innermost, inside groups and skipped steps."""

    place = 4

    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        proceed(method, *args, **kwargs)
        self._run.updated(method)


class DryTraining(Subscriber):
    """Reports steps to a dry run; outermost, so that all other subscribers have seen a step's end.

    Args:
        run: the `umem.cli.dry_run.DryRun` to report to.
    """

    place = -10

    def __init__(self, run: Any) -> None:
        self._run, self._updates = run, _CarriedOut(run)
        self._is_in_trainer = False

    def start(self) -> None:
        """Follow Chainer from now on."""
        subscribe(self)
        subscribe(self._updates)

    def stop(self) -> None:
        """Stop following it."""
        unsubscribe(self._updates)
        unsubscribe(self)

    def setup(self, proceed: Proceed, method: Any, link: Any) -> Any:
        """Count an optimizer whose updates a step must include."""
        found = proceed(method, link)
        self._run.set_up(method)
        return found

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """End a step after the last update of a turn; end the program after enough steps.

        A model on NumPy ends it before its first update, which would really compute.
        """
        if method.target is not None and method.target.xp is numpy:
            self._run.end_if_untouched()
        proceed(method, *args, **kwargs)
        if is_subscribed("PassRunner"):
            self._run.wait_for(_PLANNED_STEPS)
        self._run.after_update()
        if not self._is_in_trainer:
            self._run.end_if_over()

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """End a program that trains on NumPy."""
        self._run.end_if_untouched()
        proceed(*args, **kwargs)

    def train(self, proceed: Proceed, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Run a trainer until there are enough steps, and then its extensions that did not run."""
        self._run.trainer_began(_facts(trainer))
        if not args:  # the run itself reports the error that ends it, once
            kwargs.setdefault("show_loop_exception_msg", False)
        self._is_in_trainer = True
        try:
            with _Extensions(trainer, self._run).followed():
                proceed(trainer, *args, **kwargs)
        finally:
            self._is_in_trainer = False


class _Extensions:
    """The extensions of a trainer: which of them have run."""

    def __init__(self, trainer: Any, run: Any) -> None:
        self._trainer, self._run = trainer, run
        self._have_run: set[str] = set()
        # Chainer's private: no public name lists the extensions with their triggers.
        self._entries = trainer._extensions

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Wrap each update, and watch the triggers."""
        updater = self._trainer.updater
        update = updater.update

        def guarded() -> None:
            if self._run.is_over:
                self._run_others()
                self._run.end_if_over()
            self._run.begin_step()
            update()

        with ExitStack() as stack:
            for name, entry in self._entries.items():
                trigger = entry.trigger
                if trigger is not None:
                    entry.trigger = _Watched(trigger, self._noting(name, entry))
                    stack.callback(setattr, entry, "trigger", trigger)
            updater.update = guarded  # the trainer reads it from there when it begins
            stack.callback(delattr, updater, "update")
            yield

    def _noting(self, name: str, entry: Any) -> Callable[[], None]:
        def note() -> None:
            self._have_run.add(name)
            if isinstance(entry.extension, chainers.Evaluator):
                self._run.evaluated()

        return note

    def _run_others(self) -> None:
        """Call each extension once that did not run, in the order of their priorities."""
        entries = sorted(self._entries.items(), key=lambda item: -item[1].priority)
        for name, entry in entries:
            if name in self._have_run:
                continue
            self._run.calls_early(name)
            try:
                with _two_batches(entry.extension):
                    entry.extension(self._trainer)
            except Exception as error:
                if is_cupys_out_of_memory(error):
                    raise
                self._run.failed_early(name, error)  # before its turn: not the program's fault
                continue
            if isinstance(entry.extension, chainers.Evaluator):
                self._run.evaluated()


class _Watched:
    """A trigger that reports when it fires; otherwise the trigger itself."""

    def __init__(self, trigger: Any, fired: Callable[[], None]) -> None:
        self._trigger, self._fired = trigger, fired

    def __call__(self, trainer: Any) -> Any:
        is_now = self._trigger(trainer)
        if is_now:
            self._fired()
        return is_now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trigger, name)


class _FirstBatches:
    """The first batches of an iterator; otherwise the iterator itself."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._iterator), EVALUATED_BATCHES)

    def __copy__(self) -> _FirstBatches:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


@contextmanager
def _two_batches(extension: Any) -> Iterator[None]:
    """Make an evaluator see only the first batches."""
    # Chainer's private: `get_iterator` reads it, and users' own evaluators do by either name.
    kept = getattr(extension, "_iterators", None)
    if not (isinstance(extension, chainers.Evaluator) and isinstance(kept, dict)):
        yield
        return
    extension._iterators = {name: _FirstBatches(each) for name, each in kept.items()}
    try:
        yield
    finally:
        extension._iterators = kept


def _facts(trainer: Any) -> TrainerFacts:
    """Read the lengths of an epoch and of the run, if the trainer's parts are Chainer's own."""
    # Chainer's private: no public name lists the extensions.
    entries = trainer._extensions.values()
    evaluates = any(isinstance(entry.extension, chainers.Evaluator) for entry in entries)
    epoch = None
    try:
        iterator = trainer.updater.get_iterator("main")
        epoch = ceil(len(iterator.dataset) / iterator.batch_size)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        pass  # the program's own updater or iterator
    trigger = trainer.stop_trigger
    trigger = getattr(trigger, "max_trigger", trigger)  # of an EarlyStoppingTrigger
    period, unit = getattr(trigger, "period", None), getattr(trigger, "unit", None)
    if unit == "iteration":
        return TrainerFacts(epoch, period, evaluates)
    if unit == "epoch" and epoch is not None and period is not None:
        return TrainerFacts(epoch, ceil(epoch * period), evaluates)
    return TrainerFacts(epoch, None, evaluates)
