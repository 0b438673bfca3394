"""umem.chainer.ParallelGraph in one process: the layers, losses and masks, against whole ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip
import chainer
import chainer.functions as F
from chainer import gradient_check

from umem.chainer import ParallelGCN, ParallelGraph, ParallelGraphConvolution
from umem.chainer.gcn import GCN, Adjacency, GraphConvolution
from umem.chainer.parallel.aggregation import PartAggregation
from umem.chainer.parallel.part_functions import PartBias, PartLinear
from umem.chainer.parallel.part_sums import OverParts, over_parts
from umem.chainer.parallel.ranks import Ranks
from umem.errors import DataError, UnsupportedError
from umem.graphs import communities, cut, karate_club, normalised_adjacency
from umem.trace import Alloc

GRAPH = communities(240, 4, 1000, across=0.2, features=6, classes=3)
ASSIGNMENT = np.array([0, 1, 3, 4])[np.arange(240) * 7 % 11 % 4]
"""Of five parts, part 2 is empty."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> ParallelGraph:
    folder = tmp_path_factory.mktemp("cuts") / "five"
    cut(GRAPH, 5, folder, assignment=ASSIGNMENT)
    return ParallelGraph(folder, graph=GRAPH)


@pytest.fixture(scope="module")
def adjacency() -> Adjacency:
    return Adjacency(normalised_adjacency(GRAPH))


def random_array(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    return np.random.RandomState(seed).uniform(-1, 1, shape).astype(dtype)


# -- what a rank has -------------------------------------------------------------------------------


def test_the_rows_are_the_graphs_in_the_order_of_parts(parts: ParallelGraph) -> None:
    assert parts.parts == range(5) and parts.node_count == 240
    assert [rows.stop - rows.start for rows in parts.rows] == np.bincount(ASSIGNMENT).tolist()
    np.testing.assert_array_equal(ASSIGNMENT[parts.nodes], np.sort(ASSIGNMENT))
    for name in ("labels", "train_mask", "val_mask", "test_mask"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(GRAPH, name)[parts.nodes])
    np.testing.assert_array_equal(parts.load_features(), GRAPH.features[parts.nodes])
    wanted = GRAPH.labels_where(GRAPH.val_mask)[parts.nodes]
    np.testing.assert_array_equal(parts.labels_where(parts.val_mask), wanted)


def test_features_stay_in_their_files_until_they_are_loaded(parts: ParallelGraph) -> None:
    assert all(isinstance(x, np.memmap) for x in parts.features if len(x))


def test_a_cut_of_another_graph_is_refused(tmp_path: Path) -> None:
    cut(karate_club(), 2, tmp_path / "cut")
    with pytest.raises(DataError, match="is a cut of another graph"):
        ParallelGraph(tmp_path / "cut", graph=GRAPH)


def test_a_communicator_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"comm must be a communicator of ChainerMN .* got str"):
        ParallelGraphConvolution("naive", 3, 2)


# -- the layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_size", "out_size"), [(6, 3), (3, 6), (4, 4)])
def test_a_layer_and_its_gradients_are_those_of_the_whole_graph(
    in_size: int, out_size: int, parts: ParallelGraph, adjacency: Adjacency
) -> None:
    whole, layer = (
        GraphConvolution(in_size, out_size),
        ParallelGraphConvolution(None, in_size, out_size),
    )
    layer.copyparams(whole)
    layer.b.array[...] = whole.b.array[...] = random_array((out_size,))
    x, gy = random_array((240, in_size)), random_array((240, out_size), seed=2)
    found = []
    for model, graph, order in ((whole, adjacency, np.arange(240)), (layer, parts, parts.nodes)):
        variable = chainer.Variable(x[order])
        y = model(graph, variable)
        y.grad = gy[order]
        y.backward()
        back = np.argsort(order)
        found.append((y.array[back], variable.grad[back], model.W.grad, model.b.grad))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)


def test_the_gradients_of_a_layer_are_right_in_float64(parts: ParallelGraph) -> None:
    x = random_array((240, 3), np.float64)
    for out_size in (2, 4):
        with chainer.using_config("dtype", np.float64):
            layer = ParallelGraphConvolution(None, 3, out_size)
        gradient_check.check_backward(
            lambda v, layer=layer: layer(parts, v),
            x,
            random_array((240, out_size), np.float64, 2),
            list(layer.params()),
            dtype=np.float64,
            rtol=1e-6,
            atol=1e-6,
        )


