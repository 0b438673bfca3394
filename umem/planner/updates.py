"""What an optimizer's update needs only while it runs, where it goes chunk by chunk."""

from __future__ import annotations

CHUNK_BYTES = 512 << 10
"""A parameter's elements, gradient and state that are updated at once, in bytes together.

With the temporaries they stay in the cache of one core, of one or two MiB on processors of today;
of smaller ones the time of a call for each operation is more than what the cache saves.
"""
CHUNKED_RULES = (
    "SGD", "MomentumSGD", "CorrectedMomentumSGD", "NesterovAG", "AdaGrad", "AdaDelta", "Adam",
    "MSVAG", "RMSprop", "RMSpropGraves", "SMORMS3",
)  # fmt: skip
"""Chainer's update rules that go element by element, and may go in chunks."""


def chunked_workspace(array_bytes: int) -> int:
    """Bound the temporaries of an update in chunks.

    Adam has the most of them in half precision: five arrays of float32 beside four of float16.

    Args:
        array_bytes: of the parameter, its gradient and its state.
    """
    return 3 * min(array_bytes, CHUNK_BYTES)
