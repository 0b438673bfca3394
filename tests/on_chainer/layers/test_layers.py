"""Smaller layers: their gradients, what they are made of, and Chainer's conventions."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem.chainer  # noqa: F401  isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
import layer_cases
import scipy.linalg

from umem.chainer.layers import LowRankEmbedID, LowRankLinear, SeparableConvolution2D, in_groups
from umem.errors import DataError, SizeError

Array = np.ndarray[Any, Any]
names = pytest.mark.parametrize("name", layer_cases.LAYERS)


@pytest.mark.thorough
@names
@pytest.mark.parametrize("dtype", ["e", "f", "d"])
def test_gradients_are_those_of_central_differences(name: str, dtype: str) -> None:
    link, x = layer_cases.made(name, dtype)
    gy = np.random.default_rng(1).standard_normal(link(x).shape)
    found = layer_cases.gradients(link, x, gy.astype(dtype))
    assert {one.dtype.char for one in found.values()} == {dtype}
    expected = layer_cases.differences(name, link, x, gy.astype(dtype).astype("d"))
    assert layer_cases.apart(found, expected) < layer_cases.TOLERANCES[dtype]


# -- from trained weights ------------------------------------------------------------------------


def decaying(shape: tuple[int, int], seed: int = 0) -> Array:
    """A matrix whose singular values fall as those of trained weights do, in float64."""
    generator = np.random.default_rng(seed)
    left, _ = np.linalg.qr(generator.standard_normal((shape[0], min(shape))))
    right, _ = np.linalg.qr(generator.standard_normal((shape[1], min(shape))))
    return (left * 0.9 ** np.arange(min(shape))) @ right.T


def optimum(weight: Array, rank: int) -> float:
    """The least norm of what is left out, by SciPy's other driver."""
    singular = scipy.linalg.svd(weight.astype("d"), compute_uv=False, lapack_driver="gesvd")
    return float(np.sqrt((singular[rank:] ** 2).sum()))


@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (30, 30), (1, 9)])
@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_low_rank_weights_are_off_by_the_optimum(
    kind: str, shape: tuple[int, int], dtype: str
) -> None:
    weight = decaying(shape).astype(dtype)
    with chainer.using_config("dtype", np.dtype(dtype)):
        link = L.Linear(*shape[::-1], initialW=weight) if kind == "linear" else None
        table = L.EmbedID(*shape, initialW=weight)
    for rank in {1, min(5, *shape), min(shape)}:
        if link is not None:
            made = LowRankLinear.from_linear(link, rank)
            product = made.expand.W.array.astype("d") @ made.reduce.W.array.astype("d")
        else:
            made = LowRankEmbedID.from_embed_id(table, rank)
            product = made.reduce.W.array.astype("d") @ made.expand.W.array.astype("d").T
        error = float(np.linalg.norm(weight.astype("d") - product))
        least = optimum(weight, rank)
        # At the whole rank the least is 0, and rounding is all there is.
        assert abs(error - least) < 1e-6 * (least if rank < min(shape) else np.linalg.norm(weight))
        assert {one.dtype.char for one in made.params()} == {dtype} and made.rank == rank


def test_a_whole_rank_keeps_the_function_and_the_bias() -> None:
    generator = np.random.default_rng(0)
    link = L.Linear(6, 4, initial_bias=generator.standard_normal(4).astype("f"))
    x = generator.standard_normal((3, 6)).astype("f")
    made = LowRankLinear.from_linear(link, 4)
    assert np.allclose(made(x).array, link(x).array, atol=1e-5)
    assert made.expand.b is not link.b and not made.nobias
    assert LowRankLinear.from_linear(L.Linear(6, 4, nobias=True), 2).nobias
    table, ids = L.EmbedID(5, 3, ignore_label=2), np.array([[0, 2], [4, 1]], "i")
    lower = LowRankEmbedID.from_embed_id(table, 3)
    assert np.allclose(lower(ids).array, table(ids).array, atol=1e-5)
    assert not lower(ids).array[0, 1].any() and lower.ignore_label == 2


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_rank_of_a_share_is_the_least_that_keeps_it(share: float) -> None:
    weight = decaying((30, 20))
    with chainer.using_config("dtype", np.float64):
        rank = LowRankLinear.from_linear(L.Linear(20, 30, initialW=weight), energy=share).rank
    whole = float((weight**2).sum())
    assert whole - optimum(weight, rank) ** 2 >= share * whole * (1 - 1e-12)
    assert rank == 1 or whole - optimum(weight, rank - 1) ** 2 < share * whole


