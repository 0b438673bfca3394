"""Graphs of communities, cuts of graphs, their files, and what ranks would send."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.cli import main
from umem.errors import DataError, FileError, SizeError
from umem.graphs import (
    Graph,
    communities,
    cut,
    karate_club,
    normalised_adjacency,
    open_cut,
    save_npz,
)
from umem.graphs.halo import halo_plan, parts_of_ranks, rank_blocks

pytest.importorskip("scipy")
pymetis = pytest.importorskip("pymetis", reason="a graph is cut by pymetis (umem's extra: mpi)")

SMALL: dict[str, Any] = {"nodes": 400, "communities": 8, "ties": 2000, "features": 5, "classes": 3}


def ties_of(graph: Graph) -> np.ndarray:
    """Both ends of each entry: (E, 2)."""
    row = np.repeat(np.arange(graph.node_count), np.diff(graph.indptr))
    return np.stack([row, graph.indices], axis=1)


# -- communities ---------------------------------------------------------------------------------


def test_communities_have_the_ties_asked_for_once_each_and_no_loops() -> None:
    graph = communities(**SMALL)
    entries = {tuple(tie) for tie in ties_of(graph).tolist()}
    assert len(entries) == len(graph.indices) == 2 * SMALL["ties"]
    assert all((b, a) in entries and a != b for a, b in entries)
    assert graph.features.shape == (400, 5) and graph.class_count == 3


@pytest.mark.parametrize("across", [0.0, 0.02, 0.5, 1.0])
def test_the_share_of_ties_across_communities_is_the_one_asked_for(across: float) -> None:
    """Who belongs together is found without the generator: communities do not hang together."""
    label, count = components(communities(**SMALL, across=0.0))
    assert count == 8  # they are the same whatever the ties
    ends = label[ties_of(communities(**SMALL, across=across))]
    assert np.mean(ends[:, 0] != ends[:, 1]) == pytest.approx(across, abs=1e-9)


def components(graph: Graph) -> tuple[np.ndarray, int]:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(len(graph.indices))
    count, label = connected_components(csr_matrix((ones, graph.indices, graph.indptr)))
    return label, count


def test_communities_are_the_same_on_every_numpy_version() -> None:
    graph = communities(**SMALL, seed=3)
    digest = hashlib.sha256()
    for field in fields(Graph):
        digest.update(getattr(graph, field.name).tobytes())
    assert digest.hexdigest()[:12] == "6f798bf13af8"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": 1}, "nodes must be 2 to"),
        ({"communities": 201}, "communities must be 1 to 200"),
        ({"ties": -1}, "ties must be 0 to"),
        ({"across": 1.5}, "across must be a share from 0 to 1; got 1.5"),
        ({"ties": 20_000, "across": 0.0}, "only 9800 are possible"),
        ({"communities": 1, "across": 0.5}, "edges between 1 communities of 400 nodes, but only 0"),
        ({"classes": 401}, "classes must be 1 to 400"),
    ],
)
def test_communities_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SizeError, match=message):
        communities(**{**SMALL, **changed})


# -- a cut ---------------------------------------------------------------------------------------


def dense(graph: Graph, order: np.ndarray) -> np.ndarray:
    """The normalised adjacency in an order of nodes, as float64 by its definition."""
    matrix = np.eye(graph.node_count)
    for a, b in ties_of(graph):
        matrix[a, b] = 1
    scale = matrix.sum(axis=1) ** -0.5
    return (scale[:, None] * matrix * scale)[np.ix_(order, order)]


def matrix_of(part: Any, columns: int) -> np.ndarray:
    found = np.zeros((len(part.nodes), columns))
    for row in range(len(part.nodes)):
        for at in range(part.indptr[row], part.indptr[row + 1]):
            assert found[row, part.indices[at]] == 0  # none twice
            found[row, part.indices[at]] = part.data[at]
    return found


@pytest.mark.parametrize("parts", [1, 2, 7, 34])
def test_the_parts_are_the_graph_in_another_order(parts: int, tmp_path: Path) -> None:
    graph = karate_club()
    made = cut(graph, parts, tmp_path / "cut")
    found = open_cut(tmp_path / "cut", graph)
    assert found == made and min(found.nodes) > 0
    every = [found.part(part) for part in range(parts)]
    order = np.concatenate([part.nodes for part in every])
    assert sorted(order) == list(range(34))
    matrix = np.concatenate([matrix_of(part, 34) for part in every])
    np.testing.assert_allclose(matrix, dense(graph, order), 1e-6)
    for name in ("features", "labels", "train_mask", "val_mask", "test_mask"):
        values = np.concatenate([getattr(part, name) for part in every])
        np.testing.assert_array_equal(values, getattr(graph, name)[order])


def test_the_entries_have_the_bits_of_the_normalised_adjacency(tmp_path: Path) -> None:
    graph = communities(**SMALL)
    found = cut(graph, 5, tmp_path / "cut")
    whole = normalised_adjacency(graph)
    for number in range(5):
        part = found.part(number)
        assert len(part.data) == found.entries[number]
        wanted = whole[part.nodes]
        np.testing.assert_array_equal(np.sort(part.data), np.sort(wanted.data))


def test_communities_are_found_again_and_parts_are_balanced_by_edges(tmp_path: Path) -> None:
    graph = communities(4000, 8, 40_000, across=0.02, features=2, classes=2)
    found = cut(graph, 8, tmp_path / "cut")
    assert found.tie_count == 40_000
    assert 0.02 * 40_000 <= found.across_count <= 0.04 * 40_000
    assert found.imbalance < 1.05
    assert sum(found.entries) == 2 * 40_000 + 4000


def test_nodes_without_a_tie_level_the_parts(tmp_path: Path) -> None:
    graph = communities(4000, 8, 1500, features=2, classes=2)  # half of them have none
    found = cut(graph, 6, tmp_path / "cut")
    assert max(found.nodes) - min(found.nodes) <= 1


def test_who_belongs_where_may_be_given(tmp_path: Path) -> None:
    graph = karate_club()
    found = cut(graph, 3, tmp_path / "cut", assignment=np.arange(34) % 2 * 2)
    assert found.nodes == (17, 0, 17)
    assert found.part(1).features.shape == (0, 34)
    np.testing.assert_array_equal(found.part(2).nodes, np.arange(1, 34, 2))


@pytest.mark.parametrize(
    "assignment", [np.zeros(33, int), np.full(34, 3), np.full(34, -1), np.zeros(34)]
)
def test_an_assignment_that_is_none_is_refused(assignment: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="34 integers from 0 to 2"):
        cut(karate_club(), 3, tmp_path / "cut", assignment=assignment)
    assert not list(tmp_path.iterdir())


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [0, 35])
def test_more_parts_than_nodes_are_refused(parts: int, tmp_path: Path) -> None:
    with pytest.raises(SizeError, match=f"34 nodes can be cut into 1 to 34 parts; got {parts}"):
        cut(karate_club(), parts, tmp_path / "cut")
    assert not list(tmp_path.iterdir())


def test_a_tie_that_leads_one_way_only_is_refused(tmp_path: Path) -> None:
    graph = karate_club()
    indices = graph.indices.copy()
    row = np.repeat(np.arange(34), np.diff(graph.indptr))
    at = int(np.flatnonzero(row == 2)[0])
    indices[at] = 20  # of 2 to 0, and 2 and 20 are no friends
    with pytest.raises(DataError, match="an edge leads from node 0 to 2 and none back"):
        cut(replace(graph, indices=indices), 2, tmp_path / "cut")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    cut(karate_club(), 2, tmp_path / "cut")
    before = {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()}
    with pytest.raises(FileError, match=r"cut exists; name another folder"):
        cut(karate_club(), 3, tmp_path / "cut")
    assert {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()} == before
    with pytest.raises(FileError, match=r"nowhere is not a folder"):
        cut(karate_club(), 3, tmp_path / "nowhere" / "cut")


@pytest.mark.parametrize("writes", range(4))
def test_a_cut_that_fails_leaves_nothing(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = [], os.fsync

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > writes:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="no space left on device"):
        cut(karate_club(), 3, tmp_path / "cut")
    assert not list(tmp_path.iterdir())


def test_a_cut_of_another_graph_is_noticed(tmp_path: Path) -> None:
    graph = karate_club()
    cut(graph, 2, tmp_path / "cut")
    other = replace(graph, labels=1 - graph.labels)
    with pytest.raises(DataError, match="is a cut of another graph"):
        open_cut(tmp_path / "cut", other)


def test_a_part_of_another_cut_is_noticed(tmp_path: Path) -> None:
    cut(karate_club(), 2, tmp_path / "a")
    cut(karate_club(), 2, tmp_path / "b", assignment=np.arange(34) % 2)
    shutil.copy(tmp_path / "b" / "part-00001.safetensors", tmp_path / "a")
    found = open_cut(tmp_path / "a")
    found.part(0)
    with pytest.raises(DataError, match=r"is part 1 of another cut"):
        found.part(1)
    shutil.copy(tmp_path / "a" / "part-00000.safetensors", tmp_path / "a/part-00001.safetensors")
    with pytest.raises(DataError, match=r"is part 0 of another cut"):
        found.part(1)


def test_a_file_torn_anywhere_is_noticed(tmp_path: Path) -> None:
    cut(karate_club(), 2, tmp_path / "cut")
    found, path = open_cut(tmp_path / "cut"), tmp_path / "cut" / "part-00001.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"part-00001.safetensors .*cut the graph again"):
            found.part(1)
    path.unlink()
    with pytest.raises(DataError, match="there is no such file"):
        found.part(1)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "nodes": [1]}', "\x00", "null"]
)
def test_a_list_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(text)
    with pytest.raises(DataError, match=r"cut\.json"):
        open_cut(tmp_path)
    with pytest.raises(DataError, match="not a cut of a graph: there is no such file"):
        open_cut(tmp_path / "nowhere")


def test_without_pymetis_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umem.errors import MissingDependencyError

    monkeypatch.setitem(__import__("sys").modules, "pymetis", None)
    with pytest.raises(MissingDependencyError, match="umem's extra: mpi"):
        cut(karate_club(), 2, tmp_path / "cut")
    assert not list(tmp_path.iterdir())


# -- features in their files -----------------------------------------------------------------------


def test_opening_a_part_opens_that_file_and_the_list_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(karate_club(), 4, tmp_path / "cut")
    opened = set()
    real_open, real_os = builtins.open, os.open

    def seen(path: Any, *args: Any, **kwargs: Any) -> Any:
        opened.add(os.fspath(path) if not isinstance(path, int) else "")
        return real_open(path, *args, **kwargs)

    def seen_os(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.add(os.fspath(path))
        return real_os(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", seen)
    monkeypatch.setattr(os, "open", seen_os)
    open_cut(tmp_path / "cut").part(2)
    names = {Path(path).name for path in opened if str(tmp_path) in str(path)}
    assert names - {"part-00002.verified"} == {"cut.json", "part-00002.safetensors"}


def test_features_stay_in_the_file(tmp_path: Path) -> None:
    part = cut(karate_club(), 2, tmp_path / "cut").part(1)
    assert isinstance(part.features, np.memmap) and not part.features.flags.writeable
    np.testing.assert_array_equal(part.features, np.eye(34, dtype=np.float32)[part.nodes])


def test_features_that_are_a_memory_map_are_cut(tmp_path: Path) -> None:
    graph = communities(**SMALL)
    np.save(tmp_path / "features.npy", graph.features)
    mapped = replace(graph, features=np.load(tmp_path / "features.npy", mmap_mode="r"))
    assert cut(mapped, 3, tmp_path / "a").identity == cut(graph, 3, tmp_path / "b").identity
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


# -- what ranks would send -------------------------------------------------------------------------


def test_each_rank_has_a_run_of_parts() -> None:
    assert parts_of_ranks(12, 5) == (
        range(3),
        range(3, 6),
        range(6, 8),
        range(8, 10),
        range(10, 12),
    )
    with pytest.raises(
        SizeError, match="4 ranks for a graph in 3 parts: each needs at least one part"
    ):
        parts_of_ranks(3, 4)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1), st.data())
def test_the_blocks_of_all_ranks_are_the_matrix_and_the_plan_is_what_they_lack(
    parts: int, seed: int, data: st.DataObject
) -> None:
    """Any assignment, with empty parts; rows that are needed are counted on the dense matrix."""
    import tempfile

    graph = communities(40, 4, 60, across=0.3, seed=seed % 1000, features=1, classes=2)
    assignment = np.random.RandomState(seed).randint(0, parts, 40)
    ranks = data.draw(st.integers(1, parts))
    with tempfile.TemporaryDirectory() as place:
        found = cut(graph, parts, Path(place) / "cut", assignment=assignment)
        every = [found.part(part) for part in range(parts)]
        plan = halo_plan(found, ranks)
    whole = np.concatenate([matrix_of(part, 40) for part in every])
    offsets, runs = found.offsets, parts_of_ranks(parts, ranks)
    for rank, run in enumerate(runs):
        blocks = rank_blocks(found, runs, rank, [every[part] for part in run])
        start, stop = offsets[run.start], offsets[run.stop]
        mine = whole[start:stop]
        own = to_dense(blocks.first) + to_dense(blocks.last)
        np.testing.assert_array_equal(own, mine[:, start:stop])
        order = [block.part for block in blocks.halo]
        assert order == sorted(order, key=lambda part: (part - run.stop) % parts)
        for part in range(parts):
            columns = mine[:, offsets[part] : offsets[part + 1]]
            needed = np.flatnonzero(columns.any(axis=0))
            if part in run:
                assert plan.rows[part, rank] == 0
                continue
            assert plan.rows[part, rank] == len(needed)
            halo = [block for block in blocks.halo if block.part == part]
            assert len(halo) == (len(needed) > 0)
            for block in halo:
                np.testing.assert_array_equal(to_dense(block), columns[:, needed])
        for (part, other), rows in blocks.sent.items():
            assert len(rows) == plan.rows[part, other] > 0
            theirs = whole[offsets[runs[other].start] : offsets[runs[other].stop]]
            needed = np.flatnonzero(theirs[:, start:stop].any(axis=0))
            within = (needed >= offsets[part] - start) & (needed < offsets[part + 1] - start)
            np.testing.assert_array_equal(rows, needed[within])


def to_dense(block: Any) -> np.ndarray:
    found = np.zeros((len(block.indptr) - 1, block.columns))
    for row in range(len(found)):
        for at in range(block.indptr[row], block.indptr[row + 1]):
            found[row, block.indices[at]] += block.data[at]
    return found


# -- the command -----------------------------------------------------------------------------------


def test_the_command_cuts_and_says_what_came_of_it(tmp_path: Path) -> None:
    graph = communities(**SMALL)
    save_npz(tmp_path / "graph.npz", graph)
    arguments = ["graph", "cut", f"{tmp_path}/graph.npz", f"{tmp_path}/cut", "--parts", "4"]
    done = CliRunner().invoke(main, arguments)
    found = open_cut(tmp_path / "cut", graph)
    assert done.exit_code == 0
    assert f"{found.across_count:,} of 2,000 edges" in done.output
    assert f"entries a part: {min(found.entries):,} to {max(found.entries):,}" in done.output
    assert found.graph[:16] in done.output and "4 parts, 400 nodes" in done.output
    assert json.loads((tmp_path / "cut" / "cut.json").read_text())["nodes"] == list(found.nodes)
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1 and "exists; name another folder" in again.output


def test_the_command_refuses_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no graph")
    for file, message in (("text", "not an .npz file"), ("nowhere", "there is no such file")):
        done = CliRunner().invoke(
            main, ["graph", "cut", f"{tmp_path}/{file}", f"{tmp_path}/cut", "--parts", "2"]
        )
        assert done.exit_code == 1 and message in done.output
    assert not (tmp_path / "cut").exists()
