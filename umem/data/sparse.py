"""SciPy's sparse matrices, split into their arrays and rebuilt unchanged; and their rows.

SciPy's own constructors narrow indices and inspect the arrays; here a rebuilt matrix keeps its
types, order, repeated entries and stored zeros. SciPy is imported only to rebuild a matrix: to
have one to split, the program has imported it.
"""

from __future__ import annotations

from typing import Any

from umem._common.extras import needed
from umem._common.printable import short
from umem.data.dataset_mixin import DatasetMixin
from umem.errors import UnsupportedError

FORMATS = ("csr", "csc", "bsr", "coo")
NAMES = frozenset(f"{format}_{kind}" for format in FORMATS for kind in ("matrix", "array"))


def matrix_parts(value: Any) -> tuple[str, list[int], list[Any]] | None:
    """Split a sparse matrix into a description and the arrays it consists of, without copying.

    Returns:
        The name of its class in `scipy.sparse`, its shape and its arrays: data, indices and
        indptr; for a coo matrix data and the indices along each axis. None: its class cannot be
        split.
    """
    kind = type(value)
    if kind.__name__ not in NAMES or not kind.__module__.startswith("scipy.sparse."):
        return None
    if value.format == "coo":
        arrays = [value.data, *_coordinates(value)]
    else:
        arrays = [value.data, value.indices, value.indptr]
    return kind.__name__, [int(n) for n in value.shape], arrays


def joined_matrix(name: str, shape: list[int], arrays: list[Any]) -> Any:
    """Rebuild a sparse matrix from the parts of `matrix_parts`, sharing their arrays.

    Raises:
        ValueError: the parts do not come from `matrix_parts`.
        MissingDependencyError: SciPy is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"not a class of sparse matrices: {name!r}")
    blocks = {"blocksize": arrays[0].shape[1:]} if name.startswith("bsr") else {}
    sparse = needed("scipy.sparse", "data", "a sparse item needs")
    made = getattr(sparse, name)(tuple(shape), **blocks)
    made.data = arrays[0]
    if name.startswith("coo"):
        _set_coordinates(made, tuple(arrays[1:]))
    else:
        made.indices, made.indptr = arrays[1:]
    return made


def _coordinates(matrix: Any) -> tuple[Any, ...]:
    return tuple(matrix.coords) if hasattr(matrix, "coords") else (matrix.row, matrix.col)


def _set_coordinates(matrix: Any, arrays: tuple[Any, ...]) -> None:
    if hasattr(matrix, "coords"):
        matrix.coords = arrays
    else:  # before SciPy 1.13
        matrix.row, matrix.col = arrays


class SparseRows(DatasetMixin):
    """A dataset of the rows of a sparse matrix, each a sparse matrix of one row.

    An item is a matrix (1, columns) with the class and dtypes of the whole, and a copy of the row's
    entries in their stored order. Use the dataset beside labels in `chainer.datasets.TupleDataset`;
    let a converter join a batch by ``scipy.sparse.vstack``.

    Args:
        matrix: a ``csr_matrix`` or ``csr_array`` of SciPy (rows, columns), which is not copied.

    Raises:
        UnsupportedError: the matrix is of another class.
    """

    def __init__(self, matrix: Any) -> None:
        found = matrix_parts(matrix)
        if found is None or not found[0].startswith("csr") or len(found[1]) != 2:
            kind = f"{type(matrix).__module__}.{type(matrix).__qualname__}"
            raise UnsupportedError(
                f"rows are taken from a csr_matrix or csr_array of two dimensions; got a "
                f"{short(kind)}. Give matrix.tocsr()"
            )
        self._class, shape, (self._data, self._indices, self._indptr) = found
        self._count, self._columns = shape

    def __len__(self) -> int:
        return self._count

    def get_example(self, i: int) -> Any:
        """Return row ``i``."""
        start, stop = self._indptr[i : i + 2]
        indptr = self._indptr[:2].copy()
        indptr[:] = 0, stop - start
        arrays = [self._data[start:stop].copy(), self._indices[start:stop].copy(), indptr]
        return joined_matrix(self._class, [1, self._columns], arrays)
