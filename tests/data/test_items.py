"""Items of a dataset as bytes and back."""

from __future__ import annotations

import struct
import zlib
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.data.codec import RawCodec
from umem.data.items import buffer_bytes, pack, unpack
from umem.errors import DataError, UnsupportedError

RAW = RawCodec()


class Zlib:
    """Writes what is of floating point smaller, and leaves the rest."""

    name = "zlib"

    def compress(self, buffer: memoryview, dtype: str) -> bytes | None:
        return zlib.compress(buffer) if dtype == "<f4" else None

    def decompress(self, data: memoryview, nbytes: int) -> Any:
        return zlib.decompress(data)


def alike(a: Any, b: Any) -> bool:
    """Whether two values have the same types, layouts and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides
        return same and a.tobytes() == b.tobytes()
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (float, complex, np.generic)):
        return np.array(a).tobytes() == np.array(b).tobytes()
    return bool(a == b)


ARRAYS = st.sampled_from(
    [
        np.arange(6, dtype="f").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5, ">f8"),
        np.zeros((0, 4), np.float16),
        np.array([True, False]),
        np.array(["2026-11-23"], "M8[D]"),
        np.array([(1, (2.0, 3.0))], [("a", "<i4"), ("b", "<f8", (2,))]),
        np.array(["a", "bc"]),
        np.array([np.nan, -0.0, np.inf], "f"),
    ]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_subnormal=True), st.text(),
    st.binary(), st.complex_numbers(), ARRAYS,
    st.sampled_from([np.float32(1.5), np.int64(-3), np.str_("x"), np.bool_(True)]),
)  # fmt: skip
ITEMS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.thorough
@given(ITEMS, st.sampled_from([RAW, Zlib()]))
def test_an_item_comes_back_with_its_types_and_bits(item: Any, codec: Any) -> None:
    assert alike(unpack(pack(item, codec), codec), item)


def test_the_bits_of_a_number_that_is_none_come_back() -> None:
    for bits in ("fff8000000000000", "7ff8000000000123"):
        (nan,) = struct.unpack(">d", bytes.fromhex(bits))
        found = unpack(pack((nan, complex(1, nan)), RAW), RAW)
        assert struct.pack(">d", found[0]).hex() == bits
        assert struct.pack(">d", found[1].imag).hex() == bits


def test_what_comes_back_is_the_callers_alone() -> None:
    data = bytearray(pack(np.arange(4), RAW))
    found = unpack(data, RAW)
    found += 1
    assert unpack(data, RAW).tolist() == [0, 1, 2, 3]
    data.clear()  # BufferError where something still looks at it


def test_strided_arrays_and_mapped_ones_come_back_dense(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4, 4))
    mapped[:] = np.arange(16).reshape(4, 4)
    found = unpack(pack(mapped[::2, ::2], RAW), RAW)
    assert type(found) is np.ndarray and found.tolist() == [[0, 2], [8, 10]]


@pytest.mark.parametrize(
    "item, said",
    [
        ((1, np.array([None])), "the item[1] is an array of dtype object"),
        ({"x": {1, 2}}, "the item['x'] is a builtins.set"),
        ({3: 1}, "has the key 3, not text"),
        (np.ma.masked_array([1]), "is a numpy.ma.MaskedArray"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
    ],
)
def test_what_cannot_be_kept_is_named(item: Any, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        pack(item, RAW)
    assert said in str(caught.value) and "outside of the cache" in str(caught.value)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]}),
        np.dtype([(("title", "a"), "i4")]),
        np.dtype("f4", metadata={"unit": "m"}),
        np.dtype([("a", "O")]),
    ],
)
def test_a_dtype_that_would_not_come_back_is_named(dtype: Any) -> None:
    with pytest.raises(UnsupportedError, match="is an array of dtype"):
        pack([np.zeros(3, dtype)], RAW)


def test_a_dtype_that_numpy_does_not_know_is_named() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with pytest.raises(UnsupportedError, match=r"the item\[0\] is an array of dtype bfloat16"):
        pack((np.ones(3, bfloat16),), RAW)


@pytest.mark.parametrize(
    "item",
    [np.bytes_(b"a\0"), np.str_("a\0"), 1 << 20_000, -(1 << 63), 1 << 63, "\ud800"],
    ids=range(6),
)
def test_values_at_the_edge_come_back(item: Any) -> None:
    found = unpack(pack(item, RAW), RAW)
    assert type(found) is type(item)
    assert [*found] == [*item] if isinstance(item, (str, bytes)) else found == item


def test_what_is_in_itself_or_nested_too_deeply_is_refused() -> None:
    inside: list[Any] = []
    inside.append(inside)
    with pytest.raises(UnsupportedError, match="nested too deeply, or in itself"):
        pack(inside, RAW)


@given(st.data())
def test_bytes_that_are_cut_are_noticed(data: st.DataObject) -> None:
    whole = pack((np.arange(5), "x"), RAW)
    with pytest.raises(DataError):
        unpack(whole[: data.draw(st.integers(0, len(whole) - 1))], RAW)


def test_bytes_of_buffers_and_those_kept_raw_are_told() -> None:
    packed = pack((np.zeros(100, "f"), np.zeros(10, "u1")), Zlib())
    assert buffer_bytes(packed) == (410, 10) and len(packed) < 200
