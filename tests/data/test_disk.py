"""The disk tier of a cache: what it reads back, and disks that are full, gone or torn."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from data_cases import Items, same

import umem.data
from umem._common.files import file_system
from umem.errors import DataWarning, FileError


def ask_all(data: Any, source: Items, passes: int = 3) -> None:
    for _ in range(passes):
        for i in range(len(source)):
            assert same(data[i], source.item(i))


def test_what_went_from_memory_is_read_from_the_disk(tmp_path: Path) -> None:
    source = Items(10)
    with umem.data.cached(source, 3 * source.packed(), "1MiB", folder=tmp_path) as data:
        ask_all(data, source)
        found = data.counters
        assert found.load_count == 10 and found.disk_count == 20  # lru, over and over: no hit
        assert found.spilled_bytes == 10 * source.packed()
        assert list(tmp_path.iterdir()) == []  # the file has no name


def test_what_has_no_room_below_is_loaded_again(tmp_path: Path) -> None:
    source = Items(10)
    room = 4 * (source.packed() + 24)
    with umem.data.cached(source, source.packed(), room, folder=tmp_path) as data:
        ask_all(data, source)
        assert data.counters.spilled_bytes == 4 * source.packed()
        assert sum(source.asked[i] for i in range(4)) == 4
        assert data.counters.load_count == 4 + 6 * 3


def test_no_disk_means_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    source = Items(4)
    with umem.data.cached(source, source.packed(), disk=0) as data:
        ask_all(data, source)
        assert data.counters.disk_count == 0


def failing(name: str, monkeypatch: pytest.MonkeyPatch, after: int, number: int) -> None:
    real, left = getattr(os, name), [None] * after

    def fail(*args: Any) -> Any:
        if left:
            left.pop()
            return real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize(
    "name, number, said",
    [
        ("pwrite", errno.ENOSPC, "cannot write to .*[nN]o space left.*not yet written are loaded"),
        ("pread", errno.ESTALE, "cannot read from .*all items are loaded"),
    ],
)
def test_a_disk_that_fills_up_or_is_gone_costs_one_warning(
    name: str, number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Items(10)
    with umem.data.cached(source, 2 * source.packed(), "1MiB", folder=tmp_path) as data:
        failing(name, monkeypatch, 7, number)
        with pytest.warns(DataWarning, match=said) as caught:
            ask_all(data, source)
        assert len(caught) == 1
        assert data.counters.load_count > 10


def test_a_disk_with_little_room_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.data.disk_tier.free_bytes", lambda handle: 64 << 20)
    source = Items(5)
    with umem.data.cached(source, source.packed(), "1MiB", folder=tmp_path) as data:
        with pytest.warns(DataWarning, match=r"64\.0 MiB are left") as caught:
            ask_all(data, source)
        assert len(caught) == 1 and data.counters.spilled_bytes == 0


@pytest.mark.parametrize("at", [0, 5, 10, 20, 30, 200])
def test_a_record_that_is_not_what_was_written_is_noticed(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pread

    def torn(handle: int, count: int, offset: int) -> bytes:
        data = bytearray(real(handle, count, offset))
        data[at] ^= 1
        return bytes(data)

    source = Items(6)
    with umem.data.cached(source, 2 * source.packed(), "1MiB", folder=tmp_path) as data:
        ask_all(data, source, 1)
        monkeypatch.setattr(os, "pread", torn)
        with pytest.warns(DataWarning, match=r"item \d in .* is damaged") as caught:
            ask_all(data, source)
        assert len(caught) == 1


def test_a_record_that_is_cut_short_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pread
    source = Items(6)
    with umem.data.cached(source, 2 * source.packed(), "1MiB", folder=tmp_path) as data:
        ask_all(data, source, 1)
        monkeypatch.setattr(os, "pread", lambda handle, count, at: real(handle, count // 2, at))
        with pytest.warns(DataWarning, match="is damaged"):
            ask_all(data, source)


def test_two_caches_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    ones, others = Items(8, 1000), Items(8, 3000)
    with (
        umem.data.cached(ones, 1100, "1MiB", folder=tmp_path) as one,
        umem.data.cached(others, 3100, "1MiB", folder=tmp_path) as other,
    ):
        for _ in range(3):
            for i in range(8):
                assert same(one[i], ones.item(i)) and same(other[i], others.item(i))
        assert one.counters.disk_count and other.counters.disk_count


def test_folders_that_are_memory_themselves_are_refused() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or file_system(shm) != "tmpfs":
        pytest.skip("needs a tmpfs")
    with pytest.raises(FileError, match="tmpfs, which is in memory"):
        umem.data.cached(Items(2), "1MiB", "1MiB", folder=shm)


def test_compressed_items_go_down_and_come_back(tmp_path: Path) -> None:
    pytest.importorskip("blosc2")
    source, order = Items(12, 40_000), umem.data.known_order(0)
    codec = umem.data.BloscCodec()
    room = 5000
    with umem.data.cached(source, room, "1MiB", order=order, folder=tmp_path, codec=codec) as data:
        now = order(range(12), 0)
        for _ in range(3):
            for i in now.tolist():
                assert same(data[i], source.item(i))
            now = order(now, 12)
        found = data.counters
        assert found.content_bytes == 12 * 40_008 and found.loaded_bytes < found.content_bytes / 10
        assert found.raw_bytes <= 12 * 8 and found.peak_memory_bytes <= 1.05 * room
