"""Data that is loaded when it is needed, and kept by a policy."""

from umem.data.codec import Codec, RawCodec

__all__ = ["Codec", "RawCodec"]
