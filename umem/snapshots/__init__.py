"""Saves runs to disk, completely or not at all, and finds them again. Knows no framework.

chainer's resume and the saving of shards use this room.

A snapshot is a directory ``step-N`` (``step-N.1`` if that step was saved again) of three files:

- ``arrays.safetensors``: every array, by name; no pickle, no code.
- ``values.json``: everything else, as JSON.
- ``manifest.json``: the format's version, the step, and the length and SHA-256 of the other two.

If several ranks write a snapshot, each writes its own two, such as ``arrays-1.safetensors``: its
parts of sharded arrays, and values that differ from the first rank's.

A snapshot is written under a temporary name, synchronised and renamed; then its folder is
synchronised. So if the machine stops at any moment, the snapshot is complete or does not exist.

    writing.py     writes a snapshot, and removes old ones
    reading.py     finds the newest complete snapshot, checks it and reads it
    manifest.py    has the manifest: format, step and checksums
    shards.py      joins arrays of which each rank has written a part
    claim.py       prevents two runs from writing to one folder at a time
    background.py  writes in a thread while training continues
    operations.py  has every file operation as one method, which tests replace
"""

from typing import TYPE_CHECKING

from umem.snapshots.background import BackgroundWriter
from umem.snapshots.claim import Claim
from umem.snapshots.operations import FileOperations
from umem.snapshots.reading import SavedRun, places_in, read_newest
from umem.snapshots.writing import prune, sweep, write_snapshot

__all__ = [
    "BackgroundWriter",
    "Claim",
    "FileOperations",
    "SavedRun",
    "places_in",
    "prune",
    "read_newest",
    "sweep",
    "write_snapshot",
]

if TYPE_CHECKING:
    from umem.snapshots.manifest import MANIFEST, folder_name
    from umem.snapshots.reading import TornError, read
    from umem.snapshots.shards import SPAN
    from umem.snapshots.writing import (
        check_room,
        needed_bytes,
        new_directory,
        publish,
        remove_left,
        write_part,
    )
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__,
        manifest="MANIFEST folder_name",
        reading="TornError read",
        shards="SPAN",
        writing="check_room needed_bytes new_directory publish remove_left write_part",
    )
