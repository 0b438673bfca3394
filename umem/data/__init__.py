"""Data that is loaded when it is needed, and kept by a policy."""

from umem.data.codec import Codec, RawCodec
from umem.data.codec_report import CodecReport, KindReport
from umem.data.compressed_rows import CompressedRows, RowsReport
from umem.data.compression import BloscCodec
from umem.data.images import JpegImages, LabeledJpegImages
from umem.data.sparse_rows import SparseRows

__all__ = [
    "BloscCodec",
    "Codec",
    "CodecReport",
    "CompressedRows",
    "JpegImages",
    "KindReport",
    "LabeledJpegImages",
    "RawCodec",
    "RowsReport",
    "SparseRows",
]
