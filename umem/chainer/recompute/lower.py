"""The tier that a training run moves arrays to, from its first pass on or before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from umem.chainer.recompute.tape import Call
from umem.chainer.saved.tiers.tier import Process, Tier
from umem.chainer.saved.tiers.tiers import Where, link_of, only_numpy_moves, open_tier
from umem.devices.open import entered_device
from umem.planner.link import Link


class Lower:
    """The tier below, opened as soon as it is known what arrays there are.

    Args:
        where: where it is; False: nothing moves.

    Attributes:
        tier: what is open.
        link: the way there and back.
    """

    def __init__(self, where: Where) -> None:
        self._where = where
        self.tier: Tier | None = None
        self.link: Link | None = None
        self._process: Process | None = None
        self._is_early = False

    @property
    def is_wanted(self) -> bool:
        """True where arrays may be moved."""
        return self._where is not False

    @property
    def is_among_arrays(self) -> bool:
        """True where what is below is memory of NumPy's all the same: a GPU is simulated."""
        return self.tier is not None and entered_device() is not None

    def start(self) -> None:
        """Open it where only NumPy's arrays can come, so that a bad folder is refused at once.

        Raises:
            StateError, FileError: as `open_tier`; nothing was made.
        """
        if self.is_wanted and only_numpy_moves(self._where):
            self._open(np.empty(0))
            self._is_early = True

    def open(self, inputs: Any) -> None:
        """Open it for arrays like these; once it is open, or where there are none, do nothing."""
        arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
        if not self.is_wanted or not arrays:
            return
        is_numpy = only_numpy_moves(self._where) and isinstance(arrays[0], np.ndarray)
        if self._is_early and not is_numpy:
            self.close(())
        self._is_early = False
        if self.tier is None:
            self._open(arrays[0])

    def _open(self, array: Any) -> None:
        tier = open_tier(array, self._where)
        try:
            self.link = link_of(tier, array)
        except BaseException:  # a signal, too
            tier.close()
            raise
        self.tier, self._process = tier, Process()

    def close(self, calls: Sequence[Call]) -> None:
        """Have back what graphs that are alive have below; then nothing is there any more.

        In a process that was forked since, nothing comes back: it is the parent's.

        Raises:
            what the tier raises where it cannot bring something back; the rest is back.
        """
        tier, self.tier = self.tier, None
        if tier is None:
            return
        is_ours = self._process is not None and self._process.is_this()
        try:
            if is_ours:
                _bring_back(calls)
        finally:
            for call in calls:
                call.forget_below()
            if is_ours:
                tier.close()


def _bring_back(calls: Sequence[Call]) -> None:
    """Have all of it back that can come; raises the first error once the rest is there."""
    errors: list[Exception] = []
    for call in calls:
        try:
            if call.has_func:
                call.come_back()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
