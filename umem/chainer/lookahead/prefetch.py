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
    operations, and the addresses of the arrays that each uses. While a later iteration follows the
    same order, blocks of 2 MiB are evicted to the host and prefetched before their next use, on a
    separate stream (see `Pager`). Freed memory is discarded where the device can, so that the
    driver never has to choose. `umem.planner.prefetch` makes the plan. Meanwhile the allocator
    returns the same addresses in every step. While all reserved memory fits into VRAM, nothing
    moves. If no array is managed after the first iteration, it stops following Chainer until it is
    entered again. Enter it inside ``umem.managed()``.

    An iteration that differs (another graph or shape, a last small batch) gets no help from that
    point on, and is learned too; one `LookaheadWarning` is given. Up to four orders are remembered.
    Evaluations under ``no_backprop_mode`` are ignored. Results are the same bits with and without
    it: memory keeps its contents when it moves, and only freed memory is discarded. Arrays are held
    weakly.

    Args:
        depth: at most this many operations before its use a block is prefetched, if there is room;
            at least 1.

    Cost: a recorder's (bench/overhead.py), some microseconds for each array moved, and on a GPU for
    each allocation. A plan takes milliseconds to seconds, after each new order. Gain:
    bench/prefetch.py, simulated; never run on a GPU yet. Thread-safety: it follows the thread that
    entered it; use one object a thread.

    Raises:
        ValueError: the depth is not an int of at least 1.
        DeviceNotFoundError: on entering, if there is no CUDA device and no virtual GPU.
        StateError: on entering, if the thread is inside such a block already.

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
        """Return the results since the block was entered; also after its end."""
        return self._report if self._session is None else self._session.report

    def print_report(self, file: TextIO | None = None) -> None:
        """Print the report, to standard output by default."""
        print(self.report(), file=sys.stdout if file is None else file)
