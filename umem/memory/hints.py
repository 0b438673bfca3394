"""Hints: tell the driver where memory will be used.

Every function takes an array, what a framework keeps arrays in (Chainer's Variable, Parameter,
Link, Optimizer), or any nesting of them in dicts, lists and tuples; shared arrays count once. All
return the bytes that the hint reached: memory that is not managed takes none, and counts 0.

Advice belongs to addresses, not to arrays: on memory from a pool it stays when the pool hands the
same addresses to the next array, and it reaches neighbours on the same page. Take it back with
``unset=True`` before the array dies; or allocate under ``umem.managed(preset=...)``, where whole
pools have the advice and no other array gets their memory.
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
        HintError: something in it holds no arrays, or a container holds itself.
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
        HintError: an object holds no arrays that umem knows.
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
    """Move memory before it is used; returns the bytes that were asked for.

    Args:
        x: arrays, see the module.
        to: a GPU's ordinal, ``"cpu"``, or None for the current GPU.
        stream: where the move is queued, so that it overlaps with other work; None is the
            current stream. On a virtual GPU any value but None is a stream of its own.
        strict: raise where memory is not managed.

    Asking for more than fits evicts what came first, without an error.

    Raises:
        HintError: with ``strict``, memory that is not managed; nothing was moved.
        DeviceError: an array is on another device, or there is no such place.
        DeviceNotFoundError: there is no device at all.
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

    Args:
        x: arrays, see the module.
        advice: ``"read_mostly"``, ``"preferred_location"`` or ``"accessed_by"``.
        device: a GPU's ordinal, ``"cpu"``, or None for the current GPU; ignored by read_mostly.
        unset: take the advice back.
        strict: raise where memory is not managed.

    On pooled memory the advice outlives the array, as the module says: the next array at the
    addresses has it too, until it is unset there.

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
    """Give the advice of a preset; returns the bytes it reached.

    ``streaming``: read once a step, in order. ``random``: read here and there, often.
    ``read_mostly``: written once, read by all. ``optimizer_state``: read and written by the update
    only. `PRESETS` says what each advises.

    For arrays that exist. New ones get it from their first byte, and leave it to no other array,
    under ``umem.managed(preset=name)``; ``unset`` on those takes it from the pool's memory, so an
    array that gets the same addresses later does not have it.

    Raises:
        HintError: unknown preset; see `advise`.
    """
    check_preset(name)
    reached = [
        advise(x, advice, "cpu" if place == "cpu" else None, unset=unset, strict=strict)
        for advice, place in PRESETS[name]
    ]
    return max(reached)


def location(x: Any) -> Location:
    """Find where memory is advised to be and was last prefetched to; resident bytes where known.

    Of several arrays it reports what they agree in, and the sum of their resident bytes.

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
        HintError: ``strict``, and an array is not managed; no hint was given.
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

    Waits until the GPU has done everything that was asked of it, so what it wrote is there. Writes
    are seen on both sides. The view keeps the memory alive, also after ``a`` is gone.

    What to mind:
        - After this call nothing waits: before the host looks again at what the GPU has written
          since, or the GPU at what the host has, synchronise, or take a new view. While a
          kernel writes the array, the host sees some of it.
        - The pages that the host touches migrate to it, and fault on their way back. To see a
          few values of much memory that is fine; to read all of it, prefetch it to ``"cpu"``
          first, and back afterwards.
        - On a virtual GPU the view is a host array to ``memory.xp``, as NumPy's arrays are to
          CuPy; what the host does through it is not followed.

    Args:
        a: an array of the current device; of a variable, its ``.array``.

    Returns:
        A writable array of the same shape, strides and type.

    Raises:
        HintError: it is no array, or not managed memory: copy it instead, with ``a.get()``.
        DeviceError: it is on another device; the device lacks concurrent managed access; or a
            stream is being captured, which waiting would end.
        DeviceNotFoundError: there is no device at all.

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
