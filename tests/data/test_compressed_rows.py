"""Rows kept compressed: what comes back, and what it costs to have them."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.data import CompressedRows
from umem.errors import SizeError, UnsupportedError

pytest.importorskip("blosc2")


def counts(rows: int, columns: int, dtype: str = "f4") -> Any:
    return np.random.default_rng(0).poisson(0.3, (rows, columns)).astype(dtype)


@given(
    st.integers(0, 60),
    st.sampled_from([(), (0,), (1,), (7,), (3, 5), (400,)]),
    st.sampled_from(["f4", ">i2", "c8", "?", "U3", "M8[s]", "i4,f8"]),
    st.integers(1, 5000),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_rows_are_those_of_the_array_however_asked_for(
    n: int, shape: tuple[int, ...], dtype: str, block: int, data: Any
) -> None:
    array = np.zeros((n, *shape), dtype)
    if dtype not in ("U3", "i4,f8"):
        array[...] = np.random.default_rng(n).integers(0, 9, array.shape).astype(array.dtype)
    rows = CompressedRows(np.asfortranarray(array), block)
    assert (len(rows), rows.shape, rows.dtype) == (n, array.shape, array.dtype)
    places = data.draw(st.lists(st.integers(-n, n - 1), max_size=9)) if n else []
    for i in places:
        one = rows[i]
        assert type(one) is type(array[i]) or shape == ()
        assert one.dtype == array[i].dtype and np.all(one == array[i])
    index = np.array(places, np.int64)
    for found, want in ((rows[places], array[index]), (rows[index], array[index])):
        assert found.shape == want.shape and found.dtype == want.dtype and (found == want).all()
    part = data.draw(st.slices(n))
    assert rows[part].shape == array[part].shape and (rows[part] == array[part]).all()


def test_rows_handed_out_are_the_callers_own() -> None:
    array = counts(100, 10)
    rows = CompressedRows(array)
    rows[3][:] = 7
    rows[0:5][:] = 7
    assert (rows[3] == array[3]).all() and (rows[:] == array).all()


def test_bytes_decoded_for_each_byte_used_are_counted() -> None:
    array = counts(1024, 64)  # rows of 256 bytes, 64 in a block of 16 KiB
    rows = CompressedRows(array, "16KiB")
    assert rows.report().decoded_for_used is None
    for i in (0, 64, 0, 64):
        rows[i]
    report = rows.report()
    assert (report.used_bytes, report.decoded_bytes) == (4 * 256, 4 * 16384)
    assert report.decoded_for_used == 64 and report.block_bytes == 16384
    assert "64.0 bytes decoded for each byte used" in str(report)
    assert report.to_json()["decoded_for_used"] == 64


def test_reading_in_order_decodes_each_block_once() -> None:
    array = counts(1000, 64)
    rows = CompressedRows(array, "16KiB")
    assert all((a == b).all() for a, b in zip(rows, array, strict=True))
    assert rows.report().decoded_for_used == 1


def test_rows_asked_for_at_once_decode_each_block_once() -> None:
    array = counts(1024, 64)
    rows = CompressedRows(array, "16KiB")
    order = np.random.default_rng(1).permutation(1024)
    assert (rows[order] == array[order]).all()
    assert rows.report().decoded_for_used == 1


def test_a_block_of_one_row_decodes_what_is_used() -> None:
    rows = CompressedRows(counts(50, 1024), 1)
    for i in np.random.default_rng(0).integers(0, 50, 200):
        rows[i]
    report = rows.report()
    assert report.block_bytes == 4096 and report.decoded_for_used <= 1


def test_rows_that_do_not_shrink_are_read_without_decoding() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (500, 64), dtype=np.uint8)
    rows = CompressedRows(noise)
    assert (rows[[5, 1]] == noise[[5, 1]]).all() and (rows[499] == noise[499]).all()
    report = rows.report()
    assert (report.ratio, report.decoded_bytes, report.used_bytes) == (1, 0, 192)


def test_stored_bytes_are_those_of_the_blocks() -> None:
    report = CompressedRows(counts(4096, 64), "256KiB").report()
    assert report.ratio < 0.15 and report.array_bytes == 1 << 20
    assert report.stored_bytes == report.codec.kinds[0].stored_bytes


def test_a_mapped_array_is_read_and_let_go(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", counts(100, 64))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    rows = CompressedRows(mapped)
    (tmp_path / "x.npy").unlink()
    assert (rows[:] == counts(100, 64)).all() and type(rows[:]) is np.ndarray


def test_another_process_gets_the_rows_and_counts_of_its_own() -> None:
    rows = CompressedRows(counts(100, 64))
    rows[3]
    again = pickle.loads(pickle.dumps(rows))
    assert again.report().used_bytes == 0 and (again[:] == rows[:]).all()


def test_several_threads_may_read() -> None:
    array, wrong = counts(2000, 64), []
    rows = CompressedRows(array)

    def work(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, 2000, 500):
            if (rows[i] != array[i]).any():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and rows.report().used_bytes == 4 * 500 * 256


@pytest.mark.parametrize("wrong", [np.array(3.0), np.array([None, 1])])
def test_what_has_no_rows_of_numbers_is_refused(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="rows must be an array of numbers"):
        CompressedRows(wrong)


def test_sizes_and_places_that_are_none() -> None:
    with pytest.raises(SizeError, match="block"):
        CompressedRows(counts(3, 3), 0)
    with pytest.raises(IndexError, match="item 3 of 3"):
        CompressedRows(counts(3, 3))[3]
