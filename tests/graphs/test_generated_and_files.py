"""umem.graphs: generated graphs, the karate club, files, and the normalised adjacency."""

import hashlib
import io
import pickle
import sys
import zipfile
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import printed

import umem.graphs.npz
from umem.errors import DataError, MissingDependencyError, SizeError
from umem.graphs import Graph, karate_club, load_npz, normalised_adjacency, rmat, save_npz
from umem.graphs.labelled import prevailing

NAMES = [field.name for field in fields(Graph)]


def arrays_of(graph):
    return {name: getattr(graph, name) for name in NAMES}


def dense(graph):
    """The adjacency as float64, counting every entry once, built entry by entry."""
    matrix = np.zeros((graph.node_count, graph.node_count))
    for node in range(graph.node_count):
        for at in range(graph.indptr[node], graph.indptr[node + 1]):
            matrix[node, graph.indices[at]] = 1
    return matrix


def graph_of(indptr, indices):
    nodes = len(indptr) - 1
    return Graph(
        np.array(indptr, np.int32),
        np.array(indices, np.int32),
        np.zeros((nodes, 1), np.float32),
        np.zeros(nodes, np.int32),
        np.ones(nodes, np.bool_),
        np.zeros(nodes, np.bool_),
        np.zeros(nodes, np.bool_),
    )


