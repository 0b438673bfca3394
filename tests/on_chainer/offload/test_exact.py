"""Offload changes no bit: of many networks, in every way to go backward, whoever holds what."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer_function_cases import CASES, Case
from random_programs import Failing, Program, Runs, differences
from recompute_cases import MODELS, Mlp, rows, same, train

from tests.compat.functions.test_functions import arrays_for, flatten
from tests.on_chainer.recompute.test_exact import (
    checkpointed,
    counted,
    forgotten,
    gone_backward_inside,
    three_graphs_in_another_order,
)
from tests.on_chainer.recompute.test_unusual_events import in_another_thread
from umem.chainer.offload import mover
from umem.errors import SizeError, StateError
from umem.trace import Hint

Step = Callable[[Any, Any, Any], Any]


@pytest.fixture(autouse=True)
def everything_is_sent(monkeypatch: Any) -> None:
    """The networks of tests are small."""
    monkeypatch.setattr(mover, "SMALLEST_BYTES", 1)


@pytest.fixture(autouse=True)
def forward_waits(monkeypatch: Any) -> None:
    """Whatever is on its way down is there before the next function, on a busy machine, too."""
    monkeypatch.setattr(mover, "IN_FLIGHT_BYTES", 0)


def fetched(offload: Any) -> int:
    return sum(tier.fetched_bytes for tier in offload.tiers())


def both(folder: Path, make: Any, **options: Any) -> umem.chainer.Offload:
    """Train plainly and under Offload, and compare every number."""
    offload = umem.chainer.Offload(folder)
    same(train(make, offload, **options), train(make, **options))
    assert fetched(offload) > 0
    assert not list(folder.iterdir())
    return offload


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes(name: str, tmp_path: Path) -> None:
    both(tmp_path, name)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(0, marks=pytest.mark.thorough),
        *(pytest.param(first, marks=pytest.mark.slow) for first in (20, 40)),
    ],
)
def test_a_random_program_has_the_numbers_of_plain_chainer(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        programs = [Program(seed, None), Program(seed, lambda _: umem.chainer.Offload(tmp_path))]
        errors = []
        for program in programs:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    program.run()
                errors.append(None)
            except Exception as error:  # where training diverges, a norm may find no eigenvalues
                errors.append(type(error))
        assert errors[0] is errors[1], f"seed {seed}"
        assert not differences(programs[1].numbers, programs[0].numbers), f"seed {seed}"


# -- ways to go backward -------------------------------------------------------------------------


def twice(model: Any, x: Any, t: Any) -> Any:
    loss = model.loss(x, t)
    model.cleargrads()
    loss.backward(retain_grad=True)
    loss.backward()
    return loss


def in_two_threads_at_once(model: Any, x: Any, t: Any) -> Any:
    """Gradients with respect to a layer's weight, asked for by each; then the usual one."""
    loss = model.loss(x, t)
    found: list[Any] = []

    def ask() -> None:
        found.append(chainer.grad([loss], [model[0].W])[0].array)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.cleargrads()
    loss.backward()
    assert found[0].tobytes() == found[1].tobytes() == model[0].W.grad.tobytes()
    return loss


def of_a_gradient(model: Any, x: Any, t: Any) -> Any:
    h = given = chainer.Variable(x)
    for layer in model:
        h = F.tanh(layer(h))
    loss = F.mean(h * h)
    (gx,) = chainer.grad([loss], [given], enable_double_backprop=True)
    loss += F.sum(gx * gx)
    model.cleargrads()
    loss.backward()
    return loss


def after_an_update(model: Any, x: Any, t: Any) -> Any:
    loss = model.loss(x, t)
    model.cleargrads()
    loss.backward()
    for parameter in model.params():
        parameter.array -= 0.01 * parameter.grad
    loss.backward()
    return loss


def cut_in_two(model: Any, x: Any, t: Any) -> Any:
    h = chainer.Variable(x)
    for layer in list(model)[:4]:
        h = F.tanh(layer(h))
    middle = chainer.Variable(h.array)
    y = middle
    for layer in list(model)[4:]:
        y = F.tanh(layer(y))
    loss = F.softmax_cross_entropy(y, t)
    model.cleargrads()
    loss.backward()
    h.grad = middle.grad
    h.backward()
    return loss


