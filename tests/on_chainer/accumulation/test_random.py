"""Random losses give the gradient of the whole batch in parts, or are refused with nothing changed.

tests/conformance/accumulation_random.py runs thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from loss_verdicts import judged
from random_losses import program

LEAST_ACCEPTED = 0.95
"""Of the known, and of those with a right weight=."""
CHUNK = 40
ALLOWED = ("right", "refused", "wrong, later", "raised by the loss")


def check(seeds: Iterable[int]) -> None:
    """Judge programs; a failing one is printed as source."""
    accepted = []
    for seed in seeds:
        one = program(seed)
        found = judged(one)
        if found.outcome == "skipped":
            continue
        is_right = found.outcome in ("right", "right, warned")
        if one.grade in ("known", "weight"):
            accepted.append(is_right)
        is_compared = one.how != "by hand" and one.grade != "other"
        warned = () if is_compared else ("right, warned", "wrong, warned")
        allowed = (*ALLOWED, *warned)[: None if one.grade == "other" else -1]
        assert found.outcome in allowed, f"{found.outcome}: {found.message}\n{one}"
    assert sum(accepted) >= int(LEAST_ACCEPTED * len(accepted)) > 0


@pytest.mark.thorough
def test_twenty_random_losses_are_right_or_refused() -> None:
    check(range(20))


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(20, 300, CHUNK))
def test_random_losses_are_right_or_refused(first: int) -> None:
    check(range(first, first + CHUNK))
