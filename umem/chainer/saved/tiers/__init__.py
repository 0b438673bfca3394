"""Tiers below the one that arrays are in: files, pinned host memory, and a model of the latter."""