def unchained(model: Any, x: Any, t: Any) -> Any:
    h = F.tanh(model[0](x))
    for layer in list(model)[1:]:
        h = F.tanh(layer(h))
        if layer is model[4]:
            h.unchain_backward()
    loss = F.softmax_cross_entropy(h, t)
    model.cleargrads()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "step",
    [twice, in_another_thread, in_two_threads_at_once, three_graphs_in_another_order, of_a_gradient,
     after_an_update, cut_in_two, unchained],
)  # fmt: skip
def test_every_way_to_go_backward(step: Step, tmp_path: Path) -> None:
    both(tmp_path, "mlp", step=step)


def test_a_graph_that_lives_on_across_steps(tmp_path: Path) -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        losses.append(model.loss(x, t))
        model.cleargrads()
        losses[-1].backward()
        if len(losses) > 2:
            losses[-3].backward()
        return losses[-1]

    losses: list[Any] = []
    both(tmp_path, "mlp", step=step)


# -- functions -----------------------------------------------------------------------------------


def masked(link: Any, h: Any) -> Any:
    y, mask = F.dropout(link(h), 0.3, return_mask=True)
    return y + F.dropout(h, mask=mask)


def pooled(link: Any, h: Any) -> Any:
    y = F.reshape(F.tanh(link(h)), (len(h), 1, 4, 4))
    y, indexes = F.max_pooling_2d(y, 2, return_indices=True)
    return F.reshape(F.upsampling_2d(y, indexes, 2, outsize=(4, 4)), h.shape)


def viewed(link: Any, h: Any) -> Any:
    """Views of all kinds are retained: turned round, broadcast, split, taken apart."""
    y = F.tanh(link(h))
    left, right = F.split_axis(F.flip(y, 1), 2, axis=1)
    wide = F.broadcast_to(F.sum(left, axis=1, keepdims=True), y.shape)
    a, b = F.separate(F.reshape(y, (2, -1, 16)))
    return wide * y[:, ::-1] + F.concat([a * b, b * a], axis=0) * F.concat([right, left], axis=1)


class Around(chainer.Chain):
    """A function of interest among layers."""

    def __init__(self, apply: Any) -> None:
        super().__init__()
        self.apply = apply
        with self.init_scope():
            self.shared = L.Linear(16, 16)
            self.layers = chainer.ChainList(*(L.Linear(16, 16) for _ in range(4)))

    def loss(self, x: Any, t: Any) -> Any:
        h = self.apply(self.shared, F.sigmoid(self.shared(x)))
        for layer in self.layers:
            h = F.tanh(layer(F.sigmoid(h))) + h
        return F.softmax_cross_entropy(h, t)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
@pytest.mark.parametrize(
    "apply", [forgotten, checkpointed, counted, gone_backward_inside, masked, pooled, viewed]
)
@pytest.mark.parametrize("step", [None, twice])
def test_functions_that_do_more_than_compute(apply: Any, step: Any, tmp_path: Path) -> None:
    Runs.counts = {"forward": 0, "backward": 0, "old": 0}
    options = {} if step is None else {"step": step}
    both(tmp_path, lambda: Around(apply), data=rows, **options)


# -- who else holds what -------------------------------------------------------------------------


def test_a_program_that_keeps_its_arrays_edits_them_for_backward(tmp_path: Path) -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        kept, h = [], x
        for layer in model:
            h = F.tanh(layer(h))
            kept.append((h.array[::2], h.array, h)[len(kept) % 3])
        loss = F.softmax_cross_entropy(h, t)
        for one in kept:
            array = one.array if isinstance(one, chainer.Variable) else one
            array *= 0.5
        model.cleargrads()
        loss.backward()
        return loss

    offload = umem.chainer.Offload(tmp_path)
    same(train("mlp", offload, step=step), train("mlp", step=step))


def test_an_array_that_is_held_for_a_while_goes_when_it_is_not(tmp_path: Path) -> None:
    with umem.chainer.Offload(tmp_path) as offload:
        h = first = F.tanh(chainer.Variable(np.ones((64, 64), "f")))
        for _ in range(40):
            h = F.tanh(h)
        array = weakref.ref(first.array)
        assert array() is not None
        del first
        for _ in range(200):
            h = F.tanh(h)
        assert array() is None
        h.grad = np.ones_like(h.array)
        h.backward()
        assert "offloaded to a file in" in offload.summary()


