"""`slimmer` exchanges layers in place, all or none; its figures are a trace's, and it is undone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import umem

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.link_hooks
import chainer.links as L

from umem.chainer import slimmer
from umem.chainer.layers import Grouped, LowRank, Separable, TiedTo
from umem.errors import LayerError, SizeError, StateError

Array = np.ndarray[Any, Any]


class Mixed(chainer.Chain):  # type: ignore[misc]
    """Links in a Chain, a ChainList and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(1, 4, 3, pad=1)
            self.body = chainer.ChainList(L.Convolution2D(4, 8, 3, pad=1), L.BatchNormalization(8))
            self.top = chainer.Sequential(L.Linear(8 * 16, 16), F.relu, L.Linear(16, 3))

    def forward(self, x: Array) -> Any:
        x = F.relu(self.first(x))
        for link in self.body:
            x = link(x)
        return self.top(F.max_pooling_2d(x, 2))


class Words(chainer.Chain):  # type: ignore[misc]
    """A table, layers and a score of the table's shape."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(50, 12)
            self.inner = L.Linear(12, 12)
            self.score = L.Linear(12, 50)

    def forward(self, x: Array) -> Any:
        return self.score(F.tanh(self.inner(self.embed(x))))


def images(count: int = 2) -> Array:
    return np.random.default_rng(0).standard_normal((count, 1, 8, 8)).astype("f")


def mixed() -> Mixed:
    np.random.seed(0)
    model = Mixed()
    with chainer.using_config("train", True):
        model(images(4))  # running statistics
    return model


def contents(model: Any) -> dict[str, Any]:
    """Everything that a model is: its links, their attributes, and copies of their arrays."""
    found: dict[str, Any] = {}
    for path, link in model.namedlinks():
        for name, value in vars(link).items():
            in_order = sorted(value) if isinstance(value, set) else value
            is_row = isinstance(value, (list, set))
            found[f"{path} {name}"] = [id(one) for one in in_order] if is_row else id(value)
    for path, parameter in model.namedparams():
        found[path] = (
            id(parameter),
            None if parameter.array is None else parameter.array.tobytes(),
        )
    return found


def traced(model: Any, x: Array) -> int:
    """The operations of a forward pass, by the recorder alone."""
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        with umem.record() as recorder:
            model(x)
    return sum(op.flops for op in recorder.trace.ops)


def held(model: Any) -> int:
    return sum(array.nbytes for array in {id(p): p.array for p in model.params()}.values())


def test_bytes_and_operations_are_those_of_a_trace() -> None:
    model, x = mixed(), images()
    before = held(model), traced(model, x)
    slim = slimmer(model, {"/body/0": Separable(), L.Linear: LowRank(rank=2)}, x, quiet=True)
    assert (slim.totals.bytes_before, slim.totals.operations_before * 2) == before
    assert (slim.totals.bytes_after, slim.totals.operations_after * 2) == (
        held(model), traced(model, x),
    )  # fmt: skip
    # Of a sample, a multiply and an add as two: 64 pixels; 128 x 16 and 16 x 3 by rank 2. What
    # Linear flattens is a view, and counts nothing.
    rows = {row.path: (row.operations_before, row.operations_after) for row in slim.rows}
    assert rows == {
        "/body/0": (2 * 64 * 9 * 4 * 8, 2 * 64 * 4 * (9 + 8)),
        "/top/0": (2 * 128 * 16, 2 * 2 * (128 + 16)),
        "/top/1": (2 * 16 * 3, 2 * 2 * (16 + 3)),
    }
    sizes = {row.path: (row.bytes_before, row.bytes_after) for row in slim.rows}
    assert sizes == {
        "/body/0": (4 * (9 * 4 * 8 + 8), 4 * (4 * (9 + 8) + 8)),
        "/top/0": (4 * (128 * 16 + 16), 4 * (2 * (128 + 16) + 16)),
        "/top/1": (4 * (16 * 3 + 3), 4 * (2 * (16 + 3) + 3)),
    }


def test_layers_stand_where_the_old_ones_stood_and_undo_brings_those_back() -> None:
    model, x = mixed(), images()
    before, y = contents(model), model(x).array
    before = contents(model)  # that call was one of training
    slim = slimmer(model, {"/body/0": Separable(), "/top/*": LowRank(rank=2)}, x, quiet=True)
    kinds = [
        type(link).__name__ for link in (model.first, model.body[0], model.top[0], model.top[2])
    ]
    assert kinds == ["Convolution2D", "SeparableConvolution2D", "LowRankLinear", "LowRankLinear"]
    assert model.body[0].name == "0" and model.top[1] is F.relu
    assert {"/body/0/depthwise/W", "/top/0/reduce/W", "/top/1/expand/b"} <= {
        name for name, _ in model.namedparams()
    }
    slim.undo()
    assert contents(model) == before
    slim.undo()
    assert contents(model) == before
    with chainer.using_config("train", False):
        assert np.isfinite(y).all() and model(x).shape == y.shape


def test_the_report_has_a_row_a_layer_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = Words()
    rules = [("/inner", LowRank(rank=6)), ("/score/W", TiedTo("/embed/W"))]
    slim = slimmer(model, rules, np.arange(4).astype("i"))
    said = capsys.readouterr().out.rstrip("\n")
    assert said == str(slim)
    lines = [line.split("  ") for line in said.splitlines()]
    assert [line[0] for line in lines] == ["layer", "/inner", "/score/W", "the model"]
    assert "unchanged: it would get no smaller" in said and "tied to /embed/W" in said
    assert slim.totals.bytes_before - slim.totals.bytes_after == 4 * 50 * 12
    slim.undo()
    assert held(model) == slim.totals.bytes_before and model.score.W is not model.embed.W


def test_without_an_example_bytes_alone_are_said() -> None:
    model = Words()
    slim = slimmer(model, {"/score": LowRank(energy=0.5)}, quiet=True)
    assert slim.totals.operations_before is slim.totals.operations_after is None
    assert slim.totals.bytes_after == held(model) < slim.totals.bytes_before


def test_the_example_leaves_no_trace() -> None:
    model, x = mixed(), images()
    state = np.random.get_state()[1].tobytes()
    statistics = model.body[1].avg_mean.copy()
    slimmer(model, {"/body/0": Separable()}, x, quiet=True)
    assert (model.body[1].avg_mean == statistics).all()
    assert np.random.get_state()[1].tobytes() == state
    assert all(one.grad is None or np.isnan(one.grad).all() for one in model.params())


# -- an optimizer that is set up -----------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Adam", "Adam8bit"])
def test_an_optimizer_goes_on_with_rules_of_the_layers(kind: str) -> None:
    model, ids = Words(), np.arange(40).astype("i")
    every = chainer.optimizers if kind == "Adam" else umem.chainer.optimizers
    optimizer = getattr(every, kind)().setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
    model.score.W.update_rule.hyperparam.alpha = 0.25
    model.score.b.update_rule.enabled = False

    def loss() -> Any:
        return F.softmax_cross_entropy(model(ids), ids)

    optimizer.update(loss)
    kept = model.embed.W.update_rule.state["m"].tobytes(), model.score.W.update_rule.state["m"]
    slim = slimmer(model, {"/score": LowRank(rank=4)}, ids, quiet=True)
    new = model.score.reduce.W.update_rule
    assert (new.t, new.state, new.hyperparam.alpha) == (0, None, 0.25)
    assert new.hyperparam.parent is optimizer.hyperparam
    assert not model.score.expand.b.update_rule.enabled
    assert model.embed.W.update_rule.state["m"].tobytes() == kept[0]
    before = [one.array.copy() for one in model.score.params()]
    optimizer.update(loss)
    moved = [
        not np.array_equal(a, one.array)
        for a, one in zip(before, model.score.params(), strict=True)
    ]
    assert moved == [name != "/expand/b" for name, _ in model.score.namedparams()]
    assert (new.t, model.embed.W.update_rule.t) == (1, 2)
    slim.undo()
    assert model.score.W.update_rule.state["m"] is kept[1] and model.score.W.update_rule.t == 1


def test_slimming_is_refused_where_parameters_are_held_as_they_are() -> None:
    model = Words()
    optimizer = chainer.optimizers.Adam().setup(model)
    half = umem.chainer.half_precision(model, optimizer)
    before = contents(model)
    with pytest.raises(StateError, match="half precision is on"):
        slimmer(model, {"/score": LowRank(rank=4)})
    assert contents(model) == before
    slimmer(Words(), {"/score": LowRank(rank=4)}, quiet=True)  # no optimizer has this one
    others = Words()
    chainer.optimizers.Adam().setup(others)
    slimmer(others, {"/score": LowRank(rank=4)}, quiet=True)  # another optimizer has this one
    half.undo()
    slimmer(model, {"/score": LowRank(rank=4)}, quiet=True)


class Sentences(Words):
    """Takes a list of arrays of several lengths, one a sample."""

    def forward(self, xs: list[Array]) -> Any:
        return super().forward(np.concatenate(xs))


def test_a_list_of_arrays_has_a_sample_each() -> None:
    rows = [np.zeros(length, "i") for length in (3, 2, 5, 2)]
    one = slimmer(Words(), {"/score": LowRank(rank=4)}, np.zeros(12, "i"), quiet=True)
    for example in (rows, (rows,)):
        four = slimmer(Sentences(), {"/score": LowRank(rank=4)}, example, quiet=True)
        for name in ("operations_before", "operations_after"):
            assert getattr(four.totals, name) == 3 * getattr(one.totals, name)


# -- what cannot be exchanged --------------------------------------------------------------------


class Own(L.Linear):  # type: ignore[misc]
    """A link made from Chainer's, which may compute something else."""


