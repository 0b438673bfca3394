"""Inserts the text of a program's own headers where its source includes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from umem.host_cuda.dialect import uncommented
from umem.host_cuda.races import SOURCE

INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"\n]+)[>\"]", re.MULTILINE)
_FOLDER = re.compile(r"(?:-I|--include-path=)(.+)")
_ONCE = re.compile(r"^([ \t]*#[ \t]*)pragma[ \t]+once\b", re.MULTILINE)
OF_CUDA = "driver_types.h"
"""A header that identifies the folder of CUDA's own headers."""


def folders_of(options: Sequence[str], theirs: Sequence[Path]) -> list[Path]:
    """Return the program's own header folders, without CuPy's, CUDA's and umem's."""
    found = (Path(match[1]) for match in map(_FOLDER.fullmatch, options) if match)
    return [
        folder
        for folder in found
        if not any(map(folder.is_relative_to, theirs)) and not (folder / OF_CUDA).exists()
    ]


def find(name: str, quoted: bool, beside: Path | None, folders: Sequence[Path]) -> Path | None:
    """Return the file of an include; None if it is not the program's."""
    places = [beside, *folders] if quoted and beside else folders
    return next((path for place in places if (path := place / name).is_file()), None)


def with_headers(source: str, folders: Sequence[Path]) -> str:
    """Insert the text of a program's headers into its source, each at its first include.

    Later includes of the same header stay, so that headers without a guard behave as before, except
    of a header with ``#pragma once``.
    """
    known: dict[Path, bool] = {}
    return "".join(_parts(source, SOURCE, None, folders, known))


def _parts(
    text: str, name: str, beside: Path | None, folders: Sequence[Path], known: dict[Path, bool]
) -> Iterator[str]:
    """Yield the pieces of a text, with a header's text in place of its include."""
    code, at = uncommented(text), 0
    for found in INCLUDE.finditer(code):
        path = find(found[2], found[1] == '"', beside, folders)
        if path is None:
            continue
        yield text[at : found.start()]
        at = found.end()
        path = path.resolve()
        if path in known:
            yield "" if known[path] else f'#include "{path}"'
            continue
        held = path.read_text(encoding="utf-8", errors="replace")
        known[path] = _ONCE.search(uncommented(held)) is not None
        yield f'#line 1 "{path}"\n'
        yield from _parts(_ONCE.sub("", held), str(path), path.parent, folders, known)
        yield f'\n#line {code.count(chr(10), 0, at) + 1} "{name}"\n'
    yield text[at:]
