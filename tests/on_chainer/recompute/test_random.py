"""Planned recomputation in random programs: every number is that of plain Chainer, to the bit."""

from __future__ import annotations

import multiprocessing
import os
import tracemalloc
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from random_programs import beside_plain

import umem.chainer
from umem.errors import RecomputeWarning

pytestmark = pytest.mark.thorough

BUDGETS: tuple[str, ...] = ("min", "80%", "min", "50%", "100%", "min", "60%", "95%", "min")
METHODS = ("auto", "auto", "lower_sets", "auto", "store_all", "chen")
ORDINARY, AT_ONCE = 60, 20
SLOW = 5000
LEAST_PLANNED = 0.6


def outcome(seed: int) -> tuple[str, str]:
    """How a program ends under Recompute (planned, unplanned, refused), and what is wrong."""
    memories: list[umem.chainer.Recompute] = []

    def memory(number: int) -> umem.chainer.Recompute:
        budget: str | int = BUDGETS[(seed + number) % len(BUDGETS)]
        if number and number % 3 == 0:  # a size that a graph may fit, or not
            budget = round(1.1 * (memories[0].predicted_bytes or 1 << 30))
        made = umem.chainer.Recompute(budget, METHODS[seed % len(METHODS)])  # type: ignore[arg-type]
        memories.append(made)
        return made

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RecomputeWarning)
        program, wrong, refused = beside_plain(seed, memory)
    end = f"refused: {type(refused).__name__}" if refused else "unplanned"
    if any(memory.planned_count for memory in memories):
        end = "planned"
    texts = [str(one.message) for one in said]
    if len(memories) == 1 and len(texts) != len(set(texts)):
        wrong.append("something was said twice")
    if tracemalloc.is_tracing():
        wrong.append("tracemalloc is on")
    about = f"{program.likely}, {program.model.kinds}, {program.model.stateful}, {program.state}"
    return end, f"seed {seed}: {wrong[:4]} ({about})" if wrong else ""


@pytest.mark.parametrize("first", range(0, ORDINARY, AT_ONCE))
def test_a_random_program_has_the_numbers_of_plain_chainer(first: int) -> None:
    found = [outcome(seed) for seed in range(first, first + AT_ONCE)]
    assert not [wrong for _, wrong in found if wrong]
    assert any(end == "planned" for end, _ in found)


@pytest.mark.slow
def test_thousands_of_random_programs_have_the_numbers_of_plain_chainer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = int(os.environ.get("UMEM_FIRST_SEED", ORDINARY))
    seeds = range(first, first + SLOW)
    ends: Counter[str] = Counter()
    wrong = []
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for end, text in pool.map(outcome, seeds, chunksize=10):
            ends[end] += 1
            wrong += [text] if text else []
    with capsys.disabled():
        print(f"\nseeds {seeds.start} to {seeds.stop - 1}: {dict(ends)}, {len(wrong)} wrong")
    assert not wrong
    assert ends["planned"] >= LEAST_PLANNED * SLOW
