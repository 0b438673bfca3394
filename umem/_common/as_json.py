"""Results as plain values, for JSON on standard output, in files and in pages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from pathlib import PurePath
from typing import Any


def plain(value: Any) -> Any:
    """Convert a result to dictionaries, lists, strings and numbers.

    A dataclass and a named tuple become a dictionary of their fields, any other collection a list;
    an object with a ``to_json`` method is converted by it. Infinities and NaN, which JSON lacks,
    become None.
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value):
        return named(value, (field.name for field in fields(value)))
    if hasattr(value, "_fields"):
        return named(value, value._fields)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Iterable):
        return list(map(plain, value))
    return plain(value.item())  # a number of NumPy


def named(record: Any, names: Iterable[str], simulated: Collection[str] = ()) -> dict[str, Any]:
    """Return some attributes of a record by name, as plain values.

    Names listed in ``simulated`` get the prefix ``simulated_``.
    """
    return {
        f"simulated_{name}" if name in simulated else name: plain(getattr(record, name))
        for name in names
    }


def json_text(value: Any, *, compact: bool = False) -> str:
    """Return the JSON text of a result, in one line if ``compact``."""
    if compact:  # plain values, such as a long page, are not converted a second time
        return json.dumps(value, separators=(",", ":"), default=plain, allow_nan=False)
    return json.dumps(plain(value), indent=2)
