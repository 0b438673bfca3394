"""The oracle of random losses: it draws every kind, and notices an `accumulate` that is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import loss_families
import numpy as np
import odd_losses
import odd_programs
import pytest
from loss_verdicts import judged
from random_losses import WAYS, Program, program

import umem.chainer
from umem.errors import AccumulationError, AccumulationWarning

Share = Callable[[Any, tuple[Any, ...], tuple[Any, ...], int], float]
"""A part's share by the weight function, the part's and the batch's arguments, and the parts."""


def of_weight(weight: Any, part: tuple[Any, ...], batch: tuple[Any, ...], parts: int) -> float:
    return float(weight(*part) / weight(*batch))


def of_samples(weight: Any, part: tuple[Any, ...], batch: tuple[Any, ...], parts: int) -> float:
    return len(part[0]) / len(batch[0])


def of_parts(weight: Any, part: tuple[Any, ...], batch: tuple[Any, ...], parts: int) -> float:
    return 1 / parts


def in_parts(share: Share, before: Callable[[Any], None] = lambda optimizer: None) -> Any:
    """Make an `accumulate` that multiplies the loss of each part by a share."""

    @contextmanager
    def accumulate(optimizer: Any, *, micro_batch: int, weight: Any) -> Iterator[None]:
        def update(loss: Any, *batch: Any) -> None:
            optimizer.target.cleargrads()
            before(optimizer)
            starts = range(0, len(batch[0]), micro_batch)
            for start in starts:
                part = tuple(each[start : start + micro_batch] for each in batch)
                (loss(*part) * share(weight, part, batch, len(starts))).backward()
            type(optimizer).update(optimizer)

        optimizer.update = update
        try:
            yield
        finally:
            del optimizer.update

    return accumulate


@cache
def programs() -> list[Program]:
    return [program(seed) for seed in range(1500)]


def drawn(count: int, weight: str, grade: str = "weight") -> list[Program]:
    """Return the first programs of one term that micro_batch= takes, by what weight= gives."""
    found = [
        one
        for one in programs()
        if (one.how, one.grade, len(one.kinds), one.hook) == ("micro_batch", grade, 1, None)
        if f": {weight}" in f"{one.weight}" or weight in one.kinds
        if grade == "other" or str(one.weight).startswith("lambda")
    ]
    assert len(found) >= count
    return found[:count]


def outcomes(monkeypatch: pytest.MonkeyPatch, chosen: list[Program], accumulate: Any) -> list[str]:
    monkeypatch.setattr(umem.chainer, "accumulate", accumulate)
    return [judged(one).outcome for one in chosen]


BY_SAMPLES, BY_WEIGHT = "len(x)", "float(r.sum())"


@pytest.mark.thorough
def test_every_class_and_way_and_nearly_every_family_come_up() -> None:
    assert {one.grade for one in programs()} == {"known", "weight", "wrong", "other"}
    assert {one.how for one in programs()} == {*WAYS}
    terms = (loss_families.KNOWN, loss_families.RAGGED, loss_families.STEPWISE)
    names = {each[0] for of in (*terms, loss_families.REGULARISERS) for each in of}
    names |= {each[0] for of in (loss_families.SAID, loss_families.DICTIONARIES) for each in of}
    names |= {of[0].name for of in (*odd_losses.GROUPS, *odd_programs.MORE)}
    seen = {
        kind.removesuffix(", by hand").split(": ")[0] for one in programs() for kind in one.kinds
    }
    seen |= {kind for one in programs() for kind in one.kinds}
    assert len(names & seen) > 0.95 * len(names)


def test_a_program_is_a_function_of_its_seed() -> None:
    assert [str(program(seed)) for seed in range(50)] == [str(program(seed)) for seed in range(50)]


def test_parts_by_what_the_loss_is_divided_by_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = drawn(5, BY_SAMPLES) + drawn(3, BY_WEIGHT)
    assert set(outcomes(monkeypatch, chosen, in_parts(of_weight))) == {"right"}


def test_a_mean_of_the_parts_is_wrong_where_parts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = [
        one for one in drawn(12, BY_SAMPLES) if any(len({*sizes}) > 1 for _, sizes in one.updates)
    ]
    assert len(uneven) > 5
    assert set(outcomes(monkeypatch, uneven, in_parts(of_parts))) == {"wrong"}


def test_a_weight_that_is_ignored_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(outcomes(monkeypatch, drawn(3, BY_WEIGHT), in_parts(of_samples))) == {"wrong"}


def test_what_is_wrong_only_later_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[Any] = []

    def later(*given: Any) -> float:
        return of_samples(*given) * (2 if len(updates) > 1 else 1)

    for grade, kinds, outcome in (
        ("weight", BY_SAMPLES, "wrong"),
        ("other", "an added number by the batch", "wrong, later"),
    ):
        updates.clear()
        found = outcomes(monkeypatch, drawn(1, kinds, grade), in_parts(later, updates.append))
        assert found == [outcome]


def test_a_refusal_has_to_leave_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(optimizer: Any) -> None:
        raise AccumulationError("no")

    def change(optimizer: Any) -> None:
        next(optimizer.target.params()).array[...] += 1e-9
        refuse(optimizer)

    def draw(optimizer: Any) -> None:
        np.random.rand()
        refuse(optimizer)

    def leave(optimizer: Any) -> None:
        for parameter in optimizer.target.params():
            parameter.grad = np.ones_like(parameter.array)
        refuse(optimizer)

    chosen = drawn(1, BY_SAMPLES)
    assert outcomes(monkeypatch, chosen, in_parts(of_weight, refuse)) == ["refused"]
    for spoil in (change, draw, leave):
        found = outcomes(monkeypatch, chosen, in_parts(of_weight, spoil))
        assert found == ["refused, state changed"], spoil


def test_other_errors_and_warnings_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(optimizer: Any) -> None:
        raise KeyError("bare")

    def warn(optimizer: Any) -> None:
        warnings.warn("not compared", AccumulationWarning, stacklevel=2)

    chosen = drawn(1, BY_WEIGHT)
    assert outcomes(monkeypatch, chosen, in_parts(of_weight, fail)) == ["traceback"]
    assert outcomes(monkeypatch, chosen, in_parts(of_weight, warn)) == ["right, warned"]
    assert outcomes(monkeypatch, chosen, in_parts(of_parts, warn)) == ["wrong, warned"]
