"""`Recompute` with offload: what is moved comes back as it was, to the bit, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import MemoryTier

from umem.compat.installation import find_package
from umem.planner import Link

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

from recompute_cases import MODELS, planned, same, train

import umem.chainer  # isort: skip

from umem.chainer.recompute import lower

pytestmark = pytest.mark.thorough

FAST, MIDDLE = Link(1e12, 1e12), Link(2e8, 2e8)


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> list[MemoryTier]:
    """The tiers that were opened; they are in memory."""
    found: list[MemoryTier] = []

    def opened(array: Any, where: Any) -> MemoryTier:
        found.append(MemoryTier())
        return found[-1]

    monkeypatch.setattr(lower, "open_tier", opened)
    monkeypatch.setattr(lower, "link_of", lambda tier, array: FAST)
    return found


def fates(memory: Any) -> set[str]:
    return {row.fate for row in memory.fates()}


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("budget", ["min", "70%"])
@pytest.mark.parametrize("link", [FAST, MIDDLE])
@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
def test_training_is_the_same_to_the_bit(
    name: str, budget: str, link: Link, tiers: list[MemoryTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "link_of", lambda tier, array: link)
    memory = umem.chainer.Recompute(budget, offload=True)
    same(train(name, memory), train(name))
    assert planned(memory) or name == "lstm"
    if budget == "min" and link is FAST and name != "shared":
        assert "moved" in fates(memory)
        assert tiers[0].sent_bytes and tiers[0].fetched_bytes
    assert tiers[0].is_closed and not tiers[0].below