def test_twenty_updates_are_those_of_the_whole_graph(
    parts: ParallelGraph, adjacency: Adjacency
) -> None:
    np.random.seed(0)
    whole, model = GCN(6, 8, 3), ParallelGCN(None, 6, 8, 3)
    model.copyparams(whole)
    labels = GRAPH.labels_where(GRAPH.train_mask)
    losses: list[list[float]] = [[], []]

    def loss_of_whole() -> Any:
        loss = F.softmax_cross_entropy(whole(adjacency, GRAPH.features), labels)
        losses[0].append(float(loss.array))
        return loss

    def loss_of_parts() -> Any:
        scores = model(parts, parts.load_features())
        loss = parts.cross_entropy(scores, parts.labels_where(parts.train_mask))
        losses[1].append(float(loss.array))
        return loss

    for network, loss in ((whole, loss_of_whole), (model, loss_of_parts)):
        optimizer = chainer.optimizers.Adam(0.01).setup(network)
        for _ in range(20):
            optimizer.update(loss)
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(*losses, 1e-5)
    for (_, one), (_, other) in zip(
        sorted(whole.namedparams()), sorted(model.namedparams()), strict=True
    ):
        np.testing.assert_allclose(one.array, other.array, 1e-3, 1e-4)  # Adam divides by roots


def test_features_in_files_give_what_loaded_ones_give(parts: ParallelGraph) -> None:
    layer = ParallelGraphConvolution(None, 6, 8)
    found = []
    for x in (parts.features, parts.load_features()):
        layer.cleargrads()
        y = layer(parts, x)
        y.grad = random_array((240, 8))
        y.backward()
        found.append((y.array, layer.W.grad, layer.b.grad))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)


def test_a_second_derivative_is_refused(parts: ParallelGraph) -> None:
    layer = ParallelGraphConvolution(None, 6, 8)
    x = chainer.Variable(parts.load_features())
    (gradient,) = chainer.grad(
        [layer(parts, x)],
        [x],
        [chainer.Variable(np.ones((240, 8), "f"))],
        enable_double_backprop=True,
    )
    with pytest.raises(UnsupportedError, match="differentiated only once"):
        F.sum(gradient * gradient).backward()


def test_rows_of_another_graph_are_refused(parts: ParallelGraph) -> None:
    with pytest.raises(chainer.utils.type_check.InvalidType, match="PartAggregation"):
        parts.aggregate(random_array((239, 2)))


@pytest.mark.parametrize(
    ("option", "message"), [({"layers": 0}, "layers"), ({"dropout": 1}, "dropout")]
)
def test_models_that_cannot_be_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"ParallelGCN: {message} must be"):
        ParallelGCN(None, 6, 8, 3, **option)


def test_a_model_can_be_copied_and_saved(parts: ParallelGraph, tmp_path: Path) -> None:
    model, other = ParallelGCN(None, 6, 8, 3), ParallelGCN(None, 6, 8, 3)
    copy = model.copy("copy")
    chainer.serializers.save_npz(tmp_path / "model.npz", model)
    chainer.serializers.load_npz(tmp_path / "model.npz", other)
    x = parts.load_features()
    for same in (copy, other):
        np.testing.assert_array_equal(model(parts, x).array, same(parts, x).array)


# -- losses ----------------------------------------------------------------------------------------


def test_the_loss_is_chainers_and_so_is_its_gradient(parts: ParallelGraph) -> None:
    scores, labels = random_array((240, 3)) * 30, parts.labels_where(parts.train_mask)
    found = []
    for loss_of in (F.softmax_cross_entropy, parts.cross_entropy):
        variable = chainer.Variable(scores)
        loss = loss_of(variable, labels)
        loss.backward()
        found.append((loss.array, variable.grad))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-7)


def test_without_a_label_the_loss_is_nothing_and_accuracy_no_number(parts: ParallelGraph) -> None:
    labels, variable = np.full(240, -1, np.int32), chainer.Variable(random_array((240, 3)))
    loss = parts.cross_entropy(variable, labels)
    loss.backward()
    assert loss.array == 0 and not variable.grad.any()
    assert np.isnan(parts.accuracy(variable, labels))


def test_accuracy_counts_labelled_nodes_alone(parts: ParallelGraph) -> None:
    scores, labels = random_array((240, 3)), parts.labels_where(parts.test_mask)
    wanted = (scores.argmax(axis=1) == parts.labels)[parts.test_mask].mean()
    assert (
        parts.accuracy(scores, labels) == wanted == parts.accuracy(chainer.Variable(scores), labels)
    )