@st.composite
def rmat_arguments(draw, most_nodes=40):
    nodes = draw(st.integers(1, most_nodes))
    edges = draw(st.integers(0, nodes * (nodes - 1) // 4))
    return {
        "nodes": nodes,
        "edges": edges,
        "features": draw(st.integers(1, 5)),
        "classes": draw(st.integers(1, nodes)),
        "seed": draw(st.integers(0, 2**63 - 1)),
    }


# R-MAT


@given(rmat_arguments())
def test_rmat_graph_is_simple_symmetric_and_has_the_ties_asked_for(arguments):
    graph = rmat(**arguments)
    matrix = dense(graph)
    assert len(graph.indices) == 2 * arguments["edges"] == matrix.sum()  # so none is there twice
    assert (matrix == matrix.T).all()
    assert not matrix.diagonal().any()


@given(rmat_arguments())
def test_rmat_graph_is_one_that_a_file_may_hold(tmp_path_factory, arguments):
    graph = rmat(**arguments)
    save_npz(tmp_path_factory.getbasetemp() / "rmat.npz", graph)
    assert graph.features.shape == (arguments["nodes"], arguments["features"])
    assert graph.class_count <= arguments["classes"]
    assert (graph.train_mask ^ graph.val_mask ^ graph.test_mask).all()
    kinds = [a.dtype.str for a in arrays_of(graph).values()]
    assert kinds == ["<i4", "<i4", "<f4", "<i4", "|b1", "|b1", "|b1"]


@given(rmat_arguments())
def test_rmat_a_larger_graph_of_the_same_seed_keeps_the_first_ties(arguments):
    few = dense(rmat(**arguments | {"edges": arguments["edges"] // 2}))
    assert (dense(rmat(**arguments)) >= few).all()


def test_rmat_gives_the_same_graph_on_every_numpy_version():
    graph = rmat(1000, 5000, 8, 5, seed=3)
    digests = {n: hashlib.sha256(getattr(graph, n).tobytes()).hexdigest()[:12] for n in NAMES}
    assert digests == {
        "indptr": "6e1e076c04ea",
        "indices": "3a25ff2aa6c6",
        "features": "d0dc60338608",
        "labels": "ba73ce8fddbe",
        "train_mask": "38bbf286ff56",
        "val_mask": "9b8bd729e497",
        "test_mask": "b2d5323ceb80",
    }


def test_rmat_degrees_have_a_long_tail():
    degrees = np.sort(np.diff(rmat(20_000, 100_000, 1, 1).indptr))[::-1]
    assert degrees[0] > 100 * degrees.mean()
    assert degrees[:200].sum() > 0.25 * degrees.sum()  # 1 % of the nodes, 25 % of the ties


def test_rmat_quarters_get_the_probabilities_of_the_paper():
    low, high = np.divmod(umem.graphs.generator._draw_ties(np.random.PCG64(1), 256, 200_000), 256)
    # Self loops are drawn with (a + d)^8, and the rest is symmetrised: corners b and c are one.
    kept = 1 - 0.62**8
    assert len(low) == pytest.approx(200_000 * kept, rel=0.01)
    first = (high < 128).mean()
    last = (low >= 128).mean()
    assert first == pytest.approx((0.57 - 0.57 * 0.62**7) / kept, rel=0.02)
    assert last == pytest.approx((0.05 - 0.05 * 0.62**7) / kept, rel=0.05)


def test_rmat_label_is_the_class_with_most_weight_around_a_node():
    graph = rmat(60, 200, 1, 4)
    own = np.arange(60, dtype=np.int32) % 4
    labels = prevailing(graph.indptr, graph.indices, own, 4)
    loops = dense(graph) + np.eye(60)
    scale = np.diag(loops.sum(axis=1) ** -0.5)
    votes = scale @ loops @ scale @ np.eye(4)[own]
    assert (votes[np.arange(60), labels] >= votes.max(axis=1) - 1e-12).all()


def accuracy(graph, inputs):
    """Of least squares from the training nodes' inputs to their labels."""
    targets = np.eye(graph.class_count)[graph.labels]
    train, test = graph.train_mask, graph.test_mask
    weights = np.linalg.lstsq(inputs[train].astype(float), targets[train], rcond=None)[0]
    return ((inputs[test] @ weights).argmax(axis=1) == graph.labels[test]).mean()


def test_rmat_labels_can_be_learned_from_the_graph_better_than_from_features_alone():
    graph = rmat(4000, 40_000, 64, 8)
    alone = accuracy(graph, graph.features)
    smoothed = accuracy(graph, normalised_adjacency(graph) @ graph.features)
    assert 1 / 8 < alone < smoothed - 0.05
    assert smoothed > 0.6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": 0}, "rmat: nodes must be 1 to 2147483647 here; got 0"),
        ({"edges": -1}, "rmat: edges must be 0 to 45 here; got -1"),
        ({"edges": 46}, "rmat: edges must be 0 to 45 here; got 46"),
        ({"features": 0}, "rmat: features must be 1 to 2147483647 here; got 0"),
        ({"classes": 0}, "rmat: classes must be 1 to 10 here; got 0"),
        ({"classes": 11}, "rmat: classes must be 1 to 10 here; got 11"),
        ({"seed": -1}, "rmat: seed must be 0 to 9223372036854775807 here; got -1"),
    ],
)
def test_rmat_argument_out_of_range_is_named_with_its_range(changed, message):
    with pytest.raises(SizeError) as caught:
        rmat(**{"nodes": 10, "edges": 5, "features": 2, "classes": 2, "seed": 0} | changed)
    assert str(caught.value) == message


def test_rmat_gives_up_on_ties_that_it_practically_never_draws():
    with pytest.raises(SizeError, match=r"of 2016 different edges among 64 nodes: too dense"):
        rmat(64, 2016, 1, 1)


# The karate club


def test_karate_club_has_the_members_ties_and_factions_that_zachary_published():
    club = karate_club()
    degrees = np.diff(club.indptr)
    assert (club.node_count, len(club.indices)) == (34, 2 * 78)
    assert degrees.tolist() == [
        16, 9, 10, 6, 3, 4, 4, 4, 5, 2, 3, 1, 2, 5, 2, 2, 2, 2, 2, 3, 2, 2, 2, 5, 3, 3, 2, 4, 3, 4,
        4, 6, 12, 17,
    ]  # fmt: skip
    assert (dense(club) == dense(club).T).all()
    assert np.bincount(club.labels).tolist() == [17, 17]
    assert (club.labels[0], club.labels[33]) == (0, 1)


def test_karate_club_is_connected_and_the_leaders_are_not_tied():
    matrix = dense(karate_club()) + np.eye(34)
    assert (np.linalg.matrix_power(matrix, 5) > 0).all()  # published diameter: 5
    assert not (np.linalg.matrix_power(matrix, 4) > 0).all()
    assert matrix[0, 33] == 0


def test_karate_club_trains_on_its_two_leaders_only(tmp_path):
    club = karate_club()
    assert np.flatnonzero(club.train_mask).tolist() == [0, 33]
    assert club.test_mask.sum() == 32
    assert not club.val_mask.any()
    save_npz(tmp_path / "karate.npz", club)


def test_labels_where_hides_the_labels_of_other_nodes():
    club = karate_club()
    labels = club.labels_where(club.train_mask)
    assert labels.dtype == np.int32
    assert (labels[0], labels[33], set(labels[1:33])) == (0, 1, {-1})


# The normalised adjacency


def oracle(graph):
    loops = np.maximum(dense(graph), np.eye(graph.node_count))
    scale = np.diag(loops.sum(axis=1) ** -0.5)
    return scale @ loops @ scale


@given(rmat_arguments())
def test_normalised_adjacency_equals_the_formula_in_float64(arguments):
    graph = rmat(**arguments)
    matrix = normalised_adjacency(graph)
    np.testing.assert_allclose(matrix.toarray(), oracle(graph), rtol=3e-7)


@given(rmat_arguments())
def test_normalised_adjacency_is_symmetric_bit_for_bit(arguments):
    matrix = normalised_adjacency(rmat(**arguments)).toarray()
    np.testing.assert_array_equal(matrix, matrix.T)


def test_normalised_adjacency_is_float32_with_int32_indices_sorted():
    matrix = normalised_adjacency(karate_club())
    assert (matrix.format, matrix.nnz) == ("csr", 2 * 78 + 34)
    assert matrix.dtype == np.float32
    assert matrix.indices.dtype == matrix.indptr.dtype == np.int32
    assert matrix.has_canonical_format


def test_normalised_adjacency_leaves_the_graph_as_it_is():
    graph = karate_club()
    before = {name: array.copy() for name, array in arrays_of(graph).items()}
    normalised_adjacency(graph).data[:] = 0
    for name in NAMES:
        np.testing.assert_array_equal(getattr(graph, name), before[name])


def test_normalised_adjacency_counts_self_loops_and_repeated_ties_once():
    repeated = graph_of([0, 4, 6], [0, 1, 1, 0, 0, 0])  # unsorted, a loop on node 0
    plain = graph_of([0, 1, 2], [1, 0])
    np.testing.assert_array_equal(
        normalised_adjacency(repeated).toarray(), normalised_adjacency(plain).toarray()
    )


def test_normalised_adjacency_of_a_directed_graph_uses_the_row_sums():
    graph = graph_of([0, 2, 2, 3], [1, 2, 0])
    np.testing.assert_allclose(normalised_adjacency(graph).toarray(), oracle(graph), rtol=3e-7)


def test_normalised_adjacency_without_scipy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'scipy.*chainer\)$"):
        normalised_adjacency(karate_club())


def test_importing_graphs_loads_numpy_and_neither_scipy_nor_chainer():
    code = "import sys, umem.graphs; print({'scipy', 'chainer', 'cupy'} & set(sys.modules))"
    assert printed("-c", code) == "set()\n"


# Files


@pytest.fixture
def path(tmp_path):
    return tmp_path / "graph.npz"


def write(path, **changed):
    """The karate club with some arrays replaced, or left out (None)."""
    arrays = {k: v for k, v in (arrays_of(karate_club()) | changed).items() if v is not None}
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def message_of(path):
    with pytest.raises(DataError) as caught:
        load_npz(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


@given(arguments=rmat_arguments())
@settings(max_examples=25)
def test_what_save_npz_writes_load_npz_reads_back(tmp_path_factory, arguments):
    path = tmp_path_factory.mktemp("graphs") / "graph"  # no .npz is added to the name
    graph = rmat(**arguments)
    save_npz(path, graph)
    loaded = load_npz(path)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(graph, name))
    assert [entry.name for entry in path.parent.iterdir()] == ["graph"]


def test_load_npz_converts_wider_and_foreign_dtypes(path):
    club = karate_club()
    write(
        path,
        indptr=club.indptr.astype(np.uint64),
        indices=club.indices.astype(">i8"),
        features=club.features.astype(np.float16),
        labels=club.labels.astype(np.uint8),
        something_else=np.arange(3),
    )
    loaded = load_npz(str(path))
    for name in NAMES:
        got, expected = getattr(loaded, name), getattr(club, name)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_load_npz_names_a_missing_array_and_what_is_there(path, name):
    write(path, **{name: None})
    others = ", ".join(other for other in NAMES if other != name)
    assert message_of(path) == f"{name}: missing; the file has {others}"


def changed(array, at, value, dtype=None):
    array = array.astype(dtype or array.dtype)
    array[at] = value
    return array


CLUB = karate_club()
BAD = [
    ("indptr", CLUB.indptr[:, None], "must have 1 dimension; its shape is (35, 1)"),
    ("indptr", CLUB.indptr.astype(float), "must hold integers; its dtype is float64"),
    (
        "indptr",
        np.zeros(1, np.int32),
        "must have one element more than there are nodes, so at least 2",
    ),
    ("indptr", changed(CLUB.indptr, 0, 1), "must start with 0; [0] is 1"),
    ("indptr", changed(CLUB.indptr, 3, 10), "must not fall; [3] is 10 after 25"),
    (
        "indptr",
        changed(CLUB.indptr, 4, 2**64 - 1, np.uint64),
        "must not fall; [5] is 44 after 18446744073709551615",
    ),
    (
        "indptr",
        changed(CLUB.indptr, 34, 157),
        "must end with the length of indices, 156; [34] is 157",
    ),
    ("indptr", CLUB.indptr[:-1], "must end with the length of indices, 156; [33] is 139"),
    ("indices", CLUB.indices.astype(np.float32), "must hold integers; its dtype is float32"),
    ("indices", CLUB.indices.reshape(2, 78), "must have 1 dimension; its shape is (2, 78)"),
    ("indices", changed(CLUB.indices, 7, 34), "34 at [7] is no node; they go from 0 to 33"),
    ("indices", changed(CLUB.indices, [9, 7], -1), "-1 at [7] is no node; they go from 0 to 33"),
    (
        "indices",
        changed(CLUB.indices, 8, 2**32, np.int64),
        "4294967296 at [8] is no node; they go from 0 to 33",
    ),
    ("features", CLUB.features[:33], "must have shape (34, features); it has (33, 34)"),
    ("features", CLUB.features[:, :0], "must have shape (34, features); it has (34, 0)"),
    ("features", CLUB.features[0], "must have shape (34, features); it has (34,)"),
    ("features", CLUB.features.astype(int), "must hold floats; its dtype is int64"),
    ("features", CLUB.features.astype(complex), "must hold floats; its dtype is complex128"),
    (
        "features",
        changed(CLUB.features, ([5, 3, 3], [0, 8, 9]), np.nan),
        "nan at [3, 8] is not a finite float32",
    ),
    (
        "features",
        changed(CLUB.features, (33, 33), -np.inf),
        "-inf at [33, 33] is not a finite float32",
    ),
    (
        "features",
        changed(CLUB.features, (1, 2), 1e300, np.float64),
        "1e+300 at [1, 2] is not a finite float32",
    ),
    ("labels", CLUB.labels.astype(float), "must hold integers; its dtype is float64"),
    ("labels", CLUB.labels[:33], "must have one element a node, 34; it has 33"),
    (
        "labels",
        changed(CLUB.labels, 4, -1),
        "-1 at [4] is no class (at most as many as nodes); they go from 0 to 33",
    ),
    (
        "labels",
        changed(CLUB.labels, 6, 34),
        "34 at [6] is no class (at most as many as nodes); they go from 0 to 33",
    ),
    ("train_mask", np.zeros(34, np.bool_), "no node is for training; set at least one"),
    ("train_mask", CLUB.train_mask.astype(np.uint8), "must hold booleans; its dtype is uint8"),
    ("val_mask", CLUB.val_mask[1:], "must have one element a node, 34; it has 33"),
    ("test_mask", CLUB.test_mask[None], "must have 1 dimension; its shape is (1, 34)"),
    ("test_mask", np.array(True), "must have 1 dimension; its shape is ()"),
]


@pytest.mark.parametrize(("name", "array", "message"), BAD)
def test_load_npz_names_the_array_and_the_first_wrong_position(path, name, array, message):
    write(path, **{name: array})
    assert message_of(path) == f"{name}: {message}"
    path.unlink()
    with pytest.raises(DataError) as caught:
        save_npz(path, replace(CLUB, **{name: array}))
    assert str(caught.value) == f"{path}: {name}: {message}"
    assert list(path.parent.iterdir()) == []


def test_save_npz_that_fails_leaves_the_old_file(path, monkeypatch):
    save_npz(path, CLUB)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        save_npz(path, CLUB)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_load_npz_refuses_a_pickle_and_does_not_execute_it(path):
    path.write_bytes(pickle.dumps(Bomb()))
    assert message_of(path).startswith("not an .npz file: ")


def test_load_npz_refuses_a_pickled_array_and_does_not_execute_it(path):
    write(path, labels=np.array([Bomb()] * 34, object))
    assert message_of(path).startswith("labels: cannot be read: ValueError: Object arrays")


def test_load_npz_names_a_file_that_is_not_there(path):
    assert message_of(path) == "cannot be read: there is no such file or folder"


def test_load_npz_of_a_folder_is_an_error(path):
    path.mkdir()
    assert message_of(path) == "cannot be read: it is a folder"


@pytest.mark.parametrize("content", [b"", b"graph", b"PK\x03\x04", b"\x93NUMPY"])
def test_load_npz_of_something_else_says_that_it_is_no_npz(path, content):
    path.write_bytes(content)
    assert message_of(path).startswith("not an .npz file: ")


def test_load_npz_of_a_single_array_says_how_to_save_several(path):
    with open(path, "wb") as file:
        np.save(file, np.arange(3))
    assert message_of(path) == "one .npy array, not an .npz file of several; use numpy.savez"


def test_load_npz_of_a_zip_with_other_things_names_what_is_missing(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert message_of(path) == "indptr: missing; the file has readme.txt"


def test_load_npz_of_a_zip_with_text_for_an_array_names_the_array(path):
    write(path, indptr=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("indptr", "0 1 2")
    assert message_of(path).startswith("indptr: ")


def npz_bytes():
    buffer = io.BytesIO()
    np.savez(buffer, **arrays_of(CLUB))
    return buffer.getvalue()


WHOLE = npz_bytes()


@given(st.integers(0, len(WHOLE) - 1))
@settings(max_examples=60)
def test_load_npz_of_a_truncated_file_is_a_data_error(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("graphs") / "graph.npz"
    path.write_bytes(WHOLE[:length])
    message_of(path)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1))
@settings(max_examples=300)
def test_load_npz_of_damaged_bytes_is_a_data_error_or_the_same_graph(tmp_path_factory, damage):
    content = bytearray(WHOLE)
    for at, value in damage:
        content[at] = value
    path = tmp_path_factory.mktemp("graphs") / "graph.npz"
    path.write_bytes(bytes(content))
    try:
        graph = load_npz(path)
    except DataError as error:
        assert str(error).startswith(f"{path}: ")
    else:  # what was changed (a date, say) does not matter
        for name in NAMES:
            np.testing.assert_array_equal(getattr(graph, name), getattr(CLUB, name))


VALUES = st.sampled_from([-(2**31), -1, 0, 1, 33, 34, 2**31 - 1, 2**31, 2**40])


@given(st.sampled_from(["indptr", "indices", "labels"]), st.integers(0, 33), VALUES)
def test_load_npz_accepts_exactly_what_an_entry_by_entry_check_accepts(
    tmp_path_factory, name, at, value
):
    path = tmp_path_factory.mktemp("graphs") / "graph.npz"
    arrays = arrays_of(CLUB)
    arrays[name] = changed(arrays[name], at, value, np.int64)
    write(path, **arrays)
    indptr = arrays["indptr"].tolist()
    valid = (
        indptr[0] == 0
        and indptr == sorted(indptr)
        and all(0 <= index < 34 for index in arrays["indices"].tolist())
        and all(0 <= label < 34 for label in arrays["labels"].tolist())
    )
    if valid:
        load_npz(path)
    else:
        assert message_of(path).startswith(f"{name}: ")
