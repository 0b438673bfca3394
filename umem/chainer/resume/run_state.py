"""The whole state of a run, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import chainer
from chainer.dataset import Iterator as DatasetIterator

from umem._common.printable import short
from umem.chainer.accumulation.accumulating import accumulations
from umem.chainer.accumulation.updater import AccumulatingUpdater
from umem.chainer.parallel.shard_saving import through_shards
from umem.chainer.parallel.sharding import shards_of
from umem.chainer.precision.half_precision import half_of
from umem.chainer.resume.collecting import Collector, Distributor, MissingValue, copied, described
from umem.chainer.resume.epoch_orders import remember_orders
from umem.chainer.resume.optimizer_extras import (
    expect_states,
    is_optimizer,
    serialize_link,
    serialize_optimizer,
)
from umem.chainer.resume.random_states import (
    GENERATORS,
    GLOBAL_GENERATORS,
    serialize_generator,
    serialize_global,
)
from umem.chainer.resume.rollback import Rollback
from umem.chainer.uploading import upload
from umem.errors import SnapshotError, UmemError
from umem.snapshots import SPAN, SavedRun

_ON_GPU = "on GPU"
"""Name of the list of arrays that were on a GPU."""
_PLAIN = ("chainer.", "chainermn.", "umem.")


class RunState:
    """The parts of a run, including the state that Chainer does not save.

    Args:
        parts: by name: a Trainer, links, optimizers, iterators, any other object with a method
            ``serialize``, random generators, and JSON values.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        given = [each for _, each in _iterators(parts)]
        self._given = Rollback([*given, *GLOBAL_GENERATORS])
        self._values = {n: p for n, p in parts.items() if not _is_live(p)}
        self._parts = {n: p for n, p in parts.items() if _is_live(p)}
        self._parts |= dict(_targets_left_out(self._parts))
        self._optimizers = dict(_optimizers(self._parts))
        self._links = {n: p for n, p in self._parts.items() if isinstance(p, chainer.Link)}
        self._links |= {n: optimizer.target for n, optimizer in self._optimizers.items()}
        self._orders = {
            name: memory
            for name, iterator in _iterators(self._parts)
            if (memory := remember_orders(iterator)) is not None
        }

    def collect(self) -> Collector:
        """Collect the run's state; CuPy's generators are reseeded."""
        collector = Collector()
        self.serialize(collector)
        serialize_global(collector["random"])  # last, because parts may draw from them
        for name, value in self._values.items():
            collector["values"](name, value)
        collector.values[_ON_GPU] = collector.on_gpu()
        return collector

    def restore(self, snapshot: SavedRun) -> dict[str, Any]:
        """Restore the run from a snapshot; returns the plain values saved with it.

        Attributes and small arrays are loaded at once, and restored if the snapshot is refused. The
        arrays of models and optimizers are read last, into place, when all the rest is loaded, so
        that no large array exists twice.

        Raises:
            SnapshotError: it is of another model, or of other parts, or damaged.
            KeyboardInterrupt: while those last arrays are read; the run is then loaded. After any
                other error it is as before.
        """
        before = _Before(self)
        distributor = None
        try:
            values, stays = snapshot.values, frozenset[str]()
            if snapshot.ranks != snapshot.readers:
                values, stays = _divided_anew(values, self._parts)
            self._check(snapshot, before.collected, stays)
            on_gpu = set(values.get(_ON_GPU, ()))
            distributor = Distributor(snapshot.arrays, values, on_gpu, stays=stays)
            found = self._load(distributor)
        except BaseException as error:
            before.restore()
            self._given.restore()
            if isinstance(error, MemoryError) or not isinstance(error, Exception):
                raise
            name = "" if distributor is None else distributor.last_name[0]
            raise _refusal(snapshot, error, name) from error
        try:
            distributor.swap()
        except KeyboardInterrupt:
            distributor.swap()  # again, to its end: a partly loaded run is of no use
            raise
        return found

    def _load(self, distributor: Distributor) -> dict[str, Any]:
        """Load all parts, except for the postponed arrays."""
        parameters = (p for link in self._links.values() for p in link.params())
        if any(p.array is None for p in parameters):
            # Values beside a parameter can be restored only once it exists.
            self._load_once(distributor)
        self._load_once(distributor)
        saved = distributor["values"]
        values = {name: saved(name, None) for name in saved.names()}
        serialize_global(distributor["random"])  # last: CuPy's cannot be rolled back
        return values

    def objects(self) -> list[Any]:
        """List the objects that loading changes, without their contents."""
        optimizers = list(self._optimizers.values())
        beside = [one for each in optimizers for one in (*accumulations(each), half_of(each))]
        orders = self._orders.values()
        return [*self._parts.values(), *optimizers, *orders, *beside, *GLOBAL_GENERATORS]

    def large_arrays(self) -> list[Any]:
        """List the arrays of models and optimizers whose ``serialize`` is Chainer's or umem's.

        A user's own may compute from the values that it loads, and so must find them in place.
        """
        collector = Collector()
        for number, part in enumerate((*self._links.values(), *self._optimizers.values())):
            if all(each.serialize.__module__.startswith(_PLAIN) for each in _serialized_with(part)):
                part.serialize(collector[f"{number}"])
        return list(collector.arrays.values())

    def _load_once(self, distributor: Distributor) -> None:
        for name, optimizer in self._optimizers.items():
            expect_states(optimizer, distributor["optimizers"][name])
        distributor.postpone(self.large_arrays())
        self.serialize(distributor)

    def serialize(self, saver: Any) -> None:
        """Save or load every part in turn, except the global generators."""
        for name, part in self._parts.items():
            if not isinstance(part, GENERATORS):
                part.serialize(saver["parts"][name])
        for name, link in self._links.items():
            serialize_link(link, saver["kept"][name])
        for name, optimizer in self._optimizers.items():
            beside = through_shards(saver["optimizers"][name], shards_of(optimizer))
            serialize_optimizer(optimizer, beside)
            for accumulation in accumulations(optimizer):
                accumulation.serialize_group(saver["accumulations"][name])
        for name, part in self._parts.items():
            if isinstance(_updater(part), AccumulatingUpdater):
                _updater(part).serialize_parts(saver["accumulating"][name])
        for name, iterator in _iterators(self._parts):
            _serialize_length(iterator, name, saver["items"])
        for name, memory in self._orders.items():
            memory.serialize(saver["orders"][name])
        for name, part in self._parts.items():
            if isinstance(part, GENERATORS):
                serialize_generator(part, saver["generators"][name])

    def _check(self, snapshot: SavedRun, live: Collector, stays: frozenset[str]) -> None:
        """Check that a snapshot has this run's arrays by name, shape and dtype; changes nothing.

        Args:
            snapshot: the snapshot to load.
            live: the run's present state.
            stays: names of arrays that are not loaded, and need not match.

        Raises:
            SnapshotError: it has other arrays, or was saved in the middle of a group of
                `umem.chainer.accumulate` that is not open now.
        """
        for name, optimizer in self._optimizers.items():
            count = snapshot.values.get(f"accumulations/{name}/group/count", 0)
            if count and not accumulations(optimizer):
                raise _OtherRunError(
                    f"{short(snapshot.path)} was saved in a group of umem.chainer.accumulate, "
                    f"after {count} calls of update: resume inside of its block"
                )
        saved = snapshot.arrays
        for name, array in sorted(live.arrays.items()):
            if not name.startswith("parts/") or name in stays:
                continue
            if name + SPAN in live.values:  # any part of a whole can be read
                continue
            if name in saved.described:
                shape, dtype = saved.described[name]
                if (shape, dtype) != (array.shape, str(array.dtype)):
                    there, here = described(shape, dtype), described(array.shape, array.dtype)
                    raise _other_run(snapshot, f"{short(name)!r} is {there} there and {here} here")
            elif name not in snapshot.values:
                here = described(array.shape, array.dtype)
                raise _other_run(snapshot, f"it has no {short(name)!r}, which is {here} here")
        prefixes = tuple(self._model_prefixes(live))
        for name in sorted(saved):
            if name not in live.arrays and name not in live.values and name.startswith(prefixes):
                there = described(*saved.described[name])
                raise _other_run(snapshot, f"{short(name)!r}, {there} there, is not here")

    def _model_prefixes(self, live: Collector) -> Iterator[str]:
        """Yield what the names of each model's arrays begin with."""
        for link in self._links.values():
            paths = {id(p.array): path for path, p in link.namedparams() if p.array is not None}
            for name, array in live.arrays.items():
                path = paths.get(id(array))
                if path is not None and name.endswith(path):
                    yield name[: -len(path)] + "/"
                    break