@pytest.mark.parametrize("limit", [600, "1KiB", "1MiB"])
def test_the_rank_of_a_limit_is_the_largest_below_it(limit: int | str) -> None:
    made = LowRankLinear.from_linear(L.Linear(64, 10), limit=limit)
    number = {600: 600, "1KiB": 1024, "1MiB": 1 << 20}[limit]
    taken = sum(one.array.nbytes for one in made.params())
    assert taken <= number
    assert made.rank == 10 or taken + 4 * (64 + 10) > number


def test_directions_of_nothing_can_still_be_learnt() -> None:
    """Were both factors 0 there, neither would ever have a gradient."""
    for weight in (np.zeros((4, 6), "f"), np.outer(np.arange(4.0), np.ones(6)).astype("f")):
        made = LowRankLinear.from_linear(L.Linear(6, 4, initialW=weight), 3)
        product = made.expand.W.array @ made.reduce.W.array
        assert np.allclose(product, weight, atol=1e-5)
        x = np.random.default_rng(0).standard_normal((5, 6)).astype("f")
        optimizer = chainer.optimizers.SGD(0.1).setup(made)
        target = x @ np.random.default_rng(1).standard_normal((6, 4)).astype("f")
        start = float(F.mean_squared_error(made(x), target).array)
        for _ in range(300):
            optimizer.update(lambda: F.mean_squared_error(made(x), target))  # noqa: B023
        assert float(F.mean_squared_error(made(x), target).array) < 0.1 * start
    assert LowRankLinear.from_linear(L.Linear(6, 4, initialW=0), energy=0.9).rank == 1


def test_a_separable_convolution_is_the_nearest_one_channel_by_channel() -> None:
    generator = np.random.default_rng(0)
    link = L.Convolution2D(3, 5, (2, 3), stride=2, pad=1, dilate=2)
    link.b.array[...] = generator.standard_normal(5)
    x = generator.standard_normal((2, 3, 9, 9)).astype("f")
    for multiplier in (1, 2, 5):
        made = SeparableConvolution2D.from_convolution(link, multiplier)
        across = made.pointwise.W.array.reshape(5, 3, multiplier).astype("d")
        kernels = made.depthwise.W.array.reshape(3, multiplier, 2, 3).astype("d")
        product = np.einsum("oim,imhw->oihw", across, kernels)
        least = sum(optimum(link.W.array[:, i].reshape(5, 6), multiplier) ** 2 for i in range(3))
        error = float(np.linalg.norm(link.W.array - product))
        assert abs(error - np.sqrt(least)) < 1e-6 * np.linalg.norm(link.W.array)
        assert made(x).shape == link(x).shape
    assert np.allclose(made(x).array, link(x).array, atol=1e-5)  # a whole rank


def test_groups_keep_the_weights_that_lie_in_them() -> None:
    generator = np.random.default_rng(0)
    link = L.Convolution2D(4, 6, 3, stride=2, pad=1)
    x = generator.standard_normal((2, 4, 7, 7)).astype("f")
    made = in_groups(link, 2)
    masked = link.copy("copy")
    masked.W.array[:3, 2:] = 0
    masked.W.array[3:, :2] = 0
    assert made.groups == 2 and made.W.shape == (6, 2, 3, 3)
    assert np.allclose(made(x).array, masked(x).array, atol=1e-5)


# -- Chainer's conventions -----------------------------------------------------------------------


@names
def test_a_layer_is_copied_pickled_saved_and_loaded(name: str, tmp_path: Path) -> None:
    link, x = layer_cases.made(name, "f")
    y = link(x).array
    for other in (link.copy("copy"), copy.deepcopy(link), pickle.loads(pickle.dumps(link))):
        assert (other(x).array == y).all()
        next(other.params()).array[...] = 0
        assert (link(x).array == y).all()
    assert (link.copy("share")(x).array == y).all()
    chainer.serializers.save_npz(tmp_path / "layer.npz", link)
    make, _ = layer_cases.LAYERS[name]
    new = make()  # one that may not know its sizes yet
    chainer.serializers.load_npz(tmp_path / "layer.npz", new)
    assert (new(x).array == y).all()
    fresh = link.copy("init")
    assert not (fresh(x).array == y).all()


def test_weights_may_be_loaded_before_sizes_are_known(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 4, 5, 5)).astype("f")
    made = SeparableConvolution2D(4, 6, 3, multiplier=2)
    chainer.serializers.save_npz(tmp_path / "it.npz", made)
    lazy = SeparableConvolution2D(6, 3, multiplier=2)
    chainer.serializers.load_npz(tmp_path / "it.npz", lazy)
    assert (lazy(x).array == made(x).array).all() and lazy.in_channels == 4


