"""Prefetching of managed memory: the blocks to move to the GPU before operations use them.

`umem.lookahead` and `umem.chainer.LookaheadPrefetch` plan with it, and memory's pager makes a
device carry the plan out. All functions are pure.

    order.py            is an iteration: its operations, and the arrays that each uses
    block_footprint.py  finds the blocks that an iteration uses, and how long each stays unused
    moves.py            plans which blocks are evicted and fetched, and when
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.planner.prefetch.block_footprint import footprint
    from umem.planner.prefetch.moves import NOTHING, MovePlan, Moves, SomeBlocks, plan_moves
    from umem.planner.prefetch.order import Iteration, Order, Step
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        block_footprint="footprint",
        moves="MovePlan Moves NOTHING SomeBlocks plan_moves",
        order="Iteration Order Step",
    )
