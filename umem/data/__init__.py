"""Data that is loaded when it is needed, and kept by a policy.

    order = umem.data.known_order(seed=0)
    data = umem.data.cached(dataset, memory="2GiB", disk="20GiB", order=order)
    iterator = chainer.iterators.SerialIterator(data, 20, order_sampler=order)

Chainer is not needed. docs/data.md has the whole picture.
"""

from typing import TYPE_CHECKING

from umem.data.caching import CachedDataset, cached
from umem.data.codec import Codec, RawCodec
from umem.data.codec_report import CodecReport, KindReport
from umem.data.compressed_rows import CompressedRows, RowsReport
from umem.data.compression import BloscCodec
from umem.data.counters import DataCounters
from umem.data.epoch_draws import ClassBalanced, EpochBits, Weighted, shuffle, with_replacement
from umem.data.images import JpegImages, LabeledJpegImages
from umem.data.orders import KnownOrder, known_order
from umem.data.sparse import SparseRows

__all__ = [
    "BloscCodec",
    "CachedDataset",
    "ClassBalanced",
    "Codec",
    "CodecReport",
    "CompressedRows",
    "DataCounters",
    "EpochBits",
    "JpegImages",
    "KindReport",
    "KnownOrder",
    "LabeledJpegImages",
    "RawCodec",
    "RowsReport",
    "SparseRows",
    "Weighted",
    "cached",
    "known_order",
    "shuffle",
    "with_replacement",
]

if TYPE_CHECKING:
    from umem.data.caching import reported
    from umem.data.items import pack
else:
    from umem._common.faces import face

    _, __getattr__ = face(__name__, caching="reported", items="pack")
