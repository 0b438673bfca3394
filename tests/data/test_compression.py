"""Compression of buffers: to the bit, by the way that shrinks them, and safe in children."""

from __future__ import annotations

import pickle
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from processes import printed, python

from umem.data.items import pack, unpack
from umem.errors import DataError, MissingDependencyError, UnsupportedError

pytest.importorskip("blosc2")
from umem.data.compression import BloscCodec  # isort: skip

RANDOM = np.random.default_rng(0)


def stored(array: Any, codec: BloscCodec | None = None) -> bytes | None:
    raw = np.ascontiguousarray(array).reshape(-1)
    return (codec or BloscCodec()).compress(raw.view(np.uint8).data, raw.dtype.str)


def ratio(array: Any) -> float:
    found = stored(array)
    return 1.0 if found is None else len(found) / array.nbytes


def pixels(count: int) -> Any:
    return RANDOM.integers(0, 256, count).astype("f") / np.float32(255)


def counts(rows: int, columns: int) -> Any:
    found = RANDOM.poisson(0.3, (rows, columns)).astype("f")
    return found / np.maximum(found.sum(1, keepdims=True), 1)


def test_features_pixels_and_counts_shrink_to_three_fifths_and_normals_to_less() -> None:
    normals = RANDOM.standard_normal(1 << 16, dtype="f")
    assert ratio(np.maximum(normals, 0)) <= 0.6
    assert ratio(pixels(1 << 16)) <= 0.6
    assert ratio(counts(256, 256)) <= 0.6
    assert 0.8 < ratio(normals) < 0.9


def test_what_does_not_shrink_below_nine_tenths_is_left() -> None:
    codec = BloscCodec()
    assert stored(RANDOM.integers(0, 256, 1 << 14, dtype="u1"), codec) is None
    assert stored(RANDOM.integers(0, 1 << 32, 1 << 13, dtype="u4").view("f"), codec) is None
    assert [kind.kept_raw_count for kind in codec.report().kinds] == [1, 1]
    assert [kind.stored_bytes for kind in codec.report().kinds] == [1 << 14, 1 << 15]


def test_what_is_small_is_left() -> None:
    assert stored(np.zeros(127, "u1")) is None and stored(np.zeros(128, "u1")) is not None


def test_an_array_after_noise_is_compressed() -> None:
    codec = BloscCodec()
    noise, zeros = RANDOM.integers(0, 1 << 32, 1 << 10, dtype="u4"), np.zeros(1 << 10, "u4")
    found = [stored(array, codec) for array in [noise] + [zeros] * 20]
    assert found[0] is None and all(each is not None for each in found[1:])


def test_an_array_that_is_not_like_its_kind_is_left_all_the_same() -> None:
    codec = BloscCodec()
    for _ in range(3):
        assert stored(np.zeros(1 << 12, "u1"), codec) is not None
    stored(np.zeros(1 << 12, "u1"), codec)
    assert stored(RANDOM.integers(0, 256, 1 << 12, dtype="u1"), codec) is None
    assert codec.report().kinds[0].kept_raw_count == 1


def test_the_same_arrays_are_the_same_bytes_in_any_order() -> None:
    arrays = [pixels(1000 + 100 * i) for i in range(20)]
    first, second = BloscCodec(), BloscCodec()
    found = [stored(a, first) for a in arrays]
    assert found == [stored(a, second) for a in arrays[::-1]][::-1]


DTYPES = st.one_of(
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.boolean_dtypes(),
    hnp.byte_string_dtypes(max_len=300),
    hnp.datetime64_dtypes(endianness="?"),
    st.just(np.dtype([("a", "<f4"), ("b", ">i8", (3,))])),
)
LAYOUTS = st.sampled_from(
    [lambda a: a, lambda a: a.T, lambda a: a[::2], lambda a: a[..., ::-1], np.asfortranarray]
)


@st.composite
def arrays(draw: Any) -> Any:
    """Arrays of all types and layouts, some of zeros, some of noise, some repetitive."""
    dtype, seed = draw(DTYPES), draw(st.integers(0, 9))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=24))
    count = int(np.prod(shape)) * dtype.itemsize
    high = draw(st.sampled_from([1, 3, 256]))
    raw = np.random.default_rng(seed).integers(0, high, count, dtype=np.uint8)
    made = np.frombuffer(raw.tobytes(), dtype).reshape(shape) if count else np.empty(shape, dtype)
    return draw(LAYOUTS)(made) if made.ndim else made


