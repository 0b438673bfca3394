"""A network that is run but not trained: without a graph, on a chosen device, in a chosen type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import chainer
import numpy as np
from chainer import reporter

from umem.chainer.layers.link_paths import counterparts
from umem.chainer.precision.floats import to_half
from umem.chainer.precision.masters import Masters
from umem.chainer.precision.terms import chosen, halves
from umem.chainer.step_state import cupy_generator, numpy_generator_restored
from umem.errors import StateError, UnsupportedError
from umem.memory import managed

PRECISIONS = ("float32", "float16")
"""Accepted values of ``teacher_precision``: the teacher's own, and float16."""
MEMORIES = (None, "managed")


class Teacher:
    """A frozen network that is run without a graph and without side effects on the run.

    It runs with ``train`` off and without a graph, so that each array is freed when the network's
    own code drops it. The generators of NumPy and CuPy are restored afterwards, and its reports are
    dropped.

    Args:
        link: the network; it is not changed or moved.
        device: the Chainer device to run on. Parameters elsewhere are copied there.
        precision: "float32": unchanged; "float16": a copy with float16 parameters, except for
            normalisations.
        memory: None, or "managed": a copy of the parameters in managed memory.

    Attributes:
        link: the network that runs; the given one, if nothing had to be copied.

    Raises:
        UnsupportedError: another precision or memory; or "managed" for arrays of NumPy.
        StateError: a parameter has no values yet.
        DeviceNotFoundError: "managed" without a CUDA device.
    """

    def __init__(self, link: Any, device: Any, precision: str, memory: str | None) -> None:
        check_options(precision, memory)
        for name, parameter in link.namedparams():
            if parameter.array is None:
                raise StateError(
                    f"the teacher's parameter {name} has no values yet: train the teacher, or "
                    "load it, before it teaches"
                )
        self._is_half = precision == "float16"
        arrays = (v for _, v in values_of(link) if not isinstance(v, chainer.Parameter))
        is_there = all(_device_of(array) == device for array in arrays)
        self.link = link
        cupy = chainer.backends.cuda.cupy
        self._random: Any = cupy.random if device.xp is cupy else None
        self._generator: Any = None
        if self._is_half or memory is not None or not is_there:
            self.link = _placed(link, device, self._is_half, memory)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of the teacher's parameters, in the precision it runs in."""
        return sum({id(p): p.array.nbytes for p in self.link.params()}.values())

    def __call__(self, seed: int, *args: Any, **kwargs: Any) -> Any:
        """Return the network's output for a batch.

        Args:
            seed: the seed of CuPy's generator while it runs; NumPy's is not reseeded.
        """
        types = _computing_halves() if self._is_half else nullcontext()
        quiet = chainer.using_config("train", False)
        # NumPy's generator is restored, and not changed before: `accumulate` sees draws from it.
        apart = numpy_generator_restored(), cupy_generator(self._random, lambda: self._own(seed))
        with quiet, chainer.no_backprop_mode(), apart[0], apart[1], self._reporting(), types:
            return self.link(*args, **kwargs)

    def _own(self, seed: int) -> Any:
        """Return the teacher's own CuPy generator, seeded again."""
        if self._generator is None:  # one for all steps, because making one is slow
            self._generator = self._random.RandomState(seed)
        self._generator.seed(seed)
        return self._generator

    def _reporting(self) -> AbstractContextManager[None]:
        """Use a separate reporter in the block, because the trainer's does not know the teacher."""
        nobody = reporter.Reporter()
        nobody.add_observers("teacher", self.link.namedlinks())
        scope: AbstractContextManager[None] = nobody.scope({})
        return scope


def check_options(precision: str, memory: str | None) -> None:
    """Raise UnsupportedError for an unknown precision or memory mode."""
    if precision not in PRECISIONS:
        raise UnsupportedError(f'teacher_precision is "float32" or "float16", not {precision!r}')
    if memory not in MEMORIES:
        raise UnsupportedError(f'teacher_memory is None or "managed", not {memory!r}')


@contextmanager
def _computing_halves() -> Iterator[None]:
    """Cast the inputs of functions as mixed-precision training does, in the block."""
    nothing = Masters([])
    halves.hold(nothing)
    try:
        yield
    finally:
        halves.release(nothing)


def values_of(link: Any) -> Iterator[tuple[str, Any]]:
    """Yield a network's parameters, their arrays and its persistent arrays, with their paths."""
    for path, one in link.namedlinks():
        # Privates: the public lists have only parameters, and also the children's.
        for name in sorted(one._params | one._persistent):
            value = getattr(one, name)
            found = (value, value.array) if name in one._params else (value,)
            for each in found:
                if isinstance(each, (chainer.Parameter, *chainer.get_array_types())):
                    yield f"{path.rstrip('/')}/{name}", each


_device_of = chainer.backend.get_device_from_array


# -- a copy of the parameters ----------------------------------------------------------------------


def _placed(link: Any, device: Any, is_half: bool, memory: str | None) -> Any:
    """Copy a link to a device; it is converted to float16 on the host first."""
    if memory is not None and device.xp is np:
        with managed():  # its error names both ways out if there is no device
            pass
        raise UnsupportedError(
            "a teacher in managed memory needs arrays of CuPy, but the student is on NumPy: send "
            'the student to a GPU first, or leave out teacher_memory="managed"'
        )
    small = {id(one) for one in chosen(link, ())} if is_half else set[int]()
    copy = link.copy("share")
    with managed() if memory is not None else nullcontext():
        made: dict[int, Any] = {}
        for one, other in counterparts(link, copy):
            _give_own(one, other, made, lambda p: _array(p, device, id(p) in small, memory))
        copy.to_device(device)  # the rest: statistics
    return copy


def _give_own(one: Any, other: Any, made: dict[int, Any], array: Callable[[Any], Any]) -> None:
    """Give a copied link its own arrays; parameters shared within it stay shared.

    A copy in Chainer's mode "share" has parameters whose arrays change with the original's.
    """
    for name, parameter in sorted(vars(one).items()):
        if not isinstance(parameter, chainer.Parameter) or parameter.array is None:
            continue
        if id(parameter) not in made:
            made[id(parameter)] = chainer.Parameter(array(parameter), name=name)
        vars(other)[name] = made[id(parameter)]


def _array(parameter: Any, device: Any, is_half: bool, memory: str | None) -> Any:
    found = to_half(parameter.array) if is_half else parameter.array
    sent = device.send(found)
    return sent.copy() if memory is not None and sent is parameter.array else sent
