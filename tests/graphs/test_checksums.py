"""Cuts on disk: no byte of one changes without a word, and what was read once is not read again."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umem._common.checksums import SUMS
from umem.errors import DataError
from umem.graphs import Cut, cut, halo_plan, karate_club, open_cut, verified_files
from umem.graphs.cut_folder import GraphPart
from umem.graphs.part_file import ArraysFile

PART = "part-00001.safetensors"
MARK = "part-00001.verified"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cut of two parts that this process has not verified; files settle at once."""
    monkeypatch.setattr(verified_files, "_known", set())
    monkeypatch.setattr(verified_files, "SETTLED_NS", -1)
    return cut(karate_club(), 2, tmp_path / "cut", assignment=np.arange(34) % 2).folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the features of each part were read to be verified."""
    found: Counter[str] = Counter()
    verify = ArraysFile.verify

    def counted(file: ArraysFile, *args: Any) -> None:
        found[file._path.name] += 1
        verify(file, *args)

    monkeypatch.setattr(ArraysFile, "verify", counted)
    return found


def contents(found: Cut) -> list[Any]:
    parts = [found.part(number) for number in range(len(found.nodes))]
    return [found, *(np.array(getattr(part, f)).tobytes() for part in parts for f in part._fields)]


@pytest.mark.parametrize("stride", [37, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [PART, "cut.json"])
def test_no_flipped_bit_is_read_without_an_error(
    folder: Path, name: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Writes come too close together.
    monkeypatch.setattr(verified_files, "SETTLED_NS", 3600 * 10**9)
    whole, was = (folder / name).read_bytes(), contents(open_cut(folder))
    random, unnoticed = np.random.default_rng(0), 0
    for at in range(0, len(whole), stride):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        (folder / name).write_bytes(damaged)
        try:
            assert contents(open_cut(folder)) == was, at
            unnoticed += 1
        except DataError as error:
            assert "cut" in str(error)
    assert unnoticed <= 64 // stride + 1  # spaces behind the header


def wait_for_a_tick(path: Path) -> None:
    """Wait until a file that is changed now gets another time than one that is there."""
    probe = path.with_name("probe")
    while not probe.exists() or probe.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        probe.write_bytes(b"")
    probe.unlink()


def rewritten(path: Path, change: Any) -> None:
    """Give a part's file another header; what follows it stays."""
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    change(header, whole[start:])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[start:])


def test_arrays_that_were_exchanged_or_added_are_refused(folder: Path) -> None:
    whole, found = (folder / PART).read_bytes(), open_cut(folder)

    def exchange(header: dict[str, Any], _: bytes) -> None:
        header["train_mask"], header["val_mask"] = header["val_mask"], header["train_mask"]

    def add(header: dict[str, Any], _: bytes) -> None:
        header["more"] = {"dtype": "BOOL", "shape": [0], "data_offsets": [0, 0]}

    def leave_out(header: dict[str, Any], _: bytes) -> None:
        del header["__metadata__"][SUMS]

    for change in (exchange, add, leave_out):
        (folder / PART).write_bytes(whole)
        rewritten(folder / PART, change)
        with pytest.raises(DataError, match=r"checksum|damaged|header"):
            found.part(1)


def test_features_are_verified_once_and_again_when_the_file_changed(
    folder: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = open_cut(folder)
    for _ in range(3):
        found.part(1)
        monkeypatch.setattr(verified_files, "_known", set())  # as another process
    assert reads == {PART: 1} and (folder / MARK).exists()
    status = os.stat(folder / PART)
    damaged = bytearray((folder / PART).read_bytes())
    start = 8 + int.from_bytes(damaged[:8], "little")
    damaged[start + 5] ^= 1
    wait_for_a_tick(folder / PART)
    (folder / PART).write_bytes(damaged)
    os.utime(folder / PART, ns=(status.st_atime_ns, status.st_mtime_ns))  # as some copies do
    for _ in range(2):
        with pytest.raises(DataError, match="the checksum of features differs"):
            found.part(1)
    assert reads == {PART: 3}


def test_a_mark_of_another_file_counts_for_nothing(folder: Path, reads: Counter[str]) -> None:
    found = open_cut(folder)
    found.part(0)
    found.part(1)
    (folder / MARK).write_bytes((folder / "part-00000.verified").read_bytes())
    verified_files._known.clear()
    found.part(1)
    for content in (b"", b"\xff\x00", b"yes\n"):
        (folder / MARK).write_bytes(content)
        verified_files._known.clear()
        found.part(1)
    assert reads == {"part-00000.safetensors": 1, PART: 5}


def test_a_folder_that_cannot_be_written_to_works(
    folder: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    found = open_cut(folder)
    monkeypatch.setattr(verified_files, "whole", refused)  # root may write to any folder
    found.part(1)
    found.part(1)
    assert reads == {PART: 1}  # this process remembers
    assert not (folder / MARK).exists()


def test_a_file_that_changed_just_now_is_not_remembered(
    folder: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might change again within one tick of the file system's clock, and look the same."""
    monkeypatch.setattr(verified_files, "SETTLED_NS", 3600 * 10**9)
    found = open_cut(folder)
    found.part(1)
    found.part(1)
    assert reads == {PART: 2} and not (folder / MARK).exists()


def test_several_may_verify_at_once(folder: Path, reads: Counter[str]) -> None:
    found: list[GraphPart] = []
    openers = [threading.Thread(target=lambda: found.append(open_cut(folder).part(1)))
               for _ in range(8)]  # fmt: skip
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    assert len(found) == 8 and 1 <= reads[PART] <= 8
    assert sorted(path.name for path in folder.iterdir()) == [
        "cut.json", "part-00000.safetensors", PART, MARK,
    ]  # fmt: skip


def test_a_plan_reads_no_features(folder: Path, reads: Counter[str]) -> None:
    halo_plan(open_cut(folder), 2)
    assert not reads