def in_two_places() -> Any:
    model = Words()
    with model.init_scope():
        model.again = model.inner
    return model


def also_in_a_list() -> Any:
    model = Words()
    model.all = [model.inner]
    return model


def shared_by_hand() -> Any:
    model = Words()
    model.score.W = model.embed.W
    return model


def with_a_hook() -> Any:
    model = Words()
    model.inner.add_hook(chainer.link_hooks.TimerHook())
    return model


def spoiled() -> Any:
    model = Words()
    model.inner.W.array[0, 0] = np.nan
    return model


def tied() -> Any:
    model = Words()
    umem.chainer.tie(model, "/embed/W", "/score/W")
    return model


def twice_in_a_sequence() -> Any:
    link = L.Linear(4, 4)
    return chainer.Sequential(link, F.relu, link)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "without an array": (
        lambda: chainer.Sequential(L.Linear(None, 4)), {"/0": LowRank(rank=1)},
        r"/0 \(Linear\): it has no W yet: run the model once",
    ),
    "channels": (
        lambda: chainer.Sequential(L.Convolution2D(4, 6, 3)), {"/0": Grouped(4)},
        r"/0 \(Convolution2D\): 4 groups do not divide its 4 input and 6 output",
    ),
    "in groups already": (
        lambda: chainer.Sequential(L.Convolution2D(4, 6, 3, groups=2)), {"/0": Separable()},
        r"it has 2 groups already",
    ),
    "a class of one's own": (
        lambda: chainer.Sequential(Own(4, 4)), {L.Linear: LowRank(rank=1)},
        r"/0 \(Own\): LowRank is for Linear and EmbedID, and a class made from it",
    ),
    "of another kind": (
        mixed, {"/body/*": Separable()}, r"/body/1 \(BatchNormalization\): Separable is for Conv",
    ),
    "in two places": (
        in_two_places, {"/inner": LowRank(rank=1)}, "it is in several places, /inner and /again",
    ),
    "twice in a sequence": (
        twice_in_a_sequence, [("/0", LowRank(rank=1))], "in several places, /0 and /1",
    ),
    "also in a list": (
        also_in_a_list, {"/inner": LowRank(rank=1)}, r"several places, /inner and /all\[0\]",
    ),
    "shared by hand": (
        shared_by_hand, {"/score": LowRank(rank=1)}, "its W is shared, by /embed/W and /score/W",
    ),
    "tied": (tied, {"/embed": LowRank(rank=1)}, "its W is shared, by /embed/W and /score/W"),
    "with a hook": (with_a_hook, {"/inner": LowRank(rank=1)}, "it has link hooks, TimerHook"),
    "a rank above the sizes": (
        Words, {L.Linear: LowRank(rank=13)},
        r"/inner \(Linear\): rank 13 is above the largest, which is 12; /score \(Linear\): rank 13",
    ),
    "a limit below a rank of 1": (
        Words, {"/inner": LowRank(limit=100)}, "a rank of 1 takes 144 B, which is above",
    ),
    "NaN": (spoiled, {L.Linear: LowRank(rank=2)}, r"/inner \(Linear\): the weight has NaN"),
    "no layer": (Words, {"/inner": LowRank(rank=2), "/none*": LowRank(rank=1)}, "none.*matches no"),
    "no such class": (Words, {L.GRU: LowRank(rank=1)}, "the rule for GRU matches no layer"),
    "an empty model": (chainer.Chain, {"*": LowRank(rank=1)}, "matches no layer; there are none"),
    "a model that is the layer": (
        lambda: L.Linear(4, 4), {"/": LowRank(rank=1)}, "matches no layer; there are none",
    ),
    "no rule": (Words, {}, "there is no rule"),
    "nothing": (Words, None, "rules must be a dict or pairs.*got None"),
    "a rule for nothing": (Words, LowRank(rank=1), "rules must be a dict or pairs.*got LowRank"),
    "a text": (Words, "/inner", "rules must be a dict or pairs.*got '/inner'"),
    "no layer of many": (
        lambda: chainer.Sequential(*[L.Linear(2, 2) for _ in range(40)]),
        {"/none": LowRank(rank=1)}, r"there are /0 \(Linear\).*, and 20 more$",
    ),
    "what is no rule": (Words, {"/inner": 4}, "got '/inner': 4"),
    "a row that is no pair": (Words, [LowRank(rank=1)], "a rule is a path"),
    "a tie by class": (Words, {L.Linear: TiedTo("/embed/W")}, "got <class"),
    "a tie of other shapes": (
        Words, {"/inner": LowRank(rank=2), "/inner/W": TiedTo("/embed/W")}, "no parameter is at",
    ),
    "no model": (lambda: [1], {"*": LowRank(rank=1)}, "a model must be a chainer.Link; got list"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exchanged_is_named_and_nothing_changes(name: str) -> None:
    make, rules, said = REFUSED[name]
    model = make()
    before = contents(model) if isinstance(model, chainer.Link) else None
    with pytest.raises(LayerError, match=said):
        slimmer(model, rules)
    assert before is None or contents(model) == before


@pytest.mark.parametrize(
    "rule",
    [lambda: LowRank(), lambda: LowRank(rank=0), lambda: LowRank(energy=2.0),
     lambda: LowRank(limit="-1"), lambda: Grouped(1), lambda: Separable(0),
     lambda: LowRank(energy="most")],  # type: ignore[arg-type]
)  # fmt: skip
def test_a_rule_out_of_range_is_refused_where_it_is_made(rule: Any) -> None:
    with pytest.raises(SizeError):
        rule()


def test_a_multiplier_is_called_so() -> None:
    with pytest.raises(SizeError, match="a multiplier must be an int of at least 1; got 0"):
        Separable(0)
    with pytest.raises(LayerError, match="multiplier 10 is above the smaller size, 8"):
        slimmer(chainer.Sequential(L.Convolution2D(4, 8, 3)), {L.Convolution2D: Separable(10)})


class ReadsItsWeight(Words):
    def forward(self, x: Array) -> Any:
        return super().forward(x) + F.sum(self.inner.W)


class HidesALayer(Words):
    def __init__(self) -> None:
        super().__init__()
        inner = self.inner
        self.hidden = lambda x: inner(x)

    def forward(self, x: Array) -> Any:
        return self.score(self.hidden(self.embed(x)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ReadsItsWeight, "fails with the new layers, which have.*'W'"),
        (HidesALayer, "does not call the new layers"),
    ],
)
def test_a_model_that_does_not_work_with_new_layers_gets_its_old_ones(kind: Any, said: str) -> None:
    model = kind()
    before = contents(model)
    with pytest.raises(LayerError, match=said):
        slimmer(model, {"/inner": LowRank(rank=2)}, np.arange(3).astype("i"))
    assert contents(model) == before


