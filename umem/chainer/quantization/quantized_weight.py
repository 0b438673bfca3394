"""A weight in 8 or 4 bits, on any device; several layers may share one."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer.backend import get_array_module

from umem.chainer.quantization.scheme import (
    MOST_OF_GROUP,
    Scheme,
    column_chunks,
    encode_rows,
    row_chunks,
    spread,
)

_OFFSET = 8
"""Added to 4-bit codes, so that they are stored unsigned."""


class QuantizedWeight(chainer.Link):
    """Codes (n, k) and a scale for each row of a weight, stored as persistents, not as parameters.

    Args:
        rows, columns: n and k.
        scheme: how it is quantised.
        device: its Chainer device.

    Attributes:
        codes: int8 (n, k); in 4 bits uint8 (n, ceil(k / 2)), where a byte has a column of even
            number in its low half and the next one in its high half, each plus 8.
        multipliers: uint8 (n, ceil(k / group)), from 1 to 18; None without groups.
        scales: float32 (n,).
    """

    codes: Any
    scales: Any
    multipliers: Any

    def __init__(self, rows: int, columns: int, scheme: Scheme, device: Any = "@numpy") -> None:
        super().__init__()
        device = chainer.get_device(device)
        self.to_device(device)
        xp = device.xp
        self.shape, self.scheme = (rows, columns), scheme
        if scheme.bits == 8:
            self.add_persistent("codes", xp.zeros((rows, columns), np.int8))
        else:
            self.add_persistent("codes", xp.zeros((rows, -(-columns // 2)), np.uint8))
        self.add_persistent("scales", xp.ones(rows, np.float32))
        if scheme.group is None:
            self.multipliers = None
        else:
            groups = -(-columns // scheme.group)
            self.add_persistent("multipliers", xp.ones((rows, groups), np.uint8))

    @classmethod
    def of(cls, weight: Any, scheme: Scheme) -> QuantizedWeight:
        """Quantise a weight chunk by chunk; temporaries take about 4 MiB, or one row.

        Args:
            weight: floats, finite in float32; rows are the first axis.
        """
        rows = weight.reshape(len(weight), -1)
        device = chainer.backend.get_device_from_array(weight)
        made = cls(int(rows.shape[0]), int(rows.shape[1]), scheme, device)
        for chunk in row_chunks(*rows.shape):
            codes, multipliers, scales = encode_rows(rows[chunk], scheme)
            made.codes[chunk] = codes if scheme.bits == 8 else _pack(codes)
            made.scales[chunk] = scales
            if multipliers is not None:
                made.multipliers[chunk] = multipliers
        return made

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays."""
        multipliers = 0 if self.multipliers is None else self.multipliers.nbytes
        return int(self.codes.nbytes + self.scales.nbytes + multipliers)

    def part(self, rows: slice, columns: slice) -> Any:
        """Return codes times their groups' multipliers, integers in float32.

        Args:
            rows: a range. columns: a range that starts at a multiple of 512.
        """
        if self.scheme.bits == 8:
            return self.codes[rows, columns].astype(np.float32)
        width = columns.stop - columns.start
        packed = self.codes[rows, columns.start // 2 : -(-columns.stop // 2)]
        part = _unpack(packed)[:, :width]
        if self.multipliers is not None:
            group = self.scheme.group
            first, last = columns.start // group, -(-columns.stop // group)
            part *= spread(self.multipliers[rows, first:last], group, width)
        return part

    def rows_at(self, numbers: Any) -> Any:
        """Return the rows with these numbers dequantised: float32 (*numbers.shape, k)."""
        picked = self.codes[numbers]
        if self.scheme.bits == 8:
            found = picked.astype(np.float32)
        else:
            width = self.shape[1]
            flat = _unpack(picked.reshape(-1, picked.shape[-1]))[:, :width]
            if self.multipliers is not None:
                by_group = self.multipliers[numbers].reshape(len(flat), -1)
                flat *= spread(by_group, self.scheme.group, width)
            found = flat.reshape(*numbers.shape, width)
        found *= self.scales[numbers][..., None]
        return found

    def largest_sum(self) -> int:
        """Return the largest possible magnitude of an integer product with an input."""
        most = 0
        for chunk in row_chunks(*self.shape):
            sums = sum(
                abs(self.part(chunk, columns)).sum(axis=1, dtype=np.float64)
                for columns in column_chunks(self.shape[1])
            )
            most = max(most, int(sums.max()))
        return most * self.scheme.levels

    def wrong(self) -> str | None:
        """Describe what is wrong with loaded arrays; None if they are valid."""
        xp = get_array_module(self.scales)
        if not bool((xp.isfinite(self.scales) & (self.scales > 0)).all()):
            return "a scale is not a positive number"
        least = int(self.codes.min())
        if self.scheme.bits == 8 and least < -127:
            return "a code is below -127"
        if self.scheme.bits == 4 and not bool(((self.codes & 15) > 0).all()):
            return "a code is below -7"
        if self.scheme.bits == 4 and not bool(((self.codes >> 4) > 0).all()):
            return "a code is below -7"
        if self.multipliers is not None and not bool(
            ((self.multipliers > 0) & (self.multipliers <= MOST_OF_GROUP)).all()
        ):
            return f"a multiplier is not from 1 to {MOST_OF_GROUP}"
        return None


def _pack(codes: Any) -> Any:
    """Pack two 4-bit codes into a byte; an odd last one is padded with 0."""
    rows, columns = codes.shape
    xp = get_array_module(codes)
    shifted = xp.full((rows, columns + columns % 2), _OFFSET, np.uint8)
    xp.add(codes, np.int8(_OFFSET), out=shifted.view(np.int8)[:, :columns])
    return shifted[:, 0::2] | (shifted[:, 1::2] << np.uint8(4))


def _unpack(packed: Any) -> Any:
    """Unpack bytes to 4-bit codes: float32 with twice the columns."""
    xp = get_array_module(packed)
    codes = xp.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
    codes[:, 0::2] = packed & np.uint8(15)
    codes[:, 1::2] = packed >> np.uint8(4)
    codes -= np.float32(_OFFSET)
    return codes
