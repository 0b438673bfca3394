"""Compressed files are read a piece at a time, within limits, and to their end."""

from __future__ import annotations

import gzip
import io
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.trace.file import Inflating, TooLargeError


def inflated(content: bytes, most: int = 1 << 30, buffer: int = 1 << 16) -> bytes:
    return io.BufferedReader(Inflating(io.BytesIO(content), most), buffer).read()


@given(st.binary(max_size=5000), st.sampled_from((1, 9)), st.sampled_from((1, 7, 100, 1 << 16)))
def test_what_was_compressed_comes_out(content: bytes, level: int, buffer: int) -> None:
    assert inflated(gzip.compress(content, level, mtime=0), buffer=buffer) == content
    assert inflated(gzip.compress(content * 50, level, mtime=0), buffer=buffer) == content * 50


def test_a_header_with_a_name_is_passed_over() -> None:
    file = io.BytesIO()
    with gzip.GzipFile("a name", "wb", 6, file) as packed:
        packed.write(b"text")
    assert inflated(file.getvalue()) == b"text"
    plain = bytearray(gzip.compress(b"text", mtime=0))
    plain[3] = 8
    plain[10:10] = b"n" * (8 << 20) + b"\0"
    assert inflated(bytes(plain)) == b"text"


def test_nothing_is_in_an_empty_file() -> None:
    assert inflated(b"") == b""


def test_a_bomb_is_left_as_soon_as_it_is_one() -> None:
    """Of 100 MB of zeros in 100 kB no more is read from the file than the limit takes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(100)) + packer.flush()
    file = io.BytesIO(bomb)
    with pytest.raises(TooLargeError):
        io.BufferedReader(Inflating(file, 1 << 20), 1 << 16).read()
    assert file.tell() < len(bomb) // 2
