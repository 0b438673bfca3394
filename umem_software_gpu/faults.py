"""Faults of kernels, found in errors, and a file of a project's known faults.

The file is JSON, a fault on each line: ``{"version": 1, "faults": [{"test": "tests/test_it.py::
test_shift", "fault": "memcheck", "kernel": "shift", "argument": "1 (const float* x)"}]}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

VERSION = 1
FIELDS = ("test", "fault", "kernel", "argument")


class Fault(NamedTuple):
    """A kernel's fault: the tool of compute-sanitizer that finds it, the kernel, an argument."""

    tool: str
    kernel: str
    argument: str


class Known(NamedTuple):
    """A fault of a test."""

    test: str
    fault: Fault


def fault_of(error: BaseException | None) -> Fault | None:
    """Return the fault that an error reports, or one of its group or of its causes."""
    for each in _all(error):
        finding = vars(each).get("finding")  # of umem's errors of faults
        if finding is not None:
            return Fault(*finding)
    return None


def _all(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    left = [error]
    while left:
        each = left.pop(0)
        if each is not None and not any(each is other for other in seen):
            seen.append(each)
            left += [*getattr(each, "exceptions", ()), each.__cause__, each.__context__]
            yield each


def read(path: Path) -> set[Known]:
    """Read a file of known faults.

    Raises:
        ValueError: there is no such file, or it is damaged; the message says how to make one.
    """
    how = "--software-gpu-new-baseline writes one"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}; this umem reads {VERSION}")
        rows = [tuple(row[name] for name in FIELDS) for row in content["faults"]]
        if not all(isinstance(word, str) for row in rows for word in row):
            raise ValueError("a value is not a string")
    except OSError as error:
        raise ValueError(f"no known faults in {path}: {error.strerror}; {how}") from None
    except KeyError as error:
        raise ValueError(f"{path} has no known faults: {error} is missing; {how}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} has no known faults: {error}; {how}") from None
    return {Known(test, Fault(*fault)) for test, *fault in rows}


def write(path: Path, known: Iterable[Known]) -> None:
    """Write a file of known faults, in the order of their tests."""
    rows = [dict(zip(FIELDS, (each.test, *each.fault), strict=True)) for each in sorted(known)]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    inside = f"\n{lines}\n" if rows else ""
    path.write_text(f'{{"version": {VERSION}, "faults": [{inside}]}}\n', encoding="utf-8")
