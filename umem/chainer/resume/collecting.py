"""Chainer's serializers to and from flat dictionaries of arrays and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        gpus: the numbers of the GPUs that some lie on.
        values: everything else, as JSON can say it.
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
                raise _twice(name)
            self.arrays[name] = value
        elif isinstance(value, chainer.get_array_types()):
            raise UnsupportedError(
                f"{name!r} is a {type(value).__name__}; snapshots hold arrays of NumPy and CuPy"
            )
        else:
            content = coded(name, value)
            if name in self.arrays or self.values.get(name, content) != content:
                raise _twice(name)
            self.values[name] = content
        return value

    def copies(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copy every array to the host; waits until the GPU has done so."""
        return {name: _copy(array) for name, array in self.arrays.items()}

    def on_gpu(self) -> list[str]:
        """List the names of arrays that are on a GPU."""
        return [name for name, array in self.arrays.items() if not isinstance(array, np.ndarray)]


def _copy(array: Any) -> np.ndarray[Any, Any]:
    if not isinstance(array, np.ndarray):
        array = cuda.to_cpu(array)  # a copy already
        return np.ascontiguousarray(array).reshape(array.shape)
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _twice(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"two things would be saved as {name!r}, and one be lost: give parts and links names that "
        "differ, without a slash"
    )


class MissingValue(KeyError):
    """The snapshot has no value of a name, which some of Chainer's objects accept."""

    def __str__(self) -> str:
        return str(self.args[0])


class Distributor(serializer.Deserializer):
    """A deserializer that puts collected values back into the objects' own arrays.

    Args:
        arrays: by name, each the taker's own.
        values: as a `Collector` has them.
        on_gpu: the names of arrays that lay on a GPU.
        strict: raise a MissingValue where there is nothing of a name; else leave what is there.
        stays: names of what is left as it is here.

    Attributes:
        gpus: the numbers of the GPUs on which it has found arrays to give to.
    """

    def __init__(
        self,
        arrays: Any,
        values: Mapping[str, Any],
        on_gpu: Any,
        path: str = "",
        *,
        strict: bool = True,
        stays: frozenset[str] = frozenset(),
        gpus: set[int] | None = None,
    ) -> None:
        self._all = arrays, values, on_gpu
        self.asked: list[str] = [""]
        """The name that was read last, for error messages; shared with child distributors."""
        self._path, self.strict, self._stays = path, strict, stays
        self.gpus: set[int] = set() if gpus is None else gpus

    def __getitem__(self, key: str) -> Distributor:
        path = f"{self._path}{key.strip('/')}/"
        found = Distributor(*self._all, path, strict=self.strict, stays=self._stays, gpus=self.gpus)
        found.asked = self.asked
        return found

    def __call__(self, key: str, value: Any) -> Any:
        return self._give(key, value, lambda arrays, name: arrays[name])

    def part(self, key: str, value: Any, span: slice, shape: tuple[int, ...]) -> Any:
        """Read a slice, in C order, of a saved array if the whole array has a given shape.

        A saved array of another shape is returned whole.

        Args:
            key, value: the array's name and current value, as Chainer's deserializers take them.
            span: the elements to read.
            shape: of the whole array.
        """

        def read(arrays: Any, name: str) -> Any:
            if not hasattr(arrays, "described") or name not in arrays.described:
                return arrays[name]
            return arrays.part(name, span) if arrays.described[name][0] == shape else arrays[name]

        return self._give(key, value, read)

    def _give(self, key: str, value: Any, read: Callable[[Any, str], Any]) -> Any:
        """Read one value, into ``value`` if that is an array.

        Raises:
            MissingValue: the snapshot does not have it, and reading is strict.
            SnapshotError: its kind, shape or dtype differs; ``value`` is unchanged.
        """
        arrays, values, on_gpu = self._all
        name = self.asked[0] = self._path + key.lstrip("/")
        if name in self._stays:
            return value
        if name in values:
            found = decoded(values[name])
            _check_kind(name, found, value)
            return found
        try:
            stored = read(arrays, name)
        except KeyError:
            if not self.strict:
                return value
            raise MissingValue(name) from None
        if isinstance(value, np.ndarray):
            _check_alike(name, stored, value)
            np.copyto(value, stored)
            return value
        if isinstance(value, cuda.ndarray):
            _check_alike(name, stored, value)
            self.gpus.add(value.device.id)
            upload(value, stored)
            return value
        _check_kind(name, stored, value)
        if value is None:  # as Chainer's own give it: whoever asks puts it on a device
            return stored
        return cuda.to_gpu(stored) if name in on_gpu and cuda.available else stored

    def names(self) -> Iterator[str]:
        """Yield the names below the path, relative to it."""
        arrays, values, _ = self._all
        for name in (*arrays, *values):
            if name.startswith(self._path):
                yield name[len(self._path) :]


def _check_kind(name: str, stored: Any, live: Any) -> None:
    """Check that a value has the kind of the present one, if there is one.

    A parameter that had no shape when it was saved is None there. An integer here may have become a
    float, and a sum of numbers an array without dimensions.
    """
    if live is None or (stored is None and not isinstance(live, (str, list, tuple, dict))):
        return
    if isinstance(live, (bool, np.bool_)):
        is_alike = isinstance(stored, (bool, np.bool_))
    elif isinstance(live, (int, float, np.number)):
        is_number = np.ndim(stored) == 0 and np.asarray(stored).dtype.kind in "iuf"
        is_alike = is_number and not isinstance(stored, bool)
    elif isinstance(live, (str, list, tuple, dict)):
        is_alike = isinstance(stored, type(live))
    else:
        is_alike = not isinstance(live, chainer.get_array_types()) or isinstance(stored, np.ndarray)
    if not is_alike:
        raise SnapshotError(f"{name!r} is {quoted(stored)} there and {quoted(live)} here")


def _check_alike(name: str, stored: Any, live: Any) -> None:
    if stored.shape != live.shape or stored.dtype != live.dtype:
        raise SnapshotError(
            f"{name!r} is {described(stored.shape, stored.dtype)} there and "
            f"{described(live.shape, live.dtype)} here"
        )


def described(shape: Any, dtype: Any) -> str:
    """Describe an array by dtype and shape."""
    return f"{dtype} of shape {tuple(shape)}"


# -- values as JSON -------------------------------------------------------------------------------


def coded(name: str, value: Any) -> Any:
    """Encode a value as JSON.

    Args:
        name: its name in errors.
        value: None, a truth value, a number, text; a number of NumPy; a list, a tuple, a
            dictionary with text for keys, or an array of integers, of such.

    Raises:
        UnsupportedError: it is something else.
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
        f"{name!r} is a {type(value).__name__}, which a snapshot does not hold: it has arrays, "
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
        dtype = _plain_type(content["number"])
        return np.frombuffer(bytes.fromhex(content["bytes"]), dtype)[0]
    if "array" in content:
        return np.array(content["array"], _plain_type(content["of"])).reshape(content["in"])
    return {key: decoded(each) for key, each in content["dict"].items()}


def _plain_type(name: str) -> Any:
    dtype = np.dtype(name)
    if dtype.kind not in "bifu":
        raise ValueError(f"{name} is no type of numbers")
    return dtype
