"""Offload targets: files for NumPy, pinned host memory for CuPy, and a simulation of the latter."""
