"""What goes wrong in a step, what acts once a step, and what is held meanwhile."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from accumulation_cases import (
    FULL,
    KNOWN,
    Net,
    apart,
    gradients,
    optimizer_of,
    parameters,
    refused,
    some,
    updater,
)
from chainer import optimizer_hooks as hooks
from chainer import optimizers

from umem.errors import (
    AccumulationError,
    AccumulationWarning,
    OutOfMemoryError,
    SizeError,
    StateError,
    UnsupportedError,
)

MEAN, VALID = KNOWN["mean"], KNOWN["valid labels"]
accumulate, AccumulatingUpdater = umem.chainer.accumulate, umem.chainer.AccumulatingUpdater


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", True, np.nan])
@pytest.mark.parametrize("name", ["steps", "micro_batch"])
def test_a_size_is_a_whole_number_above_zero(name: str, size: Any) -> None:
    optimizer = optimizer_of(Net(MEAN))
    with pytest.raises(SizeError, match=f"{name} must be a whole number above 0, not"):
        accumulate(optimizer, **{name: size})


@pytest.mark.parametrize("size", [0, 2.5, "4", None])
def test_so_it_is_of_an_updater(size: Any) -> None:
    with pytest.raises(SizeError, match="micro_batch must be a whole number above 0, not"):
        updater(Net(MEAN), size)


def test_an_integer_of_numpys_is_one() -> None:
    assert accumulate(optimizer_of(Net(MEAN)), np.int64(3)).micro_batch is None
    assert updater(Net(MEAN), np.int64(3)).micro_batch == 3


@pytest.mark.parametrize("sizes", [{}, {"steps": 2, "micro_batch": 2}])
def test_one_of_steps_and_micro_batch_is_given(sizes: Any) -> None:
    with pytest.raises(SizeError, match="give one of steps= and micro_batch="):
        accumulate(optimizer_of(Net(MEAN)), **sizes)


def test_what_survives_needs_micro_batch() -> None:
    with pytest.raises(StateError, match="needs micro_batch="):
        accumulate(optimizer_of(Net(MEAN)), 4, survive=True)


def test_an_optimizer_without_a_model_is_refused() -> None:
    with pytest.raises(StateError, match=r"call optimizer\.setup\(model\) first"):
        accumulate(optimizers.Adam(), 4)
    samples = chainer.iterators.SerialIterator([1], 1)
    with pytest.raises(StateError, match=r"call optimizer\.setup\(model\) first"):
        AccumulatingUpdater(samples, optimizers.Adam(), 4)


def test_what_is_no_optimizer_by_gradients_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"is not a chainer\.GradientMethod"):
        accumulate(chainer.Optimizer().setup(Net(MEAN)), 4)


def test_arguments_of_differing_lengths_are_named() -> None:
    net = Net(MEAN)
    x, t = some()
    told = "differing lengths: argument 1 has 11, t has 10"
    with (
        accumulate(optimizer := optimizer_of(net), micro_batch=4),
        pytest.raises(SizeError, match=told),
    ):
        optimizer.update(net, x, t=t[:10])


def test_an_empty_batch_is_refused() -> None:
    net = Net(MEAN)
    x, t = some()
    with accumulate(optimizer := optimizer_of(net), micro_batch=4):
        with pytest.raises(SizeError, match="the batch is empty"):
            optimizer.update(net, x[:0], t[:0])
        with pytest.raises(SizeError, match="no argument of the loss function has a first"):
            optimizer.update(lambda: net(x, t))
    assert optimizer.t == 0


def test_micro_batches_need_a_loss_function() -> None:
    with (
        accumulate(optimizer := optimizer_of(Net(MEAN)), micro_batch=4),
        pytest.raises(StateError, match=r"splits optimizer\.update\(lossfun, \*args\) into parts"),
    ):
        optimizer.update()


@pytest.mark.parametrize("result", [None, 3.0, np.zeros(())])
def test_a_loss_that_is_none_is_refused(result: Any) -> None:
    with (
        accumulate(optimizer := optimizer_of(Net(MEAN)), micro_batch=4),
        pytest.raises(AccumulationError, match="must return a scalar Variable, not"),
    ):
        optimizer.update(lambda x: result, some()[0])


def test_so_is_one_for_each_sample() -> None:
    net = Net(lambda net, y, t: F.sum(y, axis=1))
    with (
        accumulate(optimizer := optimizer_of(net), micro_batch=4),
        pytest.raises(AccumulationError, match=r"a scalar Variable, not shape \(4,\)"),
    ):
        optimizer.update(net, *some())


def test_a_micro_batch_larger_than_the_batch_is_the_whole_batch() -> None:
    net, plain = Net(VALID), Net(VALID)
    updater(net, 100).update()
    optimizer_of(plain).update(plain, *some())
    assert np.array_equal(gradients(net), gradients(plain))


def test_a_loss_that_is_nan_is_chainers_matter() -> None:
    net = Net(lambda net, y, t: F.mean(y) * np.nan)
    with accumulate(optimizer := optimizer_of(net), micro_batch=4):
        optimizer.update(net, *some())
    assert optimizer.t == 1 and np.isnan(parameters(net)).all()


def test_an_optimizer_is_accumulated_once_at_a_time() -> None:
    net = Net(MEAN)
    optimizer = optimizer_of(net)
    twice = accumulate(optimizer, 2)
    with accumulate(optimizer, 3) as first:
        with pytest.raises(StateError, match="is accumulated already"):
            twice.enable()
        with pytest.raises(StateError, match="is accumulated already"), first:
            pass
    with pytest.raises(StateError, match="is not on"):
        twice.disable()
    with twice:
        optimizer.update(net, *some())
    assert optimizer.t == 1


# -- where it fails --------------------------------------------------------------------------------


class Failing(Net):
    """Fails at a call, after it drew and kept something."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__(MEAN, ratio=0.2)
        self.calls, self.at, self.error = [0], at, error

    def __call__(self, x: Any, t: Any) -> Any:
        loss = super().__call__(x, t)
        self.calls[0] += 1
        if self.calls[0] == self.at:
            raise self.error
        return loss


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_an_error_everything_is_as_before_the_step(at: int, error: BaseException) -> None:
    net = Failing(at, error)
    optimizer = optimizer_of(net, optimizers.Adam)
    python = random.getstate()
    with accumulate(optimizer, micro_batch=4):
        with refused(optimizer, "|".join(map(str, error.args)) or "^$", type(error)):
            optimizer.update(net, *some())
        assert random.getstate() == python
        net.at = 0
        optimizer.update(net, *some())
    assert optimizer.t == 1


