"""What is tied is one parameter: counted, updated and saved once, by whoever does it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer import tie
from umem.errors import LayerError
from umem.memory import arrays_in

Array = np.ndarray[Any, Any]
IDS = np.arange(24).astype("i")
WORDS, WIDTH = 130, 40
"""A table of 5,200 elements: large enough for a state of 8 bits."""


class Words(chainer.Chain):  # type: ignore[misc]
    """Words looked up in a table and scored by it, with a layer between."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(WORDS, WIDTH, chainer.initializers.Normal(0.3))
            self.inner = L.Linear(WIDTH, WIDTH)
            self.score = L.Linear(WIDTH, WORDS)
        if is_tied:
            tie(self, "/embed/W", "/score/W")

    def forward(self, x: Array) -> Any:
        return self.score(F.tanh(self.inner(self.embed(x))))

    def loss(self) -> Any:
        return F.softmax_cross_entropy(self(IDS), (IDS * 7) % np.int32(WORDS))


class ByHand(chainer.Chain):  # type: ignore[misc]
    """The same function of one table that no other link has, so that nothing is shared."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(WORDS, WIDTH)
            self.inner = L.Linear(WIDTH, WIDTH)
            self.score = chainer.Link(b=WORDS)
        self.score.b.array[...] = 0

    def loss(self) -> Any:
        h = F.tanh(self.inner(self.embed(IDS)))
        y = F.linear(h, self.embed.W, self.score.b)
        return F.softmax_cross_entropy(y, (IDS * 7) % np.int32(WORDS))


def words(is_tied: bool = True) -> Words:
    np.random.seed(0)
    return Words(is_tied)


def by_hand() -> ByHand:
    """With the values of `words`."""
    source, model = words(), ByHand()
    model.embed.W.array[...] = source.embed.W.array
    model.inner.copyparams(source.inner)
    return model


def shared_by_chainer() -> Words:
    """One Parameter registered with two links, as Chainer allows."""
    model = words(False)
    model.score.W = model.embed.W
    return model


def train(model: Any, optimizer: Any, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.update(model.loss)


def weights(model: Any) -> list[bytes]:
    every = model.embed.W, model.inner.W, model.inner.b, model.score.b
    return [one.array.tobytes() for one in every]


# -- counted, updated, saved once ----------------------------------------------------------------


def test_chainer_itself_updates_what_is_shared_twice() -> None:
    """Why `tie` is there; where this fails Chainer has changed, and `tie` may go."""
    model = shared_by_chainer()
    optimizer = chainer.optimizers.SGD(1.0).setup(model)
    before = model.embed.W.array.copy()
    model.cleargrads()
    model.loss().backward()
    gradient = model.embed.W.grad.copy()
    optimizer.update()
    assert np.allclose(before - model.embed.W.array, 2 * gradient, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3
    assert sum(one is model.embed.W for one in model.params()) == 2
    tie(model, "/embed/W", "/score/W")
    assert sum(one is model.embed.W for one in model.params()) == 1
    assert model.score.W is model.embed.W


def test_tied_parameters_are_listed_once() -> None:
    model = words()
    assert [name for name, _ in model.namedparams()] == [
        "/embed/W", "/inner/W", "/inner/b", "/score/b",
    ]  # fmt: skip
    assert model.score.W is model.embed.W
    assert model.count_params() == WORDS * WIDTH + WIDTH * WIDTH + WIDTH + WORDS


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: chainer.optimizers.SGD(0.1),
    "Adam": chainer.optimizers.Adam,
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(0.1),
    "Adam8bit": lambda: umem.chainer.optimizers.Adam8bit(embeddings=True),
    "MomentumSGD8bit": lambda: umem.chainer.optimizers.MomentumSGD8bit(0.1, embeddings=True),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_it_once_with_the_gradient_of_all_places(name: str) -> None:
    found = []
    for model in (words(), by_hand()):
        optimizer = OPTIMIZERS[name]().setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
        train(model, optimizer)
        found.append(weights(model))
    table = model.embed.W.update_rule
    assert found[0] == found[1] and table.t == 4
    if "8bit" in name:
        assert any(key.endswith("_codes") for key in table.state)


def test_states_are_quantised_and_counted_once() -> None:
    model, other = words(), shared_by_chainer()
    saved = []
    for one in (model, other):
        optimizer = chainer.optimizers.Adam().setup(one)
        train(one, optimizer, 1)
        saved.append(umem.chainer.optimizers.quantize_states(optimizer, embeddings=True))
    elements = WORDS * WIDTH
    codes = 2 * (elements + 4 * -(-elements // 256))
    assert saved == [8 * elements - codes] * 2  # the layer's state is too small to be


def test_half_precision_has_one_master_and_keeps_the_tie() -> None:
    model, other = words(), by_hand()
    for one in (model, other):
        optimizer = chainer.optimizers.Adam().setup(one)
        half = umem.chainer.half_precision(one, optimizer)
        train(one, optimizer)
        half.undo()
    assert weights(model) == weights(other)
    assert model.score.W is model.embed.W and model.embed.W.dtype == np.float32


@pytest.mark.parametrize("how", [{"micro_batch": 8}, {"steps": 2}])
@pytest.mark.parametrize("make", [words, shared_by_chainer])
def test_accumulated_gradients_are_those_of_the_whole(
    make: Callable[[], Any], how: dict[str, int]
) -> None:
    """Of what Chainer has registered twice, too."""
    gradients = []
    for options in (None, how):
        model = make()
        optimizer = chainer.optimizers.SGD(0.0).setup(model)

        def loss(x: Array, model: Any = model) -> Any:
            return F.softmax_cross_entropy(model(x), (x * 7) % np.int32(WORDS))

        with umem.chainer.accumulate(optimizer, **options) if options else nullcontext():
            for ids in np.split(IDS, 2) if options == {"steps": 2} else [IDS]:
                optimizer.update(loss, ids)
        gradients.append(model.embed.W.grad.copy())
    assert np.allclose(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("make", [words, shared_by_chainer])
def test_memory_has_it_once(make: Callable[[], Any]) -> None:
    model = make()
    optimizer = chainer.optimizers.Adam().setup(model)
    train(model, optimizer, 1)
    with umem.record() as recorder:
        train(model, optimizer, 1)
    expected = 4 * (WORDS * WIDTH + WIDTH * WIDTH + WIDTH + WORDS)
    allocated: dict[str, int] = {}
    for event in recorder.trace.events:
        kind = getattr(event, "kind", None)
        if kind is not None:
            allocated[kind] = allocated.get(kind, 0) + event.nbytes
    assert allocated["parameter"] == expected and allocated["state"] == 2 * expected
    model.cleargrads()
    assert sum(array.nbytes for array in arrays_in(model)) == expected


def test_a_file_has_it_once_and_is_read_into_both(tmp_path: Path) -> None:
    model = words()
    optimizer = chainer.optimizers.Adam().setup(model)
    train(model, optimizer)
    chainer.serializers.save_npz(tmp_path / "model.npz", model)
    chainer.serializers.save_npz(tmp_path / "state.npz", optimizer)
    names = set(np.load(tmp_path / "model.npz"))
    assert names == {"embed/W", "inner/W", "inner/b", "score/b"}
    assert "score/W/m" not in set(np.load(tmp_path / "state.npz"))
    new = Words()
    other = chainer.optimizers.Adam().setup(new)
    chainer.serializers.load_npz(tmp_path / "model.npz", new)
    chainer.serializers.load_npz(tmp_path / "state.npz", other)
    train(new, other)
    train(model, optimizer)
    assert weights(new) == weights(model) and new.score.W is new.embed.W


@pytest.mark.parametrize("kind", ["Adam", "Adam8bit"])
def test_a_run_goes_on_to_the_bit_and_its_snapshot_has_it_once(kind: str, tmp_path: Path) -> None:
    def run(folder: Path, updates: int) -> Words:
        model = words()
        optimizer = OPTIMIZERS[kind]().setup(model)
        done = umem.chainer.resume_run(folder, model=model, optimizer=optimizer)
        for _ in range(done.step, updates):
            optimizer.update(model.loss)
            umem.chainer.save_run(folder, model=model, optimizer=optimizer)
        return model

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    assert weights(run(tmp_path / "parts", 4)) == weights(whole)
    newest = sorted((tmp_path / "parts").glob("step-*"))[-1]
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    state = 8 if kind == "Adam" else 2.1
    assert size < (4 + state) * WORDS * WIDTH + 12 * (WIDTH * WIDTH + WIDTH + WORDS) + 20_000


# -- ties last -----------------------------------------------------------------------------------


def is_whole(model: Any) -> bool:
    """Tied, listed once, with gradients of both places."""
    model.cleargrads()
    model.loss().backward()
    rows = np.abs(model.embed.W.grad).sum(axis=1)
    names = [name for name, _ in model.namedparams()]
    return model.score.W is model.embed.W and bool((rows > 0).all()) and len(names) == 4


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda model: model.copy("copy"),
    "share": lambda model: model.copy("share"),
    "init": lambda model: model.copy("init"),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "copy of a copy": lambda model: model.copy("copy").copy("share").copy("copy"),
    "copy of what was pickled": lambda model: pickle.loads(pickle.dumps(model)).copy("copy"),
    "copy of a deep copy": lambda model: copy.deepcopy(model).copy("copy"),
    "copy of a chain above": lambda model: (
        chainer.ChainList(chainer.Chain(it=model)).copy("copy")[0].it
    ),
    "copy in a sequence": lambda model: chainer.Sequential(model).copy("copy")[0],
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_tied_in_itself(name: str) -> None:
    model = words()
    before = weights(model)
    other = COPIES[name](model)
    assert is_whole(other) and is_whole(model)
    assert other.score.W is not model.score.W
    assert (weights(other) == before) == (name != "init")
    other.embed.W.array[...] = 0
    assert (weights(model) == before) == (name != "share")


def test_ties_lie_in_lists_and_sequences_too() -> None:
    model = chainer.Sequential(
        chainer.ChainList(L.Linear(4, 4), L.Linear(4, 4)), F.relu, L.Linear(4, 4)
    )
    tie(model, "/0/0/W", "/0/1/W", "/1/W")
    for one in (model, model.copy("copy"), model.copy("share"), copy.deepcopy(model)):
        assert one[0][0].W is one[0][1].W is one[2].W
        assert len(list(one.params())) == 4
    assert model.copy("copy")[2].W is not model[2].W


def test_a_copied_sequence_may_list_its_links_in_another_order() -> None:
    """Chainer's `insert` and `append` do not agree where a link stands among the children."""
    model = chainer.Sequential(L.Linear(4, 4), L.Linear(4, 4), L.Linear(4, 5))
    model.insert(1, L.Linear(4, 4))
    paths = {id(link): path for path, link in model.namedlinks()}
    tie(model, f"{paths[id(model[0])]}/W", f"{paths[id(model[1])]}/W")
    for one in (model, model.copy("copy"), model.copy("copy").copy("copy")):
        assert one[0].W is one[1].W and one[2].W is not one[0].W
        assert len(list(one.params())) == 7


