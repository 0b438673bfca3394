"""A report of compression: a row for each kind of array, and the decoded buffers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class KindReport:
    """Compression figures of the arrays of one kind: one dtype, one range of sizes.

    Attributes:
        dtype: the arrays' dtype, as NumPy writes it: ``<f4``.
        below_bytes: arrays of this kind have less than these bytes, and at least half of them.
        count: the number of arrays.
        kept_raw_count: the number of arrays that are stored uncompressed.
        array_bytes: the arrays' uncompressed bytes.
        stored_bytes: the arrays' compressed bytes.
    """

    dtype: str
    below_bytes: int
    count: int = 0
    kept_raw_count: int = 0
    array_bytes: int = 0
    stored_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Return stored bytes divided by array bytes."""
        return self.stored_bytes / self.array_bytes if self.array_bytes else 1.0


@dataclass(frozen=True)
class CodecReport:
    """Compression and decompression figures of this process.

    Attributes:
        kinds: a row for each kind of array.
        decoded_count: the number of decoded buffers; uncompressed ones do not count.
        decoded_bytes: the decoded bytes.
        decoding_seconds: the time of decoding.
    """

    kinds: tuple[KindReport, ...]
    decoded_count: int
    decoded_bytes: int
    decoding_seconds: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kinds": [asdict(k) | {"ratio": k.ratio} for k in self.kinds]}

    def __str__(self) -> str:
        rows = [
            f"{k.count} of {k.dtype} below {k.below_bytes} B: {k.ratio:.3f} of their bytes, "
            f"{k.kept_raw_count} kept raw"
            for k in self.kinds
        ]
        return "\n".join(rows)
