"""A quick fingerprint of a dataset, which detects changes.

It covers length, shape and dtype, and the sizes and modification times of the dataset's files.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MOST_FILES = 1000
"""At most this many files are inspected, evenly spread over the list. A guess: a few ms an epoch on
a local disk."""
MOST_PARTS = 1000
"""At most this many attributes of a dataset, and attributes of these, are searched for files. A
guess, far above the attributes of real datasets."""


@dataclass(frozen=True)
class Fingerprint:
    """A quick identity of a dataset, which detects changes.

    Attributes:
        content: length, shape, dtype and file sizes; copying the files does not change it.
        number: 63 bits of a hash of the content and the modification times.
    """

    content: str
    number: int


def fingerprint(dataset: Any) -> Fingerprint:
    """Compute a dataset's fingerprint from its length, its arrays and the files that it names.

    A dataset may name its files by a method ``files()``. Without one, umem finds memory maps, the
    files of image datasets (Chainer's and `umem.data`'s) and any `pathlib.Path` in its attributes,
    also in nested datasets, such as the one below a ``TransformDataset``.

    Cost: a system call for each of at most `MOST_FILES` files.
    """
    files = list(files_of(dataset))
    places = np.linspace(0, len(files) - 1, min(len(files), MOST_FILES)).round().astype(int)
    stamps = [_stamp(files[place]) for place in places.tolist()]
    shape, dtype = getattr(dataset, "shape", None), getattr(dataset, "dtype", None)
    what = repr((len(dataset), shape, str(dtype), len(files), [size for size, _ in stamps]))
    whole = hashlib.sha256(repr((what, stamps)).encode()).digest()
    content = hashlib.sha256(what.encode()).hexdigest()[:16]
    return Fingerprint(content, int.from_bytes(whole[:8], "little") >> 1)


def _stamp(path: Any) -> tuple[int, int]:
    """Return a file's size and modification time; -1 for a missing file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return -1, -1
    return found.st_size, found.st_mtime_ns


def files_of(dataset: Any) -> Iterator[Any]:
    """List the paths of the files that a dataset names in its attributes."""
    parts, seen = deque([dataset]), set[int]()
    while parts and len(seen) < MOST_PARTS:
        part = parts.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, np.memmap):
            if part.filename is not None:
                yield part.filename
        elif isinstance(part, Path):
            yield part
        elif callable(getattr(part, "files", None)):
            yield from part.files()
        elif isinstance(part, (tuple, list)):
            parts.extend(part[:MOST_PARTS])
        elif isinstance(fields := getattr(part, "__dict__", None), dict):
            images = list(_images(fields))
            yield from images
            parts.extend([] if images else fields.values())


def _images(fields: dict[str, Any]) -> Iterator[str]:
    """Return the paths in an image dataset's attributes."""
    paths = fields.get("_paths", fields.get("_pairs"))
    if paths is not None and "_root" in fields:
        named = (each[0] if isinstance(each, tuple) else each for each in paths)
        yield from (os.path.join(fields["_root"], each) for each in named)
