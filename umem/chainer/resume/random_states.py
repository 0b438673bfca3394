"""Random generators, saved and put back: NumPy's, Python's, CuPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from chainer import serializer
from chainer.backends import cuda

from umem._common.printable import quoted
from umem.chainer.resume.loaded_checks import check_generator_state, check_python_state
from umem.errors import SnapshotError

GENERATORS = (np.random.RandomState, np.random.Generator, random.Random)


def serialize_global(saver: Any) -> None:
    """Save or restore the global generators of Python, NumPy and CuPy.

    CuPy's cannot be read. So at each saving a seed is drawn from it and it begins anew from that
    seed, in a run that is never interrupted too: what follows depends on the seed alone, which is
    saved. It is done for the GPUs that the run uses; on another one a generator would take a
    context, which takes some hundred MiB of VRAM.
    """
    serialize_generator(_GLOBAL_NUMPY, saver["numpy"])
    serialize_generator(_GLOBAL_PYTHON, saver, "python")
    if cuda.available:
        _serialize_cupy(saver["cupy"])


_GLOBAL_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_GLOBAL_NUMPY: Any = np.random.random.__self__  # type: ignore[attr-defined]


def serialize_generator(generator: Any, saver: Any, name: str = "state") -> None:
    """Save or restore the state of a generator of random numbers.

    Args:
        generator: a `random.Random`, or NumPy's ``Generator`` or ``RandomState``.
        saver: one of Chainer's serializers: called with a name and the current state, it returns
            the state to set.
        name: of the state in the snapshot.

    Raises:
        SnapshotError: the saved state is one of another kind of generator, or of none.
    """
    if isinstance(generator, random.Random):
        state = saver(name, generator.getstate())
        check_python_state(state)
        generator.setstate(state)
        return
    own = generator.bit_generator if isinstance(generator, np.random.Generator) else None
    now = generator.get_state(legacy=False) if own is None else own.state
    state = saver(name, now)
    check_generator_state(state, now)
    if own is None:
        generator.set_state(state)
    else:
        own.state = state


def is_global(generator: Any) -> bool:
    """Tell whether a generator is NumPy's global one."""
    return generator is _GLOBAL_NUMPY


def _serialize_cupy(saver: Any) -> None:
    """Reseed GPUs' generators: when saving, by a seed each draws; when loading, by the saved one.

    When saving, those of GPUs in use; when loading, those of `_saved_gpus`.

    Raises:
        SnapshotError: a saved seed is not an int of 0 to below 2**63.
    """
    saving = isinstance(saver, serializer.Serializer)
    for saved, ordinal in _used_gpus(saver) if saving else _saved_gpus(saver):
        with cuda.cupy.cuda.Device(ordinal):
            generator = cuda.cupy.random.get_random_state()
            drawn = int(generator.tomaxint()) if saving else None
            seed = saver(f"{saved}", drawn)
            if type(seed) is not int or not 0 <= seed < 2**63:
                raise SnapshotError(
                    f"the seed of GPU {ordinal}'s generator would be {quoted(seed)}"
                )
            generator.seed(seed)


def _used_gpus(saver: Any) -> list[tuple[int, int]]:
    used = sorted(saver.gpus | _gpus_with_generators())
    return [(ordinal, ordinal) for ordinal in used]


def _saved_gpus(saver: Any) -> list[tuple[int, int]]:
    """List the GPUs whose seeds were saved, each with its counterpart here.

    One saved GPU has the one in use here for its counterpart, if that is one. Otherwise each has
    itself; those not visible here are left out.
    """
    saved, used = [int(name) for name in saver.names()], saver.gpus | _gpus_with_generators()
    if len(saved) == len(used) == 1:
        return [(*saved, *used)]
    visible = cuda.cupy.cuda.runtime.getDeviceCount()
    return [(ordinal, ordinal) for ordinal in saved if ordinal < visible]


def _gpus_with_generators() -> set[int]:
    # CuPy's own record of them, which asking by `get_random_state` would add to.
    return set(cuda.cupy.random._generator._random_states)
