"""A checkpoint changes no bit: whole models, arguments and results of every kind."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from contextlib import ExitStack
from functools import partial
from typing import Any

import umem.chainer  # noqa: F401  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from checkpoint_cases import MODELS, agree, plain, same, train, variable
from recompute_cases import OldStyle

from umem.chainer import checkpoint, checkpoint_sequential, checkpointed
from umem.errors import SizeError

OPTIMIZERS = {
    "adam": chainer.optimizers.Adam,
    "momentum": partial(chainer.optimizers.MomentumSGD, lr=0.1),
}


# -- whole models ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_training_are_equal_bit_for_bit(name: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    same(train(name, checkpoint, make), train(name, plain, make))


@pytest.mark.parametrize("name", ["mlp", "residual", "lstm"])
def test_mixed16_with_loss_scaling_is_equal_bit_for_bit(name: str) -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        make = OPTIMIZERS["momentum"]
        expected = train(name, plain, make, loss_scale=256.0)
        same(train(name, checkpoint, make, loss_scale=256.0), expected)
    assert any(value.dtype == np.float16 for value in expected.values())


def test_the_loss_scale_reaches_the_parameters_of_a_region() -> None:
    link = L.Linear(4, 3)
    link.cleargrads()
    F.sum(checkpoint(link, variable(2, 4))).backward(loss_scale=1000.0)
    assert link.W._loss_scale == 1000.0
    assert np.all(link.b.grad == 2000)


@pytest.mark.parametrize("name", ["mlp", "residual", "lstm, stepwise"])
def test_lazy_sums_of_gradients_are_equal_up_to_rounding(name: str) -> None:
    with chainer.using_config("lazy_grad_sum", True):
        expected, found = train(name, plain), train(name, checkpoint)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=2e-5, err_msg=key)


def test_a_region_of_one_result_shares_parameters_with_the_outside_bit_for_bit() -> None:
    link = L.Linear(6, 6)
    x = variable(5, 6)

    def loss(call: Any) -> Any:
        h = F.tanh(link(link(x)))
        h = call(lambda h: F.tanh(link(F.tanh(link(h)) * h)) + h, h)
        h = link(link(h)) * h
        return F.sum(call(lambda h: link(F.sigmoid(link(h))) * h, h))

    agree(loss, link.W, link.b, x)


def test_gradients_accumulate_over_several_backwards_bit_for_bit() -> None:
    def accumulated(call: Any) -> list[Any]:
        np.random.seed(0)
        link, x = L.Linear(6, 6), variable(5, 6)
        link.cleargrads()
        for _ in range(4):
            F.sum(call(lambda x: F.tanh(link(F.tanh(link(x)))), x)).backward()
        return [link.W.grad, link.b.grad, x.grad]

    for expected, found in zip(accumulated(plain), accumulated(checkpoint), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_each_region_runs_exactly_twice_and_not_without_backward() -> None:
    runs: list[str] = []

    def region(name: str, x: Any) -> Any:
        runs.append(name)
        return F.tanh(x)

    x = variable(2, 2)
    h = checkpoint(partial(region, "a"), x)
    y = checkpoint(partial(region, "b"), h)
    checkpoint(partial(region, "unused"), h)
    assert runs == ["a", "b", "unused"]
    F.sum(y).backward()
    assert runs == ["a", "b", "unused", "b", "a"]
    F.sum(y).backward()  # a second time on the same graph
    assert runs[5:] == ["b", "a"]


def test_a_second_backward_on_the_same_graph_is_equal_bit_for_bit() -> None:
    link = L.Linear(6, 6)
    x = variable(5, 6)

    def loss(call: Any) -> Any:
        y = F.sum(call(lambda x: F.dropout(F.tanh(link(x))), x))
        y.backward()
        return y

    agree(loss, link.W, link.b, x)


# -- arguments and results ---------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


def test_arguments_may_be_mixed_nested_and_no_arrays() -> None:
    a, b, c = variable(3), variable(3, seed=1), variable(3, seed=2)
    array = np.arange(3, dtype=np.float32)

    def region(x: Any, none: Any, pair: Any, options: Any, *, scale: Any, deep: Any) -> Any:
        assert none is None and type(pair) is Pair and options == {"on": [1, "two"]}
        assert type(pair.right) is np.ndarray
        (key, (inner,)) = deep[0]
        assert key == "key" and type(deep[1]) is OrderedDict
        return x * scale + pair.left * pair.right - inner["c"] * deep[1]["x"]

    def loss(call: Any) -> Any:
        return F.sum(
            call(
                region,
                a,
                None,
                Pair(b, array),
                {"on": [1, "two"]},
                scale=2.5,
                deep=[("key", [{"c": c}]), OrderedDict(x=a)],
            )
        )

    agree(loss, a, b, c)


def test_a_container_without_variables_stays_the_object_that_it_is() -> None:
    given = {"count": [0]}
    checkpoint(lambda x, d: x * len(d), variable(2), given)
    assert checkpoint(lambda x, d: (x, d), variable(2), given)[1] is given


def test_a_region_without_tensors_or_results_is_just_called() -> None:
    assert checkpoint(lambda: None) is None
    assert checkpoint(lambda a, *, b: a + b, 1, b=2) == 3
    assert checkpoint(lambda x: None, variable(2)) is None
    assert checkpoint(lambda x: {"n": [x.shape]}, variable(2, 3)) == {"n": [(2, 3)]}


def test_results_keep_their_containers() -> None:
    x = variable(3)

    def region(x: Any) -> Any:
        more = defaultdict(list, rest=[x * 2])
        return {"y": F.tanh(x), "pair": Pair(x + 1, None), "more": more, "n": 7}

    found = checkpoint(region, x)
    assert list(found) == ["y", "pair", "more", "n"] and found["n"] == 7
    assert type(found["pair"]) is Pair and found["pair"].right is None
    assert type(found["more"]) is defaultdict and found["more"]["other"] == []

    def loss(call: Any) -> Any:
        found = call(region, x)
        return F.sum(found["y"] * found["pair"].left + found["more"]["rest"][0])

    agree(loss, x)


def test_a_region_may_return_its_input_and_what_it_captures() -> None:
    x, w = variable(3), chainer.Parameter(np.ones(3, np.float32))
    h = F.tanh(w)
    y, again, parameter, inner = checkpoint(lambda x: (x * w, x, w, h), x)
    assert (again, parameter, inner) == (x, w, h) and again is x and parameter is w and inner is h
    assert y.creator_node is not None

    def loss(call: Any) -> Any:
        h = F.tanh(w)
        y, again, parameter, inner = call(lambda x: (x * h, x, w, h), x)
        return F.sum(y * again + parameter * inner)

    agree(loss, x, w)


def test_the_same_variable_may_be_given_and_returned_twice() -> None:
    x = variable(3)

    def region(a: Any, b: Any, pair: Any) -> Any:
        assert a is b and a is pair[0]
        y = a * b + pair[0]
        return y, y

    def loss(call: Any) -> Any:
        first, second = call(region, x, x, [x])
        assert first is second
        return F.sum(first * 2 + second * second)

    agree(loss, x)


def test_a_result_that_leads_to_another_result_gets_the_gradients_of_both() -> None:
    x = variable(3)

    def region(x: Any) -> Any:
        h = F.tanh(x)
        return h, F.exp(h), h[1:]

    agree(lambda call: sum(F.sum(y * y) for y in call(region, x)), x)
    agree(lambda call: F.sum(call(region, x)[1]), x)


def test_views_in_and_out_are_equal_bit_for_bit() -> None:
    x = variable(4, 6)

    def region(x: Any) -> Any:
        return F.transpose(x), F.split_axis(F.reshape(x, (2, 12)), 2, 1), x[1]

    def loss(call: Any) -> Any:
        a, (b, c), d = call(region, F.transpose(x)[1:])
        return F.sum(F.tanh(a)) + F.sum(b * c) + F.sum(d)

    with pytest.raises(chainer.utils.type_check.InvalidType):  # 20 elements are not 2 x 12
        loss(plain)
    agree(lambda call: F.sum(F.tanh(call(lambda x: F.transpose(x)[1:], x))), x)
    agree(lambda call: sum(F.sum(F.tanh(y)) for y in call(region, x)[1]), x)


def test_results_that_need_no_gradient_do_not_get_one() -> None:
    x, ids = variable(3), chainer.Variable(np.arange(3), requires_grad=False)
    y, count = checkpoint(lambda x, ids: (x * 2, ids + 1), x, ids)
    assert y.requires_grad and not count.requires_grad and count.creator_node is None
    assert list(count.array) == [1, 2, 3]


def test_inputs_without_gradient_while_captured_parameters_need_one() -> None:
    link = L.Linear(4, 3)
    x = variable(2, 4, requires_grad=False)
    agree(lambda call: F.sum(F.tanh(call(link, x))), link.W, link.b)
    agree(lambda call: F.sum(F.tanh(call(link, x.array))), link.W, link.b)
    agree(lambda call: F.sum(F.tanh(call(lambda: link(x)))), link.W, link.b)
    assert x.grad is None


def test_parameters_may_be_arguments_even_without_an_array() -> None:
    w = chainer.Parameter(chainer.initializers.One())

    def region(x: Any, w: Any) -> Any:
        assert isinstance(w, chainer.Parameter)
        if w.array is None:
            w.initialize(x.shape)
        return x * w

    agree(lambda call: F.sum(F.tanh(call(region, variable(3), w))), w)


def test_an_old_style_function_runs_in_a_region() -> None:
    x = variable(3)
    agree(lambda call: F.sum(F.tanh(call(lambda x: OldStyle()(F.exp(x)), x))), x)


def test_a_sparse_matrix_with_a_variable_inside_is_captured() -> None:
    row, col = np.array([0, 1, 1], np.int32), np.array([1, 0, 2], np.int32)
    data, dense = variable(3), variable(3, 2, seed=1)
    matrix = chainer.utils.CooMatrix(data.array, row, col, (2, 3))
    loss = lambda call: F.sum(F.tanh(call(F.sparse_matmul, matrix, dense)))  # noqa: E731
    agree(loss, matrix.data, dense)


# -- the decorator, sequences ------------------------------------------------------------------


def test_the_decorator_keeps_the_name_and_takes_methods_and_options() -> None:
    class Block(chainer.Chain):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.link = L.Linear(3, 3)

        @checkpointed
        def forward(self, x: Any, times: int = 1) -> Any:
            """Several times."""
            for _ in range(times):
                x = F.tanh(self.link(x))
            return x

    block, x = Block(), variable(2, 3)
    assert (Block.forward.__name__, Block.forward.__doc__) == ("forward", "Several times.")
    y = block(x, times=3, determinism_check=False)
    assert type(y.creator_node).__name__ == "Checkpoint"
    undecorated = Block.forward.__wrapped__
    agree(lambda call: F.sum(call(undecorated, block, x, times=2)), x, block.link.W)


def sequences() -> dict[str, Any]:
    np.random.seed(0)
    links = [L.Linear(5, 5) for _ in range(7)]
    between: list[Any] = [F.dropout if i % 2 else F.tanh for i in range(7)]
    return {
        "a list": [step for pair in zip(links, between, strict=True) for step in pair],
        "a Sequential": chainer.Sequential(*links[:3], F.relu, *links[3:]),
        "a ChainList": chainer.ChainList(*links),
        "a generator": (link for link in links),
    }


@pytest.mark.parametrize("kind", sequences())
def test_a_sequence_is_equal_bit_for_bit_for_every_number_of_segments(kind: str) -> None:
    steps, x = list(sequences()[kind]), variable(4, 5)
    params = [p for step in steps if isinstance(step, chainer.Link) for p in step.params()]

    def loss(call: Any, segments: Any) -> Any:
        if call is plain:
            y = x
            for step in steps:
                y = step(y)
        else:
            y = checkpoint_sequential(steps, x, segments)
        return F.sum(y * y)

    for segments in (None, *range(1, len(steps) + 1), np.int64(2)):
        agree(partial(loss, segments=segments), x, *params)


def test_a_sequence_takes_the_container_as_it_is() -> None:
    for kind, funcs in sequences().items():
        y = checkpoint_sequential(funcs, variable(2, 5), 2)
        assert type(y.creator_node).__name__ == "Checkpoint", kind


def test_a_tuple_between_steps_becomes_arguments_as_in_a_sequential() -> None:
    steps = [lambda x: (x, x * 2), lambda a, b: (a + b, b, None), lambda a, b, c: a * b]
    x = variable(3)
    expected = chainer.Sequential(*steps)(x)
    for segments in (1, 2, 3):
        found = checkpoint_sequential(steps, x, segments)
        np.testing.assert_array_equal(found.array, expected.array)


def test_about_the_square_root_is_the_number_of_segments() -> None:
    nodes, y = 0, checkpoint_sequential([F.tanh] * 16, variable(2))
    while y.creator_node is not None:
        nodes, y = nodes + 1, y.creator_node.inputs[0]
    assert nodes == 4


@pytest.mark.parametrize("segments", [0, -1, 4, 2.0, "2", True])
def test_a_number_of_segments_that_cannot_be_names_what_can(segments: Any) -> None:
    with pytest.raises(SizeError, match=r"from 1 to 3; got"):
        checkpoint_sequential([F.tanh] * 3, variable(2), segments)


def test_nothing_to_call_is_an_error_at_the_call() -> None:
    with pytest.raises(TypeError, match="checkpoint needs something to call; got int"):
        checkpoint(3, variable(2))
    with pytest.raises(TypeError, match="checkpointed needs something to call; got Variable"):
        checkpointed(variable(2))
    with pytest.raises(TypeError, match="checkpoint_sequential needs something to call; got str"):
        checkpoint_sequential([F.tanh, "relu"], variable(2))
    with pytest.raises(SizeError, match="at least one function"):
        checkpoint_sequential([], variable(2))


def test_without_backprop_a_region_is_just_called() -> None:
    with ExitStack() as stack:
        stack.enter_context(chainer.no_backprop_mode())
        y = checkpoint(lambda x: F.tanh(x), variable(2))
        assert y.creator_node is None
        with chainer.force_backprop_mode():
            y = checkpoint(F.tanh, variable(2))
            assert type(y.creator_node).__name__ == "Checkpoint"
