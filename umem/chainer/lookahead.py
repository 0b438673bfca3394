"""Prefetch for Chainer: learn the order of a step, then move arrays before they are used."""

from __future__ import annotations

ORDERS = 4
"""How many orders are remembered: the usual one, that of a last small batch, of an alternation."""
LONGEST = 50_000
"""Operations after which an iteration without an update is given up."""
ROOM = 0.9
"""The share of VRAM that is planned with; the pool's gaps and workspace take the rest."""
