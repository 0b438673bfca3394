"""cuRAND by NumPy: the functions of ``cupy_backends.cuda.libs.curand``, by their names there.

Another stream of numbers than a GPU's, from the same distributions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.devices.software.runtime import HostRuntime

VERSION = 10310


class HostRand:
    """Generators of random numbers, by handle."""

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime
        self._generators: dict[int, np.random.Generator] = {}

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
        """Neither streams, nor places in a sequence, nor its order."""

    setStream = setGeneratorOffset = setGeneratorOrdering = nothing

    def _fill(self, address: int, dtype: str, values: Any) -> None:
        kind = np.dtype(dtype)
        found = self._runtime.view(address, kind, (len(values),), (kind.itemsize,))
        self._runtime.operation("curand", [], self._runtime.access_of(found), 10 * len(values))
        found[...] = values

    def generate(self, generator: int, address: int, count: int) -> None:
        self._fill(address, "u4", self._generators[generator].integers(0, 1 << 32, count, "u4"))

    def generateLongLong(self, generator: int, address: int, count: int) -> None:
        whole = self._generators[generator].integers(0, (1 << 64) - 1, count, "u8", endpoint=True)
        self._fill(address, "u8", whole)

    def generateUniform(self, generator: int, address: int, count: int) -> None:
        self._fill(address, "f4", 1 - self._generators[generator].random(count, "f4"))

    def generateUniformDouble(self, generator: int, address: int, count: int) -> None:
        self._fill(address, "f8", 1 - self._generators[generator].random(count))

    def generateNormal(
        self, generator: int, address: int, count: int, mean: float, deviation: float
    ) -> None:
        drawn = self._generators[generator].standard_normal(count, "f4")
        self._fill(address, "f4", drawn * np.float32(deviation) + np.float32(mean))

    def generateNormalDouble(
        self, generator: int, address: int, count: int, mean: float, deviation: float
    ) -> None:
        self._fill(address, "f8", self._generators[generator].normal(mean, deviation, count))

    def generateLogNormal(
        self, generator: int, address: int, count: int, mean: float, deviation: float
    ) -> None:
        self._fill(address, "f4", self._generators[generator].lognormal(mean, deviation, count))

    def generateLogNormalDouble(
        self, generator: int, address: int, count: int, mean: float, deviation: float
    ) -> None:
        self._fill(address, "f8", self._generators[generator].lognormal(mean, deviation, count))

    def generatePoisson(self, generator: int, address: int, count: int, mean: float) -> None:
        self._fill(address, "u4", self._generators[generator].poisson(mean, count))
