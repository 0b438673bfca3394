"""Offload changes no bit: of many networks, in every way to go backward, whoever holds what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recompute_cases import MODELS, same, train

import umem.chainer  # isort: skip  (before chainer)

from umem.chainer.offload import mover


@pytest.fixture(autouse=True)
def everything_is_sent(monkeypatch: Any) -> None:
    """The networks of tests are small."""
    monkeypatch.setattr(mover, "SMALLEST_BYTES", 1)


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes(name: str, tmp_path: Path) -> None:
    offload = umem.chainer.Offload(tmp_path)
    same(train(name, offload), train(name))
    assert sum(tier.fetched_bytes for tier in offload.tiers()) > 0
