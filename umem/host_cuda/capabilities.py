"""Intrinsics that require a compute capability.

The capability is the target of compilation, which CuPy passes in an option. Only a source that
names such an intrinsic depends on it: the intrinsic is renamed there to an undeclared name. A
program that defines one itself, under ``#if __CUDA_ARCH__ < 800``, has both renamed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from umem.host_cuda.strictness import hint

_REDUCTIONS = ("add", "min", "max", "and", "or", "xor")
LEAST = {
    **dict.fromkeys((f"__reduce_{name}_sync" for name in _REDUCTIONS), 80),
    **dict.fromkeys(("__match_any_sync", "__match_all_sync", "__nanosleep"), 70),
    **dict.fromkeys(("__dp4a", "__dp2a_lo", "__dp2a_hi"), 61),
}
"""Ten times the least capability of each intrinsic, from CUDA's programming guide: warp reductions,
warp matches, nanosleep and SIMD functions. Intrinsics that depend on an argument's type, such as
``atomicAdd`` of a half, are not listed.
"""
_NAME = re.compile("|".join(map(re.escape, sorted(LEAST, reverse=True))))
_ARCHITECTURE = re.compile(r"-arch=\w+?_(\d+)|--gpu-architecture=\w+?_(\d+)")
_ABSENT = "umem_absent"
_RENAMED = re.compile(rf"{_ABSENT}(__\w+)")


def architecture(options: Sequence[str]) -> int | None:
    """Return ten times the capability that a source is compiled for; None if not given."""
    for found in filter(None, map(_ARCHITECTURE.match, options)):
        return int(found[1] or found[2])
    return None


def names_any(source: str) -> bool:
    """Tell whether a source may name such an intrinsic."""
    return _NAME.search(source) is not None


def absent(code: str, options: Sequence[str]) -> list[str]:
    """Return the intrinsics that a source names and its GPU lacks."""
    names = {*_NAME.findall(code)}
    here = architecture(options) if names else None
    return sorted(name for name in names if here is not None and LEAST[name] > here)


def definitions(names: Sequence[str]) -> str:
    """Return the code that makes these intrinsics undefined."""
    return "".join(f"#define {name} {_ABSENT}{name}\n" for name in names)


def explained(message: str, options: Sequence[str]) -> str:
    """Return a compiler's message, with the missing intrinsics first, if any."""
    here = architecture(options)
    found = [name for name in dict.fromkeys(_RENAMED.findall(message)) if name in LEAST]
    if here is None or not found:
        return message
    first = [
        f'error: identifier "{name}" is undefined: it needs compute capability '
        f"{LEAST[name] / 10}, and this GPU has {here / 10}\n"
        for name in found
    ]
    return "".join([*first, f"{hint()}\n", _RENAMED.sub(r"\1", message)])
