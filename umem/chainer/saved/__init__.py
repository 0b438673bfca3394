"""Saved tensors: the slots of Chainer's tape that hold them, their memory, and offload targets.

The packages `recompute`, `offload` and `precision`, and the source of recordings, share it. It
imports none of them.

    slots.py         knows which attributes of Chainer's objects hold saved tensors; it empties,
                     packs and fills them
    buffers.py       is memory with all slots whose arrays are in it, and checks whether anything
                     else refers to it
    array_layout.py  describes how arrays are laid out in memory, to restore them after a fetch
    tiers/           has the offload targets

- `slots` is the only module that knows these attributes, which are private names of Chainer 7.8,
  including function state.
- `recompute` and `offload` do not import each other.
"""
