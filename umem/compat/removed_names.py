"""The names that NumPy removed from its main namespace, and their values.

The table has every name whose value or function still exists unchanged, in Python or in NumPy,
grouped by the release that removed it. Sources are the sections "Expired deprecations" of NumPy's
release notes and, for 2.0, its migration guide (numpy.org/doc/stable/release.html,
numpy.org/doc/stable/numpy_2_0_migration_guide.html); the rest was found by comparing NumPy 1.23.5,
1.26.4 and 2.4.6.

Names without a successor are left out: ``compat``, ``deprecate``, ``disp``, ``get_array_wrap``,
``geterrobj``, ``lookfor``, ``MachAr``, ``maximum_sctype``, ``recfromcsv``, ``recfromtxt``,
``set_numeric_ops``, ``set_string_function``, ``seterrobj``, ``source``, ``Tester``, ``who``, the
financial functions and the internal constants.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

_KINDS = "buifcSUVOMm"
"""Kinds of dtypes, in `find_common_type`'s order of comparison."""


def _alen(a: Any) -> int:
    return len(np.array(a, ndmin=1))


def _asscalar(a: Any) -> Any:
    return a.item()


def _asfarray(a: Any, dtype: Any = np.float64) -> Any:
    return np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else np.float64)


def _copied_and_transposed(a: Any) -> Any:
    return np.asarray(a).T.copy()


def _find_common_type(array_types: Any, scalar_types: Any) -> Any:
    """Return the type of the arrays, unless the scalars are of a higher kind.

    Numbers have the same results as before; strings, dates and void follow NumPy's current
    promotion.
    """
    arrays, scalars = map(_promoted, (array_types, scalar_types))
    if arrays is None or scalars is None:
        return arrays or scalars
    kinds = [_KINDS.index(dtype.kind) for dtype in (arrays, scalars)]
    return arrays if kinds[0] >= kinds[1] else np.promote_types(arrays, scalars)


def _promoted(types: Any) -> Any:
    return np.result_type(*map(np.dtype, types)) if len(types) else None


def _in1d(
    ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False, **kind: Any
) -> Any:
    return np.isin(np.asarray(ar1).ravel(), ar2, assume_unique, invert, **kind)


def _issctype(rep: Any) -> bool:
    found = _obj2sctype(rep) if isinstance(rep, (type, np.dtype)) else None
    return found is not None and found is not np.object_


def _issubclass(arg1: Any, arg2: Any) -> bool:
    try:
        return issubclass(arg1, arg2)
    except TypeError:
        return False


def _issubsctype(arg1: Any, arg2: Any) -> bool:
    return issubclass(_obj2sctype(arg1), _obj2sctype(arg2))


def _msort(a: Any) -> Any:
    return np.sort(a, axis=0)


def _obj2sctype(rep: Any, default: Any = None) -> Any:
    if isinstance(rep, type) and issubclass(rep, np.generic):
        return rep
    try:
        return rep.dtype.type if isinstance(rep, np.ndarray) else np.dtype(rep).type
    except Exception:
        return default


def _sctype2char(sctype: Any) -> Any:
    found = _obj2sctype(sctype)
    if found is None:
        raise ValueError("unrecognized type")
    if found not in set(np.sctypeDict.values()):
        raise KeyError(found)
    return np.dtype(found).char


class _ByType:
    """A function of a type that is called by ``[]``, like ``np.cast`` and ``np.nbytes``."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, key: Any) -> Any:
        found = _obj2sctype(key)
        if found is None:
            raise KeyError(key)
        return self.function(found)


def _cast(sctype: Any) -> Callable[[Any], Any]:
    return lambda x: np.array(x).astype(sctype)


def _itemsize(sctype: Any) -> Any:
    return np.dtype(sctype).itemsize


_SCTYPES = {
    "int": [np.int8, np.int16, np.int32, np.int64],
    "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
    "float": [np.float16, np.float32, np.float64, np.longdouble],
    "complex": [np.complex64, np.complex128, np.clongdouble],
    "others": [bool, object, bytes, str, np.void],
}

REMOVED: Mapping[str, Mapping[str, Any]] = {
    "1.18": {"rank": "ndim"},
    "1.23": {"alen": _alen, "asscalar": _asscalar},
    # Python's own types, deprecated in 1.20. bool and long are names of NumPy's types since 2.0.
    "1.24": {
        "bool": bool, "complex": complex, "float": float, "int": int, "long": int,
        "object": object, "str": str, "unicode": str,
    },
    "1.25": {"typeDict": "sctypeDict"},
    "2.0": {
        "add_docstring": "lib.add_docstring", "add_newdoc": "lib.add_newdoc", "alltrue": "all",
        "asfarray": _asfarray, "AxisError": "exceptions.AxisError", "bool8": "bool_",
        "byte_bounds": "lib.array_utils.byte_bounds", "bytes0": "bytes_",
        "cast": _ByType(_cast), "cfloat": "complex128", "clongfloat": "clongdouble",
        "compare_chararrays": "char.compare_chararrays", "complex_": "complex128",
        "ComplexWarning": "exceptions.ComplexWarning", "cumproduct": "cumprod",
        "DataSource": "lib.npyio.DataSource", "fastCopyAndTranspose": _copied_and_transposed,
        "find_common_type": _find_common_type, "float_": "float64",
        "format_parser": "rec.format_parser", "Inf": "inf", "Infinity": "inf", "infty": "inf",
        "int0": "intp", "issctype": _issctype, "issubclass_": _issubclass,
        "issubsctype": _issubsctype, "longcomplex": "clongdouble", "longfloat": "longdouble",
        "mat": "asmatrix", "math": math, "msort": _msort,
        "ModuleDeprecationWarning": "exceptions.ModuleDeprecationWarning", "NAN": "nan",
        "NaN": "nan", "nbytes": _ByType(_itemsize), "NINF": -np.inf, "NZERO": -0.0,
        "obj2sctype": _obj2sctype, "object0": "object_", "PINF": "inf", "product": "prod",
        "PZERO": 0.0, "RankWarning": "exceptions.RankWarning", "round_": "round",
        "safe_eval": ast.literal_eval, "sctype2char": _sctype2char, "sctypes": _SCTYPES,
        "singlecomplex": "complex64", "sometrue": "any", "str0": "str_", "string_": "bytes_",
        "TooHardError": "exceptions.TooHardError",
        "tracemalloc_domain": "lib.tracemalloc_domain", "uint0": "uintp", "unicode_": "str_",
        "VisibleDeprecationWarning": "exceptions.VisibleDeprecationWarning", "void0": "void",
    },
    "2.4": {"in1d": _in1d, "trapz": "trapezoid"},
    "2.5": {"chararray": "char.chararray", "row_stack": "vstack"},
}  # fmt: skip
"""Removed names by release; a text is the name's current place in NumPy, else the value itself."""

NAMES = {name: found for names in REMOVED.values() for name, found in names.items()}


def find(name: str) -> Any:
    """Return the value of a name of the table.

    Raises:
        KeyError: the table has no such name.
        AttributeError: this NumPy has no such value.
    """
    found = NAMES[name]
    return attrgetter(found)(np) if isinstance(found, str) else found
