"""The memory behind arrays: its tensor, the byte range that a view covers, and its lifetime."""

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
    """A weak reference to a root array, with its stored allocation, see `Raw`, and its address.

    The address is None until a view of the array is accessed.
    """

    __slots__ = ("address", "key", "whole")
    key: int
    whole: Reach
    address: int | None


class MemoryBlock:
    """Memory that its address identifies, and whose end an `AllocationReporter` reports."""

    __slots__ = ("address", "key", "whole")
    whole: Reach

    def __init__(self, address: int) -> None:
        self.address: int | None = address
        self.key = -address  # among the ids of arrays

    def __call__(self) -> None:
        """Return None, as a weak reference to a dead array does: no array is this memory."""


class AllocationReporter(Protocol):
    """A reporter of allocations and releases by address, such as a pool's hooks.

    ``name`` is the backend's name in traces: "cupy", or "software".
    """

    name: str

    def entered(self, recorder: Lifetimes) -> None:
        """Pass to a recorder that has begun the blocks that no operation will report."""

    def block_of(self, root: Any) -> tuple[int, int]:
        """Return the address and size of the block of memory that an array is on."""

    def begun(self, address: int, nbytes: int) -> None:
        """Record that an allocator has handed out a block of the requested bytes."""

    def ended(self, address: int) -> None:
        """Record that a block of `begun` was freed."""


reporters: list[AllocationReporter] = []
"""The reporter of CuPy's memory, if any: at most one."""
free_reporters: list[Callable[[], None]] = []
"""Called before an operation is recorded, to report frees that allocators have delayed."""


class Lifetimes(ABC):
    """Arrays and blocks of an `AllocationReporter` that a recorder follows; queues their deaths."""

    _known: dict[int, RootRef | MemoryBlock]
    _dead: deque[RootRef | MemoryBlock]
    _listener: Callable[[Event], None] | None
    _renamed: Callable[[int, str], None] | None
    _raw: list[Raw] | None
    _store: Store | None
    backend: str

    @abstractmethod
    def add(
        self, ref: RootRef | MemoryBlock, nbytes: int, kind: str, label: str, uploaded: bool
    ) -> Reach:
        """Allocate the next tensor, for an array or a block; return the access to all of it."""

    def flush(self) -> None:
        """Record the queued deaths of arrays and blocks as `Free` events."""
        dead, known, raw = self._dead, self._known, self._raw
        ref: RootRef | MemoryBlock | None = None
        while dead:
            try:
                try:
                    ref = dead[0]  # read before it is taken: a signal may come in between
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
        """Return the access to the tensor of the memory at an address; allocate it if it is new.

        The tensor lives until `block_freed`. If its kind is only "array", it takes its kind and its
        label from the first array on it.
        """
        if self._dead:
            self.flush()
        found = self._known.get(-address)
        self.backend = reporters[-1].name
        if found is None:
            return self.add(MemoryBlock(address), nbytes, kind, label, uploaded)
        if kind != "array" and found.whole[3] == "array":
            found.whole = (*found.whole[:3], kind, label, *found.whole[5:])
            if self._store is not None:
                self._store.rename(found.whole[0], kind, label)
            if self._renamed is not None:
                self._renamed(found.whole[0], kind)
        return found.whole

    def block_freed(self, address: int) -> None:
        """Queue the end of the memory at an address; from any thread, or the garbage collector."""
        found = self._known.get(-address)
        if found is not None:
            self._dead.append(found)

    def _on_block(
        self, root: Any, block: tuple[int, int], kind: str, label: str, uploaded: bool
    ) -> Reach:
        """Return the access to the part of a block that an array covers, and follow the array."""
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
    """Return the array at the end of the ``.base`` chain: the one whose death frees the memory."""
    kinds = (np.ndarray, type(array))
    base = getattr(array, "base", None)
    while base is not None:
        if isinstance(base, kinds):  # as_strided puts an object of its own in between
            array = base
        base = getattr(base, "base", None)
    return array


def part_of(array: Any, root: Any, whole: Reach, root_address: int) -> Reach:
    """Return the access to the byte range of a view; to all of the root for a view of its size.

    Args:
        array: the view.
        root: its root.
        whole: the access to all of the root.
        root_address: the root's address.
    """
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
    """Return the address of an array's first element."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)
