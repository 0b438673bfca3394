"""What Chainer's tape holds for backward: where, on which memory, and whether anybody else does.

A `Spot` is a place of the tape that holds an array; a `Buffer` is memory, with all spots whose
arrays lie on it, views included; an `ArrayLayout` is how one of them lies there. Models of Chainer
7.8 that this rests on: ``VariableNode._data`` is where retained inputs are,
``FunctionNode._retained_output_data`` where retained outputs are, and what else backward reads are
attributes of the function.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer.function import FunctionAdapter

from umem.chainer.function_facts import NODE_ATTRIBUTES, is_array
from umem.chainer.offload.tier import Sent
from umem.trace.recording.storage import address_of, root_of


class Spot:
    """A place of the tape that holds an array; its owner is held weakly.

    Args:
        owner: a variable's node, or a function.
        name: the attribute of it.
        index: the place in that, where it is a tuple.
    """

    __slots__ = ("_index", "_name", "_owner", "key", "layout")

    def __init__(self, owner: Any, name: str, index: int | None = None) -> None:
        self._owner = weakref.ref(owner)
        self._name, self._index = name, index
        self.key = id(owner), name, index
        self.layout: ArrayLayout | None = None

    def owner(self) -> Any:
        """Who holds it; None once that is gone."""
        return self._owner()

    def get(self) -> Any:
        """The array that is there now."""
        value = getattr(self._owner(), self._name, None)
        return value if self._index is None or value is None else value[self._index]

    def put(self, array: Any) -> None:
        """Have an array there, or None."""
        owner = self._owner()
        if owner is None:
            return
        if self._index is not None:
            values = list(getattr(owner, self._name))
            values[self._index] = array
            array = tuple(values)
        setattr(owner, self._name, array)

    def maker(self) -> Any:
        """The function that what is here belongs to: whose output or own it is; None: nobody's."""
        owner: Any = self._owner()
        return owner.creator_node if self._name == "_data" else owner

    @property
    def is_stash(self) -> bool:
        """Whether it is an attribute of a function's own."""
        return self._name not in ("_data", "_retained_output_data")


def spots_of(func: Any) -> Iterator[Spot]:
    """Where a function that was applied holds what its backward reads."""
    for index in func._input_indexes_to_retain or ():
        yield Spot(func.inputs[index], "_data")
    for place, index in enumerate(func._output_indexes_to_retain or ()):
        yield Spot(func, "_retained_output_data", place)
        node = func.outputs[index]()
        if node is not None:
            yield Spot(node, "_data")
    if not isinstance(func, FunctionAdapter):  # the program may hold an old-style function
        for name, value in list(vars(func).items()):
            if name not in NODE_ATTRIBUTES and is_array(value):
                yield Spot(func, name)


class Buffer:
    """Memory that the tape holds.

    Args:
        root: the array that owns it.

    Attributes:
        sent: the copy below, or on its way there.
        is_below: whether the tape's spots are empty, and `sent` has the contents.
        is_waiting: whether it is looked at again before later functions.
        kind: the class of the array that owned it first.
        pin_count: functions that read it now.
    """

    __slots__ = (
        "__weakref__", "_kept", "_root", "_skew", "_spots", "is_below", "is_waiting", "kind",
        "nbytes", "pin_count", "sent",
    )  # fmt: skip

    def __init__(self, root: Any) -> None:
        self._root = weakref.ref(root)
        self.nbytes = int(root.nbytes)
        self._spots: dict[tuple[int, str, int | None], Spot] = {}
        self.sent: Sent | None = None
        self.is_below = False
        self.is_waiting = False
        self.kind = type(root)
        self.pin_count = 0
        self._kept: Any = None
        self._skew = 0  # of the contents' first byte, from the root's

    def __del__(self) -> None:
        if self.sent is not None:
            self.sent.forget()

    def forget(self) -> None:
        """Give up what was sent, while the spots hold the contents."""
        if self.sent is not None:
            self.sent.forget()
        self.sent, self._skew = None, 0

    def root(self) -> Any:
        """The array that owns the memory now; None where nobody holds it."""
        return self._root()

    def has(self, spot: Spot) -> bool:
        """Tell whether it is known that the tape holds it there."""
        known = self._spots.get(spot.key)
        return known is not None and known.owner() is spot.owner()

    def add(self, spot: Spot) -> None:
        """The tape holds it there, too."""
        if not self.has(spot):
            self._spots[spot.key] = spot

    def is_wanted(self) -> bool:
        """Tell whether the tape still has it; forget the spots that hold something else by now."""
        self._spots = {key: spot for key, spot in self._spots.items() if self._is_at(spot)}
        return bool(self._spots)

    def _is_at(self, spot: Spot) -> bool:
        array = spot.get()
        if self.is_below:
            return array is None and spot.owner() is not None
        return array is not None and root_of(array) is self._root()

    def is_alone(self, but: Any = None) -> bool:
        """Tell whether the tape alone holds the memory, by counting references.

        Whoever else does, a variable, a view or the program's own, may edit it, and dropping it
        would free nothing.

        Args:
            but: a function whose holders are known.
        """
        spots = self._spots.values()
        if not all(spot.owner() is but or _is_private(spot) for spot in spots if spot.is_stash):
            return False
        arrays = [spot.get() for spot in spots]
        in_spots = Counter(map(id, arrays))
        distinct = {id(array): array for array in arrays}
        del arrays
        root = id(self._root())
        views = len(distinct) - (root in distinct)
        for key in distinct:  # each is held by its spots, by `distinct`, and as an argument
            if sys.getrefcount(distinct[key]) - in_spots[key] - 2 != (views if key == root else 0):
                return False
        if root not in distinct and sys.getrefcount(self._root()) - 1 != views:
            return False
        return isinstance(self._root(), np.ndarray) or _no_address_is_held(
            [*distinct.values(), *([] if root in distinct else [self._root()])]
        )

    def can_come_back(self) -> bool:
        """Tell whether all arrays on it can be made again; on CuPy, dense ones."""
        if isinstance(self._root(), np.ndarray):
            return True
        return all(is_dense(spot.get()) for spot in self._spots.values())

    def let_go(self, keep: bool = False) -> None:
        """Empty the spots: what is below is the truth from now on.

        Args:
            keep: hold it here, for `restore` soon.
        """
        root = self._root()
        start = address_of(root) + self._skew
        self.is_below = True  # first: after an interruption `restore` fills what is empty
        for spot in self._spots.values():
            spot.layout = ArrayLayout.of(spot.get(), start)
            spot.put(None)
        self._kept = root if keep else None

    def drop_kept(self) -> None:
        """Hold it no more, whatever `let_go` was told."""
        self._kept = None

    def restore(self) -> Any:
        """Have it in its spots again; returns the array that owns the memory.

        Raises:
            what `Sent.array` raises; nothing has changed.
        """
        assert self.sent is not None
        root = self._kept
        if root is None:
            root, self._skew = Ground.of(self.sent.array())
        made: dict[ArrayLayout, Any] = {}
        for spot in self._spots.values():
            layout = spot.layout
            if layout is not None and spot.get() is None:
                if layout not in made:
                    made[layout] = layout.on(Ground(root, self._skew))
                spot.put(made[layout])
        self._root, self._kept = weakref.ref(root), None
        self.is_below = False
        return root


