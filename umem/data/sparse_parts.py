"""SciPy's sparse matrices in parts: the arrays that they are made of, as they are.

SciPy's own constructors make indices narrower and look at what they are given; here a matrix
comes back with the types, the order, the repeated entries and the zeros that it had. SciPy is
imported only where a matrix is rebuilt: one that is to be split has brought it.
"""

from __future__ import annotations

from typing import Any

from umem.extras import needed

FORMATS = ("csr", "csc", "bsr", "coo")
NAMES = frozenset(f"{format}_{kind}" for format in FORMATS for kind in ("matrix", "array"))


def matrix_parts(value: Any) -> tuple[str, list[int], list[Any]] | None:
    """Split a sparse matrix into a description and the arrays it consists of, without copying.

    Returns:
        The name of its class in `scipy.sparse`, its shape and its arrays: data, indices and
        indptr; of a coo matrix data and the indices along each axis. None: it is of no class that
        can be split.
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
        ValueError: this is not what `matrix_parts` gives.
        MissingDependencyError: there is no SciPy.
    """
    if name not in NAMES:
        raise ValueError(f"no class of sparse matrices: {name!r}")
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
