"""Dry runs of programs: ``umem run --dry``, and what it says of them.

The software GPU's dry mode (`umem.devices.software`) runs a program without its arithmetic. This
room decides when a run has shown enough, and words what it has shown.
"""
