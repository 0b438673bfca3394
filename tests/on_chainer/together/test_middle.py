"""What is on is turned off, saved or turned on in the middle of what else is on."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import optimizers

CALLS, SAMPLES = 3, 4
X = np.random.RandomState(0).randn(CALLS * SAMPLES, 8).astype(np.float32)


class Net(chainer.Chain):
    """A parameter of no dimension, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.first, self.slope = L.Linear(8, 5), L.PReLU()
            self.unused = L.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return F.mean(F.square(self.slope(self.first(x))))


def values(net: Any) -> dict[str, Any]:
    return {name: p.array.copy() for name, p in net.namedparams()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name, strict=True)


def call(optimizer: Any, net: Any, at: int, by_hand: bool) -> None:
    x = X[SAMPLES * at : SAMPLES * (at + 1)]
    if not by_hand:
        optimizer.update(net, x)
        return
    net.cleargrads()
    net(x).backward(loss_scale=optimizer._loss_scale)
    optimizer.update()


# -- a group of calls that is saved before it is complete ------------------------------------------

SCALES = {
    "none": lambda net, optimizer: nullcontext(),
    "fixed": lambda net, optimizer: nullcontext(optimizer.set_loss_scale(1024.0)),
    "dynamic": lambda net, optimizer: nullcontext(optimizer.loss_scaling(scale=1024.0)),
    "half": umem.chainer.half_precision,
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
@pytest.mark.parametrize("by_hand", [False, True], ids=["loss", "by hand"])
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_goes_on_to_the_bit_wherever_it_was_saved(
    scale: str, by_hand: bool, tmp_path: Path
) -> None:
    def life(stop: int | None) -> dict[str, Any]:
        net = Net()
        optimizer = optimizers.MomentumSGD(0.1).setup(net)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        run = {"net": net, "optimizer": optimizer}
        folder = tmp_path / f"{stop}"
        with SCALES[scale](net, optimizer), umem.chainer.accumulate(optimizer, steps=2):
            done = umem.chainer.resume_run(folder, **run)
            for at in range(done.step, CALLS):
                if at == stop and not done.step:
                    raise KeyboardInterrupt
                call(optimizer, net, at, by_hand)
                umem.chainer.save_run(folder, step=at + 1, wait=True, **run)
        return values(net)

    whole = life(None)
    assert_same(life(None), whole)  # resumed after its last call: one is left over
    for stop in range(1, CALLS):
        with pytest.raises(KeyboardInterrupt):
            life(stop)
        assert_same(life(stop), whole)


# -- half precision, or a loss scale, that comes or goes inside of a group -------------------------


@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
@pytest.mark.parametrize("by_hand", [False, True], ids=["loss", "by hand"])
@pytest.mark.parametrize("begin, end", [(0, 1), (0, 2), (1, 2), (1, 3), (0, 3)])
def test_half_precision_may_come_and_go_inside_of_a_group(
    begin: int, end: int, by_hand: bool
) -> None:
    def train(*, halves: bool) -> dict[str, Any]:
        net = Net()
        optimizer = optimizers.SGD(0.1).setup(net)
        with umem.chainer.accumulate(optimizer, steps=CALLS + 1), ExitStack() as stack:
            for at in range(CALLS):
                if at == begin and halves:
                    half = umem.chainer.half_precision(net, optimizer, scale=256)
                    stack.enter_context(half)
                if at == end and halves:
                    half.undo()
                call(optimizer, net, at, by_hand)
            if end == CALLS and halves:
                half.undo()
        return values(net)

    found, plain, start = train(halves=True), train(halves=False), values(Net())
    for name, value in plain.items():
        assert found[name].dtype == np.float32
        step = np.abs(value - start[name]).max()
        np.testing.assert_allclose(found[name], value, atol=3e-3 * step, err_msg=name)


def test_gradients_that_overflowed_are_not_applied_where_half_precision_is_gone() -> None:
    net = Net()
    optimizer = optimizers.SGD(0.1).setup(net)
    before = values(net)
    with pytest.raises(umem.errors.AccumulationError, match="not finite at their loss scale"):
        with umem.chainer.accumulate(optimizer, steps=3):
            with umem.chainer.half_precision(net, optimizer, scale=2.0**30):
                call(optimizer, net, 0, by_hand=False)
    assert_same(values(net), before)
    optimizer.update(net, X)


def test_samples_that_overflow_alone_in_half_precision_are_not_compared() -> None:
    net = Net()
    optimizer = optimizers.MomentumSGD(0.1).setup(net)
    with umem.chainer.half_precision(net, optimizer):
        with umem.chainer.accumulate(optimizer, steps=CALLS):
            with pytest.warns(umem.errors.AccumulationWarning, match="3 samples overflow in half"):
                for at in range(CALLS):
                    call(optimizer, net, at, by_hand=False)


@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
@pytest.mark.parametrize("by_hand", [False, True], ids=["loss", "by hand"])
@pytest.mark.parametrize("scales", [(None, 64.0, 1024.0), (1024.0, 1.0, 64.0)])
def test_a_loss_scale_may_change_inside_of_a_group(scales: Any, by_hand: bool) -> None:
    def train(each: Any) -> dict[str, Any]:
        net = Net()
        optimizer = optimizers.SGD(0.1).setup(net)
        with umem.chainer.accumulate(optimizer, steps=CALLS):
            for at, scale in enumerate(each):
                if scale is not None:
                    optimizer.set_loss_scale(scale)
                call(optimizer, net, at, by_hand)
        return values(net)

    assert_same(train(scales), train([None] * CALLS))  # by powers of two no bit changes


# -- parameters that share an array ----------------------------------------------------------------


def shared_net(lazy: bool, repeat: bool = False) -> Any:
    np.random.seed(0)
    first = L.Linear(None if lazy else 8, 8)
    if repeat:
        return first.repeat(2, mode="share")
    return chainer.Sequential(first, F.tanh, first.copy(mode="share"))


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.Adam])
@pytest.mark.parametrize("repeat", [False, True], ids=["copy", "repeat"])
@pytest.mark.parametrize("lazy", [False, True], ids=["made", "lazy"])
def test_shared_arrays_are_trained_in_half_precision_and_float32_again(
    lazy: bool, repeat: bool, kind: Any
) -> None:
    def train(*, halves: bool) -> Any:
        net = shared_net(lazy, repeat)
        optimizer = kind(0.01).setup(net)
        half = umem.chainer.half_precision(net, optimizer) if halves else nullcontext()
        with half:
            for _ in range(3):
                optimizer.update(lambda: F.mean(F.square(net(X))))
            arrays = [p.array for p in net.params() if p.ndim == 2]
            assert len({id(array) for array in arrays}) == 1
            assert arrays[0].dtype == (np.float16 if halves else np.float32)
        arrays = [p.array for p in net.params() if p.ndim == 2]
        assert len(arrays) == 2 and arrays[0] is arrays[1] and arrays[0].dtype == np.float32
        optimizer.update(lambda: F.mean(F.square(net(X))))
        return arrays[0]

    found, plain = train(halves=True), train(halves=False)
    np.testing.assert_allclose(found, plain, atol=0.01)


