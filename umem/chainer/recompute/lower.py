"""The tier that a training run moves arrays to, from its first pass on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import chainer

from umem.chainer.offload.tier import Tier
from umem.chainer.offload.tiers import Where, link_of, open_tier
from umem.chainer.recompute.tape import Call
from umem.devices.open import entered_device
from umem.planner.link import Link


class Lower:
    """The tier below, opened when it is known what arrays there are.

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

    @property
    def is_wanted(self) -> bool:
        """True where arrays may be moved."""
        return self._where is not False

    @property
    def is_among_arrays(self) -> bool:
        """True where what is below is memory of NumPy's all the same: a GPU is simulated."""
        return self.tier is not None and entered_device() is not None

    def open(self, inputs: Any) -> None:
        """Open it for arrays like these; once it is open, do nothing."""
        if self.is_wanted and self.tier is None:
            arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
            self.tier = open_tier(arrays[0], self._where)
            self.link = link_of(self.tier, arrays[0])

    def close(self, calls: Iterable[Call]) -> None:
        """Have back what graphs that are alive have below; then nothing is there any more."""
        tier, self.tier = self.tier, None
        if tier is None:
            return
        try:
            for call in calls:
                if call.has_graph:
                    call.come_back()
                call.forget_below()
        finally:
            tier.close()
