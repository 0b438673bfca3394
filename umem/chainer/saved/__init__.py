"""Saved tensors: the slots of Chainer's tape that hold them, their memory, and where they go.

The rooms `recompute`, `offload` and `precision`, and the source of recordings, share it. It imports
none of them.

    slots.py         knows which attributes of Chainer's objects hold saved tensors; it empties,
                     packs and fills them
    buffers.py       is memory with all slots whose arrays lie on it, and whether anybody else holds
                     it
    array_layout.py  is how arrays lie on memory that was fetched
    tiers/           has the offload targets

- `slots` is the only module that knows these attributes, which are private names of Chainer 7.8.
  The function state is among them.
- `recompute` and `offload` do not import each other.
"""
