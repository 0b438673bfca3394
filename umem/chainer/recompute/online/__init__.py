"""Passes whose graph is not expected back: what to drop is decided as they go."""

from umem.chainer.recompute.online.account import Account
from umem.chainer.recompute.online.evict_online import EvictOnline
from umem.chainer.recompute.online.eviction import Candidates
from umem.chainer.recompute.online.gradients_held import GradientsHeld
from umem.chainer.recompute.online.kinds import Experience
from umem.chainer.recompute.online.online_passes import OnlinePasses
from umem.chainer.recompute.online.pressure import Pressure
from umem.chainer.recompute.online.room import Room

__all__ = [
    "Account",
    "Candidates",
    "EvictOnline",
    "Experience",
    "GradientsHeld",
    "OnlinePasses",
    "Pressure",
    "Room",
]
