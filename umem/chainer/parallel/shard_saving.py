"""State in shards through Chainer's serializers: each rank saves its own, and reads its ranges.

Beside an array of a shard, its range in the whole is saved, so that a run on any other number of
ranks can assemble its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chainer
import numpy as np
from chainer import serializer
from chainer.backends import cuda

from umem.chainer.parallel.shard_layout import Shard, flat, unit_of
from umem.chainer.resume.collecting import Distributor
from umem.snapshots import SPAN

Shards = Mapping[str, Shard]


def through_shards(inner: Any, shards: Shards) -> Any:
    """Return a serializer that saves or loads only this rank's parts below parameters' names."""
    if not shards:
        return inner
    if isinstance(inner, serializer.Deserializer):
        return _LoadingShards(inner, shards)
    return _SavingShards(inner, shards)


class _SavingShards(serializer.Serializer):
    """Saves this rank's part of each array below a parameter's name, and its range."""

    def __init__(self, inner: Any, shards: Shards, shard: Shard | None = None) -> None:
        self._inner, self._shards, self._shard = inner, shards, shard

    def __getitem__(self, key: str) -> _SavingShards:
        return _SavingShards(self._inner[key], self._shards, self._shards.get(key, self._shard))

    def __call__(self, key: str, value: Any) -> Any:
        result = self._inner(key, value)
        if self._shard is not None and isinstance(value, chainer.get_array_types()):
            span = self._shard.span(key)
            self._inner(key + SPAN, [span.start, span.stop, *_shape(self._shard, key)])
        return result


class _LoadingShards(serializer.Deserializer):
    """Loads this rank's part of each array below a parameter's name."""

    def __init__(self, inner: Any, shards: Shards, shard: Shard | None = None) -> None:
        self._inner, self._shards, self._shard = inner, shards, shard
        self.strict = getattr(inner, "strict", True)

    def __getitem__(self, key: str) -> _LoadingShards:
        return _LoadingShards(self._inner[key], self._shards, self._shards.get(key, self._shard))

    def __call__(self, key: str, value: Any) -> Any:
        """Load a value; for a sharded state, this rank's part, even if it was saved whole."""
        is_array = value is None or isinstance(value, chainer.get_array_types())
        if self._shard is None or not is_array:
            return self._inner(key, value)
        span, shape = self._shard.span(key), _shape(self._shard, key)
        if isinstance(self._inner, Distributor):
            return self._inner.part(key, value, span, shape)
        found = self._inner(key, None)
        if np.ndim(found) and found.shape == shape:  # saved whole
            found = flat(found)[span]
        if value is None or not np.ndim(found):
            return found
        value[...] = cuda.to_cpu(found) if isinstance(value, np.ndarray) else cuda.to_gpu(found)
        return value


def _shape(shard: Shard, key: str) -> tuple[int, ...]:
    """Return the shape of a whole parameter's state."""
    unit = unit_of(key)
    shape: tuple[int, ...] = shard.whole.shape
    return shape if unit == 1 else (-(-shard.whole.size // unit),)
