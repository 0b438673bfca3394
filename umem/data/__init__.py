"""Data that is loaded when it is needed, and kept by a policy."""

from umem.data.codec import Codec, RawCodec
from umem.data.codec_report import CodecReport, KindReport
from umem.data.compression import BloscCodec

__all__ = ["BloscCodec", "Codec", "CodecReport", "KindReport", "RawCodec"]
