"""Quantised models in files: the same bits, the bytes that were promised, and no other model's."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem.chainer  # noqa: F401  isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_unsigned

from umem._common.checksums import SUMS, sum_of, with_sums
from umem.chainer import load_quantized, quantize, save_quantized
from umem.errors import (
    FileError,
    QuantizationError,
    StateError,
    UnsupportedError,
    UnverifiedWarning,
)

Array = np.ndarray[Any, Any]


class Network(chainer.Chain):  # type: ignore[misc]
    """Tied words, a convolution in groups, a normalisation with numbers of its own."""

    def __init__(self, width: int = 6, stride: int = 1, lazy: bool = False) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(20, 8)
            self.conv = L.Convolution2D(
                None if lazy else 4, width, (1, 3), stride, (0, 1), groups=2
            )
            self.norm = L.BatchNormalization(width)
            self.middle = L.Linear(None if lazy else width * 8, 8)
            self.out = L.Linear(8, 20, nobias=True)
            self.out.W = self.embed.W

    def forward(self, x: Any) -> Any:
        y = F.reshape(self.embed(x), (-1, 4, 2, 4))
        return self.out(F.tanh(self.middle(F.relu(self.norm(self.conv(y))))))


WORDS = np.random.default_rng(1).integers(0, 20, (16, 4)).astype("i")


def network(seed: int = 0, **how: Any) -> Network:
    np.random.seed(seed)
    return Network(**how)


def save_file(arrays: dict[str, Array], path: Path, notes: dict[str, str] | None = None) -> None:
    """Write a file whose checksums are right, whatever is in it."""
    unsigned = {k: v for k, v in (notes or {}).items() if k != SUMS}
    sums = {name: sum_of(name, array) for name, array in arrays.items()}
    save_unsigned(arrays, path, with_sums(unsigned, sums))


def called(model: Any) -> Array:
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        y: Array = model(WORDS).array
        return y


@pytest.fixture
def small() -> Any:
    model = network()
    model.norm.avg_mean[...] = 0.1
    model.norm.N = 7
    return quantize(model, WORDS)


@pytest.fixture
def path(small: Any, tmp_path: Path) -> Path:
    save_quantized(tmp_path / "net.safetensors", small)
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, None), (4, 8)])
def test_a_file_gives_the_same_bits_into_any_model_of_its_kind(
    tmp_path: Path, bits: int, group: int | None, lazy: bool
) -> None:
    small = quantize(network(), WORDS, bits, group=group, keep=["middle"])
    save_quantized(tmp_path / "net", small)
    model = network(3, lazy=lazy)
    loaded = load_quantized(tmp_path / "net", model)
    assert (called(loaded) == called(small)).all()
    assert type(model.conv) is L.Convolution2D and type(loaded.middle) is L.Linear
    assert loaded.out.weight is loaded.embed.weight
    assert model.middle.W.is_initialized != lazy
    assert loaded.quantization_report.quantized_bytes > 0
    if not lazy:
        assert [(row.path, row.kind, row.float_bytes, row.quantized_bytes)
                for row in loaded.quantization_report.layers] == [
            (row.path, row.kind, row.float_bytes, row.quantized_bytes)
            for row in small.quantization_report.layers]  # fmt: skip
    save_quantized(tmp_path / "again", loaded)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "net").read_bytes()


def test_codes_lie_in_the_file_as_in_memory_and_once(path: Path, small: Any) -> None:
    arrays = load_file(path)
    assert arrays["conv/weight/codes"].dtype == np.int8
    assert (arrays["conv/weight/codes"] == small.conv.weight.codes).all()
    codes = [name for name in arrays if name.endswith("codes")]
    assert sorted(codes) == ["conv/weight/codes", "embed/weight/codes", "middle/weight/codes"]
    with safe_open(path, "np") as file:
        notes = file.metadata()
    assert notes["format"] == "umem quantized model" and notes["version"] == "1"
    assert json.loads(notes["model"])["values"]["norm/N"] == 7


def test_four_bits_take_half_a_byte(tmp_path: Path) -> None:
    model = L.Linear(301, 200, nobias=True)
    small = quantize(model, np.ones((1, 301), "f"), 4)
    save_quantized(tmp_path / "net", small)
    assert load_file(tmp_path / "net")["weight/codes"].shape == (200, 151)
    assert (tmp_path / "net").stat().st_size < 200 * 151 + 4 * 200 + 8 + 600


def refused(path: Path, model: Any, match: str, error: type[Exception] = QuantizationError) -> None:
    """See that a file is refused, and the model stays as it was."""
    links = [type(each) for each in model.links()]
    arrays = {name: each.array.copy() for name, each in model.namedparams()}
    with pytest.raises(error, match=match):
        load_quantized(path, model)
    assert [type(each) for each in model.links()] == links
    assert all((arrays[name] == each.array).all() for name, each in model.namedparams())


def test_a_file_of_another_model_is_refused_with_what_differs(path: Path) -> None:
    wide = network(width=8)
    refused(path, wide, r"/conv is Convolution2D \(in_channels 4, out_channels 6.*there and .* 8")
    refused(path, network(stride=2), r"stride \[1, 1\].* there and .*stride \[2, 2\]")
    less = network()
    del less.middle
    refused(path, less, r"it has /middle \(QuantizedLinear\)")
    more = network()
    with more.init_scope():
        more.extra = L.Linear(2, 2)
    refused(path, more, r"it has no /extra \(Linear\)")
    other = network()
    del other.middle
    with other.init_scope():
        other.middle = L.EmbedID(48, 8)
    refused(path, other, r"/middle is Linear .* there and EmbedID .* here")
    apart = network()
    apart.out.W = chainer.Parameter(apart.embed.W.array.copy())
    refused(path, apart, "it has no ")
    biased = network()
    with biased.out.init_scope():
        biased.out.b = chainer.Parameter(np.zeros(20, "f"))
    refused(path, biased, "it has no out/bias")
    refused(path, quantize(network(), WORDS), "is quantised already", StateError)


def outcome(path: Path, model: Any, y: Array) -> str:
    """What becomes of a file that is damaged; the model stays as it is whatever that is."""
    before = [each.array.copy() for each in model.params()]
    try:
        loaded = load_quantized(path, model)
    except (QuantizationError, FileError) as error:
        assert "Traceback" not in str(error) and len(str(error)) < 2000
        found = "refused"
    else:
        found = "same" if (called(loaded) == y).all() else "different"
    for was, each in zip(before, model.params(), strict=True):
        assert (was == each.array).all()
    return found


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_flipped_bit_of_a_file_changes_results(path: Path, small: Any, stride: int) -> None:
    """Of header, metadata and arrays; not even with a warning."""
    whole, y, model, found = path.read_bytes(), called(small), network(5), Counter[str]()
    random = np.random.default_rng(0)
    for at in range(0, len(whole), stride):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        found[outcome(path, model, y)] += 1
    assert found["different"] == 0 and found["same"] <= 8  # spaces behind the header
    assert found["refused"] > 20


def test_arrays_that_were_exchanged_added_or_renamed_are_refused(path: Path) -> None:
    arrays, model = load_file(path), network()
    with safe_open(path, "np") as file:
        notes = file.metadata()
    gamma, beta = arrays["norm/gamma"], arrays["norm/beta"]
    for changed, match in (
        (
            {"norm/gamma": beta, "norm/beta": gamma},
            "norm/(gamma|beta) has changed since it was written",
        ),
        ({"more": gamma}, r"it has \d+ arrays, and checksums of \d+"),
        ({"norm/gamma": gamma.reshape(2, 3)}, "norm/gamma has changed since it was written"),
        ({"norm/gamma": gamma.view("i4")}, "norm/gamma has changed since it was written"),
    ):
        save_unsigned({**arrays, **changed}, path, notes)
        refused(path, model, f"is damaged: {match}.* No model was made")
    renamed = {name.replace("gamma", "gamme"): array for name, array in arrays.items()}
    save_unsigned(renamed, path, notes)
    refused(path, model, "norm/gamme has changed since it was written")
    save_unsigned(
        arrays, path, {**notes, "model": notes["model"].replace('"norm/N":7', '"norm/N":8')}
    )
    refused(path, model, "its header has changed since it was written")
    save_unsigned(arrays, path, {**notes, SUMS: notes[SUMS][:-17]})
    refused(path, model, "arrays, and checksums of")
    save_unsigned(arrays, path, {"sha257" if k == SUMS else k: v for k, v in notes.items()})
    refused(path, model, "its header has 'sha257'")


def test_a_file_of_an_earlier_umem_loads_with_a_warning(path: Path, small: Any) -> None:
    arrays = load_file(path)
    with safe_open(path, "np") as file:
        notes = {k: v for k, v in file.metadata().items() if k != SUMS}
    save_unsigned(arrays, path, notes)
    with pytest.warns(
        UnverifiedWarning, match="has no checksums: an earlier umem wrote it"
    ) as told:
        loaded = load_quantized(path, network())
    assert told[0].filename == __file__
    assert (called(loaded) == called(small)).all()


def test_files_of_other_formats_and_versions_are_refused(path: Path, tmp_path: Path) -> None:
    model = network()
    with safe_open(path, "np") as file:
        notes = file.metadata()
    arrays = load_file(path)
    save_file(arrays, path, {**notes, "version": "2"})
    refused(path, model, "has version 2 of the format; this umem reads version 1")
    save_unsigned(arrays, path)
    refused(path, model, "was not written by umem.chainer.save_quantized")
    path.write_bytes(b"not one at all")
    refused(path, model, "not a safetensors file")
    refused(tmp_path / "none", model, "there is no such file", FileError)
    refused(tmp_path, model, "it is a folder", FileError)


def test_damaged_files_are_refused(path: Path) -> None:
    model = network()
    whole = path.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, model, "not a safetensors file")
    path.write_bytes(whole)
    with safe_open(path, "np") as file:
        notes = file.metadata()
    arrays = load_file(path)

    def damaged(match: str, other: dict[str, Any] | None = None, **changed: Array) -> None:
        named = {name.replace("__", "/"): array for name, array in changed.items()}
        save_file({**arrays, **named}, path, {**notes, **(other or {})})
        refused(path, model, match)

    scales = arrays["conv/weight/scales"]
    damaged("/conv: a scale is not a positive", conv__weight__scales=np.full_like(scales, np.nan))
    damaged("a scale is not a positive number", conv__weight__scales=0 * scales)
    codes = np.full_like(arrays["conv/weight/codes"], -128)
    damaged("a code is below -127", conv__weight__codes=codes)
    damaged("its input has the scale", middle__step=np.array([np.inf, 0], "f"))
    damaged("/middle: its bias has NaN", middle__bias=np.full(8, np.nan, "f"))
    damaged("the zero point 0.5", middle__step=np.array([1, 0.5], "f"))
    damaged("of another model: it has more", more=scales)
    damaged("float64 of shape", conv__weight__scales=scales.astype("d"))
    damaged("its description is not valid", {"model": "{}"})
    damaged(
        "its description is not valid", {"model": notes["model"].replace('"bits":8', '"bits":5')}
    )
    del arrays["middle/bias"]
    damaged("it has no middle/bias")


@pytest.mark.parametrize(("was", "bad"), [
    ('"in_size":48', '"in_size":4800000000000'), ('"in_size":48', '"in_size":-48'),
    ('"in_size":48', '"in_size":1.5'), ('"in_size":48', '"in_size":"48"'),
    ('["QuantizedLinear",', '[null,'), ('"norm/N":7', '"norm/N":{"a":1}'),
    ('["BatchNormalization",', '["BatchNormalization",null],"/x":["BatchNormalization",'),
])  # fmt: skip
def test_a_description_that_cannot_be_is_refused_before_memory_is_taken(
    path: Path, was: str, bad: str
) -> None:
    with safe_open(path, "np") as file:
        notes = file.metadata()
    assert was in notes["model"]
    save_file(load_file(path), path, {**notes, "model": notes["model"].replace(was, bad)})
    with pytest.raises(
        QuantizationError, match=r"its description is not valid|larger than the file"
    ):
        load_quantized(path, network(lazy=True))


def test_damaged_codes_of_four_bits_are_refused(tmp_path: Path) -> None:
    model = L.Linear(3, 2, nobias=True)
    small = quantize(model, np.ones((1, 3), "f"), 4, group=8)
    for name, bad in (("codes", 0x08), ("codes", 0x80), ("multipliers", 19), ("multipliers", 0)):
        was = getattr(small.weight, name).copy()
        getattr(small.weight, name)[1, 0] = bad
        save_quantized(tmp_path / "net", small, force=True)
        refused(tmp_path / "net", model, "a code is below -7|a multiplier is not from 1 to 18")
        getattr(small.weight, name)[...] = was


@pytest.mark.parametrize("size", [-48, 0, 10**7, 10**12, 48.0, "48", True, None, [48], [48, 48]])
def test_a_size_that_is_none_is_refused_before_there_is_memory_for_it(
    path: Path, size: Any
) -> None:
    """The model leaves the size open, so that the file alone says it."""
    arrays = load_file(path)
    for layer, name in (("/middle", "in_size"), ("/conv", "in_channels"), ("/conv", "groups")):
        with safe_open(path, "np") as file:
            notes = file.metadata()
        description = json.loads(notes["model"])
        description["layers"][layer][1][name] = size
        other = path.with_name("other")
        save_file(arrays, other, {**notes, "model": json.dumps(description)})
        tracemalloc.start()
        try:
            with pytest.raises(QuantizationError, match=r"is damaged|is of another model"):
                load_quantized(other, network(lazy=True))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("layer", [
    3, ["BatchNormalization", [6]], ["BatchNormalization", None], [3, {}], [["x"], {}],
    ["QuantizedLinear", {}], [], None,
])  # fmt: skip
def test_a_description_that_is_none_is_refused(path: Path, layer: Any) -> None:
    arrays = load_file(path)
    with safe_open(path, "np") as file:
        notes = file.metadata()
    description = json.loads(notes["model"])
    description["layers"]["/norm"] = layer
    for text in (json.dumps(description), "[" * 100_000, '{"layers":' * 100_000):
        save_file(arrays, path, {**notes, "model": text})
        refused(path, network(), "is damaged: its description is not valid")


def test_codes_whose_sums_pass_int32_are_refused(tmp_path: Path) -> None:
    link = L.Linear(70_000, 1, nobias=True)
    small = quantize(link, np.ones((1, 70_000), "f"))
    save_quantized(tmp_path / "net", small)
    load_quantized(tmp_path / "net", link)
    small.weight.codes[...] = 127  # 127 * 255 * 70,000 is more than 2**31
    save_quantized(tmp_path / "net", small, force=True)
    refused(tmp_path / "net", link, "sums of its products could pass int32")


def test_a_subclass_with_a_forward_of_its_own_is_another_model(tmp_path: Path) -> None:
    class Doubled(L.Linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    save_quantized(tmp_path / "net", quantize(L.Linear(4, 3), np.ones((1, 4), "f")))
    refused(tmp_path / "net", Doubled(4, 3), "there and Doubled")


def test_parts_of_other_bits_are_not_written_as_one(tmp_path: Path) -> None:
    """Of inputs, bits are in no array's shape: the file would be read, and computed otherwise."""
    first, second, x = L.Linear(6, 5), L.Linear(5, 3), np.ones((2, 6), "f")
    for how in ({"activation_bits": 4}, {"bits": 4}):
        both = chainer.Sequential(quantize(first, x), quantize(second, x[:, :5], **how))
        with pytest.raises(UnsupportedError, match=r"/0 has .* and /1 has .*activation_bits"):
            save_quantized(tmp_path / "net", both)
    assert not list(tmp_path.iterdir())


