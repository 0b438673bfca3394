"""Prefetching: what to move to the GPU, and when, so that it is there in time."""
