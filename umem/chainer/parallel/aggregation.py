"""The product with the normalised adjacency of a graph in parts, one remote part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda
from chainer.utils import type_check

from umem.chainer.gcn import add_product, csr_matrix
from umem.chainer.parallel.ranks import Ranks
from umem.graphs import ColumnBlock, RankBlocks

_SEND, _RECEIVE = 0, 1


class Halo:
    """A rank's blocks of the adjacency on a device, and the buffers of halo exchange.

    Two buffers, one to send and one to receive, are made at the first exchange and grow to the
    largest message.

    Attributes:
        row_count: rows of the rank.
        entry_count: entries of the adjacency in them.
        buffers: one to send, one to receive; functions share this list, so that none keeps a buffer
            that a longer one has replaced.
    """

    def __init__(self, ranks: Ranks, runs: tuple[range, ...], blocks: RankBlocks) -> None:
        self._ranks, self._runs, self._blocks = ranks, runs, blocks
        self.row_count = blocks.rows[-1].stop
        every = (blocks.first, *blocks.halo, blocks.last)
        self.entry_count = sum(len(block.indices) for block in every)
        self.buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self.to_device(chainer.get_device("@numpy"))

    def to_device(self, device: Any) -> None:
        """Move the blocks to a device, given as to Chainer's `to_device`."""
        self._device = chainer.get_device(device)
        self._first, self._last = map(self._matrix, (self._blocks.first, self._blocks.last))
        self._remote = {block.part: self._matrix(block) for block in self._blocks.halo}
        self._sent = {key: self._device.send(rows) for key, rows in self._blocks.sent.items()}

    def _matrix(self, block: ColumnBlock) -> Any:
        arrays = block.data, block.indices, block.indptr
        return csr_matrix(arrays, (self.row_count, block.columns), self._device)

    @property
    def device(self) -> Any:
        """Return the blocks' device, a `chainer.backend.Device`."""
        return self._device

    def matrices(self) -> list[Any]:
        """Return the blocks as CSR matrices."""
        return [self._first, *self._remote.values(), self._last]

    def sent(self) -> tuple[Any, ...]:
        """Return the rows that this rank sends, int32, by message."""
        return tuple(self._sent.values())

    def product(self, x: Any) -> Any:
        """Multiply this rank's rows of the adjacency by the x of all ranks: (rows, F), of x's
        dtype.
        """
        xp = cuda.get_array_module(x)
        own = xp.ascontiguousarray(_wide(x))
        out = xp.zeros(x.shape, own.dtype)
        add_product(self._first, own, out)
        for part, rows in self._arriving(x):
            add_product(self._remote[part], _wide(rows), out)
        add_product(self._last, own, out)
        return out.astype(x.dtype, copy=False)

    def _arriving(self, x: Any) -> Iterator[tuple[int, Any]]:
        """Yield the rows received from other ranks' parts; each is valid until the next.

        In step k every rank sends its parts to the k-th rank before it, and receives the parts of
        the k-th after it, in order; each send completes before the next begins. So no two ranks
        wait for each other, and each has one part's rows at a time.
        """
        rank, size = self._ranks.rank, self._ranks.size
        for step in range(1, size):
            source, target = (rank + step) % size, (rank - step) % size
            theirs, own = self._runs[source], self._runs[rank]
            for at in range(max(len(theirs), len(own))):
                going = self._send(x, own[at], target) if at < len(own) else []
                if at < len(theirs) and theirs[at] in self._remote:
                    yield theirs[at], self._receive(x, theirs[at], source)
                self._ranks.wait(going)

    def _send(self, x: Any, part: int, target: int) -> list[Any]:
        """Start sending the rows of a part that another rank needs; returns the buffers in use."""
        rows = self._sent.get((part, target))
        if rows is None:
            return []
        packed = self._buffer(_SEND, (len(rows), x.shape[1]), x.dtype)
        if cuda.get_array_module(x) is np:
            np.take(x, rows, axis=0, out=packed, mode="clip")  # "raise" would copy it once more
        else:
            x[rows].get(out=packed)
        return self._ranks.send(packed, target, "halo")

    def _receive(self, x: Any, part: int, source: int) -> Any:
        rows = self._buffer(_RECEIVE, (self._remote[part].shape[1], x.shape[1]), x.dtype)
        self._ranks.receive(rows, source)
        return cuda.get_array_module(x).asarray(rows)

    def _buffer(self, which: int, shape: tuple[int, int], dtype: Any) -> Any:
        size = shape[0] * shape[1] * np.dtype(dtype).itemsize
        if self.buffers[which].nbytes < size:
            self.buffers[which] = np.empty(size, np.uint8)
        return self.buffers[which][:size].view(dtype).reshape(shape)


def _wide(x: Any) -> Any:
    """Convert float16 to float32: neither scipy.sparse nor cuSPARSE through CuPy multiplies
    float16.
    """
    return x.astype(np.float32) if x.dtype == np.float16 else x


class PartAggregation(chainer.FunctionNode):
    """Function: this rank's rows of the adjacency times x, whose rows are spread over ranks.

    The matrix equals its transpose, so the gradient is the same product, applied to the gradients.

    Attributes:
        entries: data and indices of the blocks of the matrix.
        starts: their indptr.
        sent: by message, the rows that this rank sends.
        buffers: of messages sent and received.
        entry_count: entries of all blocks.
    """

    def __init__(self, halo: Halo) -> None:
        self._halo = halo
        matrices = halo.matrices()
        self.entries = tuple(array for m in matrices for array in (m.data, m.indices))
        self.starts = tuple(m.indptr for m in matrices)
        self.sent, self.buffers = halo.sent(), halo.buffers
        self.entry_count = halo.entry_count

    def check_type_forward(self, in_types: Any) -> None:
        # As in Chainer's own functions, whose errors name inputs by it.
        type_check._argname(in_types, ("x",))
        (x,) = in_types
        type_check.expect(x.dtype.kind == "f", x.ndim == 2, x.shape[0] == self._halo.row_count)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        (x,) = inputs
        return (self._halo.product(x),)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        gradient: tuple[Any, ...] = PartAggregation(self._halo).apply(grad_outputs)
        return gradient
