"""Programs that do more with a graph than forward and backward once are exact, or say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from recompute_cases import planned, same

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.errors import RecomputeError

Numbers = dict[str, Any]
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning"),
]


def links(count: int = 4, width: int = 32) -> Any:
    np.random.seed(0)
    return chainer.ChainList(*[L.Linear(width, width) for _ in range(count)])


def batches(steps: int, *shape: int) -> Iterator[tuple[int, Any]]:
    rng = np.random.default_rng(0)
    for step in range(steps):
        yield step, rng.standard_normal(shape, dtype=np.float32)


def note(found: Numbers, step: int, *models: Any) -> None:
    """Every parameter and persistent value after a step."""
    for place, model in enumerate(models):
        for name, parameter in sorted(model.namedparams()):
            found[f"{step} {place}{name}"] = parameter.array.copy()


def update(model: Any, optimizer: Any, loss: Any) -> None:
    model.cleargrads()
    loss.backward()
    optimizer.update()


def exact(program: Callable[[], Numbers], plans: bool = True) -> None:
    """The program gives the same bits under budgets of both kinds."""
    expected = program()
    for budget in ("min", "100%"):
        with umem.chainer.Recompute(budget) as memory:
            same(program(), expected)
        assert bool(planned(memory)) == plans


def test_two_networks_against_each_other_share_a_forward() -> None:
    def program() -> Numbers:
        maker, judge = links(3), links(3)
        rules = [chainer.optimizers.Adam().setup(model) for model in (maker, judge)]
        found: Numbers = {}

        def judged(x: Any) -> Any:
            return judge[2](F.leaky_relu(judge[1](F.leaky_relu(judge[0](x)))))

        for step, x in batches(6, 10, 32):
            real, fake = judged(x), judged(F.tanh(maker[1](F.relu(maker[0](x)))))
            rules[1].update(lambda: F.mean(F.softplus(-real)) + F.mean(F.softplus(fake)))  # noqa: B023
            rules[0].update(lambda: F.mean(F.softplus(-fake)))  # noqa: B023
            note(found, step, maker, judge)
        return found

    exact(program, plans=False)


def test_an_update_between_two_backwards_of_one_forward() -> None:
    def program() -> Numbers:
        model = links()
        rule = chainer.optimizers.SGD(0.1).setup(model)
        found: Numbers = {}
        for step, x in batches(5, 20, 32):
            h = F.tanh(model[1](F.tanh(model[0](x))))
            losses = F.mean(F.tanh(model[2](h))), F.mean(model[3](h) ** 2)
            for loss in losses:
                update(model, rule, loss)
            note(found, step, model)
        return found

    exact(program, plans=False)


def test_an_update_between_two_backwards_that_never_was_before_is_an_error_once() -> None:
    def program() -> Iterator[Numbers]:
        model = links()
        rule = chainer.optimizers.SGD(0.1).setup(model)
        for step, x in batches(9, 20, 32):
            loss = F.mean(model[2](F.tanh(model[1](F.tanh(model[0](x))))) ** 2)
            update(model, rule, loss)
            if step >= 5:
                model.cleargrads()
                try:
                    loss.backward()
                except RecomputeError:
                    yield {"refused": np.array(step)}
                    model.cleargrads()
                    continue
            found: Numbers = {f"{step} {n}": p.grad for n, p in model.namedparams()}
            yield {key: grad for key, grad in found.items() if grad is not None}

    expected = list(program())
    with umem.chainer.Recompute("min") as memory:
        results = list(program())
    assert [list(result) for result in results].count(["refused"]) == 1
    assert list(results[5]) == ["refused"]
    for result, wanted in zip(results, expected, strict=True):
        if "refused" not in result:
            same(result, wanted)
    assert "its backward runs again after an update" in memory.report()


@pytest.mark.parametrize("other", ["head", "metric", "softmax"])
def test_what_is_alive_beside_the_loss_and_does_not_go_backward(other: str) -> None:
    def program() -> Numbers:
        model = links()
        rule = chainer.optimizers.SGD().setup(model)
        found: Numbers = {}
        for step, x in batches(6, 20, 32):
            y = F.tanh(model[1](F.tanh(model[0](x))))
            beside = {
                "head": lambda: model[2](y),  # noqa: B023
                "metric": lambda: F.mean(F.absolute(y)),  # noqa: B023
                "softmax": lambda: F.softmax(y),  # noqa: B023
            }[other]()
            update(model, rule, F.mean(model[3](y) ** 2))
            note(found, step, model)
            found[f"beside {step}"] = beside.array.copy()
        return found

    exact(program)


@pytest.mark.parametrize("turns", [(0, 1), (0, 0, 1, 0), (1, 1, 1, 0)])
def test_another_of_two_losses_goes_backward(turns: tuple[int, ...]) -> None:
    def program() -> Numbers:
        model = links(6, 16)
        rule = chainer.optimizers.SGD().setup(model)
        found: Numbers = {}
        for step, x in batches(8, 12, 16):
            h = F.tanh(model[0](x))
            u = F.tanh(model[1](h))
            v = F.sigmoid(model[2](u) + h)
            p = F.sigmoid(model[3](h))
            r = F.tanh(model[5](F.tanh(model[4](p) * h)) + p * h)
            losses = F.sum(v * h) + F.sum(u * F.relu(h)), F.sum(r * h) + F.sum(F.exp(h))
            update(model, rule, losses[turns[step % len(turns)]])
            note(found, step, model)
        return found

    expected = program()
    for budget in ("min", "100%"):
        with umem.chainer.Recompute(budget):
            same(program(), expected)


def test_what_chainer_reads_from_a_function_once_it_has_run() -> None:
    def program() -> Numbers:
        np.random.seed(0)
        model = chainer.ChainList(L.Convolution2D(3, 8, 3, pad=1), L.Convolution2D(8, 4, 3, pad=1))
        rule = chainer.optimizers.SGD().setup(model)
        found: Numbers = {}
        for step, x in batches(5, 4, 3, 16, 16):
            h = F.relu(model[0](x))
            h, indexes = F.max_pooling_2d(h, 2, 2, return_indices=True)
            h, mask = F.dropout(h, 0.3, return_mask=True)
            h = h + F.dropout(h, 0.3, mask=mask)
            up = F.upsampling_2d(h, indexes, 2, 2, outsize=(16, 16))
            update(model, rule, F.mean(model[1](up) ** 2))
            note(found, step, model)
        return found

    exact(program)


class OldMask(chainer.Function):  # type: ignore[misc]
    def forward(self, inputs: Any) -> Any:
        self.mask = inputs[0] > 0
        return (inputs[0] * self.mask,)

    def backward(self, inputs: Any, gradients: Any) -> Any:
        return (gradients[0] * self.mask,)


class Appends(chainer.FunctionNode):  # type: ignore[misc]
    def __init__(self) -> None:
        self.saved: list[Any] = []

    def forward(self, inputs: Any) -> Any:
        self.saved.append(np.exp(-inputs[0]))
        return (inputs[0] * self.saved[-1],)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        return (gradients[0] * sum(self.saved),)


class Mean(chainer.FunctionNode):  # type: ignore[misc]
    """Keeps a running statistic on a link."""

    def __init__(self, link: Any) -> None:
        self.link = link

    def forward(self, inputs: Any) -> Any:
        self.link.average *= 0.9
        self.link.average += 0.1 * inputs[0].mean(axis=0)
        return (inputs[0] - inputs[0].mean(axis=0),)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        mean = F.mean(gradients[0], axis=0, keepdims=True)
        return (gradients[0] - F.broadcast_to(mean, gradients[0].shape),)


@pytest.mark.parametrize("kind", ["mask", "list", "link"])
def test_functions_of_the_users_own_are_kept(kind: str) -> None:
    def program() -> Numbers:
        model = links(5, 64)
        model.add_persistent("average", np.zeros(64, np.float32))
        rule = chainer.optimizers.SGD(1e-3).setup(model)
        apply = {
            "mask": lambda h: OldMask()(h),
            "list": lambda h: Appends().apply((h,))[0],
            "link": lambda h: Mean(model).apply((h,))[0],
        }[kind]
        found: Numbers = {}
        for step, h in batches(6, 50, 64):
            for link in model:
                h = apply(F.tanh(link(h)))
            update(model, rule, F.mean(h * h))
            note(found, step, model)
            found[f"average {step}"] = model.average.copy()
        return found

    exact(program)


def test_what_the_user_still_holds_is_not_made_twice() -> None:
    calls: list[int] = []

    class Counted(chainer.FunctionNode):  # type: ignore[misc]
        umem_recomputable = True

        def forward(self, inputs: Any) -> Any:
            calls.append(1)
            return (np.tanh(inputs[0]),)

        def backward(self, indexes: Any, gradients: Any) -> Any:
            return (gradients[0],)

    def run(hold: bool) -> int:
        model = links(8, 64)
        held: list[Any] = []
        with umem.chainer.Recompute("min"):
            for _, h in batches(5, 50, 64):
                calls.clear()
                held.clear()
                for link in model:
                    h = Counted().apply((link(h),))[0]
                    held += [h] if hold else []
                loss = F.mean(h * h)
                model.cleargrads()
                loss.backward()
        return len(calls)

    assert run(hold=True) == 8 < run(hold=False)


def test_parameters_that_no_call_reads_count() -> None:
    def run(region: Callable[..., Any]) -> Any:
        model = links(6, 256)
        rule = chainer.optimizers.SGD(1e-3).setup(model)
        memory = umem.chainer.Recompute("min")
        with memory or nullcontext():
            for _, x in batches(4, 8, 256):
                h = chainer.Variable(x)
                for link in model:
                    h = region(lambda y, link=link: F.tanh(link(y)), h)
                update(model, rule, F.mean(h * h))
        return memory.predicted_bytes

    plain, hidden = run(lambda f, x: f(x)), run(F.forget)
    assert hidden == pytest.approx(plain, rel=0.1)


def test_state_that_an_optimizer_makes_late_is_counted() -> None:
    """Gradients are accumulated over four steps: Adam has no state before the fifth."""
    layers = [L.Linear(200, 200) for _ in range(4)]
    model = chainer.ChainList(*layers)
    optimizer = chainer.optimizers.Adam().setup(model)
    x = np.ones((500, 200), np.float32)
    predicted = []
    with umem.chainer.Recompute("min") as memory:
        for number in range(9):
            h = x
            for layer in layers:
                h = F.tanh(layer(h))
            loss = F.sum(h * h)
            loss.backward()
            del loss, h
            predicted.append(memory.predicted_bytes)
            if number % 4 == 3:
                optimizer.update()
    state = 2 * sum(p.array.nbytes for p in model.params())
    before, after = predicted[3], predicted[8]
    assert before is not None and after is not None
    assert after - before == pytest.approx(state, rel=0.01)


def test_two_graphs_are_alive_when_the_block_is_left() -> None:
    gradients = []
    for memory in (nullcontext(), umem.chainer.Recompute("min")):
        np.random.seed(0)
        model = chainer.ChainList(*[L.Linear(16, 16) for _ in range(8)])
        x = np.random.standard_normal((12, 16)).astype(np.float32)
        with memory:
            for _ in range(5):
                losses = []
                for count in (40, 1):
                    h = np.tile(x, (count, 1))
                    for layer in model:
                        h = F.tanh(layer(h))
                    losses.append(F.sum(h * h))
                    losses[-1].backward()
        model.cleargrads()
        for loss in losses:
            loss.backward()
        gradients.append([p.grad.tobytes() for _, p in sorted(model.namedparams())])
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("of", ["outputs", "inputs"])
@pytest.mark.parametrize("budget", ["min", "100%", "1GiB"])
def test_an_accuracy_that_is_kept_over_the_update(of: str, budget: str) -> None:
    """It is no part of the next pass, whose parameters are other ones."""
    gradients = []
    for memory in (nullcontext(), umem.chainer.Recompute(budget)):
        np.random.seed(0)
        model = chainer.ChainList(*[L.Linear(16, 16) for _ in range(8)])
        optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
        x = np.random.standard_normal((12, 16)).astype(np.float32)
        t = np.arange(12, dtype=np.int32)
        found = []
        with memory:
            for _ in range(6):
                y = chainer.as_variable(x)
                for layer in model:
                    y = F.tanh(layer(y))
                loss = F.softmax_cross_entropy(y, t)
                model.cleargrads()
                loss.backward()
                loss.backward()
                accuracy = F.accuracy(y if of == "outputs" else chainer.Variable(x), t)
                found += [p.grad.tobytes() for _, p in sorted(model.namedparams())]
                optimizer.update()
                assert accuracy.array >= 0
        gradients.append(found)
        if isinstance(memory, umem.chainer.Recompute):
            assert planned(memory)
    assert gradients[0] == gradients[1]


# -- found by a second hunt --------------------------------------------------------------------


def deep(count: int = 8) -> Any:
    np.random.seed(0)
    return chainer.ChainList(*[L.Linear(16, 16) for _ in range(count)])


def tanh_of(model: Any, h: Any) -> Any:
    for layer in model:
        h = F.tanh(layer(h))
    return h


def test_the_call_at_which_a_plan_is_left_can_run_again_all_the_same() -> None:
    model, x = deep(), np.ones((12, 16), np.float32)
    with umem.chainer.Recompute("min") as memory:
        for number in range(9):
            h = F.tanh(model[0](x))
            if number >= 4:
                h = tanh_of(model[1:], F.tile(h, (40, 1)))
            model.cleargrads()
            F.sum(h).backward()
            del h
    assert len(planned(memory)) == 2
    assert "cannot run again" not in memory.report()


@pytest.mark.parametrize("budget", ["min", "1GiB"])
def test_a_cut_after_backward_and_another_backward_through_what_is_left(budget: str) -> None:
    gradients = []
    for memory in (nullcontext(), umem.chainer.Recompute(budget)):
        model, x = deep(), np.ones((12, 16), np.float32)
        found = []
        with memory:
            for _ in range(5):
                h = F.tanh(model[1](F.tanh(model[0](x))))
                cut = model[2](h)
                z = F.sin(F.sin(F.tanh(cut) * F.exp(h)))
                z = F.sin(F.tanh(model[3](z)))
                F.sum(z).backward()
                again = F.sum(F.sin(model[4](z) * z))
                cut.unchain_backward()
                model.cleargrads()
                again.backward()
                found += [
                    None if p.grad is None else p.grad.tobytes()
                    for _, p in sorted(model.namedparams())
                ]
                del h, cut, z, again
        gradients.append(found)
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("budget", ["min", "1GiB"])
def test_forwards_without_backward_do_not_use_up_the_measurements(budget: str) -> None:
    model, x = deep(), np.ones((40, 16), np.float32)
    with umem.chainer.Recompute(budget) as memory:
        for _ in range(6):
            for _ in range(9):
                float(F.sum(tanh_of(model, x)).array)
            model.cleargrads()
            F.sum(tanh_of(model, x)).backward()
    assert memory.predicted_bytes is not None and memory.measured_bytes is not None


def test_another_optimizer_that_keeps_more_is_counted() -> None:
    model, x = deep(), np.ones((12, 16), np.float32)
    chainer.optimizers.MomentumSGD().setup(model)
    predicted = []
    with umem.chainer.Recompute("min") as memory:
        for number in range(9):
            if number == 5:
                chainer.optimizers.Adam().setup(model)
            model.cleargrads()
            F.sum(tanh_of(model, x)).backward()
            predicted.append(memory.predicted_bytes)
            for p in model.params():
                p.update()
    assert predicted[4] is not None and predicted[8] is not None
    assert predicted[8] - predicted[4] == sum(p.array.nbytes for p in model.params())
