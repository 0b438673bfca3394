"""Calls functions of CuPy's on the software GPU, and prints a line of JSON for each.

``python dry_function_calls.py dry|real SEED both|small|large [NAME ...]`` prints versions, and then
for each case, small and large, the shapes, types and strides of its results and the figures of the
software GPU; or its error.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from typing import Any

import umem

VRAM = "8GiB"
FIGURES = ("peak_bytes", "reserved_peak_bytes", "seconds", "uploaded_bytes")


def described(found: Any) -> list[Any]:
    """Shape, type and strides of each array of a result, and the type of what is none."""
    if isinstance(found, (list, tuple)):
        return [each for one in found for each in described(one)]
    if hasattr(found, "strides"):
        return [[list(found.shape), str(found.dtype), list(found.strides)]]
    if hasattr(found, "indptr"):
        return [list(found.shape), *described((found.data, found.indices, found.indptr))]
    if hasattr(found, "row"):
        return [list(found.shape), *described((found.data, found.row, found.col))]
    return [found.__name__ if isinstance(found, type) else type(found).__name__]


def call(gpu: Any, name: str, seed: str, large: bool) -> dict[str, Any]:
    """Call one case with the pools empty before it."""
    import cupy
    from dry_function_cases import CASES, Draw

    draw = Draw(f"{name} {seed} {large}", large)
    cupy.fft.config.get_plan_cache().clear()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.random.reset_states()
    gpu.restart()
    row: dict[str, Any] = {"name": name, "large": large, "kind": CASES[name].kind}
    try:
        found = CASES[name].call(draw)
        cupy.cuda.Device().synchronize()
        row["results"] = described(found)
        figures = gpu.figures
        row.update({key: getattr(figures, key) for key in FIGURES})
        if not large:
            row["values"] = values(found)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def values(found: Any) -> list[float]:
    """The mean magnitude of each array of a small result."""
    import numpy as np

    if isinstance(found, (list, tuple)):
        return [each for one in found for each in values(one)]
    if hasattr(found, "toarray"):
        found = found.toarray()
    if not hasattr(found, "get"):
        return []
    host = found.get()
    host = np.where(np.isfinite(host), host, 0)
    return [float(f"{np.abs(host).astype('d').mean():.4g}") if host.size else 0.0]


def main() -> None:
    """Call all cases, or those that are named."""
    how, seed, size, *names = sys.argv[1:]
    gpu = umem.software_gpu("t4", vram=VRAM, force=True, dry=how == "dry")
    import cupy
    import numpy as np
    import scipy
    from dry_function_cases import CASES

    print(json.dumps({m.__name__: m.__version__ for m in (cupy, np, scipy)}), flush=True)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    gc.disable()  # a collection frees arrays at a moment of its own
    for name in names or CASES:
        for large in {"both": (False, True), "small": (False,), "large": (True,)}[size]:
            print(json.dumps(call(gpu, name, seed, large)), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
