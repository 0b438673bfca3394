"""What backward needs, one tier down from forward on: `Offload`."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from umem.chainer.offload.mover import Mover
from umem.chainer.offload.opening import checked_place, open_tier
from umem.chainer.offload.tier import Tier
from umem.devices.open import entered_device
from umem.errors import StateError
from umem.units import format_bytes, format_seconds, parse_bytes

__all__ = ["Offload"]

_on: list[Offload] = []


class Offload:
    """Send what backward needs down one tier, and bring it back before its use."""

    def __init__(
        self, to: str | os.PathLike[str] | None = None, *, limit: int | str | None = None
    ) -> None:
        self._where = checked_place(True if to is None else to)
        self._limit = None if limit is None else parse_bytes(limit, "limit")
        self._mover = Mover(self._open)

    def _open(self, array: Any) -> Tier:
        return open_tier(array, self._where, self._limit)

    def __enter__(self) -> Offload:
        if _on:
            raise StateError("an Offload is on already: leave that one first")
        if isinstance(self._where, Path) and entered_device() is None:
            self._mover.tiers[np.ndarray] = self._open(np.empty(0))
        _on.append(self)
        try:
            self._mover.start()
        except BaseException:  # a signal, too
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self in _on:
            _on.remove(self)
            self._mover.stop()

    def tiers(self) -> tuple[Tier, ...]:
        """Where arrays went: one for each kind of them."""
        return tuple(self._mover.tiers.values())

    def summary(self) -> str:
        """Say in a line what went where, and how long the program waited."""
        if not self._mover.tiers:
            return "nothing was sent"
        return "; ".join(map(_told, self._mover.tiers.values()))


def _told(tier: Tier) -> str:
    return (
        f"{format_bytes(tier.sent_bytes)} went to {tier.name}, "
        f"{format_bytes(tier.fetched_bytes)} came back; "
        f"the program waited {format_seconds(tier.waited_seconds)} for it"
    )
