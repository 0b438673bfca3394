"""Sparse matrices stay sparse, and are what they were."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.data import RawCodec, SparseRows
from umem.data.items import pack, unpack
from umem.errors import DataError, MissingDependencyError, UnsupportedError

sparse = pytest.importorskip("scipy.sparse")
RAW = RawCodec()
PARTS = ("data", "indices", "indptr", "row", "col")


def same(a: Any, b: Any) -> bool:
    """Whether two matrices are of one class, shape and type, and store the same in one order."""
    return (
        type(a) is type(b)
        and a.shape == b.shape
        and all(alike(getattr(a, name, None), getattr(b, name, None)) for name in PARTS)
    )


def alike(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def untidy(name: str, dtype: str = "f4", index: str = "i4") -> Any:
    """A matrix with entries out of order, one twice, a zero, and empty rows and columns."""
    made = getattr(sparse, name)((4, 6))
    made.data = np.array([3, 0, 5, 7], dtype)
    made.indices = np.array([2, 0, 2, 2], index)
    made.indptr = np.array([0, 0, 2, 4, 4, 4, 4][: 5 if name.startswith("csr") else 7], index)
    return made


@pytest.mark.parametrize("index", ["i4", "i8"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "?", "c8", ">f4"])
@pytest.mark.parametrize("name", ["csr_matrix", "csr_array", "csc_matrix", "csc_array"])
def test_a_matrix_comes_back_as_it_was_stored(name: str, dtype: str, index: str) -> None:
    matrix = untidy(name, dtype, index)
    assert same(unpack(pack(matrix, RAW), RAW), matrix)


@pytest.mark.parametrize(
    "matrix",
    [
        sparse.coo_matrix(([1.0, 2.0], ([0, 0], [1, 1])), shape=(2, 3)),
        sparse.coo_array(([1.0, 2.0], ([1, 0], [1, 1])), shape=(2, 3)),
        sparse.bsr_matrix(np.arange(24, dtype="f").reshape(4, 6), blocksize=(2, 3)),
        sparse.csr_matrix((0, 5)),
        sparse.csr_matrix((5, 0)),
        sparse.csr_matrix((3, 4), dtype="f4"),
    ],
    ids=lambda matrix: f"{type(matrix).__name__}{matrix.shape}",
)
def test_other_formats_and_empty_ones_come_back(matrix: Any) -> None:
    found = unpack(pack(matrix, RAW), RAW)
    assert same(found, matrix) and (found.toarray() == matrix.toarray()).all()


def test_a_row_of_a_sparse_array_comes_back_in_one_dimension() -> None:
    row = sparse.csr_array(np.eye(3))[1]
    found = unpack(pack(row, RAW), RAW)
    assert type(found) is type(row) and found.shape == row.shape
    assert (found.toarray() == row.toarray()).all()


def test_a_matrix_is_a_part_of_an_item() -> None:
    item = {"x": untidy("csr_matrix"), "y": (np.int32(3), [untidy("csc_matrix")])}
    found = unpack(pack(item, RAW), RAW)
    assert same(found["x"], item["x"]) and same(found["y"][1][0], item["y"][1][0])
    found["x"].data[:] = 9
    assert item["x"].data.tolist() == [3, 0, 5, 7]


def test_a_matrix_takes_the_bytes_of_its_entries() -> None:
    matrix = sparse.random(100, 10_000, 0.001, format="csr", dtype="f4", random_state=0)
    assert matrix.nnz == 1000 and len(pack(matrix, RAW)) < 8000 + 404 + 200


def test_what_is_no_such_matrix_is_named() -> None:
    class Own(sparse.csr_matrix):  # type: ignore[misc]
        pass

    for matrix in (sparse.lil_matrix((2, 2)), sparse.dok_matrix((2, 2)), Own((2, 2))):
        with pytest.raises(UnsupportedError, match=type(matrix).__name__):
            pack(matrix, RAW)


def test_bytes_that_name_another_class_are_refused() -> None:
    packed = pack(sparse.csr_matrix((2, 2)), RAW).replace(b"csr_matrix", b"dok_matrix")
    with pytest.raises(DataError, match="dok_matrix"):
        unpack(packed, RAW)


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(sparse.csr_matrix((2, 2)), RAW)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(MissingDependencyError, match="pip install 'scipy"):
        unpack(packed, RAW)


@given(st.integers(0, 99), st.sampled_from(["csr_matrix", "csr_array"]))
@settings(max_examples=50, deadline=None)
def test_rows_of_a_matrix_are_those_of_the_dense_one(seed: int, name: str) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 9, 2))
    dense = random.poisson(0.5, shape).astype(random.choice(["f4", "f8", "i2"]))
    rows = SparseRows(getattr(sparse, name)(dense))
    assert len(rows) == shape[0]
    for i, row in enumerate(dense):
        found = rows[i]
        assert type(found).__name__ == name and found.dtype == dense.dtype
        assert found.shape == (1, shape[1]) and (found.toarray() == row).all()
        assert same(unpack(pack(found, RAW), RAW), found)


def test_rows_are_asked_for_as_chainer_does() -> None:
    dense = np.diag([1, 2, 3, 4]).astype("f")
    rows = SparseRows(sparse.csr_matrix(dense))
    assert [row.data.tolist() for row in rows[1:3]] == [[2], [3]]
    assert [row.data.tolist() for row in rows[[3, np.int64(0)]]] == [[4], [1]]
    assert [row.data.tolist() for row in rows[np.array([2, -1])]] == [[3], [4]]
    assert rows[np.array(1)].data.tolist() == rows[-3].data.tolist() == [2]
    assert (sparse.vstack(rows[:]).toarray() == dense).all() and len(list(rows)) == 4
    for wrong in (4, -5, [0, 4]):
        with pytest.raises(IndexError, match="of 4"):
            rows[wrong]


def test_changing_a_row_leaves_the_matrix_as_it_was() -> None:
    matrix = untidy("csr_matrix")
    row = SparseRows(matrix)[1]
    row.data[:], row.indices[:], row.indptr[:] = 9, 1, 0
    assert same(matrix, untidy("csr_matrix"))


@pytest.mark.parametrize("wrong", [np.eye(3), sparse.csc_matrix((3, 3)), [[1, 2]]])
def test_rows_are_taken_from_csr_alone(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="tocsr"):
        SparseRows(wrong)
