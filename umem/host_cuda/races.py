"""Locates a race of shared memory in a program's source.

A kernel that finds a race (umem_races.h) reports addresses in its shared object; binutils, which
every g++ includes, translates them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = "<stdin>"
"""The compiler's file name for a program's source."""
_LINE = re.compile(r"^(.+):(\d+)", re.MULTILINE)
_ASKED = re.compile(r"<(line|variable) (\w+)>")


def with_names(message: str, path: Path) -> str:
    """Add variable names and line numbers to the report of a race."""
    return _ASKED.sub(lambda found: _FINDERS[found[1]](int(found[2], 16), path), message)


def line_at(address: int, path: Path) -> str:
    """Return the line in a program's source of an address in its shared object."""
    output = _output_of(["addr2line", "--inlines", "-e", str(path), hex(address)])
    found = [(Path(file).name, number) for file, number in _LINE.findall(output)]
    if not found:
        return f"an unknown line (code at {address:#x})"
    name, number = next((place for place in found if place[0] == SOURCE), found[0])
    return f"line {number}" if name == SOURCE else f"line {number} of {name}"


def _variable(address: int, path: Path) -> str:
    for line in _output_of(["nm", "--demangle", "--print-size", str(path)]).splitlines():
        found = re.fullmatch(r"(\w+) (\w+) [bBdDuVw] (.*)", line)
        start, size = (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
        if found and start <= address < start + size:
            name = re.sub(r" \[clone .*", "", found[3]).rpartition("::")[2]
            return name if address == start else f"byte {address - start} of {name}"
    return f"shared memory at {address:#x}"


_FINDERS = {"line": line_at, "variable": _variable}


def _output_of(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:  # there are no binutils: the error still has the threads
        return ""