def test_sizes_and_bits_may_be_integers_of_numpy(tmp_path: Path) -> None:
    labels = np.array([0, 2, 1])
    model = chainer.Sequential(
        L.Convolution2D(2, np.int64(4), 3, groups=np.int32(2)), L.Linear(4, labels.max() + 1)
    )
    x = np.ones((1, 2, 3, 3), "f")
    small = quantize(model, x, np.int64(4), activation_bits=np.uint8(8), group=np.int16(8))
    save_quantized(tmp_path / "net", small)
    assert (load_quantized(tmp_path / "net", model)(x).array == small(x).array).all()


def test_what_cannot_be_written_leaves_no_file(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "net"
    with pytest.raises(StateError, match="is not quantised"):
        save_quantized(path, network())
    small.norm.N = object()
    with pytest.raises(UnsupportedError, match="norm/N"):
        save_quantized(path, small)
    assert not list(tmp_path.iterdir())
    small.norm.N = 1
    with pytest.raises(FileError, match="no such file or folder"):
        save_quantized(tmp_path / "none" / "net", small)
    path.write_text("mine")
    with pytest.raises(FileError, match="exists"):
        save_quantized(path, small)
    assert path.read_text() == "mine"
    save_quantized(path, small, force=True)
    assert (called(load_quantized(path, network())) == called(small)).all()


def test_a_single_link_goes_into_a_file_too(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 5)).astype("f")
    small = quantize(L.Linear(5, 3), x)
    save_quantized(tmp_path / "net", small)
    assert (load_quantized(tmp_path / "net", L.Linear(3))(x).array == small(x).array).all()
