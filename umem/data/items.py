"""Items of a dataset as bytes and back: a header in JSON and raw buffers, never pickle.

An item is any nesting of tuples, lists and dictionaries (with text keys) of arrays, SciPy's sparse
matrices, numbers, text, bytes and None. An unpacked item has the same types, values, memory order
and bits, and shares no memory with others. A packed item is

    4 bytes     length of the header, little endian
    header      JSON: the item's description, and by buffer [nbytes, bytes here or null if raw]
    buffers     one after another, each compressed by a `Codec` or raw
"""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from typing import Any

import numpy as np

from umem._common.printable import quoted, short
from umem.data.codec import Codec
from umem.data.sparse import joined_matrix, matrix_parts
from umem.errors import DataError, UnsupportedError

_LENGTH = struct.Struct("<I")
_DOUBLES = struct.Struct("<2d")  # the bits of a NaN too
_PLAIN = (bool, str, type(None))
_WAY_OUT = (
    "A cache keeps tuples, lists and dictionaries of arrays, sparse matrices (csr, csc, bsr, coo), "
    "numbers, text, bytes and None: return only these from the dataset, and make other objects "
    "outside of the cache"
)


def pack(item: Any, codec: Codec) -> bytes:
    """Serialize an item to bytes that share no memory with it.

    Args:
        item: an item, as the module's docstring defines it.
        codec: compresses its buffers.

    Raises:
        UnsupportedError: a part has an unsupported type; the message names the part.
    """
    buffers: list[tuple[memoryview, str]] = []
    try:
        described = _describe(item, buffers, "the item")
    except RecursionError:
        raise UnsupportedError(f"the item is nested too deeply, or in itself. {_WAY_OUT}") from None
    sizes, stored = [], []
    for buffer, dtype in buffers:
        small = codec.compress(buffer, dtype) if buffer.nbytes else None
        sizes.append([buffer.nbytes, None if small is None else len(small)])
        stored.append(buffer if small is None else small)
    header = json.dumps([described, sizes], separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *stored])


def unpack(data: Any, codec: Codec) -> Any:
    """Deserialize an item from bytes.

    Args:
        data: a result of `pack`, as any buffer; no reference to it is kept.
        codec: the codec that packed it.

    Raises:
        DataError: the bytes are not a packed item of this codec.
    """
    try:
        view = memoryview(data).cast("B")
        (length,) = _LENGTH.unpack_from(view)
        at = _LENGTH.size + length
        described, sizes = json.loads(bytes(view[_LENGTH.size : at]))
        buffers = []
        for nbytes, small in sizes:
            end = at + (nbytes if small is None else small)
            stored = view[at:end]
            buffers.append(stored if small is None else codec.decompress(stored, nbytes))
            at = end
        if at != view.nbytes:
            raise ValueError(f"{view.nbytes} bytes where the header says {at}")
        return _made(described, iter(buffers))
    except (ValueError, TypeError, KeyError, StopIteration, struct.error) as error:
        raise DataError(f"not an item as the cache writes them: {error}") from error


def buffer_bytes(data: Any) -> tuple[int, int]:
    """Return the total size of the buffers in packed bytes, and of the raw buffers."""
    (length,) = _LENGTH.unpack_from(data)
    _, sizes = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    raw = sum(nbytes for nbytes, small in sizes if small is None)
    return sum(nbytes for nbytes, _ in sizes), raw


# -- to bytes ------------------------------------------------------------------------------------


