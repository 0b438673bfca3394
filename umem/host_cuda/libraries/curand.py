"""cuRAND with NumPy: the functions of ``cupy_backends.cuda.libs.curand``, under the same names.

The numbers differ from a GPU's, but have the same distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from umem.host_cuda.libraries.cores import drawn
from umem.host_cuda.observer import Launch
from umem.host_cuda.runtime import HostRuntime

VERSION = 10310
LARGEST = (1 << 64) - 1
DISTRIBUTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "generate": ("u4", lambda rng, n: rng.integers(0, 1 << 32, n, "u4")),
    "generateLongLong": ("u8", lambda rng, n: rng.integers(0, LARGEST, n, "u8", endpoint=True)),
    "generateUniform": ("f4", lambda rng, n: 1 - rng.random(n, "f4")),
    "generateUniformDouble": ("f8", lambda rng, n: 1 - rng.random(n)),
    "generateNormal": (
        "f4", lambda rng, n, m, s: rng.standard_normal(n, "f4") * np.float32(s) + np.float32(m)
    ),
    "generateNormalDouble": ("f8", lambda rng, n, m, s: rng.normal(m, s, n)),
    "generateLogNormal": ("f4", lambda rng, n, m, s: rng.lognormal(m, s, n)),
    "generateLogNormalDouble": ("f8", lambda rng, n, m, s: rng.lognormal(m, s, n)),
    "generatePoisson": ("u4", lambda rng, n, mean: rng.poisson(mean, n)),
}  # fmt: skip
"""For each function: the dtype, NumPy's method, and whether it takes mean and deviation."""


class HostRand:
    """cuRAND's functions; generators are identified by handle."""

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime
        self._generators: dict[int, np.random.Generator] = {}
        for name, (dtype, draw) in DISTRIBUTIONS.items():
            setattr(self, name, partial(self._fill, np.dtype(dtype), draw))

    def getVersion(self) -> int:
        return VERSION

    def createGenerator(self, kind: int) -> int:
        handle = self._runtime.new_handle()
        self._generators[handle] = np.random.Generator(np.random.SFC64(0))
        return handle

    def destroyGenerator(self, generator: int) -> None:
        self._generators.pop(generator, None)

    def setPseudoRandomGeneratorSeed(self, generator: int, seed: int) -> None:
        self._generators[generator] = np.random.Generator(np.random.SFC64(seed))

    def nothing(self, *_: int) -> None:
        """Do nothing: streams, offsets and orders have no effect."""

    setStream = setGeneratorOffset = setGeneratorOrdering = nothing

    def _fill(
        self, dtype: Any, draw: Callable[..., Any], generator: int, address: int, count: int,
        *parameters: float,
    ) -> None:  # fmt: skip
        found = self._runtime.view(address, dtype, (count,), (dtype.itemsize,))
        runtime = self._runtime
        writes = runtime.access_of(found)
        runtime.operation(Launch("curand", runtime.device_here, [], writes, flops=10 * count))
        drawn(self._generators[generator], found, lambda rng, n: draw(rng, n, *parameters))
