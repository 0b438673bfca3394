"""Prefetch on Chainer's tape: the order of a step is learned, then arrays move before their use.

`LookaheadPrefetch` is for users. `umem.planner.prefetch` plans the moves, and `umem.memory.Pager`
makes the device carry them out.

    prefetch.py  is `LookaheadPrefetch`
    session.py   is one use of its block: it follows, learns and moves
"""