def _describe(value: Any, buffers: list[tuple[memoryview, str]], where: str) -> Any:
    """Describe a value as JSON, and append its buffers to a list."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:  # Python reads no number of thousands of digits from text, but for bits
        return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}
    if kind is float:
        return {"float": _DOUBLES.pack(value, 0).hex()}
    if kind is complex:
        return {"complex": _DOUBLES.pack(value.real, value.imag).hex()}
    if kind is bytes:
        buffers.append((memoryview(value), "|u1"))
        return {"bytes": 0}
    if kind in (tuple, list):
        of = [_describe(each, buffers, f"{where}[{i}]") for i, each in enumerate(value)]
        return {kind.__name__: of}
    if kind is dict:
        return {"dict": [_entry(key, each, buffers, where) for key, each in value.items()]}
    if kind in (np.ndarray, np.memmap):
        return _describe_array(value, buffers, where)
    if kind in (np.str_, np.bytes_):  # of which an array would lose zeros at the end
        plain: Any = "".join(value) if kind is np.str_ else bytes(value)
        return {kind.__name__: _describe(plain, buffers, where)}
    if isinstance(value, np.generic):
        return {"number": _describe_array(np.asarray(value), buffers, where)}
    if (sparse := matrix_parts(value)) is not None:
        name, shape, arrays = sparse
        return {"sparse": [name, shape, [_describe(each, buffers, where) for each in arrays]]}
    raise UnsupportedError(f"{short(where)} is {_kind_name(kind)}. {_WAY_OUT}")


def _entry(key: Any, value: Any, buffers: Any, where: str) -> list[Any]:
    if type(key) is not str:
        raise UnsupportedError(f"{short(where)} has the key {quoted(key)}, not text. {_WAY_OUT}")
    return [key, _describe(value, buffers, f"{where}[{key!r}]")]


def _describe_array(array: Any, buffers: list[tuple[memoryview, str]], where: str) -> Any:
    """Describe a NumPy array as JSON, and append its contents to ``buffers``.

    Raises:
        UnsupportedError: the dtype holds objects, or NumPy cannot read it back.
    """
    descr = None if array.dtype.metadata is not None else _descr(array.dtype)
    if descr is None:
        raise UnsupportedError(
            f"{short(where)} is an array of dtype {short(str(array.dtype))}. {_WAY_OUT}"
        )
    by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = np.ascontiguousarray(array.T if by_columns else array).reshape(-1)
    plain = flat.view(np.uint8) if array.dtype.itemsize else np.empty(0, np.uint8)
    buffers.append((plain.data, array.dtype.str))
    return {"array": [descr, list(array.shape), bool(by_columns)]}


@lru_cache(maxsize=256)
def _descr(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as in .npy files; None if it holds objects, or NumPy cannot read it back."""
    if dtype.hasobject:
        return None
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        again = np.lib.format.descr_to_dtype(_tuples(json.loads(json.dumps(descr))))
    except (TypeError, ValueError):
        return None
    return descr if again == dtype else None


def _kind_name(kind: type) -> str:
    return f"a {short(kind.__module__)}.{short(kind.__qualname__)}"


# -- from bytes ----------------------------------------------------------------------------------


def _made(described: Any, buffers: Any) -> Any:
    """Rebuild a value from the description of `_describe` and an iterator of its buffers."""
    if not isinstance(described, dict):
        return described
    ((kind, of),) = described.items()
    if kind == "int":
        return int(of, 16)
    if kind == "float":
        return _DOUBLES.unpack(bytes.fromhex(of))[0]
    if kind == "complex":
        return complex(*_DOUBLES.unpack(bytes.fromhex(of)))
    if kind == "bytes":
        return bytes(next(buffers))
    if kind in ("tuple", "list"):
        values = [_made(each, buffers) for each in of]
        return tuple(values) if kind == "tuple" else values
    if kind == "dict":
        return {key: _made(each, buffers) for key, each in of}
    if kind in ("str_", "bytes_"):
        return getattr(np, kind)(_made(of, buffers))
    if kind == "number":
        return _made(of, buffers)[()]
    if kind == "sparse":
        name, shape, arrays = of
        return joined_matrix(name, shape, [_made(each, buffers) for each in arrays])
    return _made_array(of, next(buffers))


def _made_array(of: Any, buffer: Any) -> Any:
    descr, shape, by_columns = of
    dtype = np.lib.format.descr_to_dtype(_tuples(descr))
    array = np.empty(shape[::-1] if by_columns else shape, dtype)
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(buffer, np.uint8)
    return array.T if by_columns else array


def _tuples(descr: Any) -> Any:
    """Convert a dtype's description from JSON, whose lists are NumPy's tuples."""
    if isinstance(descr, str):
        return descr
    return [tuple(_field(part) for part in field) for field in descr]


def _field(part: Any) -> Any:
    if not isinstance(part, list):
        return part
    return tuple(part) if all(isinstance(n, int) for n in part) else _tuples(part)