def test_an_error_that_leaves_the_block_drops_the_calls_of_the_group() -> None:
    net = Net(MEAN)
    optimizer = optimizer_of(net)
    accumulated = accumulate(optimizer, 3)
    with pytest.raises(KeyError), accumulated:
        optimizer.update(net, *some())
        raise KeyError
    assert optimizer.t == 0 and accumulated.count == 0
    optimizer.update(net, *some())
    assert optimizer.t == 1


def test_an_error_in_a_call_of_update_drops_the_group_and_the_next_begins_anew() -> None:
    net, plain = Net(VALID), Net(VALID)
    x, t = some()
    with accumulate(optimizer := optimizer_of(net), 2) as accumulated:
        optimizer.update(net, x[:3], t[:3])
        with pytest.raises(ZeroDivisionError):
            optimizer.update(lambda: 1 / 0)
        assert accumulated.count == 0
        optimizer.update(net, x[:4], t[:4])
        optimizer.update(net, x[4:], t[4:])
    optimizer_of(plain).update(plain, x, t)
    assert optimizer.t == 1 and apart(gradients(plain), gradients(net)) < 1e-13


# -- out of memory ---------------------------------------------------------------------------------


class Small(Net):
    """A network that fits only so many samples; each call leaves a large array in its frame."""

    def __init__(self, most: int, error: type[BaseException] = OutOfMemoryError) -> None:
        super().__init__(VALID, ratio=0.3)
        self.most, self.error = most, error
        self.sizes: list[int] = []
        self.held: list[Any] = []

    def __call__(self, x: Any, t: Any) -> Any:
        held = np.ones(1000).view(type("Watched", (np.ndarray,), {}))
        self.held.append(weakref.ref(held))
        loss = super().__call__(x, t)
        if len(x) > self.most:
            raise self.error(f"{len(x)} do not fit")
        return loss


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
@pytest.mark.parametrize("error", [OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_a_step_that_does_not_fit_is_done_again_with_half(
    most: int, error: type[BaseException]
) -> None:
    """With the random numbers that this size draws at once."""
    net, plain = Small(most, error), Net(VALID, ratio=0.3)
    for one, size in ((net, 8), (plain, {1: 1, 2: 2, 3: 2, 5: 4}[most])):
        optimizer = optimizer_of(one, lambda: optimizers.SGD(0))
        with accumulate(optimizer, micro_batch=size, survive=True) as parts:
            np.random.seed(1)
            optimizer.update(one, *some())
            optimizer.update(one, *some())
            assert parts.micro_batch <= most and optimizer.t == 2
    assert np.array_equal(gradients(plain), gradients(net))
    assert float(net.seen) == 2 * FULL
    assert not any(held() is not None for held in net.held)


def test_a_comparison_that_does_not_fit_is_left_out() -> None:
    net = Small(2)
    with (
        accumulate(optimizer := optimizer_of(net), micro_batch=2),
        pytest.warns(AccumulationWarning, match="3 samples do not fit in memory at once"),
    ):
        optimizer.update(net, *some())
    assert optimizer.t == 1


@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
@pytest.mark.parametrize(("most", "survive"), [(0, True), (2, False)])
def test_what_does_not_fit_at_all_is_raised(most: int, survive: bool) -> None:
    net = Small(most)
    before = parameters(net)
    with (
        accumulate(optimizer := optimizer_of(net), micro_batch=8, survive=survive),
        pytest.raises(OutOfMemoryError, match="do not fit"),
    ):
        optimizer.update(net, *some())
    assert optimizer.t == 0 and np.array_equal(parameters(net), before)


def test_an_updater_survives_with_the_same_batch() -> None:
    net, plain = Small(4), Net(VALID)
    net.ratio = 0.0
    parts = updater(net, 8, survive=True)
    parts.update()
    optimizer_of(plain).update(plain, *some())
    assert parts.micro_batch == 4 and parts.iteration == 1
    assert apart(gradients(plain), gradients(net)) < 1e-13


def test_nothing_is_held_by_what_ran_out() -> None:
    """No traceback: its frames would hold the arrays of the passes that failed."""
    gc.collect()
    gc.disable()  # what a frame held is gone without it
    try:
        net = Small(2)
        with accumulate(optimizer := optimizer_of(net), micro_batch=8, survive=True, check=False):
            optimizer.update(net, *some())
        assert len(net.held) == 8 and not any(held() is not None for held in net.held)
    finally:
        gc.enable()


# -- what acts once --------------------------------------------------------------------------------


def once(optimizer: Any, calls: list[str]) -> None:
    def hook(one: Any) -> None:
        calls.append("hook")

    for it in (hooks.WeightDecay(0.1), hooks.GradientClipping(0.05), hooks.GradientNoise(0.0)):
        optimizer.add_hook(it)
    optimizer.add_hook(hook, "mine")


SCALES: dict[str, Any] = {
    "none": lambda optimizer: None,
    "static": lambda optimizer: optimizer.set_loss_scale(64.0),
    "dynamic": lambda optimizer: optimizer.loss_scaling(),
}


@pytest.mark.thorough
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["micro_batch", "steps", "by hand"])
@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
def test_hooks_and_the_loss_scale_act_once_an_update(kind: str, scale: str) -> None:
    found = []
    x, t = some()
    for way in ("whole", kind):
        net, calls = Net(VALID), []
        optimizer = optimizer_of(net, optimizers.Adam)
        once(optimizer, calls)
        SCALES[scale](optimizer)
        for _ in range(3):
            if way == "whole":
                optimizer.update(net, x, t)
            elif way == "micro_batch":
                with accumulate(optimizer, micro_batch=4):
                    optimizer.update(net, x, t)
            else:
                with accumulate(optimizer, 3):
                    for part in (slice(0, 4), slice(4, 8), slice(8, 11)):
                        if way == "steps":
                            optimizer.update(net, x[part], t[part])
                        else:
                            net.cleargrads()
                            net(x[part], t[part]).backward(loss_scale=optimizer._loss_scale)
                            optimizer.update()
        found.append((parameters(net), calls, optimizer.t, optimizer._loss_scale))
    (whole, *facts), (parts, *others) = found
    assert facts == others and facts[1] == 3
    assert np.abs(whole - parts).max() < 1e-13


@pytest.mark.filterwarnings("ignore::umem.errors.AccumulationWarning")
def test_two_optimizers_are_accumulated_beside_each_other() -> None:
    """As of a generator and a discriminator: each loss leaves gradients on both."""
    x, _ = some()
    found = []
    for steps in (1, 2):
        makes, judges = Net(MEAN), Net(MEAN)
        judges.second.W.array[...] *= 2
        first, second = optimizer_of(makes), optimizer_of(judges)
        with accumulate(first, steps), accumulate(second, steps):
            for part in ((slice(0, 11),), (slice(0, 7), slice(7, 11)))[steps - 1]:
                made = F.pad(makes.second(makes.first(x[part])), ((0, 0), (0, 1)), "constant")
                makes.cleargrads()
                F.mean(judges.second(judges.first(made)) ** 2).backward()
                first.update()
                judges.cleargrads()
                F.mean(judges.second(judges.first(made.array)) ** 3).backward()
                second.update()
        found.append((gradients(makes), gradients(judges), first.t, second.t))
    (a, b, *counts), (c, d, *others) = found
    assert counts == others == [1, 1]
    assert apart(a, c) < 1e-13 and apart(b, d) < 1e-13


def test_calls_left_over_at_the_end_of_the_block_are_one_update() -> None:
    net, plain = Net(VALID), Net(VALID)
    x, t = some()
    optimizer, other = optimizer_of(net), optimizer_of(plain)
    with accumulate(optimizer, 2) as accumulated:
        for start in (0, 4, 8):
            optimizer.update(net, x[start : start + 4], t[start : start + 4])
        assert (optimizer.t, accumulated.count) == (1, 1)
    other.update(plain, x[:8], t[:8])
    other.update(plain, x[8:], t[8:])
    assert optimizer.t == 2 and accumulated.count == 0
    assert np.abs(parameters(net) - parameters(plain)).max() < 1e-13


def test_it_is_on_from_enable_to_disable() -> None:
    net = Net(VALID)
    optimizer = optimizer_of(net)
    accumulated = accumulate(optimizer, micro_batch=4).enable()
    sizes: list[int] = []
    try:
        net.loss = lambda net, y, t: (sizes.append(len(y)), VALID(net, y, t))[1]
        optimizer.update(net, *some())
    finally:
        accumulated.disable()
    assert sizes[:3] == [4, 4, 3]
    optimizer.update(net, *some())
    assert sizes[-1] == 11


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_it_takes_no_more_than_a_loop_that_lets_chainer_add_up() -> None:
    size, rows, parts = 600, 8, 4

    def peak(step: Any) -> int:
        with chainer.using_config("dtype", np.float64):
            net = L.Linear(size, size)
        optimizer = optimizer_of(net)
        x = np.ones((rows, size))
        for _ in range(2):
            net.cleargrads()
            gc.collect()
            tracemalloc.start()
            step(net, optimizer, x)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return most

    def loop(net: Any, optimizer: Any, x: Any) -> None:
        for start in range(0, rows, rows // parts):
            (F.mean(net(x[start : start + rows // parts])) / parts).backward()
        optimizer.update()

    def accumulated(net: Any, optimizer: Any, x: Any) -> None:
        with accumulate(optimizer, micro_batch=rows // parts, check=False):
            optimizer.update(lambda x: F.mean(net(x)), x)

    def in_steps(net: Any, optimizer: Any, x: Any) -> None:
        with accumulate(optimizer, parts, check=False):
            for start in range(0, rows, rows // parts):
                optimizer.update(lambda x: F.mean(net(x)), x[start : start + rows // parts])

    least = peak(loop)  # a gradient is 2.9 MB; beside it there are copies of a part's samples
    assert peak(accumulated) < least + 200_000 and peak(in_steps) < least + 200_000
