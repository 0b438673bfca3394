"""The memory behind arrays: whose it is, the part of it that a view covers, and when it ends."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from umem.trace.events import Event, Free
from umem.trace.recording.buffer import Raw, Store

Reach = tuple[Any, ...]
"""An `Access` while recording: a plain tuple that begins with tensor, start and stop."""


class RootRef(weakref.ref[Any]):
    """A weak reference to a root array that knows how it was stored, see `Raw`, and its address.

    The address is None until a part of the array is used.
    """

    __slots__ = ("address", "key", "whole")
    key: int
    whole: Reach
    address: int | None


class MemoryBlock:
    """Memory that is known by its address, and whose end its owner tells."""

    __slots__ = ("address", "key", "whole")
    whole: Reach

    def __init__(self, address: int) -> None:
        self.address: int | None = address
        self.key = -address  # among the ids of arrays

    def __call__(self) -> None:
        """It is no array."""


class Teller(Protocol):
    """Who tells recorders of memory by its address, such as a pool's hooks.

    ``name`` is what a trace says that it was recorded on.
    """

    name: str

    def block_of(self, root: Any) -> tuple[int, int]:
        """The address and size of the memory that an array is on."""

    def begun(self, address: int, nbytes: int, held: int) -> None:
        """Memory was handed out by somebody whom the teller does not hear."""

    def ended(self, address: int, held: int) -> None:
        """That memory is free again."""


tellers: list[Teller] = []
"""Who tells of CuPy's memory, at most one."""


class Lifetimes(ABC):
    """What a recorder knows of memory: the arrays, the blocks whose end is told, and who died."""

    _known: dict[int, RootRef | MemoryBlock]
    _dead: deque[RootRef | MemoryBlock]
    _listener: Callable[[Event], None] | None
    _raw: list[Raw] | None
    _store: Store | None
    backend: str

    @abstractmethod
    def add(
        self, ref: RootRef | MemoryBlock, nbytes: int, kind: str, label: str, uploaded: bool
    ) -> Reach:
        """Allocate the next tensor, which is what ``ref`` refers to."""

    def flush(self) -> None:
        """Turn the deaths of arrays so far into events."""
        dead, known, raw = self._dead, self._known, self._raw
        ref: RootRef | MemoryBlock | None = None
        while dead:
            try:
                try:
                    ref = dead[0]  # known before it is taken: a signal may come as it is
                    ref = dead.popleft()
                except IndexError:  # another thread, which asks for figures, was faster
                    return
                if known.get(ref.key) is ref:
                    if self._listener is not None:
                        self._listener(Free(ref.whole[0]))
                    del known[ref.key]
                    if raw is not None:
                        raw.append(ref.whole[0])
            except BaseException:
                if ref is not None and ref not in dead and known.get(ref.key) is ref:
                    dead.appendleft(ref)
                raise

    def block(
        self, address: int, nbytes: int, label: str, kind: str = "array", uploaded: bool = False
    ) -> Reach:
        """The tensor that is the memory at this address, until `block_freed` tells of its end.

        One that an operation has made gets its kind and its label from the first array on it.
        """
        if self._dead:
            self.flush()
        found = self._known.get(-address)
        self.backend = tellers[-1].name
        if found is None:
            return self.add(MemoryBlock(address), nbytes, kind, label, uploaded)
        if kind != "array" and found.whole[3] == "array":
            found.whole = (*found.whole[:3], kind, label, *found.whole[5:])
            if self._store is not None:
                self._store.rename(found.whole[0], kind, label)
        return found.whole

    def block_freed(self, address: int) -> None:
        """The memory at this address is free; any thread may say so, and the collector."""
        found = self._known.get(-address)
        if found is not None:
            self._dead.append(found)

    def _on_block(
        self, root: Any, block: tuple[int, int], kind: str, label: str, uploaded: bool
    ) -> Reach:
        """The part of a block that an array covers, which is found by the array from now on."""
        known = self._known
        address, nbytes = block
        whole = self.block(address, nbytes, label, kind, uploaded)
        if root.nbytes != nbytes:
            low = min(max(address_of(root) - address, 0), nbytes)
            whole = (whole[0], low, min(low + int(root.nbytes), nbytes), *whole[3:])
        ref = RootRef(root, lambda dead: known.pop(dead.key, None))
        ref.key, ref.whole, ref.address = id(root), whole, None
        known[ref.key] = ref
        return whole


def root_of(array: Any) -> Any:
    """The array at the end of the ``.base`` chain: the one whose death frees the memory."""
    kinds = (np.ndarray, type(array))
    base = getattr(array, "base", None)
    while base is not None:
        if isinstance(base, kinds):  # as_strided puts an object of its own in between
            array = base
        base = getattr(base, "base", None)
    return array


def part_of(array: Any, root: Any, whole: Reach, root_address: int) -> Reach:
    """The byte range of a view; the whole root when the view has as many bytes."""
    nbytes = array.nbytes
    if nbytes == root.nbytes:
        return whole
    if not array.size:
        return whole[0], 0, 0
    low = address_of(array) - root_address
    high = low + array.itemsize
    if array.flags.c_contiguous:
        high = low + nbytes
    else:
        for count, step in zip(array.shape, array.strides, strict=True):
            if count > 1 and step < 0:
                low += (count - 1) * step
            elif count > 1:
                high += (count - 1) * step
    low = min(max(low, 0), root.nbytes)  # memory of others may have gaps that nbytes leaves out
    high, first = max(low, min(high, root.nbytes)), whole[1]
    return whole[0], first + low, first + high


def address_of(array: Any) -> int:
    """Where an array's first element is."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)
