"""Prefetch for Chainer: learn the order of a step, then move arrays before they are used."""

from __future__ import annotations

import sys
from typing import TextIO

from umem.chainer.lookahead.session import Follower, LookaheadReport, Session
from umem.devices import current_device
from umem.errors import StateError
from umem.trace.recording import active

__all__ = ["LookaheadPrefetch", "LookaheadReport"]


class LookaheadPrefetch:
    """Prefetches managed memory by a plan, in forward, backward and update.

    The first iteration, up to the end of an optimizer's ``update``, is learned: the order of the
    operations, and where the arrays lie that each uses. While a later iteration takes the same
    order, blocks of 2 MiB go to the host and come back before their next use, on a stream of their
    own (see `Pager`), and what no array has any more is discarded where the device can, so that the
    driver never has to choose; `umem.planner.prefetch` makes the plan. Memory is handed out at the
    same places in every step meanwhile. While all that is reserved has room in VRAM nothing moves.
    Where nothing is managed memory after the first iteration it lets go of Chainer until it is
    entered again. Enter it inside ``umem.managed()``.

    An iteration that does otherwise (another graph or shape, a last small batch) is not helped from
    there on, which a `LookaheadWarning` says once, and is learned too; up to four orders are
    remembered. Evaluations under ``no_backprop_mode`` are passed over. Results are the same bits
    with and without it: what moves keeps its contents, and only memory that the allocator has back
    is discarded. Arrays are held weakly.

    Args:
        depth: how many operations ahead something may come back, from 1, where there is room.

    Cost: that of a recorder (bench/overhead.py), some microseconds for each array moved, and on a
    GPU for each allocation; a plan takes milliseconds to seconds, after an iteration that was not
    known. Gain: bench/prefetch.py, simulated; never run on a GPU yet. Thread-safety: it follows the
    thread that entered it; use one object a thread.

    Raises:
        ValueError: the depth is not an int from 1 up.
        DeviceNotFoundError: on entering, there is no CUDA device and no virtual GPU.
        StateError: on entering, the thread is inside such a block already.

    >>> import umem, umem.chainer
    >>> with umem.virtual_gpu("v100-16gb"), umem.managed():
    ...     with umem.chainer.LookaheadPrefetch(depth=2) as lookahead:
    ...         pass  # the training loop
    >>> lookahead.report().iteration_count
    0
    """

    def __init__(self, depth: int = 2) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"LookaheadPrefetch: depth must be an int from 1 up; got {depth!r}")
        self.depth = depth
        self._report = LookaheadReport()
        self._session: Session | None = None

    def __enter__(self) -> LookaheadPrefetch:
        if self._session is not None or any(isinstance(r, Follower) for r in active()):
            raise StateError("inside a LookaheadPrefetch block already; leave that one first")
        self._session = Session(current_device(), self.depth)
        self._session.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop following the program; the report stays readable."""
        session, self._session = self._session, None
        if session is not None:
            self._report = session.report
            session.stop()

    def report(self) -> LookaheadReport:
        """Return what was done since the block was entered, also after its end."""
        return self._report if self._session is None else self._session.report

    def print_report(self, file: TextIO | None = None) -> None:
        """Print the report, to standard output by default."""
        print(self.report(), file=sys.stdout if file is None else file)
