"""Random generators, saved and put back: NumPy's, Python's, CuPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from chainer import serializer
from chainer.backends import cuda

GENERATORS = (np.random.RandomState, np.random.Generator, random.Random)


def serialize_global(saver: Any) -> None:
    """Save or put back the generators that functions draw from without being given one.

    CuPy's cannot be read. So at each saving a seed is drawn from it and it begins anew from that
    seed, in a run that is never interrupted too: what follows depends on the seed alone, which is
    saved.
    """
    serialize_generator(_GLOBAL_NUMPY, saver["numpy"])
    state = saver("python", random.getstate())
    random.setstate(state)
    if cuda.available:
        _serialize_cupy(saver["cupy"])


_GLOBAL_NUMPY: Any = np.random.random.__self__  # type: ignore[attr-defined]


def serialize_generator(generator: Any, saver: Any) -> None:
    """Save or put back one generator.

    Raises:
        ValueError: what was saved is of another kind of generator.
    """
    if isinstance(generator, random.Random):
        generator.setstate(saver("state", generator.getstate()))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = saver("state", generator.bit_generator.state)
    else:
        generator.set_state(saver("state", generator.get_state(legacy=False)))


def is_global(generator: Any) -> bool:
    """Whether it is the generator that everybody draws from."""
    return generator is _GLOBAL_NUMPY


def _serialize_cupy(saver: Any) -> None:
    """Begin CuPy's generator of each GPU anew, from a seed that it drew or that was saved."""
    saving = isinstance(saver, serializer.Serializer)
    for ordinal in range(cuda.cupy.cuda.runtime.getDeviceCount()):
        with cuda.cupy.cuda.Device(ordinal):
            generator = cuda.cupy.random.get_random_state()
            drawn = int(generator.tomaxint()) if saving else None
            generator.seed(saver(f"{ordinal}", drawn))