def test_an_example_that_the_model_does_not_take_is_said() -> None:
    model = Words()
    before = contents(model)
    with pytest.raises(LayerError, match="fails with the example"):
        slimmer(model, {"/inner": LowRank(rank=2)}, np.zeros((2, 3), "f"))
    assert contents(model) == before


class Twice(Words):
    def forward(self, x: Array) -> Any:
        return self.score(self.inner(F.tanh(self.inner(self.embed(x)))))


def test_a_layer_that_is_called_twice_has_the_operations_of_both_calls() -> None:
    slim = slimmer(Twice(), {"/inner": LowRank(rank=2)}, np.arange(5).astype("i"), quiet=True)
    row = slim.rows[0]
    assert row.operations_before == 2 * (2 * 12 * 12)
    assert row.operations_after == 2 * (2 * 2 * (12 + 12))


def test_what_was_tied_since_is_not_undone_under_the_tie() -> None:
    model = Words()
    slim = slimmer(model, {"/inner": LowRank(rank=2)}, quiet=True)
    with model.init_scope():
        model.other = L.Linear(2, 12)
    tied = umem.chainer.tie(model, "/inner/expand/W", "/other/W")
    before = contents(model)
    with pytest.raises(StateError, match="/inner/expand/W was tied since, /inner/expand/W and /o"):
        slim.undo()
    assert contents(model) == before
    tied.undo()
    slim.undo()
    assert type(model.inner) is L.Linear


