"""Offload: saved tensors move to pinned host memory or a file, and are prefetched in backward.

`Offload` is for users. It plans nothing: it moves every saved tensor. `Recompute` offloads by a
plan, and by its own code.

    offload.py         is `Offload`
    mover.py           follows Chainer, and offloads saved tensors in forward
    offloaded_pass.py  is one backward pass, which reads ahead
"""
