"""Features of nodes in an .npy file: the rows that are asked for, and no other page of the disk."""

from __future__ import annotations

import ctypes
import gc
import io
import math
import mmap
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.cli import main
from umem.errors import DataError, StateError
from umem.graphs import (
    FeatureFile,
    karate_club,
    load_npz,
    normalised_adjacency,
    open_cut,
    open_features,
    rmat,
    save_npz,
)  # fmt: skip
from umem.graphs import cut as cut_graph
from umem.graphs.cut_folder import graph_hash

PAGE = mmap.PAGESIZE


def values(nodes: int, features: int, kind: str = "<f4") -> Any:
    """Each number says where it is; exact in 16 bits where there are few."""
    return np.arange(nodes * features).reshape(nodes, features).astype(kind)


def saved(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


# -- what is given -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"])
def test_rows_are_float32_in_the_order_asked_for_whatever_the_width(
    tmp_path: Path, kind: str
) -> None:
    array = values(40, 7, kind)
    with open_features(saved(tmp_path / "x.npy", array)) as features:
        assert (features.shape, features.dtype, features.ndim, len(features)) == (
            (40, 7), np.float32, 2, 40,
        )  # fmt: skip
        found = features[[39, 0, 5, 5]]
        assert found.dtype == np.float32 and found.dtype.isnative and found.flags.c_contiguous
        assert found.tolist() == [[float(7 * row + c) for c in range(7)] for row in (39, 0, 5, 5)]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_selection_gives_what_numpy_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    nodes, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    array = values(nodes, columns)
    path = saved(tmp_path_factory.mktemp("rows") / "x.npy", array)
    numbers = st.lists(st.integers(0, nodes - 1), max_size=50)
    which = data.draw(
        st.one_of(
            numbers,
            numbers.map(lambda n: np.array(n, np.int32)),
            st.integers(0, nodes - 1),
            st.slices(nodes),
            st.lists(st.booleans(), min_size=nodes, max_size=nodes).map(np.array),
        )
    )
    with open_features(path) as features:
        expected = array[np.array(which, int) if isinstance(which, list) else which]
        np.testing.assert_array_equal(features[which], expected)


def test_what_is_given_is_the_callers_own_and_outlives_the_file(tmp_path: Path) -> None:
    with open_features(saved(tmp_path / "x.npy", values(9, 3))) as features:
        rows = features[[1, 2]]
        rows[:] = -1
        assert features[1].tolist() == [3, 4, 5]
        assert np.asarray(features).tolist() == values(9, 3).tolist()
        assert [row.tolist() for row in features] == values(9, 3).tolist()
    assert rows.sum() == -6
    with pytest.raises(StateError, match="was closed"):
        features[0]
    features.close()


def test_one_column_or_one_row_in_fortran_order_is_in_c_order_too(tmp_path: Path) -> None:
    for shape in ((5, 1), (1, 5)):
        array = np.asfortranarray(values(*shape))
        with open_features(saved(tmp_path / "x.npy", array)) as features:
            assert features[:].tolist() == array.tolist()


def test_a_file_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", values(9, 3))
    path.chmod(0o400)
    before = path.stat().st_mtime_ns
    with open_features(path) as features:
        features[0][:] = 7
    assert np.load(path).tolist() == values(9, 3).tolist()
    assert path.stat().st_mtime_ns == before


# -- what is read ------------------------------------------------------------------------------


def resident_pages(path: Path) -> set[int]:
    """The pages of a file that the system has in memory, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        count = -(-size // PAGE)
        mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)  # writable: ctypes
        try:
            marks = (ctypes.c_ubyte * count)()
            place = ctypes.c_char.from_buffer(mapping)
            done = libc.mincore(ctypes.c_void_p(ctypes.addressof(place)), size, marks)
            del place
            assert done == 0
        finally:
            mapping.close()
    return {page for page, mark in enumerate(marks) if mark & 1}


def dropped(path: Path) -> None:
    """Have the system forget a file, or skip the test where it does not."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path):
        pytest.skip("this file system keeps its files in memory")


def pages_of(rows: list[int], row_bytes: int, start: int = 128) -> set[int]:
    """The pages that rows lie in, and that of the header: NumPy pads it to 64 bytes."""
    found = {0}
    for row in rows:
        first = start + row * row_bytes
        found |= set(range(first // PAGE, (first + row_bytes - 1) // PAGE + 1))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mincore and fadvise are Linux's")
@pytest.mark.parametrize("columns", [25, 1024, 3000])
def test_only_the_pages_of_the_rows_are_read(tmp_path: Path, columns: int) -> None:
    row_bytes = 4 * columns
    nodes = 8_000_000 // row_bytes
    path = saved(tmp_path / "x.npy", np.ones((nodes, columns), np.float32))
    assert path.stat().st_size == 128 + nodes * row_bytes
    rows = [nodes - 1, 3, nodes // 2, nodes // 2 + 1, nodes // 3, 3]
    dropped(path)
    with open_features(path) as features:
        assert resident_pages(path) == {0}
        assert features[rows].shape == (6, columns)
        found = resident_pages(path)
    assert found == pages_of(rows, row_bytes)
    assert len(found) < 0.02 * path.stat().st_size / PAGE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mincore and fadvise are Linux's")
def test_a_graph_loads_without_reading_its_features(tmp_path: Path) -> None:
    graph = rmat(2000, 4000, 500, 3)
    save_npz(tmp_path / "graph.npz", replace(graph, features=np.zeros((2000, 1), np.float32)))
    path = saved(tmp_path / "features.npy", graph.features)
    dropped(path)
    found = load_npz(tmp_path / "graph.npz", features=path)
    normalised_adjacency(found)
    assert resident_pages(path) == {0}
    neighbours = found.indices[found.indptr[7] : found.indptr[8]]
    np.testing.assert_array_equal(found.features[neighbours], graph.features[neighbours])
    assert resident_pages(path) == pages_of(neighbours.tolist(), 2000)


# -- a graph in one piece ----------------------------------------------------------------------


def test_a_graph_with_features_in_a_file_is_cut_as_one_with_an_array(tmp_path: Path) -> None:
    graph = karate_club()
    bare = replace(graph, features=np.zeros((34, 1), np.float32))
    save_npz(tmp_path / "graph.npz", bare)
    path = saved(tmp_path / "features.npy", graph.features)
    mapped = load_npz(tmp_path / "graph.npz", features=path)
    assert isinstance(mapped.features, FeatureFile)
    assert graph_hash(mapped) == graph_hash(graph)
    assignment = np.arange(34) % 3
    one, other = (
        cut_graph(g, 3, tmp_path / name, assignment=assignment)
        for g, name in ((graph, "array"), (mapped, "file"))
    )
    assert one.identity == other.identity
    for part in range(3):
        name = f"part-{part:05d}.safetensors"
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()


def test_the_command_cuts_with_features_from_another_file(tmp_path: Path) -> None:
    graph = karate_club()
    arrays = {name: value for name, value in vars(graph).items() if name != "features"}
    np.savez(tmp_path / "graph.npz", **arrays)
    path = saved(tmp_path / "features.npy", graph.features)
    pytest.importorskip("pymetis")
    words = ["graph", "cut", tmp_path / "graph.npz", tmp_path / "out", "--parts", 2]
    done = CliRunner().invoke(main, [*map(str, words), "--features", str(path)])
    assert done.exit_code == 0, done.output
    part = open_cut(tmp_path / "out", graph).part(0)
    np.testing.assert_array_equal(part.features, graph.features[part.nodes])


def test_features_of_another_number_of_nodes_are_refused_and_let_go(tmp_path: Path) -> None:
    save_npz(tmp_path / "graph.npz", karate_club())
    path = saved(tmp_path / "features.npy", values(33, 2))
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(DataError, match=r"33 rows of 2>, and the graph has 34 nodes"):
        load_npz(tmp_path / "graph.npz", features=path)
    gc.collect()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


# -- bad files ---------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


GOOD = npy(values(9, 3))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no .npy file"),
        (b"PK\x03\x04" + bytes(100), "is no .npy file"),
        (GOOD[:100], "damaged header"),
        (GOOD[:-1], "has 235 bytes, and .* need 236: it is torn"),
        (GOOD[:130], "it is torn"),
        (GOOD + b"\0", "more than one array"),
        (GOOD + GOOD, "more than one array"),
        (b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\x7f" + bytes(200), "a header of .* bytes"),
        (b"\x93NUMPY\x09\x00" + GOOD[8:], "is no .npy file"),
        (GOOD.replace(b"(9, 3)", b"(-9,3)"), "damaged header|both above 0"),
        (GOOD.replace(b"(9, 3), }  ", b"(999999999999, 3), }")[: len(GOOD)], "torn|damaged"),
        (GOOD.replace(b"'<f4'", b"__imp"), "damaged header"),
        (npy(np.array([["a", None]], object)), "Python objects, which are pickles"),
        (npy(np.arange(6).reshape(2, 3)), "must hold floats; its dtype is int64"),
        (npy(np.zeros((2, 3), np.complex64)), "must hold floats"),
        (npy(np.zeros(2, [("a", "<f4")])), "must hold floats"),
        (npy(np.zeros(6, np.float32)), r"both above 0; it has \(6,\)"),
        (npy(np.zeros((2, 3, 4), np.float32)), "both above 0"),
        (npy(np.zeros((0, 3), np.float32)), "both above 0"),
        (npy(np.zeros((3, 0), np.float32)), "both above 0"),
        (npy(np.asfortranarray(values(4, 3))), "Fortran order"),
    ],
)
def test_a_file_of_something_else_is_refused_and_let_go(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(DataError, match=said) as raised:
        open_features(path)
    assert str(path) in str(raised.value)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_damaged_file_is_a_data_error_or_has_rows_of_numbers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(GOOD) - 1))
    damaged = GOOD[:at] + bytes([data.draw(st.integers(0, 255))]) + GOOD[at + 1 :]
    path = tmp_path_factory.mktemp("damaged") / "x.npy"
    path.write_bytes(damaged)
    try:
        with open_features(path) as features:
            found = features[:]
    except DataError:
        return
    assert found.shape[0] * found.shape[1] in (27, 13, 54) and np.isfinite(found).all()


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "none.npy", "no such file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "a pipe"),
    ):
        with pytest.raises(DataError, match=said):
            open_features(path)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ([9], "9 is no row"),
        ([-1], "-1 is no row"),
        (9, "9 is no row"),
        ([0.5], "whole numbers"),
        ([[1]], "whole numbers"),
        (np.ones(8, bool), "a mask of 9"),
        ("a", "whole numbers"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path: Path, which: Any, said: str) -> None:
    with (
        open_features(saved(tmp_path / "x.npy", values(9, 3))) as features,
        pytest.raises(DataError, match=said),
    ):
        features[which]


@pytest.mark.parametrize(("kind", "bad"), [("<f4", math.nan), ("<f4", math.inf), ("<f8", 1e39)])
def test_a_number_that_is_none_is_named_when_its_row_is_asked_for(
    tmp_path: Path, kind: str, bad: float
) -> None:
    array = values(9, 3, kind)
    array[5, 2] = bad
    with open_features(saved(tmp_path / "x.npy", array)) as features:
        assert features[[4, 6]].shape == (2, 3)
        with pytest.raises(DataError, match=r"at \[5, 2\], which is not a finite float32"):
            features[[8, 5, 0]]
        assert features[4].tolist() == [12, 13, 14]


# -- a file that changes -----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["written", "shorter", "longer", "empty"])
def test_a_file_that_was_changed_is_noticed(tmp_path: Path, what: str) -> None:
    path = saved(tmp_path / "x.npy", values(2000, 3))
    with open_features(path) as features:
        features[1999]
        with open(path, "r+b") as file:
            if what == "written":
                file.seek(200)
                file.write(b"\0\0\0\0")
            else:
                file.truncate({"shorter": 300, "longer": 99_999, "empty": 0}[what])
        os.utime(path, ns=(1, 1))  # as if more time had passed than the clock of files shows
        for _ in range(2):
            with pytest.raises(DataError, match="was changed since it was opened"):
                features[1999]


def test_a_change_while_rows_are_copied_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "x.npy", values(2000, 3))
    with open_features(path) as features:
        finite = np.isfinite

        def change(array: Any) -> Any:
            os.utime(path, ns=(1, 1))
            return finite(array)

        monkeypatch.setattr(np, "isfinite", change)
        with pytest.raises(DataError, match="was changed"):
            features[3]