def test_factors_may_be_tied_by_the_same_rules() -> None:
    model = Words()
    before = contents(model)
    rules = [
        ("/inner", LowRank(rank=2)),
        ("/score", LowRank(rank=2)),
        ("/score/reduce/W", TiedTo("/inner/reduce/W")),
    ]
    slim = slimmer(model, rules, IDS, quiet=True)
    assert model.score.reduce.W is model.inner.reduce.W
    assert slim.totals.bytes_after == held(model)
    slim.undo()
    assert contents(model) == before


def test_what_was_replaced_since_is_left() -> None:
    model = Words()
    slim = slimmer(model, {"/inner": LowRank(rank=2)}, quiet=True)
    del model.inner
    with model.init_scope():
        model.inner = L.Linear(12, 12)
    before = contents(model)
    with pytest.raises(StateError, match="slimmer's layer at /inner is no longer in the model"):
        slim.undo()
    assert contents(model) == before


STEPS: dict[str, Any] = {
    "low rank": lambda model: slimmer(model, {"/inner": LowRank(rank=2)}, quiet=True),
    "score": lambda model: slimmer(model, {"/score": LowRank(rank=3)}, quiet=True),
    "table": lambda model: slimmer(model, {"/embed": LowRank(rank=3)}, IDS, quiet=True),
    "in the low rank": lambda model: slimmer(model, {"/inner/*": LowRank(rank=1)}, quiet=True),
    "tie": lambda model: umem.chainer.tie(model, "/embed/W", "/score/W"),
    "tie by rule": lambda model: slimmer(model, {"/score/W": TiedTo("/embed/W")}, quiet=True),
    "tie of factors": lambda model: umem.chainer.tie(
        model, "/embed/expand/W", "/inner/expand/W", "/score/expand/W"
    ),
}
IDS = np.arange(6).astype("i")