class _Before:
    """A run before loading, to restore it after an error.

    Attributes:
        collected: its state by name; large arrays are the run's own, without a copy.
    """

    def __init__(self, state: RunState) -> None:
        self._attributes = Rollback(state.objects())
        self.collected = Collector()
        state.serialize(self.collected)
        large = {id(array) for array in state.large_arrays()}
        arrays = (array for array in self.collected.arrays.values() if id(array) not in large)
        self._small = [(array, copied(array)) for array in arrays]

    def restore(self) -> None:
        """Restore the run."""
        self._attributes.restore()
        for array, content in self._small:
            upload(array, content)


class _OtherRunError(SnapshotError):
    """A SnapshotError whose message is complete."""


def _refusal(snapshot: SavedRun, error: Exception, name: str) -> SnapshotError:
    """Return the error for a snapshot that cannot be loaded.

    Args:
        snapshot: the snapshot that could not be loaded.
        error: raised by Chainer, NumPy or a part.
        name: the name that was read last.
    """
    if isinstance(error, _OtherRunError):
        return error
    if isinstance(error, MissingValue):
        return _other_run(snapshot, f"it has no {short(str(error))!r}")
    if isinstance(error, UmemError):
        return _other_run(snapshot, str(error))
    why = f"{type(error).__name__}: {short(str(error)[:200])}"
    return _other_run(snapshot, f"{short(name)!r} cannot be loaded: {why}")


