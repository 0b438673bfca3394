"""The oracle of random losses: it draws every kind, and notices an `accumulate` that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from loss_verdicts import (
    REFUSED,
    RIGHT,
    SKIPPED,
    STATE,
    TRACEBACK,
    WARNED,
    WRONG,
    Accumulate,
    judged,
)
from random_losses import CLASSES, KNOWN, MAKERS, OTHER, Program, program

from umem.errors import AccumulationError, AccumulationWarning

KINDS = 50
"""Kinds of terms at least."""


def drawn(count: int, how: str = "micro_batch", grade: str = KNOWN) -> list[Program]:
    """The first programs of a class, parts of which are taken this way."""
    found = (each for each in map(program, range(10**6)) if (each.how, each.grade) == (how, grade))
    return [next(found) for _ in range(count)]


def in_parts(factor: Any, before: Any = None) -> Accumulate:
    """Make an `accumulate` that cuts batches and multiplies a part's gradient by a factor."""

    @contextmanager
    def block(optimizer: Any, micro_batch: int, **_: Any) -> Iterator[None]:
        def update(loss: Any, *arguments: Any) -> None:
            if before is not None:
                before(optimizer)
            size = len(arguments[0])
            starts = range(0, size, micro_batch)
            optimizer.target.cleargrads()
            for start in starts:
                part = [each[start : start + micro_batch] for each in arguments]
                (loss(*part) * factor(len(part[0]) / size, len(starts))).backward()
            type(optimizer).update(optimizer)

        optimizer.update = update
        try:
            yield
        finally:
            del optimizer.update

    return block


@contextmanager
def nothing(optimizer: Any, **_: Any) -> Iterator[None]:
    yield


def test_every_kind_of_term_comes_up_in_every_class() -> None:
    programs = [program(seed) for seed in range(1500)]
    kinds = {kind for each in programs for kind in each.kinds}
    assert len(kinds) > KINDS
    names = {maker.__name__ for makers in MAKERS.values() for maker in makers}
    assert {"nonlinear", "mixing", "sometimes", "regulariser"} <= kinds & names
    assert {each.grade for each in programs} == set(CLASSES)
    assert {each.how for each in programs} == {"micro_batch", "steps", "by hand"}
    assert {"lazy", "unused", ""} == {each.links for each in programs}
    labelled = {(c.labelled, c.lengths) for each in programs for c in each.compositions}
    assert len(labelled) == 5 * 3
    assert sum(each.grade == KNOWN for each in programs) > 400


def test_whole_batches_are_right() -> None:
    found = [judged(one, nothing).outcome for one in drawn(10) + drawn(10, grade=OTHER)]
    assert set(found) <= {RIGHT, SKIPPED} and found.count(RIGHT) > 15


@pytest.mark.thorough
def test_a_mean_of_the_parts_is_wrong_where_parts_differ() -> None:
    found = [judged(one, in_parts(lambda share, parts: 1 / parts)) for one in drawn(30)]
    assert sum(each.outcome == WRONG for each in found) > 15
    assert all("of the change" in each.message for each in found if each.outcome == WRONG)


def test_a_refusal_has_to_leave_everything_as_it_was() -> None:
    def refuse(optimizer: Any) -> None:
        raise AccumulationError("no")

    def change(optimizer: Any) -> None:
        optimizer.target.out.W.array[0, 0] += 1e-9
        refuse(optimizer)

    def draw(optimizer: Any) -> None:
        np.random.rand()
        refuse(optimizer)

    one = next(each for each in drawn(9) if not each.links and "model.out(" in each.source)
    assert judged(one, in_parts(None, refuse)).outcome == REFUSED
    for spoil, where in ((change, "out/W: "), (draw, "numpy.random: ")):
        found = judged(one, in_parts(None, spoil))
        assert found.outcome == STATE and where in found.message

    @contextmanager
    def stays(optimizer: Any, **_: Any) -> Iterator[None]:
        optimizer.update = lambda loss, *arguments: refuse(optimizer)
        yield

    found = judged(one, stays)
    assert found.outcome == STATE and "then, alone, AccumulationError" in found.message


def test_other_errors_warnings_and_numbers_that_were_drawn_are_told() -> None:
    def fail(optimizer: Any) -> None:
        raise KeyError("bare")

    def warn(optimizer: Any) -> None:
        import warnings

        warnings.warn("not compared", AccumulationWarning, stacklevel=2)

    one = next(e for e in drawn(50) if not e.links and e.compositions[0].size % 3 == 1)
    assert judged(one, in_parts(None, fail)).outcome == TRACEBACK
    assert "KeyError" in judged(one, in_parts(None, fail)).message
    assert judged(one, in_parts(lambda share, parts: 2.0, warn)).outcome == WARNED

    @contextmanager
    def draws(optimizer: Any, **_: Any) -> Iterator[None]:
        np.random.rand()
        yield

    assert judged(one, draws).outcome == WRONG
    assert judged(one, draws).message == "numpy.random is elsewhere"