@pytest.mark.parametrize("dtype", ["e", "f", "d"])
def test_parameters_are_of_the_configured_type_and_made_by_the_initialiser(dtype: str) -> None:
    with chainer.using_config("dtype", np.dtype(dtype)):
        links = [
            LowRankLinear(8, 6, rank=2, initialW=0.5, initial_bias=0.25),
            LowRankEmbedID(8, 6, rank=2, initialW=0.5),
            SeparableConvolution2D(4, 6, 3, initialW=0.5, initial_bias=0.25),
        ]
    for link in links:
        assert {one.dtype.char for one in link.params()} == {dtype}
    assert {float(one.array.flat[0]) for one in links[0].params()} == {0.5, 0.25}
    assert {float(one.array.flat[0]) for one in links[2].params()} == {0.5, 0.25}
    assert (links[1].reduce.W.array == 0.5).all() and links[1].expand.W.array.std() > 0


def test_a_layer_says_what_it_was_made_with() -> None:
    assert str(LowRankLinear(5, rank=2)) == (
        "LowRankLinear(in_size=None, out_size=5, rank=2, nobias=False)"
    )
    assert str(LowRankEmbedID(9, 5, rank=2)) == (
        "LowRankEmbedID(in_size=9, out_size=5, rank=2, ignore_label=None)"
    )
    assert str(SeparableConvolution2D(4, 6, 3, pad=1)) == (
        "SeparableConvolution2D(in_channels=4, out_channels=6, ksize=3, stride=(1, 1), "
        "pad=(1, 1), nobias=False, dilate=(1, 1), multiplier=1)"
    )


def test_a_sample_may_have_several_axes() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f")
    assert LowRankLinear(None, 6, rank=3)(x).shape == (2, 6)
    assert LowRankLinear(None, 6, rank=3)(x, n_batch_axes=2).shape == (2, 3, 6)
    ids = np.zeros((2, 3, 2), "i")
    assert LowRankEmbedID(4, 6, rank=3)(ids).shape == (2, 3, 2, 6)


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, -1, 7, 2.0, True, None])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(SizeError, match="rank"):
        LowRankLinear(8, 6, rank=rank)
    with pytest.raises(SizeError, match="rank"):
        LowRankEmbedID(8, 6, rank=rank)
    with pytest.raises(SizeError, match="rank"):
        LowRankLinear.from_linear(L.Linear(8, 6), rank)


@pytest.mark.parametrize(
    "wish", [{}, {"rank": 1, "energy": 0.5}, {"energy": 0}, {"energy": 1.5}, {"limit": "50%"}]
)
def test_a_wish_that_is_none_is_refused(wish: dict[str, Any]) -> None:
    with pytest.raises(SizeError):
        LowRankLinear.from_linear(L.Linear(8, 6), **wish)


def test_a_limit_below_a_rank_of_one_names_what_that_takes() -> None:
    with pytest.raises(SizeError, match="a rank of 1 takes 80 B, which is above the limit of 60 B"):
        LowRankLinear.from_linear(L.Linear(8, 6), limit=60)


def test_weights_that_are_none_are_refused() -> None:
    spoiled = L.Linear(8, 6)
    spoiled.W.array[2, 3] = np.nan
    with pytest.raises(DataError, match="NaN or infinity"):
        LowRankLinear.from_linear(spoiled, 2)
    with pytest.raises(DataError, match="Linear has no W yet"):
        LowRankLinear.from_linear(L.Linear(None, 6), 2)
    with pytest.raises(DataError, match=r"for trained weights use LowRankLinear.from_linear"):
        LowRankLinear(8, 6, rank=2, initialW=np.zeros((6, 8), "f"))
    convolution = L.Convolution2D(4, 6, 3)
    convolution.W.array[0, 0, 0, 0] = np.inf
    for make in (
        lambda: in_groups(convolution, 2),
        lambda: SeparableConvolution2D.from_convolution(convolution),
    ):
        with pytest.raises(DataError, match="NaN or infinity"):
            make()


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SizeError, match="4 groups do not divide its 4 input and 6 output"):
        in_groups(L.Convolution2D(4, 6, 3), 4)
    with pytest.raises(SizeError, match="at least 2"):
        in_groups(L.Convolution2D(4, 6, 3), 1)
    with pytest.raises(SizeError, match="2 groups already"):
        in_groups(L.Convolution2D(4, 6, 3, groups=2), 2)
    with pytest.raises(SizeError, match="2 groups already"):
        SeparableConvolution2D.from_convolution(L.Convolution2D(4, 6, 3, groups=2))
    with pytest.raises(SizeError, match="multiplier 10 is above"):
        SeparableConvolution2D.from_convolution(L.Convolution2D(4, 60, 3), 10)
