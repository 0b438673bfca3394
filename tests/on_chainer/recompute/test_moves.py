"""`Recompute` with offload: what is moved comes back as it was, to the bit, whatever happens."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recompute_cases import MODELS, planned, same, train
from tiers import MemorySent, MemoryTier

from umem.planner import Link

import umem.chainer  # isort: skip

from umem.chainer.recompute import offloaded
from umem.chainer.recompute.offloaded import Offloaded
from umem.chainer.saved.tiers.file_tier import FileTier
from umem.errors import FileError

import chainer  # isort: skip
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

pytestmark = pytest.mark.thorough

FAST, MIDDLE = Link(1e12, 1e12), Link(2e8, 2e8)


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> list[MemoryTier]:
    """The tiers that were opened; they are in memory."""
    found: list[MemoryTier] = []

    def opened(array: Any, where: Any) -> MemoryTier:
        found.append(MemoryTier())
        return found[-1]

    monkeypatch.setattr(offloaded, "open_tier", opened)
    monkeypatch.setattr(offloaded, "link_of", lambda tier, array: FAST)
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
    monkeypatch.setattr(offloaded, "link_of", lambda tier, array: link)
    memory = umem.chainer.Recompute(budget, offload=True)
    same(train(name, memory), train(name))
    assert planned(memory) or name == "lstm"
    if budget == "min" and link is FAST and name != "shared":
        assert "offloaded" in fates(memory)
        assert tiers[0].sent_bytes and tiers[0].fetched_bytes
    assert tiers[0].is_closed and not tiers[0].below


# -- errors, and what they leave -----------------------------------------------------------------


def deep() -> tuple[Any, Any]:
    """A network, of which at half its memory something is moved, and its loss."""
    np.random.seed(0)
    x, t = np.random.rand(64, 512).astype("f"), np.zeros(64, "i")
    layers = [one for _ in range(6) for one in (L.Linear(512, 512), F.sigmoid)]
    model = chainer.Sequential(*layers, L.Linear(512, 4))
    return model, lambda: F.softmax_cross_entropy(model(x), t)


def gradients(model: Any, loss: Any) -> list[bytes]:
    model.cleargrads()
    loss.backward()
    return [parameter.grad.tobytes() for parameter in model.params()]


def test_what_cannot_come_back_when_the_block_is_left_is_made_again(
    tiers: list[MemoryTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss_of = deep()
    expected = gradients(model, loss_of())

    def refuse(sent: MemorySent) -> Any:
        raise FileError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(FileError, match="the disk is gone"):
        with umem.chainer.Recompute("min", offload=True) as memory:
            for _ in range(4):
                gradients(model, loss_of())
            assert "offloaded" in fates(memory)
            loss = loss_of()
            patch.setattr(MemorySent, "array", refuse)
    gc.collect()  # the error holds what it went through
    assert tiers[0].is_closed and not tiers[0].below
    assert gradients(model, loss) == expected
    with umem.chainer.Recompute("min", offload=True):
        assert gradients(model, loss_of()) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_block_without_what_is_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded, "link_of", lambda tier, array: FAST)
    monkeypatch.setattr(offloaded, "open_tier", lambda array, where: FileTier(tmp_path))
    monkeypatch.setattr("umem._common.files.IN_MEMORY", ())
    model, loss_of = deep()
    expected = gradients(model, loss_of())
    memory = umem.chainer.Recompute("min", offload=tmp_path)
    child = -1
    try:
        with memory:
            for _ in range(4):
                gradients(model, loss_of())
            loss = loss_of()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # threads and fork
                child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert gradients(model, loss) == expected
        if not child:  # everything here may run twice
            os._exit(0 if gradients(model, loss) == expected else 2)
    finally:
        if not child:
            os._exit(1)


def test_arrays_that_share_their_own_bytes_do_not_go() -> None:
    memory = bytearray(np.arange(100, dtype="f4").tobytes())
    windows: Any = np.ndarray((30, 4), "f4", memory, 0, (8, 4))
    for array in (windows, windows[:, :2], np.array([None]), np.empty((0, 4))):
        assert Offloaded.send(MemoryTier(), [array]) is None


class Made(chainer.FunctionNode):
    """A function without inputs."""

    def forward(self, inputs: Any) -> Any:
        return (np.ones((2, 3), "f"),)


def test_a_pass_may_begin_with_a_function_without_inputs(tiers: list[MemoryTier]) -> None:
    model, loss_of = deep()
    expected = gradients(model, loss_of())
    with umem.chainer.Recompute("min", offload=True):
        for _ in range(3):
            assert Made().apply(())[0].shape == (2, 3)
            assert gradients(model, loss_of()) == expected
