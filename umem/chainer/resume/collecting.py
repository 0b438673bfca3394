"""Chainer's serializers to and from flat dictionaries of arrays and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from math import isfinite
from typing import Any

import chainer
import numpy as np
from chainer import serializer
from chainer.backends import cuda

from umem._common.printable import quoted
from umem._common.safetensors_file import check_type
from umem.chainer.uploading import upload
from umem.errors import SnapshotError, UnsupportedError


class Collector(serializer.Serializer):
    """A serializer that collects arrays and values by path, without copying.

    Attributes:
        arrays: the run's own arrays, of NumPy and CuPy.
        gpus: the numbers of the GPUs that hold some of them.
        values: everything else, as JSON values.
    """

    def __init__(self, path: str = "", into: Collector | None = None) -> None:
        self._path = path
        self.arrays: dict[str, Any] = {} if into is None else into.arrays
        self.values: dict[str, Any] = {} if into is None else into.values

    @property
    def gpus(self) -> set[int]:
        return {a.device.id for a in self.arrays.values() if not isinstance(a, np.ndarray)}

    def __getitem__(self, key: str) -> Collector:
        return Collector(f"{self._path}{key.strip('/')}/", self)

    def __call__(self, key: str, value: Any) -> Any:
        """Collect one value of an object; called by Chainer's ``serialize`` methods.

        Raises:
            UnsupportedError: it is an array of another kind than NumPy's and CuPy's.
            SnapshotError: another value was collected under the name.
        """
        name = self._path + key.lstrip("/")
        if isinstance(value, (np.ndarray, cuda.ndarray)):
            check_type(name, value.dtype)
            if name in self.values or self.arrays.get(name, value) is not value:
                raise _duplicate(name)
            self.arrays[name] = value
        elif isinstance(value, chainer.get_array_types()):
            raise UnsupportedError(
                f"{name!r} is a {type(value).__name__}; snapshots hold arrays of NumPy and CuPy"
            )
        else:
            content = coded(name, value)
            if name in self.arrays or self.values.get(name, content) != content:
                raise _duplicate(name)
            self.values[name] = content
        return value

    def copies(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copy every array to the host; waits until the GPU has done so."""
        return {name: copied(array) for name, array in self.arrays.items()}

    def on_gpu(self) -> list[str]:
        """List the names of arrays that are on a GPU."""
        return [name for name, array in self.arrays.items() if not isinstance(array, np.ndarray)]


def copied(array: Any) -> np.ndarray[Any, Any]:
    """Copy an array to the host, in C order and the machine's byte order."""
    if not isinstance(array, np.ndarray):
        array = cuda.to_cpu(array)  # already a copy
        return np.ascontiguousarray(array).reshape(array.shape)
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _duplicate(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"two values would be saved as {name!r}, and one would be lost: give parts and links "
        "different names without a slash"
    )


class MissingValue(KeyError):
    """The snapshot has no value of a name, which some of Chainer's objects accept."""

    def __str__(self) -> str:
        return str(self.args[0])