def test_a_file_that_is_replaced_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", values(9, 3))
    with open_features(path) as features:
        os.replace(saved(tmp_path / "new.npy", -values(9, 3)), path)
        assert features[1].tolist() == [3, 4, 5]
        with open_features(path) as new:
            assert new[1].tolist() == [-3, -4, -5]
        path.unlink()
        assert features[8].tolist() == [24, 25, 26]


def test_another_process_opens_the_same_file_or_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", values(9, 3))
    with open_features(path) as features:
        sent = pickle.dumps(features)
        assert len(sent) < 1000
        (tmp_path / "sent").write_bytes(sent)
        code = f"import pickle; print(pickle.load(open({str(tmp_path / 'sent')!r}, 'rb'))[1])"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == "[3. 4. 5.]"
        os.replace(saved(tmp_path / "new.npy", values(9, 3)), path)
        with pytest.raises(DataError, match="is another file by now"):
            pickle.loads(sent)


def test_threads_read_one_file_together(tmp_path: Path) -> None:
    array = values(5000, 30)
    wrong: list[int] = []
    with open_features(saved(tmp_path / "x.npy", array)) as features:

        def read(seed: int) -> None:
            rows = np.random.default_rng(seed).integers(0, 5000, 3000)
            if not np.array_equal(features[rows], array[rows]):
                wrong.append(seed)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
