"""Unused blocks of managed memory: discarded, or made resident for later arrays.

Models: NVIDIA's discard, on blocks without allocations; the next prefetch or fault populates a
discarded block again. Does not model: pages inside a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from umem.devices.virtual.clock import BlockMoves
from umem.devices.virtual.model import Model
from umem.units import BLOCK_BYTES


def discard_free(model: Model, blocks: Iterable[int]) -> int:
    """Discard the contents of the free ones of some blocks; returns their number.

    Charges the host one launch for all, as for a batch; none if no block is free.
    """
    with model.lock:
        moves, count = BlockMoves(), 0
        for block in _free(model, blocks):
            moves.add(model.driver.residency.discard(block, block + 1))
            count += 1
        _launch(model, count)
        model.counters.moves.add(moves)
        return count


def make_ready(model: Model, blocks: Iterable[int]) -> int:
    """Move the free ones of some blocks into VRAM; returns their number.

    Free blocks that are already in VRAM count too. The moves run concurrently with operations, and
    evict other blocks. Charges the host one launch for all; none if no block is free.
    """
    with model.lock:
        count = 0
        for block in _free(model, blocks):
            moves = model.driver.residency.prefetch(block, block + 1)
            model.counters.moves.add(moves)
            model.prefetches.add(block, block + 1, model.clocks.move(moves, overlap=True))
            count += 1
        _launch(model, count)
        return count


def _launch(model: Model, count: int) -> None:
    if count:
        model.clocks.launch(None)


def _free(model: Model, blocks: Iterable[int]) -> Iterator[int]:
    is_free = model.driver.repeating.is_free
    for block in blocks:
        if is_free(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES):
            yield block
