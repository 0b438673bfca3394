"""Snapshots on a disk: whole or not there, of the right bytes, found by their step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import python

from umem._common.safetensors_file import check_type, pieces
from umem.errors import FileError, SnapshotError, StateError, UnsupportedError
from umem.snapshots import (
    BackgroundWriter,
    Claim,
    FileOperations,
    places_in,
    prune,
    read_newest,
    sweep,
    write_snapshot,
)

DISK = FileOperations()


def arrays(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "b/W": random.random((3, 4)),
        "a": random.random(5).astype(np.float16),
        "c": random.random(()).astype(np.float32).reshape(()),
        "none": np.zeros((0, 2), np.float32),
        "codes": random.integers(0, 255, 300, np.uint8),
        "mask": random.random(7) > 0.5,
        "count": np.array([3, -1]),
    }


def write(folder: Path, step: int, disk: FileOperations = DISK) -> Path:
    return write_snapshot(disk, folder, step, arrays(step), {"step": step, "text": "é"})


def same(found: Any, step: int) -> bool:
    wanted = arrays(step)
    return sorted(found.arrays) == sorted(wanted) and all(
        np.array_equal(found.arrays[name], wanted[name])
        and found.arrays[name].dtype == wanted[name].dtype
        for name in wanted
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    found, passed_over = read_newest(DISK, tmp_path)
    assert found is not None and found.path == path and found.step == 7 and not passed_over
    assert found.values == {"step": 7, "text": "é"} and same(found, 7)


def test_the_arrays_are_the_bytes_that_safetensors_writes() -> None:
    library = pytest.importorskip("safetensors.numpy")
    assert b"".join(pieces(arrays())) == library.save(arrays())


def test_nothing_of_it_is_a_pickle(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert sorted(os.listdir(path)) == ["arrays.safetensors", "manifest.json", "values.json"]
    for name in ("manifest.json", "values.json"):
        json.loads((path / name).read_text(encoding="utf-8"))


def test_the_newest_is_the_one_of_the_highest_step_whatever_the_times_of_files(
    tmp_path: Path,
) -> None:
    for step in (9, 100, 20):
        write(tmp_path, step)
    os.utime(tmp_path / "step-9")
    found, _ = read_newest(DISK, tmp_path)
    assert found is not None and found.step == 100
    assert places_in(DISK, tmp_path) == [(9, 0), (20, 0), (100, 0)]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "a bit of the arrays": (lambda p: flip(p / "arrays.safetensors", -3), "another SHA-256"),
    "a bit of the header": (lambda p: flip(p / "arrays.safetensors", 20), "another SHA-256"),
    "a bit of the values": (lambda p: flip(p / "values.json", 3), "another SHA-256"),
    "a byte of the arrays": (lambda p: shorten(p / "arrays.safetensors"), "bytes of"),
    "the end of the manifest": (lambda p: shorten(p / "manifest.json"), None),
    "an empty manifest": (lambda p: (p / "manifest.json").write_bytes(b""), "is not whole"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "files are missing"),
    "no arrays": (lambda p: (p / "arrays.safetensors").unlink(), "files are missing"),
    "another's manifest": (lambda p: (p / "manifest.json").write_text('{"a": 1}'), "not umem's"),
    "a list": (lambda p: (p / "manifest.json").write_text("[]"), "not umem's"),
    "a folder": (lambda p: ((p / "values.json").unlink(), (p / "values.json").mkdir()), "whole"),
    "a pipe": (
        lambda p: ((p / "manifest.json").unlink(), os.mkfifo(p / "manifest.json")),
        "not whole",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_one_is_passed_over_and_told(damage: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    do, said = DAMAGES[damage]
    do(write(tmp_path, 2))
    found, passed_over = read_newest(DISK, tmp_path)
    assert found is not None
    if said is None:  # only the last line end is gone, which JSON can do without
        assert found.step == 2
        return
    assert found.step == 1 and same(found, 1)
    assert len(passed_over) == 1 and said in passed_over[0] and "step-2" in passed_over[0]


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    write(elsewhere, 5)
    (folder / "step-5").symlink_to(elsewhere / "step-5")
    found, passed_over = read_newest(DISK, folder)
    assert found is None and "it is a link" in passed_over[0]
    prune(DISK, write(folder, 5), 1)
    assert (elsewhere / "step-5/manifest.json").exists()
    assert sorted(os.listdir(folder)) == ["step-5", "step-5.1"]


def test_a_linked_file_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    (path / "values.json").rename(tmp_path / "mine.json")
    (path / "values.json").symlink_to(tmp_path / "mine.json")
    found, passed_over = read_newest(DISK, tmp_path)
    assert found is None and "is not whole" in passed_over[0]


def test_one_of_a_newer_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = write(tmp_path, 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(SnapshotError, match=r"version 3 .* reads up to 2: install the newer"):
        read_newest(DISK, tmp_path)


def test_a_snapshot_of_another_step_under_a_name_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 3).rename(tmp_path / "step-4")
    found, passed_over = read_newest(DISK, tmp_path)
    assert found is None and "for step 3" in passed_over[0]


def test_values_that_are_no_dictionary_are_passed_over(tmp_path: Path) -> None:
    write_snapshot(DISK, tmp_path, 1, arrays(), [1])  # type: ignore[arg-type]
    found, passed_over = read_newest(DISK, tmp_path)
    assert found is None and "values.json is not a dictionary" in passed_over[0]


def test_an_array_of_a_type_that_is_not_held_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'x' is an array of complex128"):
        check_type("x", np.dtype(np.complex128))


# -- old ones ----------------------------------------------------------------------------------


def test_pruning_keeps_the_newest_and_what_is_not_a_snapshot(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 9):
        write(tmp_path, step)
    (tmp_path / "step-1/notes.txt").write_text("mine")
    (tmp_path / "step-02").mkdir()
    prune(DISK, tmp_path / "step-4", 2)
    assert sorted(os.listdir(tmp_path)) == ["step-02", "step-1", "step-3", "step-4", "step-9"]


def test_a_step_saved_again_is_the_newer_one(tmp_path: Path) -> None:
    write(tmp_path, 3)
    path = write_snapshot(DISK, tmp_path, 3, arrays(8), {})
    found, _ = read_newest(DISK, tmp_path)
    assert found is not None and found.path == path and found.step == 3 and same(found, 8)
    prune(DISK, path, 1)
    assert os.listdir(tmp_path) == ["step-3.1"]


def test_what_a_killed_run_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    left = write(tmp_path, 3).rename(tmp_path / ".umem-0123456789abcdef.tmp")
    (left / "manifest.json").unlink()
    others = tmp_path / ".umem-0123456789abcdee.tmp"
    others.mkdir()
    (others / "notes.txt").write_text("mine")
    sweep(DISK, tmp_path)
    assert os.listdir(tmp_path) == [others.name]


# -- one run a folder --------------------------------------------------------------------------


def test_a_second_claim_in_the_process_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    first = Claim(tmp_path)
    with pytest.raises(StateError, match="another run of this process"):
        Claim(tmp_path)
    first.close()
    first.close()
    Claim(tmp_path).close()


CLAIM = "import sys; from pathlib import Path; from umem.snapshots import Claim; "


def claim_elsewhere(folder: Path, then: str = "") -> subprocess.CompletedProcess[str]:
    return python("-c", f"{CLAIM}c = Claim(Path({str(folder)!r})); {then}")


def test_another_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    held = Claim(tmp_path)
    result = claim_elsewhere(tmp_path)
    assert f"StateError: the run of process {os.getpid()} writes its snapshots" in result.stderr
    held.close()
    assert claim_elsewhere(tmp_path).returncode == 0


def test_a_killed_run_leaves_the_folder_free_though_its_workers_live(tmp_path: Path) -> None:
    worker = "import os, signal, time; p = os.fork(); p or time.sleep(20); print(p, flush=True); "
    result = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{CLAIM}c = Claim(Path({str(tmp_path)!r})); {worker}os.kill(os.getpid(), 9)",
        ],
        stdout=subprocess.PIPE,
    )
    assert result.stdout is not None
    child = int(result.stdout.readline())
    result.wait()
    try:
        Claim(tmp_path).close()
    finally:
        os.kill(child, 9)
        result.stdout.close()


# -- a worse disk ------------------------------------------------------------------------------


class FailingDisk(FileOperations):
    """A disk that fails at one of its operations."""

    def __init__(self, operation: str, number: int, error: OSError) -> None:
        self._left = number

        def failing(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise error
            return getattr(FileOperations, operation)(self, *args)

        setattr(self, operation, failing)


WRITES = ("make_folder", "create", "write", "synchronize", "synchronize_folder", "rename")


@pytest.mark.parametrize("operation", WRITES)
def test_a_full_disk_is_told_with_bytes_and_nothing_is_left(operation: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    disk = FailingDisk(operation, 0, OSError(28, "No space left on device"))
    with pytest.raises(FileError, match=r"no space left on device; it needs [\d.]+ KiB, .* free"):
        write(tmp_path, 2, disk)
    names = set(os.listdir(tmp_path))
    assert not {name for name in names if name.startswith(".umem")}
    found, _ = read_newest(DISK, tmp_path)
    assert found is not None and found.step == (2 if "step-2" in names else 1)


def test_a_read_only_disk_is_told(tmp_path: Path) -> None:
    disk = FailingDisk("make_folder", 0, OSError(30, "Read-only file system"))
    with pytest.raises(FileError, match=r"read-only file system; it needs [\d.]+ KiB"):
        write(tmp_path, 2, disk)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no such file or folder"):
        write(tmp_path / "gone", 1)


# -- the thread --------------------------------------------------------------------------------


def test_work_is_done_one_piece_at_a_time_and_errors_come_once() -> None:
    writer, done = BackgroundWriter(), []

    def fail() -> None:
        raise FileError("full")

    writer.start(lambda: done.append(1))
    writer.start(lambda: done.append(2))
    writer.start(fail)
    with pytest.raises(FileError, match="full"):
        writer.start(lambda: done.append(3))
    writer.wait()
    assert done == [1, 2]