def _other_run(snapshot: SavedRun, what: str) -> SnapshotError:
    return _OtherRunError(
        f"{short(snapshot.path)} is of another model or run: {what}. Make the objects as in the "
        "saved run, or name another folder to begin anew"
    )


# -- the kinds of parts ------------------------------------------------------------------------


def _is_live(part: Any) -> bool:
    return hasattr(part, "serialize") or isinstance(part, GENERATORS)


def _targets_left_out(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the targets of optimizers that are not inside another part."""
    links = (part for part in parts.values() if isinstance(part, chainer.Link))
    inside = {id(parameter) for link in links for parameter in link.params()}
    for name, part in parts.items():
        if is_optimizer(part) and part.target is not None:
            if not all(id(parameter) in inside for parameter in part.target.params()):
                yield f"{name}.target", part.target


def _serialized_with(part: Any) -> Iterator[Any]:
    """Yield the objects that a link or optimizer serializes: links, or itself and its rules."""
    if isinstance(part, chainer.Link):
        yield from part.links()
        return
    yield part
    rules = (parameter.update_rule for parameter in part.target.params())
    yield from (rule for rule in rules if rule is not None)


def _updater(part: Any) -> Any:
    return getattr(part, "updater", part)


def _optimizers(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, part in parts.items():
        if is_optimizer(part):
            yield name, part
        elif hasattr(_updater(part), "get_all_optimizers"):
            for key, optimizer in _updater(part).get_all_optimizers().items():
                yield f"{name}.{key}", optimizer


def _iterators(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, part in parts.items():
        if isinstance(part, DatasetIterator):
            yield name, part
        for key, iterator in getattr(_updater(part), "_iterators", {}).items():
            yield f"{name}.{key}", iterator


def _divided_anew(
    values: Mapping[str, Any], parts: Mapping[str, Any]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Move iterators to the same share of an epoch, in a new order, if ranks now have another
    number of samples.

    Returns:
        The values to continue from; and the names of values that stay as they are.
    """
    found, stays = dict(values), set()
    for name, iterator in _iterators(parts):
        saved, now = values.get(f"items/{name}"), len(getattr(iterator, "dataset", ()))
        if not saved or saved == now:
            continue
        part, _, key = name.rpartition(".")
        places = f"parts/{name}/", f"parts/{part}/updater/iterator:{key}/"
        for place in (*places, f"parts/{part}/iterator:{key}/"):
            position = place + "current_position"
            if position in values:
                found[position] = min(values[position] * now // saved, now - 1)
                stays |= {place + "order", place + "_order"}
        found[f"items/{name}"] = now
        if f"orders/{name}/count" in values:
            found[f"orders/{name}/count"] = 0
    return found, frozenset(stays)


def _serialize_length(iterator: Any, name: str, saver: Any) -> None:
    """Save an iterator's number of items, or check it."""
    items: Any = getattr(iterator, "dataset", None)
    if hasattr(items, "__len__"):
        there = saver(name, len(items))
        if there != len(items):
            raise SnapshotError(f"{name!r} has {there:,} items there and {len(items):,} here")
