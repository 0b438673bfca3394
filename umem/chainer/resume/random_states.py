"""Random generators, saved and restored: NumPy's, Python's, CuPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from chainer import serializer
from chainer.backends import cuda

from umem._common.printable import quoted
from umem.errors import SnapshotError

GENERATORS = (np.random.RandomState, np.random.Generator, random.Random)
_POSITIONS = {"pos": 624, "buffer_pos": 4}
"""The buffer positions of Mersenne Twister and Philox, and their bounds: NumPy checks every part of
a state but these, and would read beyond the buffer."""


def serialize_global(saver: Any) -> None:
    """Save or restore the global generators of Python, NumPy and CuPy.

    CuPy's cannot be read. So each saving draws a seed from it and restarts it from that seed, even
    in a run that is never interrupted: later numbers depend only on the seed, which is saved. This
    is done for the GPUs that the run uses; on another GPU a generator would create a context, which
    takes some hundred MiB of VRAM.
    """
    global_numpy, global_python = GLOBAL_GENERATORS
    serialize_generator(global_numpy, saver["numpy"])
    serialize_generator(global_python, saver, "python")
    if cuda.available:
        _serialize_cupy(saver["cupy"])


GLOBAL_GENERATORS: tuple[Any, Any] = (
    np.random.random.__self__,  # type: ignore[attr-defined]
    random.random.__self__,  # type: ignore[attr-defined]
)
"""NumPy's and Python's."""


def serialize_generator(generator: Any, saver: Any, name: str = "state") -> None:
    """Save or restore the state of a generator of random numbers.

    Args:
        generator: a `random.Random`, or NumPy's ``Generator`` or ``RandomState``.
        saver: one of Chainer's serializers: called with a name and the current state, it returns
            the state to set.
        name: the name of the state in the snapshot.

    Raises:
        SnapshotError: a position of the state is outside of its buffer.
        The generator's errors for a state of another kind.
    """
    set_state(generator, saver(name, state_of(generator)))


def state_of(generator: Any) -> Any:
    """Copy the state of a generator."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator; raises as `serialize_generator`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
        return
    for part in (state, state["state"]):
        for name, most in _POSITIONS.items():
            if name in part and not 0 <= int(part[name]) <= most:
                raise SnapshotError(f"a random generator would be at {quoted(part[name])}")
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def is_global(generator: Any) -> bool:
    """Tell whether a generator is NumPy's global one."""
    return generator is GLOBAL_GENERATORS[0]


def _serialize_cupy(saver: Any) -> None:
    """Reseed GPUs' generators: when saving, with a seed each draws; when loading, with the saved.

    When saving, the generators of GPUs in use; when loading, those from `_saved_gpus`.
    """
    saving = isinstance(saver, serializer.Serializer)
    for saved, ordinal in _used_gpus(saver) if saving else _saved_gpus(saver):
        with cuda.cupy.cuda.Device(ordinal):
            generator = cuda.cupy.random.get_random_state()
            drawn = int(generator.tomaxint()) if saving else None
            generator.seed(saver(f"{saved}", drawn))


def _used_gpus(saver: Any) -> list[tuple[int, int]]:
    used = sorted(saver.gpus | _gpus_with_generators())
    return [(ordinal, ordinal) for ordinal in used]


def _saved_gpus(saver: Any) -> list[tuple[int, int]]:
    """List the GPUs whose seeds were saved, each with its counterpart here.

    A single saved GPU corresponds to the single GPU in use here. Otherwise each corresponds to
    itself; those not visible here are omitted.
    """
    saved, used = [int(name) for name in saver.names()], saver.gpus | _gpus_with_generators()
    if len(saved) == len(used) == 1:
        return [(*saved, *used)]
    visible = cuda.cupy.cuda.runtime.getDeviceCount()
    return [(ordinal, ordinal) for ordinal in saved if ordinal < visible]


def _gpus_with_generators() -> set[int]:
    # CuPy's own record of them; asking by `get_random_state` would add to it.
    return set(cuda.cupy.random._generator._random_states)
