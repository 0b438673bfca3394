"""What an optimizer's update needs only while it runs, where it goes chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping

from umem.trace.events import Alloc, Op

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


def chunked_workspace(workspace_bytes: int, array_bytes: int) -> int:
    """What an update in chunks needs only while it runs, from what the whole one needs.

    It may be half more: NumPy uses large temporaries again for the next result, and small ones not.

    Args:
        workspace_bytes: of the whole update.
        array_bytes: of the parameter, its gradient and its state.
    """
    return min(workspace_bytes, -(-workspace_bytes * CHUNK_BYTES // max(1, array_bytes)))


def whole_workspace(workspace_bytes: int, array_bytes: int) -> int:
    """The reverse of `chunked_workspace`: an estimate, up to half too much for RMSprop."""
    return max(workspace_bytes, workspace_bytes * array_bytes // CHUNK_BYTES)


def chunked_update(op: Op, allocs: Mapping[int, Alloc]) -> int:
    """What a recorded update needs only while it runs, where its rule goes in chunks.

    Mixed precision converts whole arrays beside its chunks, and counts as it was measured.

    Args:
        op: the update.
        allocs: the allocation of each tensor.
    """
    needed = op.workspace_bytes or 0
    read = [allocs[tensor] for tensor in {access.tensor for access in op.reads}]
    if op.name not in CHUNKED_RULES or any(one.label.endswith(".fp32") for one in read):
        return needed
    return chunked_workspace(needed, sum(one.nbytes for one in read))
