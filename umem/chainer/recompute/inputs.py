"""Where the inputs of a call come from, and what is in them."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer
import numpy as np
from chainer.function import FunctionAdapter

if TYPE_CHECKING:
    from umem.chainer.recompute.tape import Call


class Source(NamedTuple):
    """Where an input comes from: another call's output, or an array from outside."""

    call: Call | None
    output: int
    array: Any


def owner_of(func: Any) -> Any:
    """The object that a function's state is on: for an old-style function, not its node."""
    return func.function if isinstance(func, FunctionAdapter) else func


def source_of(node: Any, array: Any) -> Source:
    """Where the array behind a variable node comes from."""
    creator = node.creator_node
    call = None if creator is None else getattr(creator, "_umem_call", None)
    if call is None:
        return Source(None, 0, array)
    if len(creator.outputs) == 1:
        return Source(call, 0, None)
    for index, reference in enumerate(creator.outputs):
        if reference() is node:
            return Source(call, index, None)
    return Source(None, 0, array)


def checksum(array: Any) -> int:
    """A checksum of an array's contents."""
    host = chainer.backend.CpuDevice().send(array)
    return zlib.crc32(np.ascontiguousarray(host).tobytes())


def wait_for(inputs: Any) -> None:
    """On a GPU, wait for all kernels: the host's time of a call is that of launching them."""
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
    device = chainer.backend.get_device_from_array(*arrays)
    if device.xp is not np:
        device.device.synchronize()
