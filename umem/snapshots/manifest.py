"""What a snapshot says of itself: which format, which step, and how its files must look."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from umem.errors import SnapshotError

FORMAT = "umem snapshot"
VERSION = 1
ARRAYS, VALUES, MANIFEST = "arrays.safetensors", "values.json", "manifest.json"
FILES = (ARRAYS, VALUES, MANIFEST)
LONGEST = 1 << 20
"""Bytes that a manifest may have; more is none."""
_NAME = re.compile(r"step-(0|[1-9]\d{0,17})(?:\.([1-9]\d{0,8}))?")
_SUM = re.compile(r"[0-9a-f]{64}")


Place = tuple[int, int]
"""Where a snapshot stands among others: its step, and how many of that step came before."""


def folder_name(place: Place) -> str:
    """Return the name of a snapshot."""
    step, again = place
    return f"step-{step}.{again}" if again else f"step-{step}"


def place_of(name: str) -> Place | None:
    """Return the place of the snapshot that would have a name, None where none would."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


@dataclass(frozen=True)
class FileSum:
    """How long a file is, and its SHA-256 in hexadecimal digits."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of a snapshot.

    Attributes:
        step: updates that the run had made.
        files: by name; the manifest itself is not among them.
    """

    step: int
    files: dict[str, FileSum]

    def to_json(self) -> bytes:
        """Write it."""
        files = {n: {"bytes": f.size_bytes, "sha256": f.sha256} for n, f in self.files.items()}
        content = {"format": FORMAT, "version": VERSION, "step": self.step, "files": files}
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read one.

        Raises:
            NewerVersionError: a newer umem wrote it. ValueError: it is none, or not whole.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("its manifest is not umem's")
        version = content.get("version")
        if type(version) is int and version > VERSION:
            raise NewerVersionError(
                f"it is of version {version} of the format, and this umem reads up to {VERSION}: "
                "install the newer umem that wrote it, or name another folder"
            )
        files = content.get("files")
        if version != VERSION or not isinstance(files, dict) or set(files) != {ARRAYS, VALUES}:
            raise ValueError("its manifest is not whole")
        return cls(_whole(content.get("step")), {n: _file_sum(f) for n, f in files.items()})


class NewerVersionError(SnapshotError):
    """A snapshot of a newer version of the format; nothing was loaded."""


def _file_sum(content: Any) -> FileSum:
    if not isinstance(content, dict) or not _SUM.fullmatch(str(content.get("sha256"))):
        raise ValueError("its manifest is not whole")
    return FileSum(_whole(content.get("bytes")), content["sha256"])


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("its manifest is not whole")
    return value
