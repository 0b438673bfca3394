"""Hints: tell the driver where memory will be used.

Every function takes an array, a framework's object that holds arrays (Chainer's Variable,
Parameter, Link, Optimizer), or any nesting of them in dicts, lists and tuples; shared arrays count
once. All return the bytes that the hint reached: memory that is not managed ignores hints, and
counts 0.

Advice belongs to addresses, not to arrays. On pooled memory it stays when the pool gives the same
addresses to the next array, and it affects neighbours on the same page. Take it back with
``unset=True`` before the array is freed; or allocate under ``umem.managed(preset=...)``, where
whole pools have the advice and no other array gets their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from umem.devices import (
    ADVICE,
    PRESETS,
    Advice,
    Device,
    Location,
    Place,
    Preset,
    check_preset,
    common,
    current_device,
)
from umem.errors import HintError
from umem.trace import parts_of


def arrays_in(x: Any) -> Iterator[Any]:
    """Yield the arrays in ``x``, each once, in a stable order.

    Raises:
        HintError: an object in ``x`` holds no arrays, or a container holds itself.
    """
    seen: dict[int, Any] = {}  # holds the arrays, so that no id is used twice
    try:
        for array in _walk(x):
            if id(array) not in seen:
                seen[id(array)] = array
                yield array
    except RecursionError:
        raise HintError("containers are nested too deeply, or hold themselves") from None


def _walk(x: Any) -> Iterator[Any]:
    """Yield the arrays in nested containers, sparse matrices and a framework's objects.

    Raises:
        HintError: an object holds no arrays that umem can find.
    """
    if x is None:
        return
    if is_array(x):
        yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from _walk(value)
    elif isinstance(x, (list, tuple, set, frozenset)):
        for value in x:
            yield from _walk(value)
    elif hasattr(x, "indptr") and hasattr(x, "indices"):
        yield from (x.data, x.indices, x.indptr)
    else:
        parts = parts_of(x)
        if parts is None:
            raise HintError(f"{type(x).__name__} holds no arrays that umem knows of")
        for part in parts:
            yield from _walk(part)


def is_array(x: Any) -> bool:
    """Tell whether ``x`` is an array, by its type, since CuPy computes the interface on access."""
    return isinstance(x, np.ndarray) or hasattr(type(x), "__cuda_array_interface__")


def prefetch(x: Any, to: Place | None = None, *, stream: Any = None, strict: bool = False) -> int:
    """Move memory before it is used; returns the requested bytes.

    A prefetch of more memory than VRAM holds evicts the pages that came first, without an error.

    Args:
        x: an array, a Chainer object, or any nesting of them.
        to: a GPU's ordinal, ``"cpu"``, or None for the current GPU.
        stream: the stream on which the move is queued, so that it overlaps with other work; None
            is the current stream. On a virtual GPU any value but None is a separate stream.
        strict: raise an error if memory is not managed.

    Raises:
        HintError: with ``strict``, memory that is not managed; nothing was moved.
        DeviceError: an array is on another device, or ``to`` is not a device of this machine.
        DeviceNotFoundError: there is no CUDA device and no virtual GPU.
    """
    device = current_device()
    place = _place(to, device)

    def move(array: Any) -> int:
        return device.prefetch(array, place, stream)

    return _apply(x, device, move, strict)


def advise(
    x: Any,
    advice: Advice,
    device: Place | None = None,
    *,
    unset: bool = False,
    strict: bool = False,
) -> int:
    """Advise the driver about memory; returns the bytes that the advice reached.

    On pooled memory the advice outlives the array: the next array at the same addresses has it too,
    until you unset it there.

    Args:
        x: an array, a Chainer object, or any nesting of them.
        advice: ``"read_mostly"``, ``"preferred_location"`` or ``"accessed_by"``.
        device: a GPU's ordinal, ``"cpu"``, or None for the current GPU; ignored by read_mostly.
        unset: take the advice back.
        strict: raise an error if memory is not managed.

    Raises:
        HintError: unknown advice, or with ``strict`` memory that is not managed.
        DeviceError, DeviceNotFoundError: see `prefetch`.
    """
    if advice not in ADVICE:
        raise HintError(f"advice must be one of {', '.join(ADVICE)}; got {advice!r}")
    current = current_device()
    place = None if advice == "read_mostly" else _place(device, current)

    def give(array: Any) -> int:
        return current.advise(array, advice, place, unset=unset)

    return _apply(x, current, give, strict)


def preset(x: Any, name: Preset, *, unset: bool = False, strict: bool = False) -> int:
    """Give the advice of a preset; returns the bytes that it reached.

    ``streaming``: read once a step, in order. ``random``: read often, in no order.
    ``read_mostly``: written once, read by all. ``optimizer_state``: read and written only by the
    update. `PRESETS` lists the advice of each.

    Use it for arrays that exist. For new arrays use ``umem.managed(preset=name)``: they have the
    advice from their first byte, and other arrays never get it. ``unset`` on such arrays removes
    the advice from the pool's memory, so a later array at the same addresses does not have it.

    Args:
        x: an array, a Chainer object, or any nesting of them.
        name: ``"streaming"``, ``"random"``, ``"read_mostly"`` or ``"optimizer_state"``.
        unset: take the advice back.
        strict: raise an error if memory is not managed.

    Raises:
        HintError: unknown preset, or with ``strict`` memory that is not managed.
        DeviceError, DeviceNotFoundError: see `prefetch`.
    """
    check_preset(name)
    reached = [
        advise(x, advice, "cpu" if place == "cpu" else None, unset=unset, strict=strict)
        for advice, place in PRESETS[name]
    ]
    return max(reached)


def location(x: Any) -> Location:
    """Return a memory's advice, its last prefetch target and, if known, its resident bytes.

    For several arrays it returns the values that they have in common, and the sum of their resident
    bytes.

    Raises:
        HintError: there is no array in ``x``.
    """
    device = current_device()
    found = [device.location(array) for array in arrays_in(x)]
    if not found:
        raise HintError("there is no array to locate")
    return common(found)


def _place(to: Place | None, device: Device) -> Place:
    if to is None:
        return device.ordinal
    if to == "cpu" or (isinstance(to, int) and not isinstance(to, bool) and to >= 0):
        return to
    raise HintError(f"a place is a GPU's ordinal or 'cpu'; got {to!r}")


def _apply(x: Any, device: Device, hint: Callable[[Any], int], strict: bool) -> int:
    """Apply a hint to all arrays in ``x``; returns the bytes reached.

    Raises:
        HintError: with ``strict``, an array is not managed; no hint was given.
    """
    arrays = [device.own_array(array) for array in arrays_in(x)]
    if strict:
        for array in arrays:
            if array.nbytes and not device.location(array).managed:
                raise HintError(
                    f"an array of shape {array.shape} is not managed memory; allocate it under "
                    "umem.managed(), or leave strict out"
                )
    return sum(hint(array) for array in arrays)


def as_numpy(a: Any) -> np.ndarray[Any, Any]:
    """Return the managed array ``a`` as a NumPy array of the same memory, without copying.

    Waits until the GPU has finished all queued work, so its results are visible. Later writes are
    visible on both sides. The view keeps the memory alive even if ``a`` is deleted.

    Caveats:
        - Only this call waits. Before the host reads later results of the GPU, or the GPU reads
          later writes of the host, synchronise or take a new view. While a kernel writes the array,
          the host may see part of the result.
        - Pages that the host touches migrate to it, and fault when the GPU uses them again. That is
          fine for a few values of a large array; to read all of it, prefetch it to ``"cpu"`` first,
          and back afterwards.
        - On a virtual GPU ``memory.xp`` treats the view as a host array, as CuPy treats NumPy
          arrays; the model does not see accesses through the view.

    Args:
        a: an array of the current device; for a Chainer variable pass its ``.array``.

    Returns:
        A writable array of the same shape, strides and type.

    Raises:
        HintError: ``a`` is not an array, or not managed memory: copy it with ``a.get()``.
        DeviceError: ``a`` is on another device; the device lacks concurrent managed access; or a
            stream capture is active, which waiting would end.
        DeviceNotFoundError: there is no CUDA device and no virtual GPU.

    >>> import umem
    >>> with umem.virtual_gpu("v100-16gb"), umem.managed() as memory:
    ...     a = memory.xp.zeros(3)
    ...     umem.as_numpy(a)[1] = 7
    ...     a.get().tolist()
    [0.0, 7.0, 0.0]
    """
    if not is_array(a):
        hint = "; pass its .array" if hasattr(a, "array") else ""
        raise HintError(f"as_numpy takes one array; got {type(a).__name__}{hint}")
    return current_device().host_view(a)