def _no_address_is_held(arrays: list[Any]) -> bool:
    """Tell whether no other array of CuPy lies on the memory of these, which are all different.

    One that is made from an address, as by ``as_strided``, has no base: it holds the pointer, or
    the memory by a pointer of its own.
    """
    pointers = Counter(id(array.data) for array in arrays)
    if any(sys.getrefcount(array.data) - 1 != pointers[id(array.data)] for array in arrays):
        return False
    return sys.getrefcount(arrays[0].data.mem) - 1 == len(pointers)


def _is_private(spot: Spot) -> bool:
    """Tell whether only the graph holds the function of a stash, by counting references."""
    outputs = (node() for node in spot.owner().outputs or ())
    count = sum(node is not None and node.creator_node is spot.owner() for node in outputs)
    return sys.getrefcount(spot.owner()) - 1 == count


# -- how arrays lie on memory ----------------------------------------------------------------------


class Ground(NamedTuple):
    """Memory that has come back: the array that owns it, and where in it the contents begin."""

    root: Any
    skew: int

    @classmethod
    def of(cls, array: Any) -> Ground:
        """The memory that an array is all of."""
        root = root_of(array)
        return cls(root, address_of(array) - address_of(root))


class ArrayLayout(NamedTuple):
    """How an array lies on memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]
    kind: type

    @classmethod
    def of(cls, array: Any, start: int) -> ArrayLayout:
        """How an array lies on memory that begins at an address."""
        return cls(address_of(array) - start, array.shape, array.dtype, array.strides, type(array))

    def on(self, ground: Ground) -> Any:
        """An array that lies so on other memory; what owns that, where it is the same."""
        root, offset = ground.root, ground.skew + self.offset
        same = (0, self.shape, self.dtype, self.strides, self.kind)
        if same == (offset, root.shape, root.dtype, root.strides, type(root)):
            return root
        if not isinstance(root, np.ndarray):
            return self._on_cupy(root, offset)
        made: Any = np.ndarray(self.shape, self.dtype, bytes_of(root), offset, self.strides)
        return made if self.kind is np.ndarray else made.view(self.kind)

    def _on_cupy(self, root: Any, offset: int) -> Any:
        """By CuPy's own steps where these can make it, so that it holds the root."""
        if not _fills(self.shape, self.strides, self.dtype.itemsize):
            xp = chainer.backend.get_array_module(root)
            return xp.ndarray(self.shape, self.dtype, root.data + offset, self.strides)
        order = _by_stride(self.strides)
        length = self.dtype.itemsize * prod(self.shape)
        dense = bytes_of(root)[offset : offset + length].view(self.dtype)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return dense.reshape([self.shape[axis] for axis in order]).transpose(inverse)


def bytes_of(array: Any) -> Any:
    """The memory of an array that is dense in any order of its axes, the lowest address first."""
    return array.transpose(_by_stride(array.strides)).reshape(-1).view(np.uint8)


def is_dense(array: Any) -> bool:
    """Tell whether an array covers its memory without gaps, in any order of its axes."""
    return _fills(array.shape, array.strides, array.itemsize)


def is_bytes(root: Any) -> bool:
    """Tell whether memory can be copied as bytes: dense, each byte once, and no Python objects."""
    return root.nbytes > 0 and not root.dtype.hasobject and is_dense(root)


def _fills(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _by_stride(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])