def test_whole_layers_are_shared() -> None:
    blocks = [chainer.Chain(a=L.Linear(4, 4), b=L.LayerNormalization(4)) for _ in range(3)]
    model = chainer.ChainList(*blocks)
    tie(model, "/0", "/1", "/2")
    assert {name for name, _ in model.namedparams()} == {
        "/0/a/W", "/0/a/b", "/0/b/beta", "/0/b/gamma",
    }  # fmt: skip
    assert model[2].b.gamma is model[0].b.gamma and model[1].a.W is model[0].a.W
    assert model.copy("copy")[1].a.W.array is not model[1].a.W.array


def test_undone_everybody_has_their_own_again() -> None:
    model = words(False)
    own, names = model.score.W, [name for name, _ in model.namedparams()]
    found = tie(model, "/embed/W", "/score/W")
    found.undo()
    found.undo()
    assert model.score.W is own and [name for name, _ in model.namedparams()] == names
    assert "copy" not in vars(model) and model.copy("copy").score.W is not model.embed.W


def test_an_optimizer_that_is_set_up_goes_on_with_the_first() -> None:
    model = words(False)
    optimizer = chainer.optimizers.Adam().setup(model)
    train(model, optimizer, 2)
    rule = model.embed.W.update_rule
    found = tie(model, "/embed/W", "/score/W")
    train(model, optimizer, 2)
    assert model.score.W.update_rule is rule and rule.t == 4
    found.undo()
    assert model.score.W.update_rule.t == 2


