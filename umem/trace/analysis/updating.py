"""Workspace of an optimizer's update that runs chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping

from umem.trace.events import Alloc, Op

CHUNK_BYTES = 512 << 10
"""Bytes of parameter, gradient and state together that are updated at once.

With the temporaries they stay in the cache of one core, of one or two MiB on processors of today;
of smaller ones the time of a call for each operation is more than what the cache saves.
"""
CHUNKED_RULES = (
    "SGD", "MomentumSGD", "CorrectedMomentumSGD", "NesterovAG", "AdaGrad", "AdaDelta", "Adam",
    "MSVAG", "RMSprop", "RMSpropGraves", "SMORMS3",
)  # fmt: skip
"""Chainer's elementwise update rules, which can run in chunks."""


def chunked_workspace(workspace_bytes: int, array_bytes: int) -> int:
    """Estimate the workspace of a chunked update from that of the whole one.

    It may be half more: NumPy uses large temporaries again for the next result, and small ones not.

    Args:
        workspace_bytes: of the whole update.
        array_bytes: of the parameter, its gradient and its state.
    """
    return min(workspace_bytes, -(-workspace_bytes * CHUNK_BYTES // max(1, array_bytes)))


def chunked_update(op: Op, allocs: Mapping[int, Alloc]) -> int:
    """Return the workspace of a recorded update if its rule runs in chunks, else as measured.

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
