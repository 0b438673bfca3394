"""JPEG files as a dataset: what Pillow and Chainer give, smaller where asked, errors with names."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umem.compat import find_package
from umem.data import JpegImages, LabeledJpegImages, RawCodec
from umem.data.items import pack, unpack
from umem.errors import DataError, FileError, MissingDependencyError, SizeError

pytest.importorskip("simplejpeg")
Image = pytest.importorskip("PIL.Image")
HEIGHT, WIDTH = 101, 67


def picture(height: int = HEIGHT, width: int = WIDTH) -> Any:
    y, x = np.mgrid[:height, :width]
    bands = [(np.sin(x / 9 + band) + np.cos(y / 7) + 2) * 60 for band in range(3)]
    return Image.fromarray(np.stack(bands, -1).astype("u1"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    picture().save(tmp_path / "colour.jpg", quality=90)
    picture().save(tmp_path / "progressive.jpg", progressive=True, subsampling=0)
    picture().convert("L").save(tmp_path / "grey.jpg")
    picture().convert("CMYK").save(tmp_path / "print.jpg")
    picture(9, 300).save(tmp_path / "wide.jpg")
    return tmp_path


NAMES = ["colour.jpg", "progressive.jpg", "grey.jpg", "wide.jpg"]


def pillow(path: Path) -> Any:
    """Channels, height and width, as Chainer makes them of what Pillow reads."""
    pixels = np.asarray(Image.open(path))
    return (pixels[..., None] if pixels.ndim == 2 else pixels).transpose(2, 0, 1)


def test_images_are_those_that_pillow_reads(folder: Path) -> None:
    images = JpegImages(NAMES, folder)
    assert len(images) == 4 and images.exact
    for name, found in zip(NAMES, images[:], strict=True):
        want = pillow(folder / name)
        assert found.dtype == np.float32 and found.flags.c_contiguous
        assert found.shape == want.shape and (found == want).all()


@pytest.mark.skipif(find_package() is None, reason="no Chainer")
def test_items_are_those_of_chainers_datasets(folder: Path) -> None:
    import umem.chainer  # noqa: F401  isort: skip  (before chainer)
    from chainer.datasets import ImageDataset, LabeledImageDataset

    (folder / "paths.txt").write_text("colour.jpg\ngrey.jpg\n")
    (folder / "pairs.txt").write_text("colour.jpg 3\ngrey.jpg -1\n")
    for given in (str(folder / "paths.txt"), ["colour.jpg", "grey.jpg"]):
        ours, theirs = JpegImages(given, str(folder)), ImageDataset(given, str(folder))
        for a, b in zip(ours[:], theirs[:], strict=True):
            assert a.dtype == b.dtype and (a == b).all()
    for given in (str(folder / "pairs.txt"), [("colour.jpg", 3), ("grey.jpg", -1)]):
        arguments: Any = (given, str(folder), np.float64, np.int64)
        ours, theirs = LabeledJpegImages(*arguments), LabeledImageDataset(*arguments)
        for (a, x), (b, y) in zip(ours[:], theirs[:], strict=True):
            assert a.dtype == b.dtype and (a == b).all()
            assert type(x) is type(y) and (x.dtype, x.shape, x) == (y.dtype, y.shape, y)


@pytest.mark.parametrize("reduce", [2, 4, 8])
def test_a_reduced_image_has_that_part_of_height_and_width(folder: Path, reduce: int) -> None:
    images = JpegImages(NAMES, folder, np.uint8, reduce=reduce)
    assert not images.exact
    for name, found in zip(NAMES, images[:], strict=True):
        whole = pillow(folder / name)
        assert found.shape == (len(whole), *(-(-n // reduce) for n in whole.shape[1:]))


def test_a_reduced_image_is_near_the_mean_of_its_pixels(folder: Path) -> None:
    (found,) = JpegImages(["progressive.jpg"], folder, reduce=8)[:]
    whole = pillow(folder / "progressive.jpg")[:, :96, :64].astype("f")
    means = whole.reshape(3, 12, 8, 8, 8).mean((2, 4))
    assert np.abs(found[:, :12, :8] - means).max() < 3


@pytest.mark.parametrize(
    "size, shape",
    [
        (13, (26, 17)),
        ((13, 9), (13, 9)),
        ((40, 1), (51, 34)),
        ((40, 40), (64, 42)),
        ((101, 1), (101, 67)),
        (500, (101, 67)),
        ((1, 1), (13, 9)),
    ],
)
def test_an_image_has_at_least_the_size_that_was_asked_for(
    folder: Path, size: Any, shape: tuple[int, int]
) -> None:
    images = JpegImages(["colour.jpg"], folder, at_least=size)
    assert images[0].shape == (3, *shape) and not images.exact


def test_channels_are_those_of_the_file_or_those_asked_for(folder: Path) -> None:
    pair = ["colour.jpg", "grey.jpg"]
    assert [len(x) for x in JpegImages(pair, folder)[:]] == [3, 1]
    assert [len(x) for x in JpegImages(pair, folder, channels=1)[:]] == [1, 1]
    colour, grey = JpegImages(pair, folder, channels=3)[:]
    assert (grey == pillow(folder / "grey.jpg")).all() and len(grey) == len(colour) == 3
    one = JpegImages(pair, folder, np.int16, channels=1)[0]
    want = np.asarray(Image.open(folder / "colour.jpg").convert("L"), np.int16)
    assert np.abs(one[0] - want).max() <= 1


def broken(folder: Path, kind: str) -> bytes:
    data = (folder / "colour.jpg").read_bytes()
    if kind == "cut":
        return data[: len(data) // 2]
    if kind == "end missing":
        return data[:-2]
    if kind == "zeros":
        return data[:700] + bytes(50) + data[750:]
    if kind == "huge":  # the frame's header says 65500 x 65500
        at = data.index(b"\xff\xc0")
        return data[: at + 5] + b"\xff\xdc" * 2 + data[at + 9 :]
    return {"empty": b"", "text": b"no image", "another": b"\x89PNG\r\n\x1a\n" + data}[kind]


@pytest.mark.parametrize(
    "kind", ["cut", "end missing", "zeros", "huge", "empty", "text", "another"]
)
def test_a_file_that_is_corrupt_is_named_by_item_and_path(folder: Path, kind: str) -> None:
    (folder / "bad.jpg").write_bytes(broken(folder, kind))
    images = JpegImages(["colour.jpg", "bad.jpg"], folder)
    with pytest.raises(DataError, match=r"item 1, .*bad\.jpg") as caught:
        images[-1]
    assert "Replace the file" in str(caught.value) and isinstance(caught.value, ValueError)
    assert (images[0] == pillow(folder / "colour.jpg")).all()
    if kind == "huge":
        assert "65500 x 65500 pixels" in str(caught.value)


def test_cmyk_is_refused_rather_than_guessed_at(folder: Path) -> None:
    with pytest.raises(DataError, match=r"item 0, .*print.jpg.*CMYK"):
        JpegImages(["print.jpg"], folder)[0]


def test_a_file_that_is_not_there_or_none_is_named(folder: Path) -> None:
    with pytest.raises(FileError, match=r"item 0, .*gone\.jpg: there is no such file") as caught:
        JpegImages(["gone.jpg"], folder)[0]
    assert isinstance(caught.value, OSError)
    with pytest.raises(FileError, match="it is a folder"):
        LabeledJpegImages([(".", 1)], folder)[0]


@pytest.mark.parametrize(
    "how, said",
    [
        ({"reduce": 3}, "1, 2, 4 or 8; got 3"),
        ({"reduce": 0}, "got 0"),
        ({"channels": 4}, "channels must be 1, 3 or None; got 4"),
        ({"at_least": 0}, "above zero; got 0"),
        ({"at_least": (3, -1)}, "above zero"),
        ({"at_least": (3.5, 1)}, "above zero"),
        ({"at_least": (3, 4, 5)}, "height, width"),
        ({"at_least": 4, "reduce": 2}, "not both"),
    ],
)
def test_sizes_that_are_none_are_refused_at_once(how: dict[str, Any], said: str) -> None:
    for kind in (JpegImages, LabeledJpegImages):
        with pytest.raises(SizeError, match=said):
            kind([], **how)


def test_lists_that_are_none_are_refused_by_line(folder: Path) -> None:
    (folder / "pairs.txt").write_text("\ncolour.jpg 3\n\ngrey.jpg three\n")
    with pytest.raises(DataError, match=r"pairs.txt, line 4: .*grey.jpg three"):
        LabeledJpegImages(folder / "pairs.txt")
    with pytest.raises(FileError, match=r"none.txt: cannot read the list"):
        JpegImages(folder / "none.txt")


def test_a_dataset_of_images_goes_to_another_process_and_into_a_cache(folder: Path) -> None:
    images = pickle.loads(pickle.dumps(LabeledJpegImages([("colour.jpg", 7)], folder, "u1")))
    image, label = unpack(pack(images[0], RawCodec()), RawCodec())
    assert (image == pillow(folder / "colour.jpg")).all() and image.dtype == np.uint8
    assert label == 7 and label.dtype == np.int32 and label.shape == ()


def test_without_simplejpeg_the_error_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(MissingDependencyError, match="pip install 'simplejpeg"):
        JpegImages([])
