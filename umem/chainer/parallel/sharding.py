"""`sharded`: every rank keeps and updates only a part of an optimizer's state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from chainer import GradientMethod
from chainer.serializer import Deserializer

from umem.chainer.agreement import of_all_ranks, register_gather
from umem.chainer.parallel.shard_exchange import (
    all_gather,
    broadcast_first,
    mpi_of,
    reduce_scatter_mean,
)
from umem.chainer.parallel.shard_hooks import NormsOfAll
from umem.chainer.parallel.shard_layout import FlatVector, Shard
from umem.chainer.parallel.shard_refusals import check_optimizer_of_shards, check_parameters
from umem.chainer.parallel.shard_saving import through_shards
from umem.chainer.parameters_once import ModelView
from umem.chainer.precision.half_precision import masters_of
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import StateError

__all__ = ["Sharding", "sharded", "shards_of"]

_shardings: MutableMapping[Any, Sharding] = weakref.WeakKeyDictionary()


def sharded(optimizer: Any, comm: Any) -> Any:
    """Shard an optimizer's state over the ranks of a communicator, which train one model (ZeRO-1).

    ::

        comm = chainermn.create_communicator("naive")
        optimizer = umem.chainer.sharded(chainer.optimizers.Adam(), comm)
        optimizer.setup(model)

    It replaces ``chainermn.create_multi_node_optimizer``: every rank computes the gradients of its
    own samples, and they are averaged. There every rank has the whole state and updates every
    parameter; here all parameters are concatenated by name and cut into shards of equal state, one
    a rank, also inside a large parameter. A rank averages the gradients of its shard in the order
    of ranks, updates it by the optimizer's own rule, and receives the other ranks' shards. Weights
    equal, to the bit, those of the same optimizer that updates all of them from gradients averaged
    in that order.

    The optimizer is changed in place, and returned; it may be set up before or after. If the ranks'
    weights differ, as after initialising each with another seed, the first update only copies rank
    0's to all, as ChainerMN's always does. After an update ``grad`` of a parameter is still this
    rank's own; hooks see the averaged gradient of this rank's shard.

    Elementwise hooks run on shards: WeightDecay, Lasso, GradientHardClipping, and your own hooks
    with ``is_elementwise = True``. GradientClipping and GradientLARS compute their norms from one
    float64 sum of squares a rank, added in the order of ranks: equal to a norm of the whole up to
    rounding.

    Args:
        optimizer: one of Chainer's, or one with 8-bit states; or another whose update rule's own
            class has ``is_elementwise``.
        comm: a communicator of ChainerMN or of mpi4py; messages are sent through the host.

    Cost: a rank sends and receives the gradients and the parameters once a step; state takes 1/N,
    buffers 32 MiB and the gradient of a shard. Thread-safety: as the optimizer's; every rank calls
    update, serialize and setup in the same order.

    Returns:
        The optimizer.

    Raises:
        TypeError: ``comm`` is not a communicator.
        UnsupportedError: the optimizer, a rule or a hook needs whole parameters; it is named.
        StateError: it is sharded already; or, in update, the ranks' parameters are not alike.

    After each of these nothing has changed. Source: Rajbhandari et al., "ZeRO: Memory Optimizations
    Toward Training Trillion Parameter Models" (SC 2020), stage 1.
    """
    mpi = mpi_of(comm)
    if optimizer in _shardings:
        raise StateError("the optimizer is sharded already")
    check_optimizer_of_shards(optimizer)
    _shardings[optimizer] = sharding = Sharding(optimizer, mpi)
    register_gather(optimizer, mpi.allgather, sharding.has_cut)
    for subscriber in (sharding, NormsOfAll(mpi.allgather, sharding.sees_shards)):
        weakref.finalize(optimizer, unsubscribe, subscriber)
        subscribe(subscriber)
    return optimizer


def shards_of(optimizer: Any) -> dict[str, Shard]:
    """Return this rank's shards by parameter name; empty if the optimizer is not sharded."""
    sharding = _shardings.get(optimizer)
    return {} if sharding is None else sharding.shards()


