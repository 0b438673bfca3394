"""Files of safetensors, against the library: what one writes the other reads, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umem._common.files import FileError
from umem._common.safetensors_file import SafetensorsFile, header, pieces
from umem.graphs import cut, karate_club

library = pytest.importorskip("safetensors.numpy")

TYPES = ("bool", "uint8", "int8", "float16", "int32", "float32", "complex64", "float64", "int64")
SHAPES = ((), (5,), (0, 3), (2, 3, 4))


def arrays() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        f"/link {number}/ä{kind}": np.array(100 * random.random(shape)).astype(kind)
        for number, shape in enumerate(SHAPES)
        for kind in TYPES
    }


def same(found: Any, wanted: Any) -> bool:
    return sorted(found) == sorted(wanted) and all(
        found[name].dtype == array.dtype
        and found[name].shape == array.shape
        and found[name].tobytes() == array.tobytes()
        for name, array in wanted.items()
    )


@pytest.mark.parametrize("notes", [None, {"made by": "somebody, é"}])
def test_what_the_library_writes_is_read(tmp_path: Path, notes: Any) -> None:
    library.save_file(arrays(), tmp_path / "file", notes)
    found = SafetensorsFile(tmp_path / "file")
    assert same(found, arrays()) and found.notes == (notes or {})
    assert found.described["/link 3/äint32"] == ((2, 3, 4), "int32")


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"".join(pieces(arrays(), {"a": "b"})))
    assert same(library.load_file(tmp_path / "file"), arrays())
    assert b"".join(pieces({})) == library.save({})


def test_the_library_reads_a_part_of_a_cut(tmp_path: Path) -> None:
    part = cut(karate_club(), 2, tmp_path / "cut", assignment=np.arange(34) % 2).part(1)
    found = library.load_file(tmp_path / "cut" / "part-00001.safetensors")
    assert same(found, {name: np.array(array) for name, array in part._asdict().items()})


def test_an_array_that_was_read_is_the_readers_own_and_one_that_is_mapped_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(b"".join(pieces({"a": np.arange(12.0).reshape(3, 4)})))
    found = SafetensorsFile(tmp_path / "file")
    mapped, part = found.mapped("a"), found.part("a", slice(3, 9))
    found["a"][:] = 0
    part[:] = 0
    assert isinstance(mapped, np.memmap) and not mapped.flags.writeable
    found.close()
    np.testing.assert_array_equal(mapped, np.arange(12.0).reshape(3, 4))


def test_stretches_are_read(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    (tmp_path / "file").write_bytes(b"".join(pieces({"a": array})))
    found = SafetensorsFile(tmp_path / "file")
    for start in range(25):
        for stop in range(start, 25):
            np.testing.assert_array_equal(
                found.part("a", slice(start, stop)), array.ravel()[start:stop]
            )


def test_arrays_may_lie_at_any_byte(tmp_path: Path) -> None:
    a, b = np.array([True]), np.arange(3, dtype=np.float64)
    head = header({"a": a, "b": b}, alignment=1)
    (tmp_path / "file").write_bytes(head + a.tobytes() + b.tobytes())
    assert same(SafetensorsFile(tmp_path / "file"), {"a": a, "b": b})


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "said",
    [
        [],
        {"a": 3},
        {"a": {}},
        {"a": entry("BF16", (4,))},
        {"a": entry(["F32"])},
        {"a": entry(shape=3)},
        {"a": entry(shape=(-2, -1))},
        {"a": entry(shape=(2.0,))},
        {"a": entry(shape=(True, 2))},
        {"a": entry(shape=(3,))},
        {"a": entry(offsets=(0,))},
        {"a": entry(offsets=(0, 12))},
        {"a": entry(offsets=(4, 12))},
        {"a": entry(offsets=("0", "8"))},
        {"a": entry(), "b": entry()},
        {"a": entry(shape=(1,), offsets=(0, 4))},
        {"a": entry(), "b": entry(shape=(0, 10**30), offsets=(8, 8))},
        {"a": entry(), "b": entry(shape=(0,) * 99, offsets=(8, 8))},
        {"a": entry(), "__metadata__": 3},
        {"a": entry(), "__metadata__": {"b": 3}},
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, said: Any) -> None:
    text = json.dumps(said).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=r"header|damaged"):
        SafetensorsFile(tmp_path / "file")


@pytest.mark.parametrize("content", [b"", b"no header", (1 << 40).to_bytes(8, "little") + b"{}"])
def test_what_does_not_begin_with_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="it does not begin with a header"):
        SafetensorsFile(tmp_path / "file")


def test_a_file_that_is_torn_anywhere_is_refused(tmp_path: Path) -> None:
    whole = b"".join(pieces(arrays(), {"a": "b"}))
    for length in range(0, len(whole), 7):
        (tmp_path / "file").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"header|damaged"):
            SafetensorsFile(tmp_path / "file")
    (tmp_path / "file").write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=r"instead of \d+: it is damaged"):
        SafetensorsFile(tmp_path / "file")


def test_brackets_without_end_are_refused(tmp_path: Path) -> None:
    text = b"[" * 200_000
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="its header"):
        SafetensorsFile(tmp_path / "file")


def test_only_files_are_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SafetensorsFile(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        SafetensorsFile(tmp_path)
    with pytest.raises(FileError, match="a device"):
        SafetensorsFile(Path("/dev/null"))


def test_the_headers_are_those_that_were_written_so_far() -> None:
    """A part's begins its arrays at 64 bytes, for rows that are read where they lie."""
    rows = np.zeros((3, 2), np.float32)
    compact = b'{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}'
    spaced = (
        b'{"__metadata__": {"a": "b"}, '
        b'"x": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}'
    )
    notes = {"a": "b"}
    assert header({"x": rows}, notes) == (88).to_bytes(8, "little") + compact.ljust(88)
    wide = header({"x": rows}, notes, alignment=64, separators=(", ", ": "))
    assert wide == (120).to_bytes(8, "little") + spaced.ljust(120)