def test_without_a_step_shared_arrays_are_those_that_were_there() -> None:
    net = shared_net(lazy=False)
    optimizer, array, before = optimizers.SGD(0.1).setup(net), net[0].W.array, values(net)
    umem.chainer.half_precision(net, optimizer).undo()
    assert net[0].W.array is net[2].W.array is array
    assert_same(values(net), before)


@pytest.mark.parametrize("how", ["keep", "view"])
def test_memory_that_would_be_half_in_one_place_alone_is_refused(how: str) -> None:
    net = shared_net(lazy=False)
    if how == "view":
        with net[2].init_scope():
            net[2].W = chainer.Parameter(net[0].W.array.T)
    optimizer, before = optimizers.SGD(0.1).setup(net), values(net)
    with pytest.raises(umem.errors.StateError, match="share memory, and would not as halves"):
        umem.chainer.half_precision(net, optimizer, keep=["/1"] if how == "keep" else ())
    assert_same(values(net), before)
    optimizer.update(lambda: F.mean(F.square(net(X))))


def test_a_shared_run_in_half_precision_goes_on_to_the_bit(tmp_path: Path) -> None:
    def life(stop: int | None) -> dict[str, Any]:
        net = shared_net(lazy=True)
        optimizer = optimizers.Adam(0.01).setup(net)
        with umem.chainer.half_precision(net, optimizer):
            done = umem.chainer.resume_run(tmp_path / f"{stop}", net=net, optimizer=optimizer)
            for step in range(done.step, 4):
                if step == stop and not done.step:
                    raise KeyboardInterrupt
                optimizer.update(lambda: F.mean(F.square(net(X))))
                umem.chainer.save_run(
                    tmp_path / f"{stop}", step=step + 1, wait=True, net=net, optimizer=optimizer
                )
        return values(net)

    whole = life(None)
    with pytest.raises(KeyboardInterrupt):
        life(2)
    assert_same(life(2), whole)
