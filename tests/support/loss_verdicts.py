"""Runs a random program with `accumulate` and with the whole batch, and says which differ.

The reference is Chainer's own ``optimizer.update`` of whole batches, in float64; nothing of umem
takes part in it.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from random_losses import Program, program

import umem.chainer  # isort: skip  (before chainer)
import chainer

from umem.errors import AccumulationWarning, UmemError

RIGHT, REFUSED, WRONG, WARNED, STATE, TRACEBACK, SKIPPED = OUTCOMES = (
    "right",
    "refused",
    "wrong",
    "wrong, warned",
    "refused, state changed",
    "traceback",
    "skipped",
)
"""Wrong, warned: after an AccumulationWarning. Skipped: the whole batch raises, or diverges, or the
program raises the same of some of its samples by itself."""
TOLERANCE = 1e-7
"""Of the largest change of a parameter in an update; rounding is 1e-15 of it."""
LARGEST = 1e4
Accumulate = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Verdict:
    """What came out of a program.

    Attributes:
        outcome: one of `OUTCOMES`.
        update: the number of the update that is wrong or was refused, from 0.
        message: by how much it is off, or the error.
    """

    outcome: str
    update: int = -1
    message: str = ""


class State:
    """What an update changes: parameters, kept values, random generator, count of updates."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        saved: dict[str, Any] = {}
        chainer.serializers.DictionarySerializer(saved).save(model)
        self.values = {name: np.array(value) for name, value in saved.items()}
        self.random = np.random.get_state()[1:3]
        self.updates = optimizer.t

    def differs(self, other: State) -> str:
        """Name the first difference; nothing is allowed for rounding."""
        for name, value in self.values.items():
            if not _same(value, other.values.get(name)):
                return name
        if self.updates != other.updates:
            return "optimizer.t"
        return "" if self.has_random_of(other) else "numpy.random"

    def has_random_of(self, other: State) -> bool:
        """Say whether the next random numbers are the same."""
        return self.random[1] == other.random[1] and bool((self.random[0] == other.random[0]).all())


def _same(a: Any, b: Any) -> bool:
    if b is None or a.shape != b.shape:
        return False
    return bool(a.tobytes() == b.tobytes()) if a.dtype != object else a.item() is b.item()


class Run:
    """A model of a program, its optimizer and its loss function, from the same beginning."""

    def __init__(self, program: Program) -> None:
        np.random.seed(program.seed % 2**32)
        self.program = program
        self.model = program.model()
        self.optimizer = program.optimizer_of(self.model)
        self.functions = program.functions(self.model)

    def state(self) -> State:
        return State(self.model, self.optimizer)

    def begin(self, place: int) -> None:
        """Set what a program changes from batch to batch: a factor, and which loss it is."""
        self.functions["TURN"][0] = place
        self.functions["BETA"][0] = 0.3 / (place + 1)

    def update(self, arguments: list[Any]) -> Iterator[None]:
        """Make one call of update; yields right before it, after backward by hand."""
        loss = self.functions["loss"]
        if self.program.how != "by hand":
            yield
            self.optimizer.update(loss, *arguments)
            return
        self.model.cleargrads()
        loss(*arguments).backward()
        yield
        self.optimizer.update()


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    with chainer.using_config("dtype", np.float64), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def whole(program: Program) -> list[State] | str:
    """Train by whole batches; the state before, and after each update, or why there is none."""
    with _quiet():
        run = Run(program)
        states = [run.state()]
        for place, batch in enumerate(program.batches()):
            run.begin(place)
            try:
                run.optimizer.update(run.functions["loss"], *batch)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            states.append(run.state())
            if not _is_calm(states[-1]):
                return "diverges"
    return states


def _is_calm(state: State) -> bool:
    numbers = [v for v in state.values.values() if v.dtype.kind == "f"]
    return all(np.isfinite(v).all() and (abs(v) < LARGEST).all() for v in numbers)


