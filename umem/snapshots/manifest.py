"""The manifest of a snapshot: its format, its step, and checksums of its files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from umem._common.checksums import FileSum
from umem.errors import SnapshotError

FORMAT = "umem snapshot"
VERSION = 2
"""The newest version of the format. Snapshots of one rank are written as version 1, which older
releases of umem can read."""
MANIFEST = "manifest.json"
_FILE = re.compile(r"manifest\.json|(arrays|values)(-[1-9]\d{0,5})?\.(safetensors|json)")
LONGEST = 1 << 20
"""Most bytes of a manifest: a guess, enough for some thousand ranks."""
_NAME = re.compile(r"step-(0|[1-9]\d{0,17})(?:\.([1-9]\d{0,8}))?")
_SUM = re.compile(r"[0-9a-f]{64}")


def arrays_name(rank: int = 0) -> str:
    """Return the name of the file with a rank's arrays."""
    return f"arrays-{rank}.safetensors" if rank else "arrays.safetensors"


def values_name(rank: int = 0) -> str:
    """Return the name of the file with a rank's other values."""
    return f"values-{rank}.json" if rank else "values.json"


def is_of_snapshot(name: str) -> bool:
    """Tell whether a snapshot may have a file of this name."""
    return _FILE.fullmatch(name) is not None


Place = tuple[int, int]
"""Sort key of a snapshot: its step, and a number among snapshots of that step."""


def folder_name(place: Place) -> str:
    """Return the folder name of a snapshot."""
    step, again = place
    return f"step-{step}.{again}" if again else f"step-{step}"


def place_of(name: str) -> Place | None:
    """Return the place of a snapshot by its folder name; None if the name is not a snapshot's."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


@dataclass(frozen=True)
class Manifest:
    """The manifest of a snapshot.

    Attributes:
        step: number of updates that the run had made.
        files: the checksums of the other files, by name.
        ranks: number of ranks that have written it.
    """

    step: int
    files: dict[str, FileSum]
    ranks: int = 1

    def to_json(self) -> bytes:
        """Write the manifest as JSON."""
        files = {n: {"bytes": f.size_bytes, "sha256": f.sha256} for n, f in self.files.items()}
        version = {"version": 1} if self.ranks == 1 else {"version": 2, "ranks": self.ranks}
        content = {"format": FORMAT, **version, "step": self.step, "files": files}
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse a manifest.

        Raises:
            NewerVersionError: a newer umem wrote it. ValueError: it is invalid or incomplete.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("its manifest is not umem's")
        version = content.get("version")
        if type(version) is int and version > VERSION:
            raise NewerVersionError(
                f"it has version {version} of the format, and this umem reads up to {VERSION}: "
                "install the newer umem that wrote it, or name another folder"
            )
        files, ranks = content.get("files"), _whole(content.get("ranks", 1))
        wanted = {name(rank) for rank in range(ranks) for name in (arrays_name, values_name)}
        if (
            version not in (1, 2)
            or not isinstance(files, dict)
            or set(files) != wanted
            or not ranks
        ):
            raise ValueError("its manifest is not whole")
        sums = {name: _file_sum(file) for name, file in files.items()}
        return cls(_whole(content.get("step")), sums, ranks)


class NewerVersionError(SnapshotError):
    """A snapshot has a newer version of the format; nothing was loaded."""


def _file_sum(content: Any) -> FileSum:
    if not isinstance(content, dict) or not _SUM.fullmatch(str(content.get("sha256"))):
        raise ValueError("its manifest is not whole")
    return FileSum(_whole(content.get("bytes")), content["sha256"])


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("its manifest is not whole")
    return value
