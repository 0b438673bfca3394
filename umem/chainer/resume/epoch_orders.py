"""Orders of an epoch that an iterator has drawn ahead.

MultiprocessIterator and MultithreadIterator draw the order of the next epoch while they load ahead,
and load ahead again after each snapshot, so that Chainer alone would draw it once more. Here each
order has a number, and whoever asks twice for the order after it gets the same one.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from chainer import iterators

from umem.chainer.resume.random_states import GENERATORS, is_global, serialize_generator
from umem.data import KnownOrder
from umem.errors import StateError


class NumberedOrder(np.ndarray[Any, Any]):
    """An epoch's order that knows how many were drawn before it, as do its copies and slices."""

    number = 0

    def __array_finalize__(self, made_from: Any) -> None:
        self.number = getattr(made_from, "number", 0)


class OrderMemory:
    """An order sampler that wraps another, and remembers the orders it has drawn ahead.

    Thread-safety: iterators ask from their own threads; one at a time is answered.
    """

    def __init__(self, iterator: Any, sampler: Any) -> None:
        self._iterator, self._sampler = iterator, sampler
        self._ahead: dict[int, NumberedOrder] = {}
        self._lock = threading.Lock()

    def __call__(self, current_order: Any, current_position: int) -> Any:
        with self._lock:
            now = self._number()
            self._ahead = {n: order for n, order in self._ahead.items() if n > now}
            number = getattr(current_order, "number", 0) + 1
            if number not in self._ahead:
                drawn = np.asarray(self._sampler(current_order, current_position))
                self._ahead[number] = _numbered(drawn, number)
            return self._ahead[number]

    def _number(self) -> int:
        """Return the number of the iterator's present order."""
        # Iterators have no public access to their present order.
        return int(getattr(self._iterator._state.order, "number", 0))

    def serialize(self, saver: Any) -> None:
        """Save or restore the sampler's generators, and the orders drawn ahead of the iterator."""
        with self._lock:
            if isinstance(self._sampler, KnownOrder):
                self._place_known(saver["known"], self._sampler)
            for name, generator in _generators(self._sampler).items():
                serialize_generator(generator, saver[name])
            now = self._number()
            ahead = [self._ahead[n] for n in sorted(self._ahead) if n > now]
            count = saver("count", len(ahead))
            known = dict(enumerate(map(_plain, ahead)))
            saved = [saver(f"{i}", known.get(i)) for i in range(count)]
            self._ahead = {
                now + 1 + i: _numbered(each, now + 1 + i) for i, each in enumerate(saved)
            }

    def _place_known(self, saver: Any, known: KnownOrder) -> None:
        """Save or restore the position in a known order, and move caches there.

        An iterator that loads ahead does so again after it was saved.
        """
        # Iterators have no public access to their present order.
        order, position = self._iterator._state.order, self._iterator.current_position
        known.follow(np.asarray(order), position)
        known.serialize(saver)
        known.follow(np.asarray(order), position)


def _plain(order: Any) -> Any:
    return np.asarray(order)


def _numbered(order: Any, number: int) -> NumberedOrder:
    found = np.array(order).view(NumberedOrder)
    found.number = number
    return found


def _generators(sampler: Any) -> dict[str, Any]:
    """Return a sampler's own generators by attribute."""
    found = {name: value for name, value in vars(sampler).items() if isinstance(value, GENERATORS)}
    return {name: value for name, value in found.items() if not is_global(value)}


def _in_order(current_order: Any, current_position: int) -> Any:
    return current_order


def remember_orders(iterator: Any) -> OrderMemory | None:
    """Wrap the order sampler of an iterator that draws orders ahead; None for one that does not.

    MultiprocessIterator draws in another thread: a sampler that draws from NumPy's global generator
    would do so at any moment, and no run could be repeated. It gets its own generator, seeded from
    the global one.

    Raises:
        StateError: the iterator has given batches already.
    """
    sampler = getattr(iterator, "order_sampler", None)
    if isinstance(sampler, OrderMemory):
        return sampler
    if isinstance(iterator, iterators.MultiprocessIterator):
        return _remember_in_processes(iterator, sampler)
    if sampler is None or not hasattr(iterator, "_state"):
        return None
    iterator.order_sampler = OrderMemory(iterator, sampler)
    return iterator.order_sampler  # type: ignore[no-any-return]


def _remember_in_processes(iterator: Any, sampler: Any) -> OrderMemory:
    """Wrap the order sampler of a MultiprocessIterator.

    Raises:
        StateError: it has given batches already.
    """
    # The loop has its own reference to the sampler; both are replaced below.
    loop = iterator._prefetch_loop
    if loop is None or loop.thread is not None:
        raise StateError(
            "this MultiprocessIterator has given batches already: call resume_run, or begin the "
            "Snapshot, before the first"
        )
    if sampler is None:  # Chainer cannot save one without an order
        sampler = _in_order
        order = np.arange(len(iterator.dataset))
        iterator._reset_state(0, 0, False, order)
    elif isinstance(sampler, iterators.ShuffleOrderSampler) and is_global(sampler._random):
        sampler = iterators.ShuffleOrderSampler(np.random.RandomState(np.random.randint(2**31)))
    iterator.order_sampler = loop.order_sampler = OrderMemory(iterator, sampler)
    return iterator.order_sampler  # type: ignore[no-any-return]