def test_sums_over_parts_are_from_the_left() -> None:
    stack = np.array([2**24, 1, 1, -(2**24)], np.float32)
    assert over_parts(Ranks(), stack) == 0  # 2 in any order that adds the ones first
    assert over_parts(Ranks(), stack[[1, 2, 0, 3]]) == 2
    halves = np.full((4096, 1), 1, np.float16)  # in halves a sum of ones stops at 2048
    assert over_parts(Ranks(), halves)[0] == 4096


# -- dropout ---------------------------------------------------------------------------------------


def test_dropout_drops_its_share_scales_the_rest_and_has_one_mask_for_both_ways(
    parts: ParallelGraph,
) -> None:
    np.random.seed(3)
    x = chainer.Variable(np.ones((240, 50), np.float32))
    y = parts.dropout(x, 0.25)
    assert set(np.unique(y.array)) == {0, np.float32(1 / 0.75)}
    assert (y.array == 0).mean() == pytest.approx(0.25, abs=0.02)
    y.grad = np.ones_like(y.array)
    y.backward()
    np.testing.assert_array_equal(x.grad, y.array)


def test_dropout_follows_numpys_seed_and_differs_from_call_to_call(parts: ParallelGraph) -> None:
    x = np.ones((240, 5), np.float32)
    np.random.seed(3)
    first, second = parts.dropout(x).array, parts.dropout(x).array
    np.random.seed(3)
    np.testing.assert_array_equal(parts.dropout(x).array, first)
    assert (first != second).any()
    for one, other in zip(parts.rows[0:1], parts.rows[3:4], strict=True):
        size = min(one.stop - one.start, other.stop - other.start)
        assert (first[one][:size] != first[other][:size]).any()  # each part has its own


def test_dropout_is_for_training(parts: ParallelGraph) -> None:
    x, state = np.ones((240, 5), np.float32), np.random.get_state()[1].copy()
    with chainer.using_config("train", False):
        assert parts.dropout(x).array is x
    assert parts.dropout(x, 0).array is x
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    with pytest.raises(ValueError, match="ratio must be from 0 to below 1; got 1"):
        parts.dropout(x, 1)


# -- what umem sees of it --------------------------------------------------------------------------


def test_a_recorder_knows_the_functions_by_name_and_the_arrays_they_hold(
    parts: ParallelGraph,
) -> None:
    model = ParallelGCN(None, 6, 8, 3, layers=2, dropout=0.5)
    labels, x = parts.labels_where(parts.train_mask), parts.load_features()
    with umem.record() as recorder:
        parts.cross_entropy(model(parts, x), labels).backward()
    names = [op.name for op in recorder.trace.ops if op.phase == "forward"]
    wanted = "ToParts ToParts PartAggregation PartLinear PartBias ReLU PartDropout".split()
    assert names[: len(wanted)] == wanted and "PartCrossEntropy" in names and "OverParts" in names
    found = {e.label: e for e in recorder.trace.events if isinstance(e, Alloc)}
    assert found["PartAggregation.entries"].kind == "input"


def test_recompute_plans_around_what_ranks_do_together(
    parts: ParallelGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions that exchange run once each a step, whatever is made again."""
    model = ParallelGCN(None, 6, 64, 3, layers=5)
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    labels, x = parts.labels_where(parts.train_mask), parts.load_features()
    runs: Counter[str] = Counter()

    def counted(kind: type) -> None:
        forward = kind.forward

        def counting(self: Any, inputs: Any) -> Any:
            runs[kind.__name__] += 1
            return forward(self, inputs)

        monkeypatch.setattr(kind, "forward", counting)

    for kind in (PartAggregation, OverParts, PartLinear, PartBias):
        counted(kind)
    with umem.chainer.Recompute("min") as memory:
        seen = []
        for _ in range(5):
            runs.clear()
            optimizer.update(lambda: parts.cross_entropy(model(parts, x), labels))
            seen.append(dict(runs))
    exchanges = {(once["PartAggregation"], once["OverParts"]) for once in seen}
    assert exchanges == {(2 * 5 - 1, 1 + 2 * 5)}  # features have no gradient
    made = [once["PartLinear"] + once["PartBias"] for once in seen]
    assert min(made) >= 10 < max(made), memory.summary()
