"""Layout of shards: parameters as one flat vector, split between ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer.backends import cuda

from umem.chainer.optimizers.quantized_state import BLOCK, SCALES
from umem.chainer.optimizers.rules import QuantizedRule
from umem.chainer.uploading import upload


class Stretch(NamedTuple):
    """A parameter's range in a flat vector.

    Attributes:
        size: its elements.
        block: it is split only at multiples of this many elements.
        element_bytes: bytes of state per element.
    """

    size: int
    block: int
    element_bytes: float


def cut(stretches: Sequence[Stretch], count: int) -> list[int]:
    """Split a flat vector into shards whose optimizer state takes nearly the same bytes.

    Returns ``count`` + 1 bounds, from 0 to the vector's length; a shard may be empty. A stretch is
    split only at multiples of its block. If no element has state, shards have nearly the same
    number of elements.

    Cost: a few operations a shard and a stretch.
    """
    sizes = np.array([one.size for one in stretches], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rates = np.array([one.element_bytes for one in stretches])
    if not (rates * sizes).any():
        rates = np.ones(len(stretches))
    before = np.concatenate([[0.0], np.cumsum(sizes * rates)])
    found = [0]
    for part in range(1, count):
        wanted = before[-1] * part / count
        at = min(int(np.searchsorted(before, wanted, "right")) - 1, len(stretches) - 1)
        block, inside = stretches[at].block, (wanted - before[at]) / max(rates[at], 1e-9)
        offset = min(round(inside / block) * block, stretches[at].size)
        found.append(max(found[-1], int(starts[at]) + offset))
    return [*found, int(starts[-1])]


class Shard:
    """One parameter, and this rank's part of it.

    Attributes:
        name: the parameter's name.
        whole: the model's parameter.
        begin: its first index in the flat vector.
        start: the first element of this rank's part.
        stop: one after its last element.
        part: a parameter of its own, of one dimension, with the same update rule.
    """

    def __init__(self, name: str, whole: Any, begin: int, start: int, stop: int) -> None:
        self.name, self.whole, self.begin, self.start, self.stop = name, whole, begin, start, stop
        self.part = chainer.Parameter(flat(whole.array)[start:stop], name=whole.name)
        self.part.update_rule = whole.update_rule

    def show(self, grad: Any) -> None:
        """Point the part at the parameter's present array, and give it a gradient."""
        self.part.array = flat(self.whole.array)[self.start : self.stop]
        self.part.update_rule = self.whole.update_rule
        self.part.grad = grad
        # Chainer's private: the scale in a gradient, by which the update divides it.
        self.part._loss_scale = self.whole._loss_scale

    def keep_own_state(self) -> None:
        """Free all state except this rank's part; the rule had the whole parameter's."""
        state = self.part.update_rule.state or {}
        for key, value in state.items():
            state[key] = flat(value)[self.span(key)].copy()

    def span(self, key: str) -> slice:
        """Return the range of a state's elements that this rank has."""
        unit = unit_of(key)
        return slice(-(-self.start // unit), -(-self.stop // unit))


def unit_of(key: str) -> int:
    """Return how many elements of a parameter share one element of a state, by the state's name."""
    return BLOCK if key.endswith(SCALES) else 1


def flat(array: Any) -> Any:
    """Return an array flattened in C order, as a view if it is contiguous."""
    return array.reshape(-1)


class FlatVector:
    """Parameters of one dtype as one vector in the order of names, and all ranks' shards of it.

    Args:
        named: the parameters, which have arrays, each once.
        rank: this process's rank.
        count: the number of ranks.
    """

    def __init__(self, named: Sequence[tuple[str, Any]], rank: int, count: int) -> None:
        self.dtype = named[0][1].dtype
        self.bounds = cut([_stretch(one) for _, one in named], count)
        first, last = self.bounds[rank : rank + 2]
        self.shards: list[Shard] = []
        begin = 0
        for name, parameter in named:
            start, stop = (min(max(at - begin, 0), parameter.size) for at in (first, last))
            self.shards.append(Shard(name, parameter, begin, start, stop))
            begin += parameter.size

    def read(self, what: str, start: int, stop: int, out: np.ndarray[Any, Any]) -> None:
        """Copy a range to a host array.

        Args:
            what: "grad" or "array" of the parameters; a missing gradient is 0.
        """
        for shard, here, there in self._over(start, stop):
            value = getattr(shard.whole, what)
            out[there] = 0 if value is None else cuda.to_cpu(flat(value)[here])

    def read_parts(self, start: int, stop: int, out: np.ndarray[Any, Any]) -> None:
        """Copy this rank's results for a range of its own shard to a host array."""
        for shard, here, there in self._over(start, stop):
            inside = slice(here.start - shard.start, here.stop - shard.start)
            out[there] = cuda.to_cpu(shard.part.array[inside])

    def write(self, start: int, stop: int, values: np.ndarray[Any, Any]) -> None:
        """Copy a range into the parameters."""
        self.put([shard.whole.array for shard in self.shards], start, stop, values)

    def put(self, arrays: Any, start: int, stop: int, values: np.ndarray[Any, Any]) -> None:
        """Copy a range into arrays of the parameters' sizes, in their order."""
        by_shard = dict(zip(map(id, self.shards), arrays, strict=True))
        for shard, here, there in self._over(start, stop):
            array = by_shard[id(shard)]
            if array.flags.c_contiguous:
                upload(flat(array)[here], values[there])
            else:
                changed = flat(array)
                upload(changed[here], values[there])
                array[...] = changed.reshape(array.shape)

    def _over(self, start: int, stop: int) -> Iterator[tuple[Shard, slice, slice]]:
        """Yield the shards that overlap a range, with the range in the parameter and in the
        vector.
        """
        for shard in self.shards:
            first = max(start, shard.begin)
            last = min(stop, shard.begin + shard.whole.size)
            if first < last:
                here = slice(first - shard.begin, last - shard.begin)
                yield shard, here, slice(first - start, last - start)


def _stretch(parameter: Any) -> Stretch:
    """Decide how a parameter's state is split, and fix its bits as for the whole parameter."""
    rule = parameter.update_rule
    if isinstance(rule, QuantizedRule):
        rule.choose_bits(parameter.size)
    # The float32 copy of use_fp32_update has no public name.
    master_bytes = 0 if rule._fp32_param is None else 4
    state = _state_of_block(rule, parameter.dtype)
    block = BLOCK if any(key.endswith(SCALES) for key in state) else 1
    state_bytes = sum(getattr(value, "nbytes", 0) for value in state.values())
    return Stretch(parameter.size, block, state_bytes / BLOCK + master_bytes)


def _state_of_block(rule: Any, dtype: Any) -> dict[str, Any]:
    """Make the state that a number of elements would have."""
    single = np.float32 if rule._fp32_param is not None or rule._use_fp32_update else dtype
    trial = copy.copy(rule)
    # As Chainer does before it calls init_state.
    trial._state = {}
    trial.init_state(chainer.Parameter(np.zeros(BLOCK, single)))
    made: dict[str, Any] = trial.state
    return made
