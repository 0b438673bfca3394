"""Prefetch on Chainer's tape: the order of a step is learned, then arrays move before their use.

`LookaheadPrefetch` is for users. `umem.planner.prefetch` plans the moves, and `umem.memory.Pager`
has the device do them.

    prefetch.py  is `LookaheadPrefetch`
    session.py   is one time inside its block: it follows, learns and moves
"""
