"""Features of a graph in an .npy file of their own, which is mapped."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from umem.cli import main
from umem.errors import DataError
from umem.graphs import cut, karate_club, load_npz, open_cut, save_npz


def values(rows: int, columns: int, kind: str = "<f4") -> Any:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(kind)


def bare_graph(path: Path) -> Path:
    """The club, with no features of its own."""
    graph = karate_club()
    arrays = {name: value for name, value in vars(graph).items() if name != "features"}
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("kind", ["<f2", "<f4", ">f8"])
def test_a_graph_with_mapped_features_is_cut_as_one_with_an_array(
    tmp_path: Path, kind: str
) -> None:
    array = values(34, 5, kind)
    np.save(tmp_path / "features.npy", array)
    mapped = load_npz(bare_graph(tmp_path / "graph.npz"), features=tmp_path / "features.npy")
    assert isinstance(mapped.features, np.memmap) and mapped.features.dtype == kind
    whole = replace(karate_club(), features=array.astype("<f4"))
    one, other = (
        cut(graph, 3, tmp_path / name, assignment=np.arange(34) % 3)
        for graph, name in ((whole, "array"), (mapped, "file"))
    )
    for part in range(3):
        expected, found = one.part(part).features, other.part(part).features
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_the_command_cuts_with_features_from_another_file(tmp_path: Path) -> None:
    pytest.importorskip("pymetis")
    array = values(34, 2)
    np.save(tmp_path / "features.npy", array)
    words = ["graph", "cut", bare_graph(tmp_path / "graph.npz"), tmp_path / "out", "--parts", 2]
    done = CliRunner().invoke(
        main, [*map(str, words), "--features", str(tmp_path / "features.npy")]
    )
    assert done.exit_code == 0, done.output
    part = open_cut(tmp_path / "out").part(0)
    np.testing.assert_array_equal(part.features, array[part.nodes])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39])
def test_a_number_that_is_not_finite_is_named_and_leaves_no_cut(tmp_path: Path, bad: float) -> None:
    array = values(34, 3, "<f8")
    array[20, 1] = bad
    np.save(tmp_path / "features.npy", array)
    graph = load_npz(bare_graph(tmp_path / "graph.npz"), features=tmp_path / "features.npy")
    with pytest.raises(DataError, match=r"features: \[20, 1\] is not a finite float32"):
        cut(graph, 2, tmp_path / "out", assignment=np.arange(34) % 2)
    assert sorted(os.listdir(tmp_path)) == ["features.npy", "graph.npz"]


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an .npy file to map"),
        (b"\x93NUMPY\x01\x00\xff", "not an .npy file to map"),
        (npy(values(34, 2))[:-4], "not an .npy file to map"),
        (npy(np.array([[{}]] * 34, object)), "not an .npy file to map"),
        (npy(np.asfortranarray(values(34, 2))), "in Fortran order"),
        (npy(values(33, 2)), r"must have shape \(34, features\); it has \(33, 2\)"),
        (npy(values(34, 2)[:, 0]), r"it has \(34,\)"),
        (npy(np.zeros((34, 2), "<i4")), "must hold floats"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "features.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        load_npz(bare_graph(tmp_path / "graph.npz"), features=path)


def test_an_archive_a_folder_a_pipe_and_nothing_are_refused(tmp_path: Path) -> None:
    graph = bare_graph(tmp_path / "graph.npz")
    os.mkfifo(tmp_path / "pipe")
    for path in (graph, tmp_path, tmp_path / "pipe", tmp_path / "none.npy"):
        with pytest.raises(DataError):
            load_npz(graph, features=path)


def test_a_graph_that_is_saved_has_the_features_that_were_mapped(tmp_path: Path) -> None:
    array = values(34, 2, "<f8")
    np.save(tmp_path / "features.npy", array)
    graph = load_npz(bare_graph(tmp_path / "graph.npz"), features=tmp_path / "features.npy")
    save_npz(tmp_path / "whole.npz", graph)
    np.testing.assert_array_equal(
        load_npz(tmp_path / "whole.npz").features, array.astype(np.float32)
    )
