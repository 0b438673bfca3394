"""Requirements such as ``numpy>=2.0,<3``, checked against what is installed.

Only what this layer and Chainer's own test decorators need: release numbers and the six
comparisons. Pre-releases count as the release they lead to.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from umem.errors import CompatError

_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9][\w.]*)\s*")
_NAME = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^]]*\])?\s*")
CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.5.0rc1`` is (2, 5, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None; ``python`` and ``cupy`` work too.

    A module that is already imported answers for itself, which saves reading metadata.
    """
    if name == "python":
        return ".".join(str(part) for part in sys.version_info[:3])
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    candidates = CUPY_DISTRIBUTIONS if name == "cupy" else (name,)
    return next(_metadata_versions(candidates), None)


def _metadata_versions(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        try:
            yield metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def holds(requirement: str) -> bool:
    """Tell whether a requirement is met here; "any" always is.

    Raises:
        CompatError: the text is no requirement.
    """
    if requirement == "any":
        return True
    match = _NAME.match(requirement)
    if match is None:
        raise CompatError(f"not a requirement: {requirement!r}")
    clauses = [_clause(text, requirement) for text in requirement[match.end() :].split(",") if text]
    version = installed_version(match.group(1))
    return version is not None and all(_meets(version, *clause) for clause in clauses)


def _clause(text: str, requirement: str) -> tuple[str, str]:
    match = _CLAUSE.fullmatch(text)
    if match is None:
        raise CompatError(f"not a requirement: {requirement!r}")
    return match.group(1), match.group(2)


def _meets(version: str, comparison: str, wanted: str) -> bool:
    left, right = release(version), release(wanted)
    width = max(len(left), len(right))
    return _COMPARE[comparison](_padded(left, width), _padded(right, width))


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))
