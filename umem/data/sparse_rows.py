"""The rows of a sparse matrix as a dataset."""

from __future__ import annotations

from typing import Any

from umem.data.dataset_mixin import DatasetMixin
from umem.data.sparse_parts import joined_matrix, matrix_parts
from umem.errors import UnsupportedError
from umem.printable import short


class SparseRows(DatasetMixin):
    """A dataset of the rows of a sparse matrix, each a sparse matrix of one row.

    An item is a matrix (1, columns) of the same class, with the types of data and indices that the
    whole has, and with copies of its entries in the order in which they are stored: changing it
    changes nothing else. Beside labels it can be put into `chainer.datasets.TupleDataset`; a batch
    of items is made one matrix by ``scipy.sparse.vstack``, which a converter calls.

    Args:
        matrix: a ``csr_matrix`` or ``csr_array`` of SciPy (rows, columns). It is held, not copied.

    Raises:
        UnsupportedError: it is something else.
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
