"""Mends for NEP 50: each module overflows or stays narrow without its mend."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.compat.test_shims import load, numpy_2
from umem.compat.requirement import holds


def summary_of(values: Any, without: str | None = None, weight: Any = 1) -> tuple[Any, Any]:
    summary = load("chainer.reporter", without).Summary()
    for value in values:
        summary.add(value, weight)
    return summary.make_statistics()


@numpy_2
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ["scalar", "array"])
def test_summary_float64(dtype, kind):
    value = np.dtype(dtype).type(7.253)
    values = [value if kind == "scalar" else np.array(value)] * 20_000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        narrow, _ = summary_of(values, without="summary-float64")
    assert abs(float(narrow) / float(value) - 1) > 1e-6
    mean, std = summary_of(values)
    assert abs(mean / float(value) - 1) < 1e-12
    assert std < 1e-6


def test_summary_float64_agrees_with_numpy_on_weighted_values():
    values = np.random.RandomState(0).rand(1000).astype("float16")
    weights = np.random.RandomState(1).randint(1, 200, 1000).astype("float16")
    summary = load("chainer.reporter").Summary()
    for value, weight in zip(values, weights, strict=True):
        summary.add(value, weight)
    mean, std = summary.make_statistics()
    x, w = values.astype(float), weights.astype(float)
    expected = np.average(x, weights=w)
    assert mean == pytest.approx(expected, rel=1e-12)
    assert std == pytest.approx(np.sqrt(np.average((x - expected) ** 2, weights=w)), rel=1e-9)


class OnDevice:
    """A zero-dimensional array that fails where the host would have to wait for a device."""

    ndim = 0

    def __init__(self, value: Any) -> None:
        self._value = np.asarray(value)
        self.dtype = self._value.dtype

    def _stays(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host waited for the device")

    __float__ = __int__ = __bool__ = __array__ = item = get = tolist = _stays
    __array_ufunc__ = None

    def astype(self, dtype: Any) -> OnDevice:
        return OnDevice(self._value.astype(dtype))

    def __add__(self, other: Any) -> OnDevice:
        return OnDevice(self._value + getattr(other, "_value", other))

    def __mul__(self, other: Any) -> OnDevice:
        return OnDevice(self._value * getattr(other, "_value", other))

    __radd__, __rmul__ = __add__, __mul__


def test_summary_float64_does_not_wait_for_the_device():
    summary = load("chainer.reporter").Summary()
    for _ in range(20_000):
        summary.add(OnDevice(np.float16(7.253)))
    assert summary._x.dtype == np.float64
    assert float(summary._x._value) / 20_000 == pytest.approx(float(np.float16(7.253)), rel=1e-12)


@numpy_2
def test_pad_sequence():
    xs = [np.array([1, 2], "uint8"), np.array([3], "uint8")]
    name = "chainer.functions.array.pad_sequence"
    with pytest.raises(OverflowError):
        load(name, without="pad-sequence").pad_sequence(xs, padding=-1)
    assert load(name).pad_sequence(xs, padding=-1).array.tolist() == [[1, 2], [3, 255]]


@pytest.mark.parametrize("without, handed_over", [("pad-sequence", -1), (None, np.uint8(255))])
def test_pad_sequence_hands_a_kernel_a_number_that_its_type_holds(without, handed_over):
    """As CuPy's path has it, which takes -1 for an unsigned T no more either."""

    class OnGpu(np.ndarray):
        _c_contiguous = True

    def elementwise(*_: Any) -> Any:
        return lambda *values: found.append(values[2])

    found: list[Any] = []
    module = load("chainer.functions.array.pad_sequence", without)
    module.backend = SimpleNamespace(get_array_module=lambda *_: SimpleNamespace(empty=np.empty))
    cupy = SimpleNamespace(array=lambda values, dtype: np.zeros(len(values), dtype))
    module.cuda = SimpleNamespace(cupy=cupy, elementwise=elementwise)
    xs = [np.ones(length, "uint8").view(OnGpu) for length in (2, 1)]
    module.PadSequence(None, -1).forward(xs)
    assert found == [handed_over] and type(found[0]) is type(handed_over)


@numpy_2
def test_concat_padding():
    batch = [np.array([1, 2], "uint8"), np.array([3], "uint8")]
    name = "chainer.dataset.convert"
    if holds("numpy>=2.4"):  # some releases before still let `numpy.full` wrap round
        with pytest.raises(OverflowError):
            load(name, without="concat-padding").concat_examples_func(batch, padding=-1)
    assert load(name).concat_examples_func(batch, padding=-1).tolist() == [[1, 2], [3, 255]]


@numpy_2
def test_integer_constants():
    x = np.array([0, 7], "uint8")
    name = "chainer.functions.math.basic_math"
    with pytest.raises(OverflowError):
        load(name, without="integer-constants").sub(x, 1)
    assert load(name).sub(x, 1).array.tolist() == [255, 6]
    assert load(name).add(np.ones(2, "f"), 0.5).array.dtype == np.float32


@numpy_2
def test_divide_by_scalar():
    name = "chainer.functions.math.basic_math"

    def reciprocal(without: str | None = None) -> Any:
        return load(name, without).div(np.ones(1), np.float16(3)).array[0]

    assert reciprocal(without="divide-by-scalar") != 1 / 3
    assert reciprocal() == 1 / 3


@numpy_2
def test_force_type():
    with pytest.raises(OverflowError):
        load("chainer.utils", without="force-type").force_type(np.dtype("int8"), 300)
    assert load("chainer.utils").force_type(np.dtype("int8"), 300) == np.int8(44)
    assert load("chainer.utils").force_type(np.dtype("float32"), 300).dtype == np.float32


@numpy_2
def test_clip_gpu(monkeypatch):
    x = np.array([-1, 0.5, 2], "float16")
    found = []
    for without in ("clip-gpu", None):
        module = load("chainer.functions.math.clip", without)
        # NumPy's clip in place of CuPy 14's, which goes by the same rules
        monkeypatch.setattr(module, "cuda", SimpleNamespace(cupy=np))
        (clipped,) = module.Clip(np.float32(-0.75), None).forward_gpu((x,))
        found.append((clipped.dtype, clipped.tolist()))
    assert found == [("float32", [-0.75, 0.5, 2]), ("float16", [-0.75, 0.5, 2])]
