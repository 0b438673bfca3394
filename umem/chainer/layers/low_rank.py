"""Linear and EmbedID with weights of low rank: two factors instead of one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import chainer.links as L
import numpy as np

from umem.chainer.layers.like_link import filled, on_host, refuse_array
from umem.chainer.layers.truncation import RankWish, check_factors, decomposed, factors

__all__ = ["LowRankEmbedID", "LowRankLinear"]


class TwoFactors(chainer.Chain):
    """Base of low-rank links, made of two of Chainer's links.

    Attributes:
        reduce: the link that maps inputs to ``rank`` values.
        expand: the `Linear` that maps these values to the result.
    """

    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(chainer.Link.__str__(self))

    @property
    def printable_specs(self) -> Iterator[tuple[str, Any]]:
        """Return the constructor's arguments."""
        yield from ((name, getattr(self, name)) for name in self.names)

    @property
    def rank(self) -> int:
        """Return the rank: the size between the two factors."""
        return int(self.expand.in_size)

    @property
    def out_size(self) -> int:
        """Return the size of a result."""
        return int(self.expand.out_size)


class LowRankLinear(TwoFactors):
    """A `chainer.links.Linear` whose weight is a product of two factors: ``expand(reduce(x))``.

    Parameters have ``rank * (in_size + out_size)`` elements instead of ``in_size * out_size``, and
    a sample takes as many multiply-adds; the bias is extra.

    Args:
        in_size: elements of a sample; None, or omitted: taken from the first batch.
        out_size: elements of its result.
        rank: values between the factors.
        nobias: as in Chainer.
        initialW: initialiser of each factor, by default Chainer's of `Linear`. To start from
            existing weights, use `from_linear`.
        initial_bias: as in Chainer.

    Raises:
        SizeError: a rank below 1 or above a size.
        DataError: ``initialW`` is an array.
    """

    names = ("in_size", "out_size", "rank", "nobias")

    def __init__(
        self,
        in_size: int | None,
        out_size: int | None = None,
        *,
        rank: int,
        nobias: bool = False,
        initialW: Any = None,
        initial_bias: Any = None,
    ) -> None:
        super().__init__()
        if out_size is None:
            in_size, out_size = None, in_size
        check_factors(rank, in_size, out_size)
        refuse_array(initialW, "LowRankLinear.from_linear")
        with self.init_scope():
            self.reduce = L.Linear(in_size, rank, True, initialW)
            self.expand = L.Linear(rank, out_size, nobias, initialW, initial_bias)

    @classmethod
    def from_linear(
        cls,
        link: Any,
        rank: int | None = None,
        *,
        energy: float | None = None,
        limit: int | str | None = None,
    ) -> LowRankLinear:
        """Approximate a trained `Linear`, which is not changed, by the nearest matrix of a rank.

        Cost: a singular value decomposition in float64 on the host.

        Args:
            link: has a weight; the result is on the same device.
            rank: of the weight.
            energy: instead of a rank: the least that keeps this share of the sum of squares.
            limit: instead of a rank: the largest with which parameters take at most this many
                bytes, including the bias; an int or "64KiB".

        Raises:
            SizeError: not exactly one of the three is given, or it is out of range.
            DataError: the weight has NaN or infinity, or no shape yet.
        """
        wish, weight = RankWish(rank, energy, limit), on_host(link, "W")
        first, second = _cut(weight, wish, 0 if link.b is None else link.b.array.nbytes)
        made: LowRankLinear = filled(
            lambda: cls(*weight.shape[::-1], rank=len(second), nobias=link.b is None, initialW=0),
            link,
            {"/reduce/W": second, "/expand/W": first},
        )
        return made

    @property
    def in_size(self) -> int | None:
        """Return the size of a sample; None before the first batch."""
        weight = self.reduce.W.array
        return self.reduce.in_size if weight is None else int(weight.shape[1])

    @property
    def nobias(self) -> bool:
        """Tell whether the link has no bias."""
        return self.expand.b is None

    def forward(self, x: Any, n_batch_axes: int = 1) -> Any:
        """Apply both factors; arguments and result are as in `Linear`."""
        return self.expand(self.reduce(x, n_batch_axes), n_batch_axes)


class LowRankEmbedID(TwoFactors):
    """A `chainer.links.EmbedID` whose table is a product of two factors.

    The smaller table has ``rank`` elements an identifier, and a `Linear` without bias expands them
    to ``out_size``: ``rank * (in_size + out_size)`` elements instead of ``in_size * out_size``. A
    sample takes ``rank * out_size`` multiply-adds; a plain table takes none.

    Args:
        in_size: the number of identifiers.
        out_size: elements of an embedding.
        rank: elements of an identifier in the table.
        initialW: initialiser of the table, by default Chainer's of `EmbedID`; the second factor is
            initialised as a `Linear`. To start from existing weights, use `from_embed_id`.
        ignore_label: as in Chainer; its embedding is 0.

    Raises:
        SizeError: a rank below 1 or above a size.
        DataError: ``initialW`` is an array.

    Source: Lan et al., "ALBERT" (ICLR 2020), section 3.1, which starts from no trained table.
    """

    names = ("in_size", "out_size", "rank", "ignore_label")

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        rank: int,
        initialW: Any = None,
        ignore_label: int | None = None,
    ) -> None:
        super().__init__()
        check_factors(rank, in_size, out_size)
        refuse_array(initialW, "LowRankEmbedID.from_embed_id")
        with self.init_scope():
            self.reduce = L.EmbedID(in_size, rank, initialW, ignore_label)
            self.expand = L.Linear(rank, out_size, nobias=True)

    @classmethod
    def from_embed_id(
        cls,
        link: Any,
        rank: int | None = None,
        *,
        energy: float | None = None,
        limit: int | str | None = None,
    ) -> LowRankEmbedID:
        """Approximate a trained `EmbedID`; arguments and errors as in
        `LowRankLinear.from_linear`.
        """
        table = on_host(link, "W")
        first, second = _cut(table, RankWish(rank, energy, limit), 0)
        made: LowRankEmbedID = filled(
            lambda: cls(*table.shape, rank=len(second), initialW=0, ignore_label=link.ignore_label),
            link,
            {"/reduce/W": first, "/expand/W": second.T},
        )
        return made

    @property
    def in_size(self) -> int:
        """Return the number of identifiers."""
        return int(self.reduce.W.shape[0])

    @property
    def ignore_label(self) -> int | None:
        """Return the identifier whose embedding is 0."""
        label: int | None = self.reduce.ignore_label
        return label

    def forward(self, x: Any) -> Any:
        """Look up identifiers, an int array of any shape; the result has one more axis."""
        return self.expand(self.reduce(x), n_batch_axes=x.ndim)


def _cut(weight: Any, wish: RankWish, bias_bytes: int) -> tuple[Any, Any]:
    """Cut a weight of shape (m, n) to the requested rank, in float64."""
    left, singular, right = decomposed(weight, "the weight")
    unit = int(sum(weight.shape)) * int(np.dtype(weight.dtype).itemsize)
    return factors(left, singular, right, wish.of(singular, unit, bias_bytes))
