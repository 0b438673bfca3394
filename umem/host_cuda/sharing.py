"""Selects the kernels that several cores may share, and the number of cores.

A kernel from CuPy's templates computes each output only from its inputs, unless its author's own
code does more; then one thread runs it, like every other kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from umem.host_cuda.templates import is_known

_SIDE_EFFECTS = re.compile(
    r"\batomic[A-Z]|\bstatic\b|\b__shared__\b"
    r"|\b(printf|const_cast|reinterpret_cast|volatile|asm)\b"
    r"|__device__[^;(){}]*[;=]"  # a variable of all threads
    r"|\*\s*\)"  # a cast to a pointer
)
_ELEMENT = re.compile(r"\b\w+\[_(?:in_|out_)?ind\.get\(\)\]")
_OWN_PLACES = re.compile(r"void cupy_getitem_mask\(")
"""CuPy's kernels that write each element at its own address."""


def usable_cores() -> int:
    """Return the number of cores to use: ``OMP_NUM_THREADS``, or all that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(int(wanted), there or 1) if wanted.isdecimal() and int(wanted) else there or 1


def may_share(source: str, loops: str, parameters: Iterable[str]) -> bool:
    """Tell whether several cores may compute parts of a kernel's output.

    Args:
        source: CuPy's source.
        loops: the result of `as_loops`.
        parameters: the parameters of each kernel in it.
    """
    if is_known(source) or _OWN_PLACES.search(source):
        return True
    if _SIDE_EFFECTS.search(loops):
        return False
    left = _ELEMENT.sub("", source)
    return all(_is_own(name, left) for text in parameters for name in _written(text))


def _written(parameters: str) -> list[str]:
    """Return the names of arrays and pointers that a kernel may write."""
    arrays = re.findall(r"(?<!const )CArray<[^<>]*(?:<[^<>]*>)?[^<>]*>\s+(\w+)", parameters)
    pointers = re.findall(r"(?:^|,)(?!\s*const\b)[^,]*\*[^,]*?(\w+)\s*(?=,|$)", parameters)
    return [*arrays, *pointers]


def _is_own(name: str, left: str) -> bool:
    """Tell whether each thread only accesses its own element of an array."""
    return name.startswith("_raw_") and len(re.findall(rf"\b{name}\b", left)) == 1