class Sharding(Subscriber):
    """The subscriber that shards one optimizer's state; see `sharded`.

    Attributes:
        rank: this process's rank.
        size: the number of ranks.
        vectors: the parameters seen so far, cut; those seen later are cut separately.
    """

    place = -1.5  # inside accumulation, around half precision

    def __init__(self, optimizer: GradientMethod, mpi: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._mpi = mpi
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self.vectors: list[FlatVector] = []
        self._shards: dict[int, Shard] = {}
        self._is_inside = False

    @property
    def optimizer(self) -> Any:
        """Return the optimizer; None if it was freed."""
        return self._optimizer()

    # -- Chainer's events ------------------------------------------------------------------------

    def step(self, proceed: Proceed, method: Any, *args: Any, **kwargs: Any) -> None:
        """Run the loss as usual, and update this rank's shards."""
        if method is not self._optimizer() or self._is_inside:
            proceed(method, *args, **kwargs)
            return
        lossfun, *rest = args or (kwargs.pop("lossfun", None),)
        self._is_inside = True
        try:
            if lossfun is not None:
                _compute_gradient(method, lossfun, rest, kwargs)
            self._update(method, lambda: proceed(method))
        finally:
            self._is_inside = False

    def check_gradients(self, proceed: Proceed, method: Any) -> None:
        """Skip the step on all ranks if one has NaN, where Chainer scales the loss dynamically."""
        proceed(method)
        # Chainer's privates: its check sets these flags, and then its update skips the step.
        if self.sees_shards(method) and method._loss_scaling_is_dynamic:
            if any(of_all_ranks(method, method._loss_scaling_isnan)):
                method._loss_scaling_isnan = method._loss_scaling_isnan_ever = True

    def serialize_optimizer(self, proceed: Proceed, owner: Any, serializer: Any) -> None:
        """Save this rank's shards, or load them from a snapshot of any number of ranks."""
        if owner is not self._optimizer():
            proceed(owner, serializer)
            return
        if isinstance(serializer, Deserializer):
            self.shard_new(owner)
        for shard in self._shards.values():
            shard.show(None)
        with self.showing_shards(owner):
            proceed(owner, through_shards(serializer, self.shards()))

    def shards(self) -> dict[str, Shard]:
        """Return the shards by parameter name."""
        return {one.name: one for one in self._shards.values()}

    def has_cut(self) -> bool:
        """Tell whether the state of the parameters' present rules is sharded."""
        every = self._shards.values()
        return any(one.part.update_rule is one.whole.update_rule for one in every)

    # -- a step ----------------------------------------------------------------------------------

    def _update(self, method: Any, proceed: Callable[[], None]) -> None:
        """Update this rank's shards with averaged gradients, and send them to all ranks."""
        if not self.shard_new(method):
            return
        for vector in self.vectors:
            self._average(vector)
        with self.showing_shards(method):
            proceed()
        for vector in self.vectors:
            all_gather(self._mpi, vector.bounds, vector.read_parts, vector.write, vector.dtype)
            for shard in vector.shards:
                shard.part.cleargrad()

    def shard_new(self, method: Any) -> bool:
        """Shard parameters that are new; tells whether all ranks had the same values.

        If not, each now has rank 0's.

        Raises:
            UnsupportedError, StateError: see `sharded`; nothing has changed.
        """
        named = dict(check_parameters(method, self._mpi.allgather))
        self._expect_own_rules(list(named.values()))
        new = {name: one for name, one in named.items() if id(one) not in self._shards}
        is_same = True
        for dtype in sorted({one.dtype for one in new.values()}):
            of_type = [(name, one) for name, one in sorted(new.items()) if one.dtype == dtype]
            is_same &= self._cut(of_type)
        return is_same

    def _expect_own_rules(self, parameters: list[Any]) -> None:
        """Forget all shards if the optimizer was set up anew; refuse if single rules were
        replaced.
        """
        known = [self._shards[id(one)] for one in parameters if id(one) in self._shards]
        replaced = [one for one in known if one.part.update_rule is not one.whole.update_rule]
        if len(replaced) == len(known):
            self.vectors, self._shards = [], {}
        elif replaced:
            raise StateError(
                f"{replaced[0].name} has another update rule than in the last update, and its "
                "state is in shards for that rule. Set it before the first update, or call setup"
            )

    def _cut(self, named: list[tuple[str, Any]]) -> bool:
        """Shard new parameters; returns whether all ranks had the same values."""
        vector = FlatVector(named, self.rank, self.size)
        self.vectors.append(vector)
        for shard in vector.shards:
            self._shards[id(shard.whole)] = shard
            shard.keep_own_state()
            self._keep_own_master(shard)
        return broadcast_first(
            self._mpi,
            vector.bounds[-1],
            lambda start, stop, out: vector.read("array", start, stop, out),
            vector.write,
            vector.dtype,
        )

    def _keep_own_master(self, shard: Shard) -> None:
        """Free a float16 parameter's master except this rank's part, until half precision is
        undone.
        """
        masters = masters_of(self._optimizer())
        if masters is not None and masters.of(shard.whole) is not None:
            masters.shorten(shard.whole, shard.part, slice(shard.start, shard.stop))
            masters.before_join = self._join_masters

    def _join_masters(self) -> None:
        """Restore every parameter's whole float32 master on every rank."""
        for vector in self.vectors:
            if vector.dtype == np.float16:
                self._join_masters_of(vector)

    def _join_masters_of(self, vector: FlatVector) -> None:
        """Gather float32 masters from all ranks, and make them the parameters' arrays."""
        singles = [np.empty(shard.whole.shape, np.float32) for shard in vector.shards]
        for shard in vector.shards:
            # The float32 copy of use_fp32_update has no public name.
            shard.part.array = shard.part.update_rule._fp32_param.array
        all_gather(
            self._mpi, vector.bounds, vector.read_parts, partial(vector.put, singles), np.float32
        )
        for shard, single in zip(vector.shards, singles, strict=True):
            shard.whole.cleargrad()
            shard.whole.array = shard.whole.device.send(single)
        vector.dtype = np.dtype(np.float32)

    def _average(self, vector: FlatVector) -> None:
        """Average the gradients of this rank's shards over ranks."""
        mean = reduce_scatter_mean(
            self._mpi,
            vector.bounds,
            lambda start, stop, out: vector.read("grad", start, stop, out),
            vector.dtype,
        )
        at = 0
        for shard in vector.shards:
            length = shard.stop - shard.start
            shard.show(shard.whole.device.send(mean[at : at + length]))
            at += length

    def sees_shards(self, method: Any) -> bool:
        """Tell whether an optimizer is this one, and its target is the shards now."""
        return (
            method is self._optimizer() and type(getattr(method, "target", None)) is ModelInShards
        )

    def _stand_in(self, parameter: Any) -> Any:
        shard = self._shards.get(id(parameter))
        return parameter if shard is None else shard.part

    @contextmanager
    def showing_shards(self, method: Any) -> Iterator[None]:
        """Make this rank's shards the optimizer's target in the block."""
        target, method.target = method.target, ModelInShards(method.target, self._stand_in)
        try:
            yield
        finally:
            method.target = target


class ModelInShards(ModelView):
    """A model whose parameters are this rank's shards."""


def _compute_gradient(method: Any, lossfun: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Compute gradients as Chainer's `update` does."""
    loss = lossfun(*args, **kwargs)
    if getattr(method, "_use_cleargrads", True):
        method.target.cleargrads()
    else:
        method.target.zerograds()
    # As GradientMethod.update.
    loss.backward(loss_scale=method._loss_scale)
