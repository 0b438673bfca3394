"""What a batch is cut of, `AccumulatingUpdater` in a Trainer, and snapshots of open groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
from accumulation_cases import (
    FULL,
    KNOWN,
    LOSSES,
    WEIGHTS,
    Net,
    apart,
    gradients,
    optimizer_of,
    parameters,
    some,
    updater,
)

MEAN, VALID = KNOWN["mean"], KNOWN["valid labels"]
accumulate, AccumulatingUpdater = umem.chainer.accumulate, umem.chainer.AccumulatingUpdater


# -- arguments -------------------------------------------------------------------------------------


def test_arrays_variables_lists_and_keywords_are_cut_and_the_rest_goes_everywhere() -> None:
    seen = []

    def lossfun(x: Any, rows: Any, steps: Any, *, scale: float, y: Any, none: None) -> Any:
        seen.append((x.shape, len(rows), [s.shape for s in steps], scale, y.shape, none))
        assert type(rows) is tuple and isinstance(y, chainer.Variable)
        return F.mean(net.first(x)) + 0 * F.mean(y)

    net = Net(MEAN)
    x, _ = some()
    rows, steps = tuple(range(11)), [np.zeros((11, 2)), np.zeros((11, 3))]
    with accumulate(optimizer := optimizer_of(net), micro_batch=6, check=False):
        optimizer.update(
            lossfun, x, rows, steps, scale=2.0, y=chainer.Variable(x[:, :1]), none=None
        )
    whole, half = ((6, 5), 6, [(6, 2), (6, 3)], 2.0, (6, 1), None), 5
    assert seen[0] == whole and seen[-1][:2] == ((5, 5), half)


def test_named_tuples_stay_named_tuples() -> None:
    class Pair(NamedTuple):
        x: Any
        y: Any

    def lossfun(pair: Any) -> Any:
        return F.mean((net.first(pair.x) - pair.y) ** 2)

    x, _ = some()
    found = []
    for size in (4, 11):
        net = Net(MEAN)
        with accumulate(optimizer := optimizer_of(net), micro_batch=size, check=False):
            optimizer.update(lossfun, Pair(x, np.ones((11, 8))))
        found.append(gradients(net.first))
    assert apart(*found) < 1e-13


def test_gradients_of_inputs_are_those_of_the_parts() -> None:
    """A variable that the program made goes into the graph of each part."""
    net = Net(MEAN)
    x, _ = some()
    made = chainer.Parameter(x.copy())
    y = made * 2
    with accumulate(optimizer := optimizer_of(net), micro_batch=4, check=False):
        optimizer.update(lambda y: F.mean(net.first(y) ** 2), y)
    found = made.grad
    made.cleargrad()
    plain = Net(MEAN)
    F.mean(plain.first(made * 2) ** 2).backward()
    assert apart(made.grad, found) < 1e-13


# -- an updater ------------------------------------------------------------------------------------


@pytest.mark.parametrize("converter", ["padding", "ragged", "dict", "one"])
def test_converters_of_any_kind(converter: str) -> None:
    draw = np.random.RandomState(4)
    rows = [draw.randn(n, 5) for n in (3, 1, 4, 2, 5, 2, 1)]

    def loss(x: Any = None, **more: Any) -> Any:
        x = more.get("rows", x)
        if isinstance(x, list):
            total = [F.reshape(F.sum(F.tanh(net.first(row))), (1,)) for row in x]
            return F.mean(F.concat(total, 0))
        y = F.tanh(net.first(x.reshape(-1, 5)))
        return F.sum(y)

    converters: dict[str, Any] = {
        "padding": lambda b, d: chainer.dataset.concat_examples(b, d, padding=0),
        "ragged": lambda b, d: (list(b),),
        "dict": lambda b, d: {"rows": list(b)},
        "one": lambda b, d: list(b),
    }
    found, weight = [], 1 if converter == "padding" else None
    for size in (7, 2):
        net = Net(MEAN)
        iterator = chainer.iterators.SerialIterator(rows, 7, shuffle=False)
        one = AccumulatingUpdater(
            iterator, optimizer_of(net), size,
            converter=converters[converter], loss_func=loss, weight=weight,
        )  # fmt: skip
        one.update()
        found.append(gradients(net.first))
    assert apart(*found) < 1e-13


def test_a_trainer_sees_the_loss_of_the_whole_batch() -> None:
    seen = []
    for size in (FULL, 4):
        net = Net(VALID)
        trainer = chainer.training.Trainer(updater(net, size), (1, "iteration"))
        trainer.extend(lambda trainer: seen.append(dict(trainer.observation)))
        trainer.run()
    for whole, parts in [seen]:
        assert abs(float(whole["main/loss"].item()) - float(parts["main/loss"])) < 1e-13
        assert abs(parts["main/rows"] - (16 + 16 + 9) / 11) < 1e-13


def test_an_updater_is_saved_as_chainers_and_goes_on(tmp_path: Any) -> None:
    path = str(tmp_path / "run.npz")
    nets = Net(VALID), Net(VALID), Net(VALID)
    going, stopped, resumed = (updater(net, 2, count=4) for net in nets)
    for _ in range(4):
        going.update()
    for _ in range(2):
        stopped.update()
    chainer.serializers.save_npz(path, stopped)
    chainer.serializers.load_npz(path, resumed)
    for _ in range(2):
        resumed.update()
    assert np.array_equal(parameters(nets[0]), parameters(nets[2]))
    assert (resumed.iteration, resumed.epoch) == (going.iteration, going.epoch) == (4, 1)
    plain = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(list(zip(*some(), strict=True)), 4, shuffle=False),
        optimizer_of(Net(VALID)),
    )
    chainer.serializers.load_npz(path, plain)
    assert plain.iteration == 2


def test_of_several_optimizers_the_main_one_is_accumulated() -> None:
    net, other = Net(VALID), optimizer_of(Net(MEAN))
    samples = chainer.iterators.SerialIterator(list(zip(*some(), strict=True)), FULL)
    optimizers_of = {"main": optimizer_of(net), "other": other}
    one = AccumulatingUpdater({"main": samples}, optimizers_of, 4, loss_scale=8.0)
    one.update()
    assert (one.get_optimizer("main").t, other.t) == (1, 0)


def test_an_epoch_ends_as_without() -> None:
    net = Net(VALID)
    one = updater(net, 2, count=4)
    for _ in range(3):
        one.update()
    assert one.is_new_epoch and one.get_optimizer("main").epoch == 1


# -- snapshots -------------------------------------------------------------------------------------


def values_of(accumulated: Any) -> dict[str, Any]:
    """What a snapshot has of an open group."""
    found: dict[str, Any] = {}

    class Lists(chainer.serializers.DictionarySerializer):
        def __getitem__(self, name: str) -> Any:
            return Lists(found, f"{self.path}{name}/")

        def __call__(self, name: str, value: Any) -> Any:
            found[self.path + name] = value
            return value

    accumulated.serialize_group(Lists(found))
    return found


class Saved:
    """Gives back what `values_of` has found."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values, self._path = values, path

    def __getitem__(self, name: str) -> Saved:
        return Saved(self._values, f"{self._path}{name}/")

    def __call__(self, name: str, value: Any) -> Any:
        return self._values[self._path + name]


