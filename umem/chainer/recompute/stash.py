"""A function's stash, which it keeps on itself for its backward: dropped, packed, never redrawn.

A dropout's mask is one bit an element while nobody reads it. That holds for
`chainer.functions.dropout` on arrays of NumPy or CuPy, whose mask is zero or one scale; masks that
the user gave, and cuDNN's own states, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chainer

from umem.chainer.saved.slots import state_slots
from umem.planner.from_trace import DRAWS


class Stash:
    """The arrays that one call keeps on itself.

    Args:
        kind: the function's class.

    Attributes:
        names: the attributes that hold it.
        is_dropped: whether it was let go.
    """

    __slots__ = ("_draws", "_has_mask", "_packed", "is_dropped", "names")

    def __init__(self, kind: type) -> None:
        self.names: tuple[str, ...] = ()
        self.is_dropped = False
        self._draws = kind.__name__ in DRAWS
        self._has_mask = kind.__name__ == "Dropout" and kind.__module__.startswith("chainer.")
        self._packed: Packed | None = None

    def learn(self, names: tuple[str, ...]) -> None:
        """These attributes hold it."""
        self.names = names

    def drop(self, func: Any) -> None:
        """Let it go, unless it is what was drawn."""
        if func is None or self._draws or not self.names:
            return
        for slot in state_slots(func, self.names):
            slot.put(None)
        self.is_dropped = True

    def arrays(self, func: Any) -> list[Any]:
        """What it is, where each attribute holds one array; none where one does not."""
        found = [] if func is None else [slot.get() for slot in state_slots(func, self.names)]
        return found if all(hasattr(array, "dtype") for array in found) else []

    def restore(self, func: Any, arrays: Sequence[Any]) -> None:
        """Put back what `arrays` has returned."""
        for slot, array in zip(state_slots(func, self.names), arrays, strict=True):
            slot.put(array)
        self.is_dropped = False

    def came_back(self) -> None:
        """The function has run again, and made it."""
        self.is_dropped = False

    def pack(self, func: Any) -> None:
        """Keep a dropout's mask as bits."""
        if func is None or not self._has_mask or "mask" not in self.names or func.mask is None:
            return
        if self._packed is None:
            self._packed = pack(func.mask)
        if self._packed is not None:
            func.mask = None

    def unpack(self, func: Any) -> bool:
        """Have a packed mask back on the function; whether there was one."""
        if self._packed is None or func.mask is not None:
            return False
        func.mask = unpack(self._packed)
        return True


def packing(func: Any, arrays: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
    """Return the bytes of a dropout's mask, as it is and as bits; zero for any other function."""
    if type(func).__name__ != "Dropout" or "mask" not in arrays:
        return 0, 0
    mask = arrays["mask"][0]
    return mask.nbytes, -(-mask.size // 8)


class Packed(NamedTuple):
    """A mask as bits, and what it takes to have it back."""

    bits: Any
    scale: Any
    shape: tuple[int, ...]


def pack(mask: Any) -> Packed | None:
    """The mask as bits; None where it is no array in C order of zeros and one other value."""
    if mask is None or not mask.flags.c_contiguous or not mask.size:
        return None
    xp = chainer.backend.get_array_module(mask)
    scale = mask.max()
    kept = mask != 0
    if not bool((mask[kept] == scale).all()):
        return None
    return Packed(xp.packbits(kept), scale, mask.shape)


def unpack(packed: Packed) -> Any:
    """The mask, bit for bit."""
    xp = chainer.backend.get_array_module(packed.bits)
    count = 1
    for length in packed.shape:
        count *= length
    flags = xp.unpackbits(packed.bits)[:count].astype(bool).reshape(packed.shape)
    return packed.scale * flags
