"""Orders of items whose future epochs are known."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from umem.data.epoch_draws import Draw, EpochBits, Order, check_seed, largest, shuffle
from umem.errors import DataError, DataWarning, StateError, warn_at_program

_REMEMBERED = 4
"""At most this many drawn orders are kept: one for the iterator's epoch, one for the cache's."""


class KnownOrder:
    """An order sampler for Chainer's iterators whose future epochs can be computed.

    Use ``SerialIterator(data, 20, order_sampler=order)``, with an order for each iterator: two
    iterators of one order would take epochs in turn. An order is recognised by its contents, so an
    iterator that draws an epoch again, after a snapshot was saved or loaded, gets the same order.

    Args:
        seed: 0 to 2**64 - 1.
        draw: a function ``draw(bits, count)`` that makes an epoch's order of ``count`` items from
            its bits alone: `shuffle`, `with_replacement`, `Weighted`, `ClassBalanced` or your own.
            For spawned workers it must be picklable.

    Attributes:
        seed: the seed.
        content: the dataset's fingerprint, which is saved with the order; empty until a cache uses
            the order.
        epoch: the epoch drawn last; -1 before the first.
        position: the iterator's position in the epoch before that when it was drawn, or as set by
            `follow`.

    Thread-safety: one iterator's threads and caches may use it at the same time; a forked process
    starts with its parent's state.
    """

    def __init__(self, seed: int, draw: Draw = shuffle) -> None:
        self.seed = check_seed(seed)
        self.epoch, self.position = -1, 0
        self.content = ""
        self._draw, self._count = draw, 0
        self._known: dict[int, Order] = {}
        self._subscribers: list[weakref.ref[Any]] = []

    def __repr__(self) -> str:
        return f"KnownOrder(seed={self.seed}, epoch={self.epoch}, position={self.position})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker; listeners stay in this process."""
        names = ("seed", "epoch", "position", "_draw", "_count")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["seed"], state["_draw"])  # type: ignore[misc]
        self.__dict__.update(state)

    def of_items(self, count: int) -> int:
        """Fix the number of items; returns the number of positions in an epoch.

        Raises:
            StateError: another number is fixed already. DataError: see `items`.
        """
        if self._count not in (0, count):
            raise StateError(
                f"this order has {self._count} items and cannot be used with {count}: "
                "make an order for each dataset"
            )
        self._count = count
        return len(self.items(0))

    def items(self, epoch: int) -> Order:
        """Return the order of an epoch, a read-only array.

        Raises:
            DataError: the user's function returned an invalid order, or two for one epoch.
        """
        known = self._known  # replaced whole: threads may come here at once, and draw the same
        if epoch not in known:
            kept = list(known.items())[1 - _REMEMBERED :]
            self._known = known = {**dict(kept), epoch: self._drawn(epoch)}
        order: Order = known[epoch]
        return order

    def _drawn(self, epoch: int) -> Order:
        found = self._checked(epoch)
        if epoch == 0 and not np.array_equal(found, self._checked(0)):
            raise DataError(
                "the function of known_order returned two orders for one epoch: it must draw from "
                "its argument bits alone"
            )
        found.flags.writeable = False
        return found

    def _checked(self, epoch: int) -> Order:
        found = np.asarray(self._draw(EpochBits(self.seed, epoch), self._count))
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise DataError("the function of known_order must return an array of indices")
        if len(found) and not 0 <= found.min() <= found.max() < self._count:
            raise DataError(f"the order has indices outside its range of {self._count} items")
        return found.astype(np.int64)

    # -- what iterators call -----------------------------------------------------------------

    def __call__(self, current_order: Any, current_position: int) -> Order:
        """Return a copy of the next epoch's order.

        Args:
            current_order: the order of the epoch that ends; 0, 1, 2, ... when an iterator begins.
            current_position: the iterator's position in it.

        Raises:
            StateError: the current order is not one of this sampler's.
        """
        if not self._count:
            self.of_items(len(current_order))
        if current_position == 0 and _is_first(current_order):
            self.epoch, self.position = self.epoch + 1, 0
            self._report(self.epoch, 0)
        else:
            epoch = self._epoch_of(current_order)
            self.epoch, self.position = epoch + 1, int(current_position)
            self._report(epoch, int(current_position))
        return self.items(self.epoch).copy()

    def _epoch_of(self, order: Any) -> int:
        """Find the epoch that has a given order, the likeliest epochs first."""
        order = np.asarray(order)
        near = [e for e in (self.epoch, self.epoch - 1, self.epoch + 1) if e >= 0]
        for epoch in (*near, *range(largest(self._count))):
            if np.array_equal(self.items(epoch), order):
                return int(epoch)
        raise StateError(
            f"the present order is not one of the first {largest(self._count)} epochs of {self!r}: "
            "load the iterator with the seed and the function that it was saved with"
        )

    def follow(self, current_order: Any, current_position: int) -> None:
        """Set the position from an iterator, for example one loaded from a snapshot.

        Args:
            current_order: the iterator's order.
            current_position: the position of its next item.

        Raises:
            StateError: the order is not one of this sampler's.
        """
        if not self._count:
            self.of_items(len(current_order))
        self.epoch = self._epoch_of(current_order)
        self.position = int(current_position)
        self._report(self.epoch, self.position)

    def serialize(self, serializer: Any) -> None:
        """Save or load seed, epoch and position, by Chainer's serializers.

        If a cache uses the order, the dataset's fingerprint is saved too, and a run that is resumed
        with other data gets a warning.

        Raises:
            StateError: the loaded order has another seed.
        """
        seed = int(serializer("seed", f"{self.seed}"))  # 64 bits without a sign
        if seed != self.seed:
            raise StateError(f"the saved order has seed {seed}, and this order has {self.seed}")
        self.epoch = int(serializer("epoch", self.epoch))
        self.position = int(serializer("position", self.position))
        if self.content:
            self._serialize_content(serializer)

    def _serialize_content(self, serializer: Any) -> None:
        """Save the dataset's fingerprint, or compare it with the saved one and warn of a
        difference.
        """
        try:
            was = str(serializer("content", self.content))
        except KeyError:  # saved without a cache
            return
        if was != self.content:
            warn_at_program(
                "the data have another length, shape or dtype, or their files other sizes, than "
                "when this run was saved: it continues with the present data",
                DataWarning,
            )

    # -- what caches ask ---------------------------------------------------------------------

    def subscribe(self, method: Callable[[int, int], None]) -> None:
        """Register a bound method, called with epoch and position when an iterator reports them.

        The order does not keep it alive.
        """
        self._subscribers.append(weakref.WeakMethod(method))

    def _report(self, epoch: int, position: int) -> None:
        for reference in (*self._subscribers,):
            method = reference()
            if method is None:
                self._subscribers.remove(reference)
            else:
                method(epoch, position)


def known_order(seed: int, draw: Draw = shuffle) -> KnownOrder:
    """Make an order sampler whose future epochs are known; see `KnownOrder`.

    >>> order = known_order(0)
    >>> order(range(5), 0)
    array([0, 2, 1, 4, 3])
    """
    return KnownOrder(seed, draw)


def _is_first(order: Any) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))