@given(st.lists(st.sampled_from([*STEPS, "undo", "undo the first", "copy"]), max_size=10))
@settings(max_examples=40)
def test_any_steps_leave_a_whole_model_and_can_be_undone(steps: list[str]) -> None:
    """Parameters are listed once, copies compute the same, and a refused step changes nothing."""
    model = Words()
    start = contents(model)
    done: list[Any] = []
    for step in steps:
        before = contents(model)
        try:
            if step in STEPS:
                done.append(STEPS[step](model))
            elif step == "copy":
                other = model.copy("copy")
                assert np.array_equal(other(IDS).array, model(IDS).array)
                names = [name for name, _ in model.namedparams()]
                assert [name for name, _ in other.namedparams()] == names
                assert not {id(p) for p in other.params()} & {id(p) for p in model.params()}
            elif done:
                index = 0 if step == "undo the first" else -1
                done[index].undo()
                done.pop(index)
        except (LayerError, StateError):
            assert contents(model) == before
        every = [id(one) for one in model.params()]
        assert len(every) == len(set(every))
        model.cleargrads()
        F.sum(model(IDS)).backward()
        assert all(one.grad is not None for one in model.params())
        for link in model.links():  # whatever is used is listed
            used = [v for v in vars(link).values() if isinstance(v, chainer.Parameter)]
            assert {id(one) for one in used} <= set(every)
    while done:
        done.pop().undo()
    assert contents(model) == start


def test_a_class_means_no_parts_of_layers_that_are_small_already() -> None:
    model = Words()
    slimmer(model, {"/inner": LowRank(rank=2)}, quiet=True)
    slim = slimmer(model, {L.Linear: LowRank(rank=3)}, quiet=True)
    assert [row.path for row in slim.rows] == ["/score"]


def test_a_zero_matrix_becomes_one_of_rank_one() -> None:
    model = chainer.Sequential(L.Linear(8, 8, initialW=0))
    slimmer(model, {"/0": LowRank(energy=0.9)}, quiet=True)
    assert model[0].rank == 1
    assert not model(np.ones((2, 8), "f")).array.any()
