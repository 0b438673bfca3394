"""Two techniques, one turned on after the other, and off in either order: right, or refused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import random_compositions as compositions
from chainer import optimizers

from umem.chainer.layers import LowRank
from umem.chainer.optimizers import dequantize_states, quantize_states
from umem.chainer.tap import POINTS
from umem.errors import AccumulationError, LayerError, StateError

ON: dict[str, Callable[[Any, Any, str], Any]] = {
    "half": lambda net, optimizer, _: umem.chainer.half_precision(net, optimizer, scale=64).undo,
    "group": lambda _, optimizer, __: umem.chainer.accumulate(optimizer, 3).enable().disable,
    "parts": lambda _, optimizer, __: (
        umem.chainer.accumulate(optimizer, micro_batch=3).enable().disable
    ),
    "recompute": lambda _, __, ___: entered(umem.chainer.Recompute("50%")),
    "offload": lambda _, __, folder: entered(umem.chainer.Offload(folder)),
    "workspace": lambda _, __, ___: umem.chainer.workspace("4KiB").enable().disable,
    "saved_in": lambda _, __, ___: umem.chainer.saved_in("bfloat16").undo,
    "8-bit": lambda _, optimizer, __: quantized(optimizer),
    "tie": lambda net, _, __: umem.chainer.tie(net, "/third", "/fourth").undo,
    "slimmer": lambda net, _, __: (
        umem.chainer.slimmer(net, {"/second": LowRank(rank=6)}, quiet=True).undo
    ),
    "aware": lambda net, _, __: umem.chainer.quantization_aware(net, bits=8).undo,
    "chunked": lambda _, __, ___: umem.chainer.chunked_updates().close,
}
STRUCTURE = {"group", "tie", "slimmer"}
"""What decides which numbers are right; all else is near to plain training."""
LOOSE = {"aware"}
REFUSED = {
    ("half", "slimmer"), ("aware", "slimmer"),
    ("group", "parts"), ("parts", "group"), ("recompute", "offload"), ("offload", "recompute"),
    ("group", "tie"), ("group", "slimmer"),
}  # fmt: skip
"""The second is not turned on while the first is on, and a group has a call that waits."""
STAYS = {("slimmer", "half"), ("slimmer", "group"), ("tie", "group")}
"""The first is not turned off while the second is on."""
MIXES = {
    (first, second): "of its norm from"
    for one in ("group", "parts")
    for first, second in (("aware", one), (one, "aware"))
}
"""Ranges that follow a batch are those of no part: refused in the call."""


def entered(block: Any) -> Callable[[], None]:
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


def quantized(optimizer: Any) -> Callable[[], Any]:
    quantize_states(optimizer, least_size=0)
    return lambda: dequantize_states(optimizer)


def everything(net: Any, optimizer: Any) -> dict[str, Any]:
    """What a refusal must not change, to the objects themselves and Chainer's functions."""
    found = compositions.left_of(net, optimizer) | {"class": type(optimizer).__name__}
    for path, link in net.namedlinks():
        found[f"{path} class"] = type(link).__name__
    for name, parameter in net.namedparams():
        found[f"{name} is"] = id(parameter), id(parameter.array), id(parameter.update_rule)
        found[f"{name} grad"] = None if parameter.grad is None else parameter.grad.copy()
    return found | {str(point): vars(point.owner)[point.name] for point in POINTS}


TRAININGS: list[Any] = []


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    """Leave nothing on after a test that failed."""
    yield
    while TRAININGS:
        for off in [*TRAININGS.pop()._off.values()][::-1]:
            with contextlib.suppress(Exception):
                off()


class Training:
    """A network that is trained while techniques come and go."""

    def __init__(self, folder: str) -> None:
        drawn = compositions.Composition(3, "Perceptron", 12, False, "", {}, [], None)
        self._batch = compositions.batches(drawn)[0]
        np.random.seed(0)
        self.net = compositions.Perceptron()
        self._optimizer = optimizers.MomentumSGD(0.02).setup(self.net)
        self._folder = folder
        self._off: dict[str, Callable[[], Any]] = {}
        TRAININGS.append(self)

    def call(self) -> None:
        self._optimizer.update(self.net, *self._batch)

    def turn_on(self, name: str) -> None:
        self._off[name] = ON[name](self.net, self._optimizer, self._folder)

    def turn_off(self, name: str) -> None:
        self._off[name]()
        del self._off[name]

    def refuses(self, what: Callable[[str], None], name: str) -> None:
        before = everything(self.net, self._optimizer)
        with pytest.raises((StateError, LayerError)):
            what(name)
        assert not compositions.differing(everything(self.net, self._optimizer), before)

    def end(self) -> dict[str, Any]:
        while self._off:
            self.turn_off([*self._off][-1])
        self.call()
        return {name: p.array for name, p in self.net.namedparams()}


def expected(first: str, second: str, crossed: bool) -> dict[str, Any]:
    """The same with nothing on but what decides on the numbers."""
    training = Training("")
    for step, name in steps(first, second, crossed):
        if step == "call":
            training.call()
        elif name in STRUCTURE:
            getattr(training, step)(name)
    return training.end()


def steps(first: str, second: str, crossed: bool) -> list[tuple[str, str]]:
    leaving = (first, second) if crossed else (second, first)
    return [
        ("turn_on", first), ("call", ""), ("turn_on", second), ("call", ""),
        ("turn_off", leaving[0]), ("call", ""), ("turn_off", leaving[1]),
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("crossed", [False, True], ids=["nested", "crossed"])
@pytest.mark.parametrize("first, second", list(itertools.permutations(ON, 2)))
def test_a_pair_is_right_or_refused_before_anything_changes(
    first: str, second: str, crossed: bool, tmp_path: Any
) -> None:
    originals = [vars(point.owner)[point.name] for point in POINTS]
    training = Training(str(tmp_path))
    pair = first, second
    if pair in MIXES:
        training.turn_on(first)
        training.call()
        training.turn_on(second)
        with pytest.raises(AccumulationError, match=MIXES[pair]):
            training.call()
    elif pair in REFUSED:
        training.turn_on(first)
        training.call()
        training.refuses(training.turn_on, second)
    elif pair in STAYS and crossed:
        for name in pair:
            training.turn_on(name)
            training.call()
        training.refuses(training.turn_off, first)
    else:
        for step, name in steps(first, second, crossed):
            training.call() if step == "call" else getattr(training, step)(name)
        near = expected(first, second, crossed)
        far = 2e-2 if LOOSE & {first, second} else 2e-3
        for name, array in training.end().items():
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, near[name], atol=far, rtol=0, err_msg=name)
    training.end()
    assert [vars(point.owner)[point.name] for point in POINTS] == originals


@pytest.mark.parametrize("name", ["tie", "slimmer"])
def test_parameters_are_not_exchanged_inside_of_an_open_group(name: str, tmp_path: Any) -> None:
    training = Training(str(tmp_path))
    training.turn_on("group")
    training.call()
    training.refuses(training.turn_on, name)
    for _ in range(2):
        training.call()
    training.turn_on(name)  # between two groups nothing waits
    training.call()
    training.refuses(training.turn_off, name)
    training.turn_off("group")
    training.turn_off(name)
