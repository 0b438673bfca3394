"""A dataset that is changed below its cache: what is noticed of it, and when."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import Items, same

import umem.data
from umem.data.fingerprint import MOST_FILES, files_of, fingerprint
from umem.errors import DataWarning


def a_file(folder: Path, name: str = "rows.npy", value: int = 0) -> Path:
    path = folder / name
    np.save(path, np.full((8, 100), value, np.float32))
    return path


def ask_all(data: Any) -> list[float]:
    return [float(np.ravel(data[i])[0]) for i in range(len(data))]


def test_a_file_that_was_written_again_is_noticed_when_the_next_epoch_begins(
    tmp_path: Path,
) -> None:
    path = a_file(tmp_path)
    with umem.data.cached(np.load(path, mmap_mode="r"), "1MiB") as data:
        assert ask_all(data) == ask_all(data) == [0.0] * 8
        with path.open("r+b") as file:  # where it lies, as the map has it
            file.seek(-8 * 400, os.SEEK_END)
            file.write(np.full((8, 100), 5, np.float32).tobytes())
        later = path.stat().st_mtime + 10
        os.utime(path, (later, later))
        with pytest.warns(DataWarning, match="another size or modification time") as caught:
            assert ask_all(data) == [5.0] * 8
        assert len(caught) == 1 and data.counters.lost_count == 1
        assert ask_all(data) == [5.0] * 8


@pytest.mark.parametrize("changed", [0, 7])
def test_the_first_and_the_last_item_are_looked_at_in_every_epoch(changed: int) -> None:
    class Changing(Items):
        add = 0

        def item(self, index: int) -> Any:
            array, number = super().item(index)
            return array + np.uint8(self.add * (index == changed)), number

    source = Changing(8)
    with umem.data.cached(source, "1MiB") as data:
        for _ in range(2):
            assert all(same(data[i], source.item(i)) for i in range(8))
        source.add = 1
        with pytest.warns(DataWarning, match=f"item {changed} of the dataset has changed"):
            assert all(same(data[i], source.item(i)) for i in range(8))


def test_a_dataset_that_grows_or_shrinks_is_noticed() -> None:
    source = Items(8)
    with umem.data.cached(source, "1MiB") as data:
        for i in range(8):
            data[i]
        source.sizes.append(100)
        with pytest.warns(DataWarning, match="another size"):
            data[0]
        assert data.counters.lost_count == 1 and len(data) == 8


def test_what_stays_as_it_is_says_nothing(tmp_path: Path) -> None:
    rows = np.load(a_file(tmp_path), mmap_mode="r")
    with warnings.catch_warnings(), umem.data.cached(rows, "1MiB") as data:
        warnings.simplefilter("error")
        for _ in range(4):
            ask_all(data)
        assert data.counters.lost_count == 0 and data.counters.load_count == 8


class Below:
    """Holds a dataset as Chainer's TransformDataset does."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return 8


class Images:
    """Names its files as Chainer's image datasets do."""

    def __init__(self, root: Path, paths: Any) -> None:
        self._root, self._paths = str(root), paths

    def __len__(self) -> int:
        return len(self._paths)


class Naming:
    """Names its files itself."""

    def __len__(self) -> int:
        return 1

    def files(self) -> list[str]:
        return ["a", "b"]


def test_files_are_found_of_maps_images_paths_and_parts(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    rows = np.load(path, mmap_mode="r")
    found = [str(each) for each in files_of(Below((rows, Below(rows[2:]))))]
    assert found == [str(path)] * 2
    assert list(files_of(Images(tmp_path, ["x.jpg", "y.jpg"]))) == [
        str(tmp_path / "x.jpg"),
        str(tmp_path / "y.jpg"),
    ]
    assert list(files_of(Images(tmp_path, [("x.jpg", 3)]))) == [str(tmp_path / "x.jpg")]
    assert list(files_of(Naming())) == ["a", "b"]
    below = Below(None)
    below.path = path  # type: ignore[attr-defined]
    assert list(files_of(below)) == [path]
    assert list(files_of(Items(3))) == list(files_of([1, "x", b"y"])) == []
    turning = Below(None)
    turning._dataset = turning
    assert list(files_of(turning)) == []


def test_of_many_files_so_many_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[str]()
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path: looked.append(str(path)) or real(path))
    fingerprint(Images(tmp_path, [f"{n}.jpg" for n in range(10 * MOST_FILES)]))
    monkeypatch.undo()
    assert len(looked) == MOST_FILES
    assert looked[0].endswith("/0.jpg") and looked[-1].endswith(f"/{10 * MOST_FILES - 1}.jpg")


def saved_and_loaded(before: Any, after: Any) -> None:
    """A run's order is saved, and a run with other data goes on from it."""
    saved: dict[str, Any] = {}
    one, other = umem.data.known_order(3), umem.data.known_order(3)
    with umem.data.cached(before, "1MiB", order=one):
        one.serialize(lambda key, value: saved.setdefault(key, value))
    with umem.data.cached(after, "1MiB", order=other):
        other.serialize(lambda key, value: saved[key])


def test_a_run_that_goes_on_with_other_data_is_told_so(tmp_path: Path) -> None:
    one = np.load(a_file(tmp_path), mmap_mode="r")
    copied = np.load(a_file(tmp_path, "copy.npy"), mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved_and_loaded(one, copied)  # files may be elsewhere, and later
    with pytest.warns(DataWarning, match="another length, shape or dtype"):
        saved_and_loaded(one, copied[:6])


def test_an_order_that_was_saved_without_a_cache_is_loaded() -> None:
    saved = {"seed": "3", "epoch": 2, "position": 1}
    order = umem.data.known_order(3)
    with umem.data.cached(Items(4), "1MiB", order=order):
        order.serialize(lambda key, value: saved[key])
    assert order.epoch == 2
