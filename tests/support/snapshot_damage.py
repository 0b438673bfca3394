"""Snapshots whose values were damaged and signed again, and what objects are, to the last bit."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from umem.snapshots import MANIFEST

Values = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]

INSTEAD: tuple[Any, ...] = (
    None, True, 0, -1, -(10**9), 2**70, 10**12, 1.5, "", "x", "[]", "3", [], [1], [[1, 2]],
    [["/lstm", "forward"]], {}, {"dict": {}}, {"dict": {"a": 1}}, {"tuple": []}, {"tuple": 3},
    {"float": "nan"}, {"float": "inf"}, {"float": "x"}, {"number": "float32", "bytes": "00"},
    {"number": "int64", "bytes": "ff" * 8}, {"number": "O", "bytes": ""}, {"array": [1, 2]},
    {"array": [-1, 2], "of": "int64", "in": [2]}, {"array": [1], "of": "O", "in": [10**12]},
    {"array": [1], "of": "int64", "in": [10**12]}, 10**400, [None] * 3,
)  # fmt: skip
"""What stands in the place of a value; some of it JSON, some of it what umem codes in JSON."""


def write(folder: Path, values: Any, arrays: Arrays) -> None:
    """Write a snapshot whose checksums are right, over the one that is there."""
    save_file(arrays, folder / "arrays.safetensors")
    (folder / "values.json").write_text(json.dumps(values))
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, said in manifest["files"].items():
        content = (folder / name).read_bytes()
        said["bytes"], said["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def read(folder: Path) -> tuple[Values, Arrays]:
    """Read what a snapshot has."""
    return json.loads((folder / "values.json").read_text()), load_file(
        folder / "arrays.safetensors"
    )


def damages(values: Values, arrays: Arrays) -> Iterator[tuple[str, Values, Arrays]]:
    """Yield snapshots with one thing wrong each, and what that is."""
    for name, value in values.items():
        yield f"no {name}", {k: v for k, v in values.items() if k != name}, arrays
        for path in _places(value):
            for other in INSTEAD:
                yield (
                    f"{name}{path} is {str(other)[:60]}",
                    values | {name: _replaced(value, path, other)},
                    arrays,
                )
    for name, array in arrays.items():
        less = {k: v for k, v in arrays.items() if k != name}
        yield f"no array {name}", values, less
        for said, other in _other_arrays(array):
            yield f"array {name} is {said}", values, arrays | {name: other}
        for other in (None, 3, "x", {"array": [1, 2], "of": "int64", "in": [2]}):
            yield f"array {name} is the value {other}", values | {name: other}, less
            yield f"{name} is an array and the value {other}", values | {name: other}, arrays
    yield "a value more", values | {"parts/more": 1}, arrays
    yield "an array more", values, arrays | {"parts/more": np.ones(3, "f")}
    yield "no values", {}, arrays


def _places(value: Any, depth: int = 3) -> Iterator[tuple[Any, ...]]:
    """Where something else may stand inside of a value; of long lists at a few places."""
    yield ()
    if depth and isinstance(value, dict):
        for key in value:
            yield from ((key, *path) for path in _places(value[key], depth - 1))
    elif depth and isinstance(value, list):
        for at in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from ((at, *path) for path in _places(value[at], depth - 1))


def _replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    made = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = _replaced(value[path[0]], path[1:], other)
    return made


def _other_arrays(array: Any) -> Iterator[tuple[str, Any]]:
    """Yield arrays that a snapshot should not have in the place of one, by what is wrong."""
    yield "float64", array.astype(np.float64)
    yield "bool", array.astype(bool)
    yield "complex", array.astype(np.complex64)
    yield "int32", array.astype(np.int32)
    yield "flat and longer", np.concatenate([array.reshape(-1), array.reshape(-1)])
    yield "empty", np.empty(0, array.dtype)
    yield "of one more dimension", array[None].copy()
    yield "a number", np.array(3, array.dtype)
    yield "transposed", np.ascontiguousarray(array.T)
    if array.dtype.kind in "iu":
        for wrong in (-1, 10**9):
            yield f"{wrong}", np.full_like(array, np.array(wrong).astype(array.dtype))
    if array.dtype.kind == "f":
        yield "NaN", np.full_like(array, np.nan)


# -- what objects are ------------------------------------------------------------------------------

_LEFT_OUT = {"dataset", "_datasets", "_dataset", "_comm", "_prefetch_loop", "_pool", "_next",
             "_next_state", "_start_at", "_wakeup", "_lock", "_device"}  # fmt: skip
"""Attributes that are data, of threads, or (the device) looked up once and kept by Chainer."""


def fingerprint(*objects: Any) -> str:
    """Say all that there is in objects and below, arrays to the bit; and the global generators."""
    found = hashlib.sha256()
    seen: dict[int, int] = {}
    keep: list[Any] = []

    def say(text: str) -> None:
        found.update(text.encode() + b"\0")

    def visit(value: Any) -> None:
        """Add a value and all that it holds to the digest, each object once."""
        if isinstance(value, (int, float, str, bytes, bool, type(None), np.generic)):
            say(f"{type(value).__name__} {value!r}")
        elif isinstance(value, np.ndarray):
            say(f"{type(value).__name__} {value.dtype} {value.shape}")
            found.update(np.ascontiguousarray(value).tobytes())
            visit(vars(value) if hasattr(value, "__dict__") else None)
        elif id(value) in seen:
            say(f"again {seen[id(value)]}")
        elif isinstance(value, (FunctionType, MethodType, ModuleType, type)):
            say(repr(getattr(value, "__qualname__", value)))
        else:
            seen[id(value)] = len(seen)
            keep.append(value)
            say(f"{type(value).__name__}")
            inside(value)

    def inside(value: Any) -> None:
        """Add what a container, a random generator or an object holds."""
        if isinstance(value, (np.random.RandomState, random.Random)):
            state = value.get_state(legacy=False) if hasattr(value, "get_state") else None
            visit(value.getstate() if state is None else state)
        elif isinstance(value, np.random.Generator):
            visit(value.bit_generator.state)
        elif isinstance(value, dict):
            say(str(len(value)))
            for key, each in value.items():
                visit(key)
                visit(each)
        elif isinstance(value, (list, tuple, set, frozenset)):
            say(str(len(value)))
            for each in value:
                visit(each)
        elif not isinstance(value, threading.Thread) and hasattr(value, "__dict__"):
            for name in sorted(vars(value)):
                if name not in _LEFT_OUT:
                    say(name)
                    visit(vars(value)[name])

    for each in objects:
        visit(each)
    visit(np.random.get_state())
    visit(random.getstate())
    return found.hexdigest()
