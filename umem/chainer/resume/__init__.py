"""Runs that go on where they were: what of a run is saved, and how it is put back.

Objects with state are saved through Chainer's protocol, a method ``serialize``, which `Collector`
and `Distributor` carry out in the two directions.
"""

from umem.chainer.resume.collecting import Collector, Distributor

__all__ = ["Collector", "Distributor"]