# -- what cannot be tied -------------------------------------------------------------------------


def lazy() -> Any:
    return chainer.Chain(a=L.Linear(4, 4), b=L.Linear(None, 4))


def of_two_types() -> Any:
    model = chainer.Chain(a=L.Linear(4, 4))
    with chainer.using_config("dtype", np.float64):
        model.add_link("b", L.Linear(4, 4))
    return model


def tied_in_threes() -> Any:
    model = chainer.Chain(a=L.Linear(4, 4), b=L.Linear(4, 4), c=L.Linear(4, 4))
    tie(model, "/a/W", "/b/W")
    return model


def the_same_twice() -> Any:
    link = L.Linear(4, 4)
    return chainer.ChainList(link, link)


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...], str]] = {
    "nothing to tie": (words, ("/embed/W",), "needs at least two places"),
    "no such place": (
        words,
        ("/embed/W", "/none/W"),
        "no parameter is at '/none/W'.*/embed/W, /in",
    ),
    "tied already": (
        words,
        ("/inner/b", "/score/W"),
        "different parameters|shape|tied with another",
    ),
    "tied to what is tied": (words, ("/score/W", "/embed/W"), "/score/W is tied with another"),
    "other shapes": (words, ("/embed/W", "/inner/W"), r"has the shape \(130, 40\), and /inner/W"),
    "other types": (of_two_types, ("/a/W", "/b/W"), "has the dtype float32, and /b/W has float64"),
    "no array yet": (lazy, ("/a/W", "/b/W"), "/b/W has no array yet"),
    "other parameters": (lambda: words(False), ("/embed", "/score"), "have different parameters"),
    "itself": (words, ("/embed/W", "/embed/W"), "are one link"),
    "one link twice": (the_same_twice, ("/0", "/1"), "are one link"),
    "named twice": (lambda: words(False), ("/embed/W", "/score/W", "/score/W"), "named twice"),
    "first of a tie, to another": (
        tied_in_threes,
        ("/c/W", "/a/W"),
        "/b/W is tied to /a/W.*name /a/W first",
    ),
    "first of a tie, with its layer": (tied_in_threes, ("/c", "/a"), "/b/W is tied to /a/W"),
    "no path": (words, (0, "/score/W"), "a place is a path such as '/embed/W'; got 0"),
    "no other path": (words, ("/embed/W", None), "a place is a path.*got None"),
    "no model": (lambda: 3, ("/a", "/b"), "no parameter is at"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tied_is_said_and_nothing_changes(name: str) -> None:
    make, places, said = REFUSED[name]
    model = make()
    is_link = isinstance(model, chainer.Link)
    before = [(path, id(one)) for path, one in model.namedparams()] if is_link else None
    with pytest.raises(LayerError, match=said):
        tie(model, *places)
    assert before is None or [(path, id(one)) for path, one in model.namedparams()] == before