def judged(program: Program, accumulate: Accumulate = umem.chainer.accumulate) -> Verdict:
    """Run a program both ways and compare them after each update."""
    expected = whole(program)
    if isinstance(expected, str):
        return Verdict(SKIPPED, message=expected)
    with _quiet() as caught:
        verdict = _accumulated(Run(program), accumulate, expected)
    is_told = any(issubclass(each.category, AccumulationWarning) for each in caught)
    if verdict.outcome == WRONG and is_told:
        return Verdict(WARNED, verdict.update, verdict.message)
    return verdict


def _accumulated(run: Run, accumulate: Accumulate, expected: list[State]) -> Verdict:
    program = run.program
    options = dict(program.options)
    if "weight" in run.functions:
        options["weight"] = run.functions["weight"]
    place, before = 0, run.state()
    try:
        with accumulate(run.optimizer, **options):
            for place, batch in enumerate(program.batches()):
                run.begin(place)
                for arguments in program.parts(place, batch):
                    for _ in run.update(arguments):
                        before = run.state()
                is_open = place + 1 == len(program.compositions) and run.optimizer.t == place
                if not is_open:  # a group that is cut short is updated at the end of the block
                    off = _off(run.state(), *expected[place : place + 2])
                    if off:
                        return Verdict(WRONG, place, off)
        off = _off(run.state(), *expected[-2:])
    except UmemError as error:
        message = f"{type(error).__name__}: {error}"
        changed = before.differs(run.state()) or _off_alone(run, place, expected)
        if changed:
            return Verdict(STATE, place, f"{changed}: {message}")
        return Verdict(REFUSED, place, message)
    except Exception as error:
        outcome = SKIPPED if _raises_alone(run, place, type(error)) else TRACEBACK
        return Verdict(outcome, place, _traced(error))
    return Verdict(WRONG, place, off) if off else Verdict(RIGHT)


def _raises_alone(run: Run, place: int, kind: type[Exception]) -> bool:
    """Say whether the loss of some samples raises by Chainer alone, as where it is the number 0."""
    batch, program = run.program.batches()[place], run.program
    size = program.options.get("micro_batch")
    starts = range(0, len(batch[0]), size) if size else ()
    cut = [[each[start : start + size] for each in batch] for start in starts]
    for arguments in cut or program.parts(place, batch):
        try:
            run.functions["loss"](*arguments).backward()
        except kind:
            return True
    return False


def _off_alone(run: Run, place: int, expected: list[State]) -> str:
    """Update by Chainer alone after a refusal: say by how much that is off, or what it raises."""
    try:
        run.begin(place)
        run.optimizer.update(run.functions["loss"], *run.program.batches()[place])
    except Exception as error:
        return f"then, alone, {_traced(error)}"
    off = _off(run.state(), *expected[place : place + 2])
    return off and f"then, alone, {off}"


def _traced(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} at {Path(frame.filename).name}:{frame.lineno}"


def _off(found: State, before: State, after: State) -> str:
    """Say by how much the change of an update is off; empty where it is rounding."""
    if found.updates != after.updates:
        return f"{found.updates} updates instead of {after.updates}"
    names = [name for name, value in after.values.items() if value.dtype.kind == "f"]
    if any(name not in found.values or found.values[name].dtype.kind != "f" for name in names):
        return "a parameter has no array"
    old = {name: value for name, value in before.values.items() if value.dtype.kind == "f"}
    changes = [after.values[name] - old[name] for name in names if name in old]
    change = max((abs(each).max() for each in changes), default=0.0)
    off = max(abs(found.values[name] - after.values[name]).max() for name in names)
    size = max(abs(after.values[name]).max() for name in names)
    if not off <= TOLERANCE * change + 1e-12 * size:
        return f"off by {off / change if change else np.inf:.2g} of the change"
    return "" if found.has_random_of(after) else "numpy.random is elsewhere"


def main(seeds: list[str]) -> None:
    """Print programs and what comes of them."""
    for seed in map(int, seeds):
        one = program(seed)
        verdict = judged(one)
        print(one)
        print(f"# {verdict.outcome} (update {verdict.update}): {verdict.message}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