OLD_NAMES = {"#0": "36434f3c:0", "#1": "8acf2113:0", "#said": "weight"}
"""What totals were called when they went by lines of the program."""


@pytest.mark.parametrize("names", [{}, OLD_NAMES], ids=["now", "before"])
@pytest.mark.parametrize("name", ["valid labels", "two", "sum by number"])
def test_an_open_group_goes_on_from_its_snapshot(name: str, names: dict[str, str]) -> None:
    two = lambda net, y, t: F.mean(y**2) + 0.5 * F.mean(abs(y))  # noqa: E731
    loss = LOSSES.get(name, two)
    how = {"steps": 2, "weight": WEIGHTS.get(name)}
    x, t = some()
    net, other, plain = Net(loss), Net(loss), Net(loss)
    with accumulate(optimizer_of(net), **how) as begun:
        begun.optimizer.update(net, x[:4], t[:4])
        saved = values_of(begun)
    for key, value in saved.items():
        if key.endswith(" of"):
            saved[key] = [names.get(one, one) for one in value]
    with accumulate(optimizer_of(other), **how) as resumed:
        resumed.serialize_group(Saved(saved))
        assert resumed.count == 1
        resumed.optimizer.update(other, x[4:], t[4:])
    optimizer_of(plain).update(plain, x, t)
    assert resumed.optimizer.t == 1 and apart(gradients(plain), gradients(other)) < 1e-13
