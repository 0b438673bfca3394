"""Truncation of matrices to a low rank: the choice of the rank, and the two factors.

Source: Eckart and Young, "The approximation of one matrix by another of lower rank" (Psychometrika
1, 1936): no matrix of that rank is nearer, in the sum of squares, than the first singular values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from umem.errors import DataError, SizeError
from umem.units import format_bytes, parse_bytes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RankWish:
    """A rank given by number, by energy or by bytes; exactly one of the three is set.

    Args:
        rank: the rank itself.
        energy: at least this share, above 0 and at most 1, of the sum of squares of the weights.
        limit: the most bytes of the parameters, including the bias; an int or "64KiB".

    Raises:
        SizeError: none of them, several, or one that is out of range.
    """

    rank: int | None = None
    energy: float | None = None
    limit: int | str | None = None

    def __post_init__(self) -> None:
        """Check that exactly one of ``rank``, ``energy`` and ``limit`` is given and valid.

        Raises:
            SizeError: none or several are given, or the given one is not a valid rank, share or
                size.
        """
        given = (self.rank, self.energy, self.limit)
        if sum(one is not None for one in given) != 1:
            raise SizeError(f"give one of rank, energy and limit; got {self}")
        if self.rank is not None:
            _check_rank(self.rank)
        if self.energy is not None and not _is_share(self.energy):
            raise SizeError(f"energy must be a share above 0 and at most 1; got {self.energy!r}")
        if self.limit is not None:
            parse_bytes(self.limit, "limit")

    def __str__(self) -> str:
        given = {"rank": self.rank, "energy": self.energy, "limit": self.limit}
        found = ", ".join(f"{name}={one!r}" for name, one in given.items() if one is not None)
        return found or "none"

    def of(self, singular: Array, unit_bytes: int, fixed_bytes: int) -> int:
        """Return the rank for a matrix.

        Args:
            singular: its singular values, shape (largest rank,), the largest first.
            unit_bytes: bytes of a rank of 1.
            fixed_bytes: bytes at any rank.

        Raises:
            SizeError: a rank above the largest, or a limit below the bytes of rank 1.
        """
        if self.limit is not None:
            return self._within(len(singular), unit_bytes, fixed_bytes)
        if self.energy is not None:
            return _rank_of_share(singular, self.energy)
        rank = self.rank or 0
        if rank > len(singular):
            raise SizeError(f"rank {rank} is above the largest, which is {len(singular)}")
        return rank

    def _within(self, largest: int, unit_bytes: int, fixed_bytes: int) -> int:
        limit = parse_bytes(self.limit or 0, "limit")
        rank = (limit - fixed_bytes) // unit_bytes
        if rank < 1:
            raise SizeError(
                f"a rank of 1 takes {format_bytes(unit_bytes + fixed_bytes)}, which is above the "
                f"limit of {format_bytes(limit)}"
            )
        return min(rank, largest)


def check_factors(rank: Any, *sizes: int | None, name: str = "rank") -> None:
    """Check that a rank suits a matrix of these sizes, as far as they are known.

    Args:
        name: its name in messages.

    Raises:
        SizeError: it is not an int of at least 1, or it is above a size.
    """
    _check_rank(rank, name)
    known = [size for size in sizes if size is not None]
    if known and rank > min(known):
        raise SizeError(
            f"{name} {rank} is above the smaller size, {min(known)}: two factors of it would hold "
            "more than the whole"
        )


def _check_rank(rank: Any, name: str = "rank") -> None:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 1:
        raise SizeError(f"a {name} must be an int of at least 1; got {rank!r}")


def _is_share(energy: Any) -> bool:
    try:
        return bool(0 < energy <= 1)
    except (TypeError, ValueError):  # not a number; or an array of several
        return False


def _rank_of_share(singular: Array, share: float) -> int:
    energies = np.cumsum(np.square(singular))
    if not len(energies) or energies[-1] == 0:
        return 1
    reached = np.searchsorted(energies, share * energies[-1] * (1 - 4e-16), "left")
    return min(int(reached), len(singular) - 1) + 1


def decomposed(matrices: Any, name: str) -> tuple[Array, Array, Array]:
    """Compute the SVD of matrices (..., m, n) in float64, returned as by `numpy.linalg.svd`.

    Raises:
        DataError: NaN or infinity in them.
    """
    matrices = np.asarray(matrices, np.float64)
    refuse_nan(matrices, name)
    left, singular, right = np.linalg.svd(matrices, full_matrices=False)
    return left, singular, right


def refuse_nan(weights: Array, name: str) -> None:
    """Raise a DataError if weights have NaN or infinity."""
    if not np.isfinite(weights).all():
        raise DataError(f"{name} has NaN or infinity, which no smaller layer approximates")


def factors(left: Array, singular: Array, right: Array, rank: int) -> tuple[Array, Array]:
    """Compute two factors of a rank, with shapes (..., m, rank) and (..., rank, n).

    Both factors contain the root of a singular value, so that their gradients have one size. If a
    singular value is 0, the left column is 0 and the right row is kept: with both 0, both gradients
    would always be 0.
    """
    kept = singular[..., :rank]
    least = np.finfo(np.float64).eps * max(left.shape[-2], right.shape[-1])
    is_nothing = kept <= least * singular[..., :1]
    roots = np.sqrt(np.where(is_nothing, 0, kept))
    rows = np.where(is_nothing, 1, roots)
    return left[..., :rank] * roots[..., None, :], right[..., :rank, :] * rows[..., None]
