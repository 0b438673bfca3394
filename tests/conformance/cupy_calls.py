"""Calls one public function of CuPy's after another on the software GPU; `cupy_sweep.py` starts it.

Arguments come from `ARGUMENTS`, where a function needs particular ones, or from trying: the first
combinations that NumPy's or SciPy's function of the same name takes. What CuPy's function returns
for the same arguments is compared with it.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import resource
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

import umem

WORKS, NO_ORACLE, MISSING, ERROR, DIFFERS = "works", "no oracle", "missing", "error", "differs"
MODULES = (
    "cupy", "cupy.ndarray", "cupy.linalg", "cupy.fft", "cupy.random", "cupy.polynomial.polynomial",
    "cupy.lib.stride_tricks", "cupyx", "cupyx.linalg", "cupyx.scipy", "cupyx.scipy.fft",
    "cupyx.scipy.fftpack", "cupyx.scipy.interpolate", "cupyx.scipy.linalg", "cupyx.scipy.ndimage",
    "cupyx.scipy.signal", "cupyx.scipy.signal.windows", "cupyx.scipy.sparse",
    "cupyx.scipy.sparse.linalg", "cupyx.scipy.sparse.csgraph", "cupyx.scipy.spatial",
    "cupyx.scipy.spatial.distance", "cupyx.scipy.special", "cupyx.scipy.stats",
)  # fmt: skip
KINDS = ("v", "m", "i", "n", "f", "[v, w]", "sh", "b", "c", "s")
"""Names of what is tried as an argument, see `values`."""
MOST_ARGUMENTS, MOST_TRIED = 3, 3
DRAWN = {
    "cupy.empty", "cupy.empty_like", "cupyx.scipy.sparse.rand", "cupyx.scipy.sparse.random",
}  # fmt: skip
"""Functions whose result is anything, or drawn."""
UNSIGNED = {
    "eig", "eigh", "qr", "svd", "svds", "eigsh", "lobpcg", "polyfit", "lu", "lu_factor",
}  # fmt: skip
"""Functions whose result is known up to signs or order."""
ARGUMENTS = {
    name.strip(): text.strip()
    for line in Path(__file__).with_name("cupy_arguments.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
    for name, _, text in [line.partition("|")]
}
"""Arguments, as Python writes them, in the names of `values`."""


def values(xp: Any, sp: Any, folder: str) -> dict[str, Any]:
    """What arguments are made of, as arrays of NumPy's or of CuPy's."""
    rng = np.random.default_rng(0)
    base = rng.random((4, 4))
    square = base @ base.T + 4 * np.eye(4)
    steps = np.linspace(0.1, 0.9, 6)
    wave = np.sin(np.arange(64) / 3) + rng.random(64) / 10
    band = scipy.sparse.diags([-np.ones(5), 4 * np.ones(6), -np.ones(5)], [-1, 0, 1]).tocsr()
    give = (lambda x: xp.asarray(x)) if xp is not np else np.array
    arrays = {
        "v": steps, "w": np.sqrt(steps), "m": square, "i": np.arange(1, 7), "b": steps < 0.5,
        "c": steps + 1j * steps[::-1], "t": rng.random((2, 4, 2)), "u": np.arange(6, dtype="u1"),
        "im": np.argsort(base, axis=1), "x": wave, "x6": np.arange(6.0), "mm": rng.random((6, 6)),
        "stack": np.stack([steps, np.sqrt(steps)]), "knots": np.repeat([0, 0.5, 1.0], [4, 1, 4]),
        "xl": np.linspace(0, 1, 40), "X2": rng.random((40, 2)),
        "sos": np.array([[1.0, 0.5, 0.2, 1.0, 0.3, 0.1]]),
    }  # fmt: skip
    found: dict[str, Any] = {name: give(value) for name, value in arrays.items()}
    matrix = (lambda x: x) if xp is np else sp.sparse.csr_matrix
    long = scipy.sparse.diags([np.arange(1.0, 41)], [0]).tocsr()
    np.save(f"{folder}/saved.npy", steps)
    np.savetxt(f"{folder}/text", steps)
    found.update(
        s=matrix(band), big=matrix(long), lower=matrix(scipy.sparse.tril(band).tocsr()), n=3, f=0.5,
        sh=(2, 3), path=f"{folder}/made", saved=f"{folder}/saved.npy", text=f"{folder}/text",
        host=np.array(steps), np_sum=xp.sum, np_mean=xp.mean, np_add=lambda x, y: x + y,
        np_ones=xp.ones,
        np_dtype=np.dtype([("x", "f4"), ("y", "f8")]), CHO=xp.linalg.cholesky,
        RS=xp.random.RandomState(0),
        np_triu=xp.triu, np_greater=xp.greater,
        LU=lambda x: sp.linalg.lu_factor(x), SPL=lambda x, y: _spline(sp, x, y),
        STFT=lambda x: sp.signal.stft(x, nperseg=16)[2], PEAKS=lambda x: sp.signal.find_peaks(x)[0],
    )  # fmt: skip
    return found


def _spline(sp: Any, x: Any, y: Any) -> Any:
    made = sp.interpolate.make_interp_spline(x, y)
    return made.t, made.c, made.k


def names() -> Iterator[str]:
    """Every public function, by module; one that stands in several is named in the first."""
    seen: set[int] = set()
    for module in MODULES:
        place = _found(module)
        for name in sorted(dir(place)):
            value = getattr(place, name, None)
            if name.startswith("_") or not callable(value) or isinstance(value, type):
                continue
            if isinstance(value, types.ModuleType) or id(value) in seen:
                continue
            if "cupy" not in str(getattr(value, "__module__", None) or "cupy"):
                continue
            if module != "cupy.ndarray":
                seen.add(id(value))
            yield f"{module}.{name}"


def _found(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def oracle_of(path: str) -> Any:
    """NumPy's or SciPy's function of the same name; None where there is none."""
    first = path.replace("cupyx.scipy", "scipy", 1) if path.startswith("cupyx") else path
    if first.startswith("cupyx") or path.startswith("cupy.random") or path in DRAWN:
        return None
    try:
        return _found(first.replace("cupy", "numpy", 1))
    except (ImportError, AttributeError):
        return None


def _tried(function: Any, path: str) -> Iterator[str]:
    """Arguments to try: the ones listed, or combinations of so many as the function asks for."""
    if path in ARGUMENTS:
        yield ARGUMENTS[path]
        return
    first = ("m, ", "v, ") if path.startswith("cupy.ndarray.") else ("",)
    for count in _counts(function, path):
        for chosen in itertools.product(KINDS, repeat=count):
            for start in first:
                yield (start + ", ".join(chosen)).removesuffix(", ")


def _counts(function: Any, path: str) -> list[int]:
    counted = getattr(function, "nin", None)
    if counted is None:
        try:
            given = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return list(range(MOST_ARGUMENTS))
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        counted = sum(p.default is p.empty and p.kind in plain for p in given)
        if any(p.kind is p.VAR_POSITIONAL for p in given) and not counted:
            return [1, 0, 2]
    if path.startswith("cupy.ndarray."):
        counted = max(0, counted - 1)
    return [counted] if counted <= MOST_ARGUMENTS else []


def _plain(found: Any) -> Any:
    """Results as NumPy's, in tuples."""
    if hasattr(found, "toarray"):
        found = found.toarray()
    if hasattr(found, "get") and not isinstance(found, dict):
        return found.get()
    if isinstance(found, dict):
        return tuple(_plain(found[key]) for key in sorted(found, key=str))
    if isinstance(found, (list, tuple)):
        return tuple(_plain(each) for each in found)
    return found


