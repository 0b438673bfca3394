"""Orders whose coming epochs are known: the same bits on every NumPy."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from data_cases import epochs
from hypothesis import given
from hypothesis import strategies as st

import umem.data
from umem.data import ClassBalanced, KnownOrder, Weighted, known_order
from umem.errors import DataError, SizeError, StateError

MASK = (1 << 64) - 1


def philox(key: tuple[int, int], blocks: int) -> list[int]:
    """Philox4x64-10 in plain integers, from the paper; NumPy counts from one."""
    found = []
    for block in range(1, blocks + 1):
        (k0, k1), (c0, c1, c2, c3) = key, (block, 0, 0, 0)
        for _ in range(10):
            high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 1 << 64)
            high1, low1 = divmod(0xCA5A826395121157 * c2, 1 << 64)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
        found += [c0, c1, c2, c3]
    return found


@given(st.integers(0, MASK), st.integers(0, 1000), st.integers(1, 40))
def test_a_shuffle_is_the_order_of_philoxs_keys(seed: int, epoch: int, count: int) -> None:
    order = known_order(seed)
    order.of_items(count)
    keys = philox((seed, epoch), -(-count // 4))[:count]
    assert order.items(epoch).tolist() == sorted(range(count), key=keys.__getitem__)


def digest(draw: Any, count: int) -> str:
    order = known_order(7, draw)
    order.of_items(count)
    content = b"".join(order.items(e).astype("<i8").tobytes() for e in range(3))
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.mark.parametrize(
    "draw, bits",
    [
        (umem.data.shuffle, "6abb9215f43d41be"),
        (umem.data.with_replacement, "61629ee1d03e63af"),
        (Weighted(1 / np.arange(1, 1001)), "05666790dfc39e46"),
        (ClassBalanced([i % 3 // 2 for i in range(1000)]), "62be005c61b0df70"),
    ],
)
def test_orders_have_bits_that_stay(draw: Any, bits: str) -> None:
    assert digest(draw, 1000) == bits


def counts(draw: Any, count: int, draws: int = 200) -> Counter[int]:
    order = known_order(1, draw)
    order.of_items(count)
    return Counter(i for epoch in range(draws) for i in order.items(epoch).tolist())


def test_draws_are_as_likely_as_they_should_be() -> None:
    found = counts(umem.data.with_replacement, 100)
    assert all(abs(found[i] - 200) < 5 * 200**0.5 for i in range(100))
    weights = np.array([0, 1, 2, 7] * 25, float)
    found = counts(Weighted(weights), 100)
    expected = weights / weights.sum() * 20_000
    assert found[0] == 0 and all(
        abs(found[i] - e) < 5 * (e + 1) ** 0.5 for i, e in enumerate(expected)
    )
    found = counts(ClassBalanced([0] * 90 + [1] * 10), 100)
    assert abs(sum(found[i] for i in range(90)) - 10_000) < 500
    assert all(abs(found[i] - 1000) < 5 * 1000**0.5 for i in range(90, 100))


def test_positions_of_a_shuffle_are_as_likely_for_every_item() -> None:
    order = known_order(3)
    order.of_items(5)
    found = Counter(tuple(order.items(e).tolist()) for e in range(12_000))
    assert len(found) == 120 and all(abs(n - 100) < 50 for n in found.values())


def test_an_iterator_is_given_epoch_after_epoch_and_a_beginning_is_the_next() -> None:
    order = known_order(2)
    given_out = epochs(order, 10)
    first, second = next(given_out), next(given_out)
    assert order.items(0).tolist() == first and order.items(1).tolist() == second
    assert order.epoch == 1
    assert order(np.arange(10), 0).tolist() == order.items(2).tolist()


def test_an_epoch_that_is_drawn_again_is_the_same() -> None:
    order = known_order(2)
    now = order(np.arange(10), 0)
    drawn = order(now, 8)
    assert order(now, 9).tolist() == drawn.tolist() and order.epoch == 1


def test_an_order_that_goes_on_elsewhere_is_found_by_its_content() -> None:
    there = known_order(5)
    there.of_items(50)
    here = known_order(5)
    assert here(there.items(12).copy(), 3).tolist() == there.items(13).tolist()
    assert (here.epoch, here.position) == (13, 3)
    with pytest.raises(StateError, match="not one of the first"):
        known_order(6)(there.items(12).copy(), 3)


def test_what_is_handed_out_may_be_changed() -> None:
    order = known_order(5)
    found = order(np.arange(9), 0)
    expected = found.copy()
    found[:] = 0
    assert order.items(0).tolist() == expected.tolist()


def test_seed_epoch_and_position_are_saved_and_loaded() -> None:
    order = known_order(MASK)
    order.follow(np.asarray(_items(order, 20, 4)), 7)
    saved: dict[str, Any] = {}
    order.serialize(lambda key, value: saved.setdefault(key, value))
    assert saved == {"seed": str(MASK), "epoch": 4, "position": 7}
    other = known_order(MASK)
    other.serialize(lambda key, value: saved[key])
    assert (other.epoch, other.position) == (4, 7)
    with pytest.raises(StateError, match="the saved order has seed"):
        known_order(0).serialize(lambda key, value: saved[key])


def _items(order: KnownOrder, count: int, epoch: int) -> Any:
    order.of_items(count)
    return order.items(epoch)


def test_an_order_goes_to_another_process_as_it_is() -> None:
    order = known_order(1, Weighted([1.0, 2.0, 3.0]))
    order(np.arange(3), 0)
    other = pickle.loads(pickle.dumps(order))
    assert (other.epoch, other.items(5).tolist()) == (0, order.items(5).tolist())


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, True, "x"])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(SizeError, match="seed must be"):
        known_order(seed)


@pytest.mark.parametrize(
    "draw, said",
    [
        (lambda bits, count: np.random.permutation(count), "two orders for one epoch"),
        (lambda bits, count: bits.below(count + 5, count) + 5, "outside its range"),
        (lambda bits, count: np.zeros(count), "must return an array of indices"),
    ],
)
def test_a_function_that_draws_no_order_is_refused(draw: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        known_order(0, draw)(np.arange(40), 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Weighted([1.0, -1.0]),
        lambda: Weighted([0.0, 0.0]),
        lambda: Weighted([np.nan]),
        lambda: known_order(0, Weighted([1.0]))(np.arange(3), 0),
        lambda: known_order(0, ClassBalanced([1]))(np.arange(3), 0),
        lambda: ClassBalanced([]),
    ],
)
def test_weights_and_labels_of_other_items_are_refused(make: Any) -> None:
    with pytest.raises(SizeError):
        make()


def test_an_order_is_of_one_dataset() -> None:
    order = known_order(0)
    order(np.arange(4), 0)
    with pytest.raises(StateError, match="has 4 items and cannot be used with 5"):
        order.of_items(5)
