"""Random numbers that calls draw are drawn once: kept, and dropout's masks as one bit an element.

Models: `umem.chainer.Recompute`. A mask is there in full while something reads or writes it.
Does not model: masks of other widths than four bytes an element, masks that a user gave.
"""

from __future__ import annotations

from collections.abc import Iterable

from umem.predict.techniques.stream import Stream
from umem.trace.trace import Alloc, Op

PACKED = "Dropout"
BITS = 32
"""Of an element of a mask that is kept as one."""


class Masks:
    """The masks of a trace, packed and unpacked.

    Args:
        stream: where their events go; it follows them.
        allocs: the masks.
    """

    def __init__(self, stream: Stream, allocs: Iterable[Alloc]) -> None:
        self._stream = stream
        self._allocs = {alloc.tensor: alloc for alloc in allocs}
        self._bits: dict[int, int] = {}

    def pack(self, op: Op) -> None:
        """Keep only the bits of the masks that a call has written."""
        for tensor, _, _ in op.writes:
            if tensor in self._allocs:
                if tensor not in self._bits:
                    self._bits[tensor] = self._stream.make(_packed(self._allocs[tensor]))
                self._stream.drop(tensor)

    def unpack(self, tensor: int) -> None:
        """Bring a mask back in full, because something is about to use it."""
        if tensor in self._bits:
            self._stream.hold(self._bits[tensor])
            if self._stream.is_gone(tensor):
                self._stream.alloc(self._allocs[tensor])


def is_mask(op: Op, alloc: Alloc) -> bool:
    """Tell whether what a call makes is a mask that is kept as bits."""
    return op.name == PACKED and alloc.kind == "stash"


def packed_bytes(nbytes: int) -> int:
    """The bytes of a mask's bits."""
    return -(-nbytes // BITS)


def _packed(mask: Alloc) -> Alloc:
    return mask._replace(nbytes=packed_bytes(mask.nbytes), label=f"{mask.label} (bits)")
