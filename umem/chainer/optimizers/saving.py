"""Saving and loading of 8-bit states by Chainer's serializers.

The size of blocks and the version of the map are saved with the codes and scales. A 32-bit state
that is loaded into an 8-bit rule is quantised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer.backends import cuda

from umem.chainer.finite import LARGEST_SINGLE, first_beyond, why
from umem.chainer.optimizers.dynamic_map import VERSION
from umem.chainer.optimizers.quantized_state import BLOCK, CODES, SCALES, block_count, quantized
from umem.chainer.optimizers.steps import SIGNS
from umem.errors import DataError

NAMES = sorted({name for signs in SIGNS.values() for name in signs})
BLOCK_KEY, VERSION_KEY = "quantization_block", "quantization_version"


def save(serializer: Any, updates: int, state: dict[str, Any] | None) -> None:
    """Save a rule's update count and its state, 8-bit or float32."""
    serializer("t", updates)
    for key, value in (state or {}).items():
        serializer(key, value)
    if any(key.endswith(CODES) for key in state or ()):
        serializer(BLOCK_KEY, BLOCK)
        serializer(VERSION_KEY, VERSION)


def load(serializer: Any, signs: dict[str, bool], least_size: int) -> dict[str, Any] | None:
    """Load a state saved by `save` or by Chainer's own rule, as NumPy arrays.

    Args:
        signs: the states by name, and whether they may be negative.
        least_size: float32 states with at least this many elements are quantised.

    Returns:
        The state; None if there is none.

    Raises:
        DataError: blocks of another size, another map, arrays that do not belong together, or NaN
            or infinity.
    """
    return _small(serializer, signs) or _whole(serializer, signs, least_size)


def _small(serializer: Any, signs: dict[str, bool]) -> dict[str, Any] | None:
    """Load an 8-bit state; None if there is none."""
    keys = [name + end for name in NAMES for end in (CODES, SCALES)]
    found = {key: value for key in keys if (value := _read(serializer, key)) is not None}
    if not found:
        return None
    _check_format(_read(serializer, BLOCK_KEY), _read(serializer, VERSION_KEY))
    wanted = {name + end for name in signs for end in (CODES, SCALES)}
    if found.keys() != wanted:
        raise DataError(
            f"the 8-bit state is not this optimizer's, or incomplete: it has {sorted(found)}, but "
            f"needs {sorted(wanted)}"
        )
    for name in signs:
        _check_arrays(name, found[name + CODES], found[name + SCALES])
    return found


def _whole(serializer: Any, signs: dict[str, bool], least_size: int) -> dict[str, Any] | None:
    """Load a float32 state, quantised if it is large; None if there is none."""
    found = {name: _read(serializer, name) for name in signs}
    if any(value is None for value in found.values()):
        return None
    state: dict[str, Any] = {}
    for name, value in found.items():
        if value.size < least_size:
            state[name] = value
        elif first_beyond([(name, value)], LARGEST_SINGLE) is not None:
            raise DataError(f"8 bits cannot hold the state {name!r}: {why(value, LARGEST_SINGLE)}")
        else:
            state[name + CODES], state[name + SCALES] = quantized(value, signs[name])
    return state


def _read(serializer: Any, key: str) -> Any:
    """Load an array; None if it is absent, whether or not the serializer raises for that."""
    try:
        value = serializer(key, None)
    except KeyError:
        return None
    return None if value is None else np.array(cuda.to_cpu(value))


def _check_format(block: Any, version: Any) -> None:
    if (block, version) != (BLOCK, VERSION):
        raise DataError(
            f"the 8-bit state has blocks of {block} values and version {version} of the map; this "
            f"umem reads blocks of {BLOCK} and version {VERSION}. Load it with the umem that saved "
            "it, convert it there with dequantize_states, and save that"
        )


def _check_arrays(name: str, codes: Any, scales: Any) -> None:
    """Raise DataError unless codes and scales are a valid 8-bit state."""
    types = (codes.dtype, scales.dtype)
    if types != (np.uint8, np.float32) or scales.shape != (block_count(codes.size),):
        raise DataError(
            f"the 8-bit state {name!r} is not valid: codes are {codes.dtype} of shape "
            f"{codes.shape}, with {scales.size} scales of {scales.dtype}; it needs "
            f"{block_count(codes.size)} of float32"
        )
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise DataError(f"the 8-bit state {name!r} has scales that are not finite, or negative")
