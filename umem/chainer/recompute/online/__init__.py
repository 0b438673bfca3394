"""Online eviction: keeps passes within the budget whose graphs are not expected back."""

from umem.chainer.recompute.online.evict_online import EvictOnline
from umem.chainer.recompute.online.eviction import Candidates
from umem.chainer.recompute.online.kinds import Experience
from umem.chainer.recompute.online.pressure import Room

__all__ = ["Candidates", "EvictOnline", "Experience", "Room"]
