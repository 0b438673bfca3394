"""NumPy arrays that a virtual GPU follows: ``memory.xp`` without a real GPU.

It has creation functions, every ufunc with its reductions, copies and slicing, with CuPy's names;
anything else is an `UnsupportedError`. Inside a framework's function the arrays behave as NumPy's,
because the function is recorded as a whole.

Models: allocation, reads and writes of each operation, by the byte range of views.
Does not model: ``np.asarray(a)``, which returns a view for the host without a copy (CuPy refuses
it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from umem._common.arithmetic import FLOAT32, of_dtype, of_product
from umem.errors import UnsupportedError
from umem.trace import names
from umem.trace.recording import Measured, Reach, Recorder, active, inside

_METHODS = {
    "T", "all", "any", "astype", "base", "copy", "ctypes", "data", "dtype", "fill", "flags",
    "get", "imag", "item", "itemsize", "max", "mean", "min", "nbytes", "ndim", "prod", "ravel",
    "real", "reshape", "shape", "size", "squeeze", "strides", "sum", "swapaxes", "tolist",
    "transpose", "view",
}  # fmt: skip
_NO_INDEX = (bool, np.bool_, np.ndarray)
_CONSTANTS = {"pi", "e", "inf", "nan", "newaxis", "dtype", "ndarray"}


class _UnsupportedName(UnsupportedError, AttributeError):
    """An UnsupportedError that is an AttributeError too, so that ``hasattr`` works."""


class FollowedArray(np.ndarray[Any, Any]):
    """A NumPy array whose operations are recorded as events; made by this module's functions."""

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **kwargs: Any
    ) -> Any:
        """Run a ufunc on plain arrays; with a recorder, record it as one operation.

        Returns ``out`` if given; else followed arrays, or plain ones if nothing is recorded
        (without a recorder, and inside a framework's function).

        Raises:
            UnsupportedError: while recording, an operand is a NumPy array that no recorder knows,
                or out= is given for some results only.
        """
        plain = [_plain(value) for value in inputs]
        options = {name: _plain(value) for name, value in kwargs.items()}
        if out:
            options["out"] = tuple(_plain(value) for value in out)

        def run() -> Any:
            return getattr(ufunc, method)(*plain, **options)

        if inside() or not active():
            result = run()
        else:
            reads = (*inputs, kwargs.get("where"))
            _refuse_foreign_arrays((*reads, *out))
            if any(value is None for value in out):
                raise _unsupported("out= for some results only")
            written = inputs[:1] if method == "at" else out
            flops = _matmul_flops(plain) if ufunc is np.matmul else None
            result = _record(_name(ufunc, method), run, reads, written, flops)
        return result if not out else out[0] if len(out) == 1 else out

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any, kwargs: Any
    ) -> Any:
        if inside() or not active():
            return func(*_plain_nested(args), **_plain_nested(kwargs))
        raise _unsupported(f"numpy.{func.__name__}")

    def __getitem__(self, key: Any) -> Any:
        if inside() or not active():
            return _plain(self)[key]
        return super().__getitem__(_basic(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assign to a part; with a recorder, record it as one operation.

        Raises:
            UnsupportedError: while recording, the index does not give a view, or the value is a
                NumPy array.
        """
        if inside() or not active():
            _plain(self)[key] = _plain(value)
            return
        target = super().__getitem__(_basic(key))
        _refuse_foreign_arrays((value,))

        def run() -> None:
            _plain(target)[...] = _plain(value)

        _record("setitem", run, (value,), (target,))

    def copy(self, order: Any = "C") -> Any:
        """Return a copy with its own memory."""
        return _record("copy", lambda: _plain(self).copy(order), (self,), ())

    def astype(self, dtype: Any, copy: bool = True) -> Any:  # type: ignore[override]
        """Return a copy with a dtype; with ``copy=False``, itself if nothing changes."""
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return _record("astype", lambda: _plain(self).astype(dtype), (self,), ())

    def reshape(self, *shape: Any, order: Any = "C") -> Any:  # type: ignore[override]
        """Return a view if possible, otherwise a copy."""
        return self._view_or_copy("reshape", _plain(self).reshape(*shape, order=order))

    def ravel(self, order: Any = "C") -> Any:
        """Return a flat view if possible, otherwise a copy."""
        return self._view_or_copy("ravel", _plain(self).ravel(order))

    def _view_or_copy(self, name: str, made: Any) -> Any:
        if np.may_share_memory(made, _plain(self)) or not self.size:
            return made.view(FollowedArray)
        return _record(name, lambda: made, (self,), ())

    def fill(self, value: Any) -> None:
        """Set every element."""
        self[...] = value

    def get(self) -> np.ndarray[Any, Any]:
        """Return a copy in host memory, as CuPy's method does."""
        for recorder in active():
            reads = _access_all(recorder, (self,))
            workspace = 0 if recorder.measure == "workspace" else None
            recorder.emit_op("get", "array", reads, [], 0, None, "stream", None, workspace)
        copy: np.ndarray[Any, Any] = _plain(self).copy()
        return copy

    def __repr__(self) -> str:
        return f"followed {_plain(self)!r}"

    def __str__(self) -> str:
        return str(_plain(self))

    def __reduce__(self) -> Any:
        return _plain(self).__reduce__()


class _Refused:
    """A NumPy attribute that is not recorded; access raises while recording.

    Used instead of one ``__getattribute__``: NumPy looks attributes up too, and drops exceptions
    raised then, even KeyboardInterrupt.
    """

    def __init__(self, name: str) -> None:
        self._name, self._plain = name, getattr(np.ndarray, name)

    def __get__(self, array: Any, owner: type) -> Any:
        if array is None:
            return self._plain
        self._check()
        return self._plain.__get__(array, owner)

    def __set__(self, array: Any, value: Any) -> None:
        self._check()
        self._plain.__set__(array, value)

    def _check(self) -> None:
        if active() and not inside():
            raise _unsupported(f"ndarray.{self._name}")


for _refused in {name for name in dir(np.ndarray) if not name.startswith("_")} - _METHODS:
    setattr(FollowedArray, _refused, _Refused(_refused))


def empty(shape: Any, dtype: Any = float, order: Any = "C") -> Any:
    """Return an uninitialised array; touches no memory."""
    return _follow(np.empty(shape, dtype, order), "empty")


def _maker(name: str) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        return _record(name, lambda: getattr(np, name)(*args, **kwargs), (), ())

    make.__name__, make.__doc__ = name, f"As ``numpy.{name}``, made on the device."
    return make


zeros, ones, full, arange = map(_maker, ("zeros", "ones", "full", "arange"))


def empty_like(a: Any, dtype: Any = None) -> Any:
    """Return an array as `empty`, with the shape and dtype of ``a``."""
    return empty(a.shape, dtype or a.dtype)


def zeros_like(a: Any, dtype: Any = None) -> Any:
    """Return an array as `zeros`, with the shape and dtype of ``a``."""
    return zeros(a.shape, dtype or a.dtype)


def ones_like(a: Any, dtype: Any = None) -> Any:
    """Return an array as `ones`, with the shape and dtype of ``a``."""
    return ones(a.shape, dtype or a.dtype)


def full_like(a: Any, fill_value: Any, dtype: Any = None) -> Any:
    """Return an array as `full`, with the shape and dtype of ``a``."""
    return full(a.shape, fill_value, dtype or a.dtype)


def array(obj: Any, dtype: Any = None, copy: bool = True) -> Any:
    """Return a copy on the device, uploaded if it comes from the host.

    With ``copy=False``, returns an array on the device itself if it has the dtype.
    """
    if isinstance(obj, FollowedArray):
        return obj.astype(dtype or obj.dtype, copy=copy)
    return _follow(np.array(obj, dtype), "array", uploaded=True)


def asarray(a: Any, dtype: Any = None) -> Any:
    """Return the array itself if it is on the device with that dtype, otherwise a copy.

    The copy of a host array is uploaded.
    """
    return array(a, dtype, copy=False)


def ascontiguousarray(a: Any, dtype: Any = None) -> Any:
    """Return the array itself if it is C-contiguous, otherwise a copy."""
    found = asarray(a, dtype)
    return found if found.flags.c_contiguous else found.copy()


def copy(a: Any) -> Any:
    """Return a copy with its own memory."""
    return a.copy()


def copyto(dst: Any, src: Any) -> None:
    """Copy ``src`` into ``dst``."""
    dst[...] = src


def asnumpy(a: Any) -> np.ndarray[Any, Any]:
    """Return a copy in host memory; returns a host array itself."""
    return a.get() if isinstance(a, FollowedArray) else np.asarray(a)


def __getattr__(name: str) -> Any:
    found = getattr(np, name, None)
    dtype = isinstance(found, type) and issubclass(found, np.generic)
    if isinstance(found, np.ufunc) or dtype or (name in _CONSTANTS and found is not None):
        return found
    if name == "newaxis":
        return None
    raise _unsupported(f"xp.{name}")


def _unsupported(what: str) -> _UnsupportedName:
    return _UnsupportedName(
        f"{what} is not followed by the virtual GPU: its arrays have creation functions, ufuncs, "
        f"copies and slicing. Use functions of {names()}, or a real GPU."
    )


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, FollowedArray) else value


def _plain_nested(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_nested(item) for item in value)
    if isinstance(value, dict):
        return {name: _plain_nested(item) for name, item in value.items()}
    return _plain(value)


def _basic(key: Any) -> Any:
    """Return a key that gives a view; adds an ellipsis to integers, as CuPy returns 0-d arrays.

    Raises:
        UnsupportedError: a part of the key is an array, a bool or not an index.
    """
    keys = key if isinstance(key, tuple) else (key,)
    for item in keys:
        basic = item is None or item is Ellipsis or isinstance(item, slice)
        if not basic and (isinstance(item, _NO_INDEX) or not hasattr(item, "__index__")):
            raise _unsupported(f"indexing with {type(item).__name__}")
    return keys if any(item is Ellipsis for item in keys) else (*keys, Ellipsis)


def _refuse_foreign_arrays(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, FollowedArray) or not isinstance(value, np.ndarray) or not value.ndim:
            continue
        if any(recorder.known(value) is None for recorder in active()):
            raise UnsupportedError(
                "a NumPy array cannot be combined with an array of the virtual GPU, as in CuPy: "
                "convert it with memory.xp.asarray"
            )


def _name(ufunc: np.ufunc, method: str) -> str:
    return ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"


def _matmul_flops(operands: list[Any]) -> int:
    left, right = (np.asarray(value) for value in operands[:2])
    columns = right.shape[-1] if right.ndim > 1 else 1
    return 2 * left.size * columns


def _follow(data: Any, label: str, *, uploaded: bool = False) -> Any:
    followed = np.asarray(data).view(FollowedArray)
    for recorder in active():
        recorder.access(followed, "array", label, uploaded=uploaded)
    return followed


def _record(
    name: str,
    run: Callable[[], Any],
    reads: Iterable[Any],
    out: Iterable[Any],
    flops: int | None = None,
) -> Any:
    """Run one operation, follow its results, and report it to recorders.

    Without a recorder, and inside a framework's function, only runs it.
    """
    recorders = active()
    if not recorders or inside():
        return run()
    measured = Measured()
    try:
        made = run()
        measured.stop()
        results = tuple(out)
        if not results:
            made = _wrap(made)
            results = made if isinstance(made, tuple) else (made,)
        work = max((r.size for r in (*results, *_arrays(reads))), default=0)
        kind = of_dtype if flops is None else of_product
        for recorder in recorders:
            read = _access_all(recorder, reads)
            written = recorder.follow(list(results), "array", name)
            recorder.emit_op(
                name,
                "array",
                read,
                written,
                work if flops is None else flops,
                None,
                "stream",
                measured.seconds,
                measured.workspace_bytes,
                arithmetic=kind(results[0].dtype) if results else FLOAT32,
            )
        return made
    finally:
        measured.close()


def _wrap(made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(_wrap(item) for item in made)
    return np.asarray(made).view(FollowedArray)


def _arrays(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, np.ndarray)]


def _access_all(recorder: Recorder, values: Iterable[Any]) -> list[Reach]:
    return [recorder.access(value, "input", "array", uploaded=True) for value in _arrays(values)]