def test_parameters_and_inputs_never_go(tmp_path: Path) -> None:
    model, x = Mlp(), np.ones((8, 16), "f")
    given = chainer.Variable(x)
    held = [weakref.ref(array) for array in (x, *(p.array for p in model.params()))]
    with umem.chainer.Offload(tmp_path):
        loss = model.loss(given, np.zeros(8, "i"))
        for _ in range(40):
            loss = loss + 0
        assert given.node.data is x
        assert all(array() is not None for array in held)
        loss.backward()


def test_small_arrays_stay(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(mover, "SMALLEST_BYTES", 1 << 16)
    offload = umem.chainer.Offload(tmp_path)
    train("mlp", offload)
    assert fetched(offload) == 0


def test_less_is_held_at_the_end_of_forward(tmp_path: Path) -> None:
    def held(offload: Any) -> int:
        alive: list[Any] = []

        class Watch(chainer.FunctionHook):
            name = "watch"

            def forward_postprocess(self, function: Any, in_data: Any) -> None:
                alive.extend(weakref.ref(array) for array in in_data)

        h = chainer.Variable(np.ones((64, 64), "f"))
        with offload, Watch():
            for _ in range(100):
                h = F.tanh(h)
            return len({id(a()) for a in alive if a() is not None})

    assert held(umem.chainer.Offload(tmp_path)) < 30 < 99 <= held(chainer.using_config("a", 1))


# -- when something goes wrong -------------------------------------------------------------------


def test_an_exception_in_the_middle_of_a_step_leaves_nothing(tmp_path: Path) -> None:
    def step(model: Any, x: Any, t: Any) -> Any:
        count.append(1)
        loss = F.mean(Failing().apply((model.loss(x, t),))[0])
        model.cleargrads()
        if len(count) % 3 == 1:
            Failing.countdown["backward"] = 1
            with pytest.raises(ArithmeticError):
                loss.backward()
            Failing.countdown["backward"] = -1
        loss.backward()
        if len(count) % 3 == 2:
            Failing.countdown["forward"] = 1
            with pytest.raises(ArithmeticError):
                Failing().apply((model.loss(x, t),))
            Failing.countdown["forward"] = -1
        return loss

    count: list[int] = []
    both(tmp_path, "mlp", step=step)


def test_leaving_brings_back_what_a_graph_needs(tmp_path: Path) -> None:
    model, x, t = Mlp(), rows(np.random.default_rng(0)), np.zeros(80, "i")
    t = t[: len(x)]
    with pytest.raises(ArithmeticError), umem.chainer.Offload(tmp_path):
        loss = model.loss(x, t)
        raise ArithmeticError
    model.cleargrads()
    loss.backward()
    found = [p.grad.tobytes() for p in model.params()]
    model.cleargrads()
    model.loss(x, t).backward()
    assert found == [p.grad.tobytes() for p in model.params()]


def test_it_is_entered_again_and_graphs_from_before_go_on(tmp_path: Path) -> None:
    offload = umem.chainer.Offload(tmp_path)

    def step(model: Any, x: Any, t: Any) -> Any:
        h = x
        for layer in model:
            with offload:
                h = F.tanh(layer(h))
                h = h + F.sigmoid(h)
        loss = F.softmax_cross_entropy(h, t)
        model.cleargrads()
        with offload:
            loss.backward()
        return loss

    same(train("mlp", step=step), train("mlp", step=step))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_bring_back_and_takes_nothing_away(tmp_path: Path) -> None:
    model, x, t = Mlp(), rows(np.random.default_rng(0)), np.zeros(80, "i")
    t = t[: len(x)]
    with umem.chainer.Offload(tmp_path):
        loss = model.loss(x, t)
        loss = loss + 0  # what was sent is let go
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads and fork
            child = os.fork()
        if not child:
            code = 1
            try:
                loss.backward()
            except StateError as error:
                code = 0 if "before this process was forked" in str(error) else 2
                model.loss(x, t).backward()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        model.cleargrads()
        loss.backward()
    found = [p.grad.tobytes() for p in model.params()]
    model.cleargrads()
    model.loss(x, t).backward()
    assert found == [p.grad.tobytes() for p in model.params()]


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", 3, True, False])
def test_a_place_is_a_folder(place: Any) -> None:
    with pytest.raises(StateError, match="a folder"):
        umem.chainer.Offload(place)


def test_a_limit_is_a_size(tmp_path: Path) -> None:
    with pytest.raises(SizeError, match="limit"):
        umem.chainer.Offload(tmp_path, limit="much")


def test_a_limit_is_kept_to_and_no_bit_changes(tmp_path: Path) -> None:
    offload = umem.chainer.Offload(tmp_path, limit="32KiB")
    same(train("mlp", offload), train("mlp"))
    assert 0 < fetched(offload)


def test_one_moves_at_a_time(tmp_path: Path) -> None:
    with umem.chainer.Offload(tmp_path) as first:
        with pytest.raises(StateError, match="on already"):
            first.__enter__()
        with pytest.raises(StateError, match="on already"):
            umem.chainer.Offload(tmp_path).__enter__()
        with pytest.raises(StateError, match=r"Recompute\(budget, offload"):
            umem.chainer.Recompute("min").__enter__()
    with umem.chainer.Recompute("min"):
        with pytest.raises(StateError, match=r"Recompute\(budget, offload"):
            umem.chainer.Offload(tmp_path).__enter__()
    both(tmp_path, "mlp")


# -- together with the rest of umem --------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["residual", "mlp", "transformer"])
def test_beside_a_recorder_no_bit_changes(name: str, tmp_path: Path) -> None:
    with umem.record():
        expected = train(name)
    with umem.record():
        same(train(name, umem.chainer.Offload(tmp_path)), expected)
    with umem.chainer.Offload(tmp_path), umem.record():
        same(train(name), expected)


def test_a_recorder_sees_what_goes_and_what_comes(tmp_path: Path) -> None:
    model, x, t = Mlp(), rows(np.random.default_rng(0)), np.zeros(80, "i")

    def peak(offload: Any) -> tuple[int, dict[str, int]]:
        with offload, umem.record() as recorder:
            loss = model.loss(x, t[: len(x)])
            model.cleargrads()
            loss.backward()
        hints = [e for e in recorder.trace.events if isinstance(e, Hint)]
        count = {action: sum(h.action == action for h in hints) for action in ("send", "fetch")}
        return umem.replay(recorder.trace, "t4").peak_bytes, count

    plain, nothing = peak(chainer.using_config("train", True))
    less, moved = peak(umem.chainer.Offload(tmp_path))
    assert nothing == {"send": 0, "fetch": 0}
    assert moved["send"] >= moved["fetch"] >= 5
    assert less < plain


def test_on_a_virtual_gpu(tmp_path: Path) -> None:
    with umem.virtual_gpu("t4", vram="64MiB"):
        offload = umem.chainer.Offload()
        same(train("mlp", offload), train("mlp"))
    assert fetched(offload) > 0 and "simulated" in offload.summary()


# -- every function ------------------------------------------------------------------------------


DIFFERENTIABLE = [n for n, case in CASES.items() if case.gradient and "float32" in case.only]


def went_backward_twice(case: Case) -> list[bytes]:
    """The outputs of a function between others, and the gradients of two passes, to the bit."""
    np.random.seed(0)
    xs = [chainer.Variable(array.astype("f")) for array in arrays_for(case)]
    ys = flatten(case.run(*(x * 1 for x in xs)))
    loss = sum(F.sum(y * y) for y in ys)
    for _ in range(30):  # what is held for a while is let go
        loss = loss * 1
    found = [y.array.tobytes() for y in ys]
    del ys
    for _ in range(2):
        loss.backward()
        found += [b"" if x.grad is None else x.grad.tobytes() for x in xs]
    return found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_function_of_chainers_has_the_same_bits(name: str, tmp_path: Path) -> None:
    expected = went_backward_twice(CASES[name])
    with umem.chainer.Offload(tmp_path):
        assert went_backward_twice(CASES[name]) == expected
