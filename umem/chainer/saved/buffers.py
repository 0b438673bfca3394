"""Buffers: memory of saved tensors, with all slots of Chainer's tape whose arrays are in it."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from typing import Any

import numpy as np

from umem.chainer.saved.array_layout import ArrayLayout, Ground, is_dense
from umem.chainer.saved.slots import Slot
from umem.chainer.saved.tiers.tier import Sent
from umem.trace.recording import address_of, root_of


class Buffer:
    """Memory of saved tensors that the tape holds, here or in an offload target.

    Args:
        root: the array that owns the memory, held weakly.

    Attributes:
        sent: the copy in the offload target, complete or on its way; None: there is none.
        is_below: whether the tape's slots are empty, and only `sent` has the contents.
        is_waiting: whether the buffer is queued to be checked before later functions.
        kind: the class of the array that owned the memory first.
        pin_count: running functions that read the memory; it is not offloaded before they end.
    """

    __slots__ = (
        "__weakref__", "_kept", "_layouts", "_root", "_skew", "_slots", "is_below", "is_waiting",
        "kind", "nbytes", "pin_count", "sent",
    )  # fmt: skip

    def __init__(self, root: Any) -> None:
        self._root = weakref.ref(root)
        self.nbytes = int(root.nbytes)
        self._slots: dict[tuple[int, str, int | None], Slot] = {}
        self._layouts: dict[tuple[int, str, int | None], ArrayLayout] = {}
        self.sent: Sent | None = None
        self.is_below = False
        self.is_waiting = False
        self.kind = type(root)
        self.pin_count = 0
        self._kept: Any = None
        self._skew = 0  # the offset of the contents' first byte from the root's

    def __del__(self) -> None:
        if self.sent is not None:
            self.sent.forget()

    def forget(self) -> None:
        """Discard the copy in the offload target; for a buffer whose slots hold the contents."""
        if self.sent is not None:
            self.sent.forget()
        self.sent, self._skew = None, 0

    def root(self) -> Any:
        """Return the array that owns the memory now; None if that array was freed."""
        return self._root()

    def has(self, slot: Slot) -> bool:
        """Tell whether a slot is known to belong to the buffer."""
        known = self._slots.get(slot.key)
        return known is not None and known.owner() is slot.owner()

    def add(self, slot: Slot) -> None:
        """Add a slot whose array is in the memory."""
        if not self.has(slot):
            self._slots[slot.key] = slot

    def is_wanted(self) -> bool:
        """Tell whether the tape still needs the memory; forget slots that hold other arrays."""
        self._slots = {key: slot for key, slot in self._slots.items() if self._is_at(slot)}
        return bool(self._slots)

    def _is_at(self, slot: Slot) -> bool:
        """Tell whether a slot holds an array in the memory, or lacks the offloaded one."""
        array = slot.get()
        if self.is_below:
            return array is None and slot.owner() is not None
        return array is not None and root_of(array) is self._root()

    def is_alone(self, but: Any = None) -> bool:
        """Tell whether only the tape refers to the memory, by counting references.

        A variable, a view or the program itself could edit the memory, and while they refer to it,
        dropping the tape's arrays frees nothing.

        Args:
            but: a function whose state is assumed to be held only by the tape.
        """
        slots = self._slots.values()
        if not all(slot.owner() is but or _is_private(slot) for slot in slots if slot.is_state):
            return False
        arrays = [slot.get() for slot in slots]
        in_slots = Counter(map(id, arrays))
        distinct = {id(array): array for array in arrays}
        del arrays
        root = id(self._root())
        views = len(distinct) - (root in distinct)
        for key in distinct:  # each is held by its slots, by `distinct`, and as an argument
            if sys.getrefcount(distinct[key]) - in_slots[key] - 2 != (views if key == root else 0):
                return False
        if root not in distinct and sys.getrefcount(self._root()) - 1 != views:
            return False
        return isinstance(self._root(), np.ndarray) or _no_address_is_held(
            [*distinct.values(), *([] if root in distinct else [self._root()])]
        )

    def can_be_restored(self) -> bool:
        """Tell whether all arrays in the memory can be restored: on CuPy, only dense ones can."""
        if isinstance(self._root(), np.ndarray):
            return True
        return all(is_dense(slot.get()) for slot in self._slots.values())

    def release(self, keep: bool = False) -> None:
        """Empty the slots, and record the layouts of their arrays: only `sent` has the contents.

        Args:
            keep: also keep the memory, for a `restore` that comes soon; until `drop_kept`.
        """
        root = self._root()
        start = address_of(root) + self._skew
        self.is_below = True  # first: after an interruption `restore` fills the empty slots
        for key, slot in self._slots.items():
            self._layouts[key] = ArrayLayout.of(slot.get(), start)
            slot.put(None)
        self._kept = root if keep else None

    def drop_kept(self) -> None:
        """Drop the memory that `release` kept, if any."""
        self._kept = None

    def restore(self) -> Any:
        """Fill the empty slots from `sent`, or from kept memory; return the array that owns it.

        Slots whose arrays had the same layout share one array. `sent` stays, until `forget`.

        Raises:
            The errors of `Sent.array`; nothing has changed.
        """
        assert self.sent is not None
        root = self._kept
        if root is None:
            root, self._skew = Ground.of(self.sent.array())
        made: dict[ArrayLayout, Any] = {}
        for key, slot in self._slots.items():
            layout = self._layouts.get(key)
            if layout is not None and slot.get() is None:
                if layout not in made:
                    made[layout] = layout.on(Ground(root, self._skew))
                slot.put(made[layout])
        self._root, self._kept = weakref.ref(root), None
        self.is_below = False
        return root


def _no_address_is_held(arrays: list[Any]) -> bool:
    """Tell whether no other array of CuPy is in the memory of these, by counting references.

    An array from an address, as by ``as_strided``, has no base: it refers to the pointer, or to the
    memory by its own pointer. The given arrays are all different.
    """
    pointers = Counter(id(array.data) for array in arrays)
    if any(sys.getrefcount(array.data) - 1 != pointers[id(array.data)] for array in arrays):
        return False
    return sys.getrefcount(arrays[0].data.mem) - 1 == len(pointers)


def _is_private(slot: Slot) -> bool:
    """Tell whether only the graph refers to the function that has a slot's state."""
    outputs = (node() for node in slot.owner().outputs or ())
    count = sum(node is not None and node.creator_node is slot.owner() for node in outputs)
    return sys.getrefcount(slot.owner()) - 1 == count
