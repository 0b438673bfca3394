"""What is on until it is undone, whatever it is, is undone in the same ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem._common.switch import Switch
from umem.errors import StateError


class Lamp(Switch):
    times = 0

    def _take_back(self) -> None:
        self.times += 1


def test_a_block_undoes_what_is_on_still_whatever_leaves_it() -> None:
    with pytest.raises(KeyError), Lamp() as lamp:
        raise KeyError
    with Lamp() as other:
        other.undo()
    assert lamp.times == other.times == 1


def switches() -> dict[str, Switch]:
    """One of each that umem.chainer returns, on a model of its own."""

    def model() -> Any:
        net = chainer.Sequential(L.Linear(4, 8), F.relu, L.Linear(8, 4))
        net(np.ones((2, 4), "f"))
        return net

    half = model()
    tied = chainer.Chain()
    with tied.init_scope():
        tied.first, tied.other = L.Linear(4, 4), L.Linear(4, 4)
    return {
        "half_precision": umem.chainer.half_precision(half, chainer.optimizers.Adam().setup(half)),
        "saved_in": umem.chainer.saved_in("bfloat16"),
        "chunked_updates": umem.chainer.chunked_updates(),
        "quantization_aware": umem.chainer.quantization_aware(model(), bits=8),
        "slimmer": umem.chainer.slimmer(
            model(), {"/0": umem.chainer.layers.LowRank(rank=1)}, quiet=True
        ),
        "tie": umem.chainer.tie(tied, "/first/W", "/other/W"),
    }


@pytest.mark.parametrize(
    "name",
    sorted(
        ["half_precision", "saved_in", "chunked_updates", "quantization_aware", "slimmer", "tie"]
    ),
)
def test_all_that_umem_turns_on_is_undone_by_the_end_of_with(name: str) -> None:
    found = switches()
    try:
        with found[name] as entered:
            assert entered is found[name] and entered.is_on
        assert not entered.is_on
        if entered.undone:
            with pytest.raises(StateError, match="undone already"):
                entered.undo()
        else:
            entered.undo()
    finally:
        for one in found.values():
            if one.is_on:
                one.undo()
