"""Where the inputs of a call come from, and what is in them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer
import numpy as np

if TYPE_CHECKING:
    from umem.chainer.recompute.tape import Call


LEAF, GOES_ON = -1, -2
"""In a wiring: an input from outside, and one that a graph has made that nobody follows."""


class InputSource(NamedTuple):
    """Where an input comes from: another call's output, or an array from outside."""

    call: Call | None
    output: int
    array: Any


def source_of(node: Any, array: Any) -> InputSource:
    """Where the array behind a variable node comes from."""
    creator = node.creator_node
    call = None if creator is None else getattr(creator, "_umem_call", None)
    if call is None:
        return InputSource(None, 0, array)
    if len(creator.outputs) == 1:
        return InputSource(call, 0, None)
    for index, reference in enumerate(creator.outputs):
        if reference() is node:
            return InputSource(call, index, None)
    return InputSource(None, 0, array)


def wire(
    number: int, func: Any, arrays: Sequence[Any], leaves: dict[int, tuple[int, Any]]
) -> tuple[list[InputSource], tuple[Any, ...]]:
    """Where each input of a function comes from, and the same in a form that can be compared.

    That is, for another call's output, its place, which output, and how many passes ago.

    Args:
        number: of the pass.
        leaves: the nodes that come from outside, by identity; new ones are added.
    """
    sources: list[InputSource] = []
    wiring: list[tuple[Any, ...]] = []
    for node, array in zip(func.inputs, arrays, strict=True):
        source = source_of(node, array)
        sources.append(source)
        if source.call is None:
            leaf = leaves.setdefault(id(node), (len(leaves), node))[0]
            kind = LEAF if node.creator_node is None else GOES_ON
            wiring.append((kind, leaf, array.shape, array.dtype))
        else:
            wiring.append((source.call.index, source.output, number - source.call.number))
    return sources, tuple(wiring)


def is_from_elsewhere(wiring: Sequence[tuple[Any, ...]]) -> bool:
    """Tell whether an input was made in an earlier pass."""
    return any(entry[0] == GOES_ON or (entry[0] >= 0 and entry[-1]) for entry in wiring)


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