class Distributor(serializer.Deserializer):
    """A deserializer that puts collected values back into the objects' own arrays.

    Args:
        arrays: by name; the taker owns each.
        values: as in a `Collector`.
        on_gpu: the names of arrays that were on a GPU.
        stays: names of values to leave as they are.

    Attributes:
        strict: Chainer's option: missing values raise.
        gpus: the numbers of the GPUs with arrays to load into.
        last_name: the name that was read last, for error messages.
    """

    strict = True

    def __init__(
        self,
        arrays: Any,
        values: Mapping[str, Any],
        on_gpu: Any,
        *,
        stays: frozenset[str] = frozenset(),
    ) -> None:
        self._all = arrays, values, on_gpu
        self._path, self._stays = "", stays
        self.last_name = [""]
        self.gpus: set[int] = set()
        self._postponed: dict[int, Any] = {}
        self._loaded: list[tuple[Any, Any]] = []

    def __getitem__(self, key: str) -> Distributor:
        below = copy(self)  # shares all but the path
        below._path = f"{self._path}{key.strip('/')}/"
        return below

    def __call__(self, key: str, value: Any) -> Any:
        return self._give(key, value, _mapped if _is_array(value) else _read)

    def postpone(self, arrays: Iterable[Any]) -> None:
        """Leave some of the objects' arrays as they are until `swap`, and forget earlier ones."""
        self._postponed.clear()
        self._loaded.clear()
        self._postponed.update({id(array): array for array in arrays})

    def swap(self) -> None:
        """Copy the found values into the postponed arrays, in place."""
        for array, stored in self._loaded:
            upload(array, stored)

    def part(self, key: str, value: Any, span: slice, shape: tuple[int, ...]) -> Any:
        """Read a slice, in C order, of a saved array if the whole array has a given shape.

        A saved array of another shape is returned whole.

        Args:
            key, value: the array's name and current value, as Chainer's deserializers take them.
            span: the elements to read.
            shape: the whole array's shape.
        """

        def read(arrays: Any, name: str) -> Any:
            if not hasattr(arrays, "described") or name not in arrays.described:
                return arrays[name]
            return arrays.part(name, span) if arrays.described[name][0] == shape else arrays[name]

        return self._give(key, value, read)

    def _give(self, key: str, value: Any, read: Callable[[Any, str], Any]) -> Any:
        """Read one value, into ``value`` if that is an array.

        Raises:
            MissingValue: the snapshot does not have it.
            SnapshotError: its shape or dtype differs, or it is not an array; ``value`` is
                unchanged.
        """
        arrays, values, on_gpu = self._all
        name = self.last_name[0] = self._path + key.lstrip("/")
        if name in self._stays:
            return value
        if name in values:
            if _is_array(value) and value.ndim:
                raise SnapshotError(f"{name!r} is {quoted(values[name])} there and an array here")
            return decoded(values[name])
        try:
            stored = read(arrays, name)
        except KeyError:
            raise MissingValue(name) from None
        if not _is_array(value):
            # None comes from Chainer's own objects, which put the array on a device themselves.
            is_uploaded = value is not None and name in on_gpu and cuda.available
            return cuda.to_gpu(stored) if is_uploaded else stored
        if stored.shape != value.shape or stored.dtype != value.dtype:
            raise SnapshotError(
                f"{name!r} is {described(stored.shape, stored.dtype)} there and "
                f"{described(value.shape, value.dtype)} here"
            )
        if not isinstance(value, np.ndarray):
            self.gpus.add(value.device.id)
        if id(value) in self._postponed:
            self._loaded.append((value, stored))
        else:
            upload(value, stored)
        return value

    def names(self) -> Iterator[str]:
        """Yield the names below the path, relative to it."""
        arrays, values, _ = self._all
        for name in (*arrays, *values):
            if name.startswith(self._path):
                yield name[len(self._path) :]


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, cuda.ndarray))


def _read(arrays: Any, name: str) -> Any:
    return arrays[name]


def _mapped(arrays: Any, name: str) -> Any:
    """Return an array in its file, if there is one: it is copied right away."""
    return arrays.mapped(name) if hasattr(arrays, "mapped") else arrays[name]


def described(shape: Any, dtype: Any) -> str:
    """Describe an array by dtype and shape."""
    return f"{dtype} of shape {tuple(shape)}"


# -- values as JSON -------------------------------------------------------------------------------


def coded(name: str, value: Any) -> Any:
    """Encode a value as JSON.

    Args:
        name: its name in errors.
        value: None, a truth value, a number, text; a number of NumPy; or a list, a tuple, a
            dictionary with text for keys, or an array of integers, of these.

    Raises:
        UnsupportedError: another value.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if isfinite(value) else {"float": repr(value)}
    if type(value) is list:
        return [coded(name, each) for each in value]
    if type(value) is tuple:
        return {"tuple": [coded(name, each) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: coded(f"{name}/{key}", each) for key, each in value.items()}}
    if isinstance(value, np.generic) and value.dtype.kind in "bifu":
        return {"number": str(value.dtype), "bytes": value.tobytes().hex()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        return {"array": value.reshape(-1).tolist(), "of": str(value.dtype), "in": value.shape}
    raise UnsupportedError(
        f"{name!r} is a {type(value).__name__}, which a snapshot cannot hold: it has arrays, "
        "numbers, text, and lists, tuples and dictionaries of these, and no pickle"
    )


def decoded(content: Any) -> Any:
    """Decode a value from JSON.

    Raises:
        ValueError, TypeError, KeyError: it was not written by `coded`.
    """
    if isinstance(content, list):
        return [decoded(each) for each in content]
    if not isinstance(content, dict):
        return content
    if "float" in content:
        return float(content["float"])
    if "tuple" in content:
        return tuple(decoded(each) for each in content["tuple"])
    if "number" in content:
        return np.frombuffer(bytes.fromhex(content["bytes"]), content["number"])[0]
    if "array" in content:
        return np.array(content["array"], content["of"]).reshape(content["in"])
    return {key: decoded(each) for key, each in content["dict"].items()}
