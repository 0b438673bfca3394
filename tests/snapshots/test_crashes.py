"""Whatever a disk has left when the power goes, the last snapshot that was promised loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import module

pytestmark = pytest.mark.thorough

forgetful_disk = module("resume_parts.forgetful_disk")
prefixes = module("resume_parts.prefixes")


def test_every_prefix_of_the_log_loads_on_every_disk_that_may_be_left() -> None:
    found = prefixes.try_all(3, 2)
    assert found["prefixes"] > 60 and found["disks"] > 500
    assert (found["lost"], found["wrong"], found["stuck"]) == (0, 0, 0)


class ForgetsFiles(forgetful_disk.RecordingDisk):  # type: ignore[name-defined, misc]
    """What is in files is never synchronised."""

    def synchronize(self, handle: int) -> None:
        pass


class ForgetsNames(forgetful_disk.RecordingDisk):  # type: ignore[name-defined, misc]
    """The names in the folder of the run are never synchronised."""

    def synchronize_folder(self, path: Path) -> None:
        if path.name.startswith("."):
            super().synchronize_folder(path)


class ForgetsWhatIsInside(forgetful_disk.RecordingDisk):  # type: ignore[name-defined, misc]
    """The names in a snapshot's own directory are never synchronised."""

    def synchronize_folder(self, path: Path) -> None:
        if not path.name.startswith("."):
            super().synchronize_folder(path)


@pytest.mark.parametrize("kind", [ForgetsFiles, ForgetsNames, ForgetsWhatIsInside])
def test_each_synchronisation_is_needed(kind: type) -> None:
    assert prefixes.try_all(2, 2, kind)["lost"] > 0


def test_the_model_of_a_disk_forgets_what_was_not_synchronised() -> None:
    log = [
        ("make_folder", "a"),
        ("create", "a/x"),
        ("write", "a/x", b"one"),
        ("synchronize", "a/x"),
        ("synchronize_folder", "a"),
        ("write", "a/x", b"two"),
        ("rename", "a/x", "a/y"),
    ]
    left = [str(tree) for tree in forgetful_disk.crashes(forgetful_disk.after(log), 0, 40)]
    assert left[0] == "{}"  # the folder's own name was not synchronised
    assert left[1] == str({"a": {"y": b"onetwo"}})
    assert str({"a": {"x": b"one"}}) in left
    assert str({"a": {"y": b"one\0\0\0"}}) in left
