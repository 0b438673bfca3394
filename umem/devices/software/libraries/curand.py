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


METHODS = (
    "random", "integers", "standard_normal", "standard_exponential", "standard_gamma", "gamma",
    "beta", "exponential", "poisson", "power", "chisquare", "f", "geometric", "hypergeometric",
    "logseries", "binomial", "uniform", "dirichlet",
)  # fmt: skip
"""Of ``cupy.random.Generator``, whose own kernels were compiled for a GPU."""
TYPED = ("random", "integers", "standard_normal", "standard_exponential", "standard_gamma")
"""Those to which NumPy too takes a type."""
LAST = {
    "random": 2, "standard_normal": 2, "standard_exponential": 3, "standard_gamma": 3, "beta": 3,
    "uniform": 3,
}  # fmt: skip
"""The place of the last argument: ``out``, or the type that NumPy does not take."""
BIT_GENERATORS = ("XORWOW", "MRG32k3a", "Philox4x3210")
"""All of them are NumPy's one, under CuPy's names."""


def host_generators(cupy: Any) -> dict[str, type]:
    """Make CuPy's classes of generators, by their names there, that draw by NumPy."""
    base = cupy.random.BitGenerator

    def begin_bits(self: Any, seed: Any = None, *, size: int = -1) -> None:
        self.numpy = np.random.SFC64(seed)

    def random_raw(self: Any, size: Any = None, output: bool = True) -> Any:
        drawn = self.numpy.random_raw(size)
        return cupy.asarray(drawn, "u8") if output else None

    def begin(self: Any, bit_generator: Any) -> None:
        self.bit_generator = bit_generator
        self.numpy = np.random.Generator(bit_generator.numpy)

    def method(name: str) -> Any:
        def draw(self: Any, *given: Any, out: Any = None, **options: Any) -> Any:
            arguments = list(given)
            dtype = None if name in TYPED else options.pop("dtype", None)
            if len(arguments) > LAST.get(name, len(arguments)):
                *arguments, last = arguments
                out, dtype = (last, None) if name in TYPED else (out, last)
            hosts = [cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else x for x in arguments]
            drawn = cupy.asarray(getattr(self.numpy, name)(*hosts, **options), dtype)
            if out is None:
                return drawn
            out[...] = drawn
            return out

        draw.__name__ = name
        return draw

    bits: dict[str, Any] = {"__init__": begin_bits, "random_raw": random_raw}
    methods = {"__init__": begin, **{name: method(name) for name in METHODS}}
    return {
        **{name: type(name, (base,), bits) for name in BIT_GENERATORS},
        "Generator": type("Generator", (), methods),
    }