def _same(one: Any, other: Any, unsigned: bool) -> str:
    """How two results differ; an empty text where they do not."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        if len(one) != len(other):
            return f"{len(one)} results instead of {len(other)}"
        pairs = zip(one, other, strict=True)
        return next(filter(None, (_same(a, b, unsigned) for a, b in pairs)), "")
    if not isinstance(other, (np.ndarray, np.generic, int, float, complex, bool, tuple)):
        return ""
    try:
        a, b = np.asarray(one), np.asarray(other)
        if a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
            return ""
    except (TypeError, ValueError):
        return ""
    if a.shape != b.shape:
        return f"shape {a.shape} instead of {b.shape}"
    if unsigned:
        a, b = np.sort(np.abs(a), axis=None), np.sort(np.abs(b), axis=None)
    tolerance = 1e-3 if "e" in a.dtype.char else 1e-5
    if np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"{a.ravel()[:4]} instead of {b.ravel()[:4]}"


def call(path: str, folder: str) -> dict[str, str]:
    """Call a function, and say what became of it."""
    import cupy
    import cupyx.scipy

    function, oracle = _found(path), oracle_of(path)
    numpy_values = lambda: values(np, scipy, folder)  # noqa: E731
    cupy_values = lambda: values(cupy, cupyx.scipy, folder)  # noqa: E731
    last, tried = {"status": ERROR, "said": "no arguments were found"}, 0
    for text in _tried(oracle if oracle is not None else function, path):
        given = numpy_values()
        expected = None
        if oracle is not None:
            try:
                expected = eval(f"F({text})", {**given, "F": oracle})
            except Exception:
                if path not in ARGUMENTS:
                    continue
        tried += 1
        device = cupy_values()
        try:
            found = eval(f"F({text})", {**device, "F": function})
            cupy.cuda.Device().synchronize()
        except Exception as error:
            status = MISSING if isinstance(error, NotImplementedError) else ERROR
            said = f"{type(error).__name__}: {str(error)[-300:]}"
            if last["status"] not in (MISSING,):
                last = {"status": status, "said": said, "arguments": text}
            is_our_fault = status == MISSING or type(error).__name__ == "CompileException"
            if is_our_fault or tried >= (MOST_TRIED if oracle is not None else 200):
                return last
            continue
        if expected is None and given.get("v") is not None and oracle is not None:
            found = (found, *(device[k] for k in ("v", "m")))
            expected = (None, *(given[k] for k in ("v", "m")))  # what was changed in place
        if oracle is None:
            return {"status": NO_ORACLE, "said": _zeros(_plain(found)), "arguments": text}
        said = _same(_plain(found), _plain(expected), path.rpartition(".")[2] in UNSIGNED)
        return {"status": DIFFERS if said else WORKS, "said": said, "arguments": text}
    return last


def _zeros(found: Any) -> str:
    is_array = isinstance(found, np.ndarray) and found.size and found.dtype.kind in "iufc"
    return "all zero" if is_array and not found.any() else ""


def main() -> None:
    limit, results = int(sys.argv[1]), sys.argv[2]
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    umem.software_gpu("t4", "4GiB", force=True)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    with open(results, "a", encoding="utf-8", buffering=1) as file:
        wanted = json.loads(sys.stdin.read()) or None
        if wanted is None:
            for name in names():
                file.write(json.dumps({"name": name}) + "\n")
            return
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for name in wanted:
                file.write(json.dumps({"name": name, "status": "crash"}) + "\n")
                file.write(json.dumps({"name": name, **call(name, folder)}) + "\n")
