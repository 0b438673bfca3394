"""Indexing as in Chainer's datasets, without Chainer: by number, slice and list."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


class DatasetMixin:
    """A dataset defined by `get_example`, and indexed as `chainer.dataset.DatasetMixin` is."""

    def __len__(self) -> int:
        raise NotImplementedError

    def get_example(self, i: int) -> Any:
        """Return item ``i``, which is at least 0 and below the length."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        """Return an item, or a list of items for a slice, a list or an array of numbers.

        Raises:
            IndexError: there is no such item.
        """
        if isinstance(index, slice):
            return [self.get_example(i) for i in range(*index.indices(len(self)))]
        if isinstance(index, (list, np.ndarray)) and np.ndim(index):
            return [self.get_example(self._place(i)) for i in index]
        return self.get_example(self._place(index))

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"item {place} of {len(self)}")
        return place % len(self)
