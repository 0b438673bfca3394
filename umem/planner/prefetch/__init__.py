"""Prefetching of managed memory: the blocks to move to the GPU before operations use them."""
