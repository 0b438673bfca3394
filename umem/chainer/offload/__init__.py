"""Offload: saved tensors move to pinned host memory or a file, and are prefetched in backward."""
