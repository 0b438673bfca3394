"""CuPy's own random number generators, for ``cupy.random.Generator``.

CuPy's classes are unchanged. The C++ functions below them (``cupy_distributions.cuh``) launch
kernels compiled for a GPU; functions here replace them, and draw with NumPy. A generator's state is
in device memory, as CuPy keeps it, so copies of it continue alike.

The numbers differ from a GPU's, but have the same distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from umem.host_cuda.libraries.cores import drawn
from umem.host_cuda.libraries.handles import Array, HostLibrary
from umem.host_cuda.runtime import HostRuntime

FIRST = "illlll"
"""C++ letters of the first arguments: generator, state, its size, output, size, stream."""
KIND = rf"_Z\d+\w+?{FIRST}\w*"
"""Symbols of CuPy's functions that draw."""
STATE_WORDS = 6
"""Words of SFC64's state, as many as in CuPy's smallest state, of one XORWOW thread."""


DISTRIBUTIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "raw": ("I", "", lambda rng, n: rng.integers(0, 1 << 32, n, "u4")),
    "random_uniform": ("d", "", lambda rng, n: rng.random(n)),
    "random_uniform_float": ("f", "", lambda rng, n: rng.random(n, "f4")),
    "standard_normal": ("d", "", lambda rng, n: rng.standard_normal(n)),
    "standard_normal_float": ("f", "", lambda rng, n: rng.standard_normal(n, "f4")),
    "exponential": ("d", "", lambda rng, n: rng.standard_exponential(n)),
    "beta": ("d", "dd", lambda rng, n, a, b: rng.beta(a, b, n)),
    "binomial": ("q", "id", lambda rng, n, count, p: rng.binomial(count, p, n)),
    "geometric": ("q", "d", lambda rng, n, p: rng.geometric(p, n)),
    "hypergeometric": (
        "q", "qqq",
        lambda rng, n, good, bad, k: rng.hypergeometric(good, bad, np.clip(k, 0, good + bad), n),
    ),
    "logseries": ("q", "d", lambda rng, n, p: rng.logseries(np.maximum(p, 0), n)),
    "poisson": ("q", "d", lambda rng, n, mean: rng.poisson(np.fmax(mean, 0), n)),
    "standard_gamma": ("d", "d", lambda rng, n, a: rng.standard_gamma(np.maximum(a, 0), n)),
}  # fmt: skip
"""By CuPy's function names: the types of the drawn numbers and of the parameters, and NumPy's
function. Values out of range are treated as in CuPy's kernels; where these never end, or return
nonsense, NumPy's ValueError is raised.
"""
C_FUNCTIONS = {
    "init_curand_generator": ("ilmll",),
    "interval_32": (FIRST + "jj", FIRST + "ii"),
    "interval_64": (FIRST + "mm", FIRST + "ll"),
    **{name: (FIRST + "l" * len(given),) for name, (_, given, _) in DISTRIBUTIONS.items()},
    "binomial": (FIRST + "lll",),  # memory of its own, too
}
"""CuPy's functions and the C++ letters of their arguments, from 14.2 on and before."""


class HostDistributions(HostLibrary):
    """Functions of CuPy's ``cupy_distributions.cuh``, under the same names."""

    def __init__(self, runtime: HostRuntime) -> None:
        super().__init__(runtime)
        for name, distribution in DISTRIBUTIONS.items():
            setattr(self, name, partial(self._draw_by_arrays, *distribution))
        self.interval_32 = partial(self._draw_up_to, np.dtype("u4"))
        self.interval_64 = partial(self._draw_up_to, np.dtype("u8"))

    def init_curand_generator(
        self, generator: int, state: int, seed: int, size: int, stream: int
    ) -> None:
        if size > 0:
            self._keep_state(state, np.random.SFC64([seed, generator]))

    def _keep_state(self, state: int, bits: Any) -> None:
        now = bits.state
        found = self._vector("u8", state, STATE_WORDS)
        found[...] = *now["state"]["state"], now["has_uint32"], now["uinteger"]

    def _draw(
        self, dtype: Any, draw: Callable[..., Any], state: int, states: int, out: int, size: int,
        read: tuple[Array, ...] = (),
    ) -> None:  # fmt: skip
        """Fill memory with draws of a NumPy generator whose state is stored in CuPy's."""
        if states < 1:
            raise ValueError("a generator of size 0 cannot draw numbers")
        found = self._vector(dtype, out, size)
        self._tell("curand", read, (found,), 10 * size)
        *words, has_half, half = self._vector("u8", state, STATE_WORDS)
        bits = np.random.SFC64(0)
        bits.state = {
            "bit_generator": "SFC64", "state": {"state": np.array(words, "u8")},
            "has_uint32": int(has_half), "uinteger": int(half),
        }  # fmt: skip
        drawn(np.random.Generator(bits), found, draw, [_flat(x) for x in read])
        self._keep_state(state, bits)

    def _draw_by_arrays(
        self, dtype: str, given: str, draw: Callable[..., Any], generator: int, state: int,
        states: int, out: int, size: int, stream: int, *parameters: int,
    ) -> None:  # fmt: skip
        read = tuple(map(self._array, parameters, given))
        self._draw(dtype, draw, state, states, out, size, read)

    def _draw_up_to(
        self, dtype: Any, generator: int, state: int, states: int, out: int, size: int,
        stream: int, most: int, mask: int,
    ) -> None:  # fmt: skip
        """Draw integers from 0 to ``most``, inclusive."""
        most &= (1 << 8 * dtype.itemsize) - 1

        def draw(rng: Any, count: int) -> Any:
            return rng.integers(0, most, count, dtype, endpoint=True)

        self._draw(dtype, draw, state, states, out, size)

    def _array(self, address: int, dtype: str) -> Array:
        """Return the array that CuPy describes in memory: address, dimensions, shape, strides."""
        data, count = (int(x) for x in self._vector("i8", address, 2))
        sizes = [int(x) for x in self._vector("i8", address + 16, 2 * count)]
        shape, strides = tuple(sizes[:count]), tuple(sizes[count:])
        return self._runtime.view(data, np.dtype(dtype), shape, strides)


def _flat(values: Array) -> Array:
    """Return the elements as a flat array; a single element if all are the same one."""
    return values.ravel() if any(values.strides) else values.ravel()[:1]
