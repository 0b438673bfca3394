"""The virtual GPU: a model of pages and time that follows a run, or replays a trace.

docs/virtual-gpu.md lists what it models and what it does not. Everything it reports is
*simulated*; the arithmetic beside it is real and runs on NumPy.
"""

from umem.devices.virtual.device import VirtualGPU

__all__ = ["VirtualGPU"]