@pytest.mark.thorough
@given(st.lists(arrays(), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_array_comes_back_to_the_bit(found: Any) -> None:
    codec = BloscCodec()
    for each, back in zip(found, unpack(pack(found, codec), codec), strict=True):
        assert (back.dtype, back.shape, back.tobytes()) == (each.dtype, each.shape, each.tobytes())
        assert back.flags.writeable and back.flags.owndata | (back.base is not None)


def test_items_whose_shapes_change_share_few_kinds() -> None:
    codec = BloscCodec()
    for length in range(1, 2000):
        item = np.arange(length, dtype="i4")
        assert (unpack(pack(item, codec), codec) == item).all()
    assert len(codec.report().kinds) <= 13


def test_a_read_only_array_and_one_of_objects() -> None:
    codec, array = BloscCodec(), np.zeros(1000, "f")
    array.flags.writeable = False
    found = unpack(pack(array, codec), codec)
    found[0] = 1
    assert array[0] == 0
    with pytest.raises(UnsupportedError):
        pack(np.array([{}], object), codec)


def test_what_is_decoded_is_counted() -> None:
    codec = BloscCodec()
    packed = pack((np.zeros(1000, "f"), np.float32(3), np.zeros(10, "u1")), codec)
    for _ in range(3):
        unpack(packed, codec)
    report = codec.report()
    assert (report.decoded_count, report.decoded_bytes) == (3, 12000)
    assert report.to_json()["kinds"][0]["ratio"] == report.kinds[0].ratio < 0.1
    assert "<f4 below 4096 B" in str(report) and "kept raw" in str(report)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_bytes_that_were_changed_are_an_error_or_as_many_bytes(data: Any) -> None:
    """Blosc2 has no checksum; nothing may be written beyond the array, whatever the bytes say."""
    codec = BloscCodec()
    good = stored(np.tile(np.arange(100, dtype="i4"), 20), codec)
    assert good is not None
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(bad)[: data.draw(st.integers(0, len(bad)))]
    try:
        assert codec.decompress(cut, 8000).nbytes == 8000
    except DataError as error:
        assert "8000 bytes" in str(error)


@pytest.mark.parametrize("nbytes", [0, 1, 7999, 8001, 1 << 20])
def test_a_length_that_the_header_does_not_say_is_refused(nbytes: int) -> None:
    codec = BloscCodec()
    good = stored(np.tile(np.arange(100, dtype="i4"), 20), codec)
    with pytest.raises(DataError, match="its header says"):
        codec.decompress(good, nbytes)


def test_several_threads_may_use_one_codec() -> None:
    codec, wrong = BloscCodec(), []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            array = random.poisson(0.3, random.integers(1, 50_000)).astype("f")
            if (unpack(pack(array, codec), codec) != array).any():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sum(kind.count for kind in codec.report().kinds) == 120


def test_a_codec_goes_to_another_process() -> None:
    codec = BloscCodec()
    array = pixels(1 << 12)
    want = stored(array, codec)
    again = pickle.loads(pickle.dumps(codec))
    assert again.report().kinds == () and stored(array, again) == want


def test_without_blosc2_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    with pytest.raises(MissingDependencyError, match="pip install 'blosc2"):
        BloscCodec()


CHILD = """
import multiprocessing, os, sys, threading, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import numpy as np
from umem.data.compression import BloscCodec
from umem.data.items import pack, unpack

ARRAY = np.tile(np.arange(1000, dtype="f"), 1000)

def work(codec, packed, answer):
    assert (unpack(packed, codec) == ARRAY).all()
    assert (unpack(pack(ARRAY, codec), codec) == ARRAY).all()
    answer.put("done")

def main(method, before):
    codec = BloscCodec()
    packed = pack(ARRAY, codec)
    if before == "pool":  # the program's own use, whose threads no child has
        import blosc2
        blosc2.decompress2(blosc2.compress2(ARRAY, typesize=4, nthreads=2), nthreads=2)
        blosc2.asarray(ARRAY)[5:10]
    if before == "busy":  # a child is made while others are in the middle of it
        going = True
        def loop():
            while going:
                unpack(packed, codec), pack(ARRAY, codec)
        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads: thread.start()
    context = multiprocessing.get_context(method)
    answer = context.SimpleQueue()
    for _ in range(5 if method == "fork" else 1):
        child = context.Process(target=work, args=(codec, packed, answer))
        child.start()
        child.join(40)
        if child.is_alive():
            child.kill()
            os._exit(3)
        print(answer.get() if child.exitcode == 0 else f"exit {child.exitcode}", flush=True)
    if before == "busy":
        going = False
        for thread in threads: thread.join()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "before"),
    [
        ("fork", "used"),
        ("fork", "pool"),
        ("fork", "busy"),
        ("forkserver", "busy"),
        ("spawn", "busy"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_child_of_a_process_that_compressed_decodes(
    method: str, before: str, tmp_path: Any
) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(CHILD))
    done = python(script, method, before, timeout=60)
    times = 5 if method == "fork" else 1
    assert (done.returncode, done.stdout.split()) == (0, ["done"] * times), done.stderr


def test_no_thread_of_blosc2_is_started() -> None:
    code = """
import os, blosc2, numpy as np
from umem.data.compression import BloscCodec
codec = BloscCodec()
before = len(os.listdir("/proc/self/task"))
array = np.zeros(1 << 22, "f")
stored = codec.compress(array.view("u1").data, "<f4")
codec.decompress(stored, array.nbytes)
print(len(os.listdir("/proc/self/task")) - before)
"""
    if sys.platform != "linux":
        pytest.skip("threads are counted in /proc")
    assert printed("-c", code) == "0\n"
