"""Passes whose graph is not expected back: what to evict is decided as they go."""

from umem.chainer.recompute.online.evict_online import EvictOnline
from umem.chainer.recompute.online.eviction import Candidates
from umem.chainer.recompute.online.kinds import Experience
from umem.chainer.recompute.online.pressure import Room

__all__ = ["Candidates", "EvictOnline", "Experience", "Room"]
