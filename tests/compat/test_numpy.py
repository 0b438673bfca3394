"""Mends for what NumPy and setuptools removed: each module breaks without its mend."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.compat.test_shims import chainer, load, numpy_2


@numpy_2
def test_sctypes():
    with pytest.raises(AttributeError, match="sctypes"):
        load("chainer.functions.array.as_strided", without="sctypes")
    x = chainer.Variable(np.arange(6, dtype="f"))
    y = load("chainer.functions.array.as_strided").as_strided(x, (2, 2), (3, 1), 0)
    y.grad = np.array([[1, 2], [3, 4]], "f")
    y.backward()
    assert y.array.tolist() == [[0, 1], [3, 4]]
    assert x.grad.tolist() == [1, 2, 0, 3, 4, 0]


def test_environment_check(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.distutils", None)
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    with pytest.raises(ImportError):
        load("chainer._environment_check", without="environment-check")
    load("chainer._environment_check").check()


@pytest.mark.parametrize(
    "module, name",
    [
        ("chainer.testing.helper", "testing-requirements"),
        ("chainer.testing.doctest_helper", "doctest-requirements"),
    ],
)
def test_testing_requirements_and_doctest_requirements(monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    with pytest.raises(ImportError):
        load(module, without=name)
    load(module)


def test_testing_requirements_decide_what_is_skipped():
    helper = load("chainer.testing.helper")
    skips = [
        getattr(decorate(type("Case", (), {})), "__unittest_skip__", False)
        for decorate in (
            helper.with_requires("numpy>=1.10"),
            helper.with_requires("numpy>=1.10", "no-such-package"),
            helper.without_requires("numpy>=1.10"),
            helper.without_requires("numpy<1.10"),
        )
    ]
    assert skips == [False, True, True, False]


def test_doctest_requirements_decide_what_is_skipped(monkeypatch):
    monkeypatch.delenv("READTHEDOCS", raising=False)
    helper = load("chainer.testing.doctest_helper")
    assert helper.skipif_requires_satisfied("numpy>=1.10") is True
    assert helper.skipif_requires_satisfied("numpy<1.10") is False


def resized(module: ModuleType, mode: str, align: bool) -> Any:
    x = np.arange(8, dtype="f").reshape(1, 1, 2, 4)
    return module.resize_images(x, (4, 8), mode=mode, align_corners=align).array


def test_np_float():
    name = "chainer.functions.array.resize_images"
    for mode, align in (("bilinear", True), ("bilinear", False), ("nearest", False)):
        with pytest.raises(AttributeError, match="float"):
            resized(load(name, without="np-float"), mode, align)
    y = resized(load(name), "bilinear", True)
    rows, columns = np.arange(4) / 3, np.arange(8) * 3 / 7  # x is linear in both indices
    np.testing.assert_allclose(y[0, 0], 4 * rows[:, None] + columns[None], rtol=1e-6)


@numpy_2
def test_meshgrid_tuple():
    p = np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]], "f")
    x = np.array([1, 0, 1])
    name = "chainer.distributions.categorical"
    with pytest.raises(TypeError):
        load(name, without="meshgrid-tuple").Categorical(p=p).log_prob(x)
    for value in (x, chainer.Variable(x)):
        got = load(name).Categorical(p=p).log_prob(value).array
        np.testing.assert_allclose(got, np.log([0.8, 0.5, 0.1]), rtol=1e-6)


@numpy_2
def test_ndarray_device():
    text = load("chainer.variable", without="ndarray-device").Variable(np.ones(2, "f"))
    assert "device: CPU" not in text.debug_print()
    assert "device: CPU" in load("chainer.variable").Variable(np.ones(2, "f")).debug_print()


class StrictNumpy:
    """NumPy as it will be: no ``out`` by position and no ``fix``."""

    def __getattr__(self, name: str) -> Any:
        if name == "fix":
            raise AttributeError(name)
        return getattr(np, name)

    def maximum(self, a: Any, b: Any, *, out: Any = None) -> Any:
        return np.maximum(a, b, out=out)


def test_maximum_out(monkeypatch):
    def padded(without: str | None = None) -> Any:
        convert = load("chainer.dataset.convert", without)
        monkeypatch.setattr(convert, "numpy", StrictNumpy())
        return convert.concat_examples_func([np.ones(1), np.ones(3)], padding=0)

    with pytest.raises(TypeError):
        padded(without="maximum-out")
    assert padded().tolist() == [[1, 0, 0], [1, 1, 1]]


def test_fix_is_trunc(monkeypatch):
    def fixed(without: str | None = None) -> Any:
        module = load("chainer.functions.math.fix", without)
        strict = SimpleNamespace(get_array_module=lambda *arrays: StrictNumpy())
        monkeypatch.setattr(module, "backend", strict)
        return module.fix(np.array([-1.5, -0.5, 0.5, 2.9], "f")).array

    with pytest.raises(AttributeError):
        fixed(without="fix-is-trunc")
    assert fixed().tolist() == [-1, 0, 0, 2]
    assert fixed().dtype == np.float32


class FixedShape(np.ndarray):
    """An array whose shape cannot be set, as NumPy will have it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shape":
            raise AttributeError("the shape of an array cannot be set")
        super().__setattr__(name, value)


@pytest.mark.parametrize("argument, shape", [("initialW", (6, 4)), ("initial_bias", (6,))])
def test_set_shape(monkeypatch, argument, shape):
    def filled(without: str | None = None) -> Any:
        module = load("chainer.links.activation.maxout", without)
        caught: dict[str, Any] = {}
        linear = SimpleNamespace(Linear=lambda *args, **kwargs: caught.update(kwargs))
        monkeypatch.setattr(module, "linear", linear)
        module.Maxout(4, 2, 3, **{argument: fill})
        array = np.zeros(shape).view(FixedShape)
        caught[argument](array)
        return array

    def fill(array: Any) -> None:
        array[...] = np.arange(array.size).reshape(array.shape)

    with pytest.raises(AttributeError, match="shape"):
        filled(without="set-shape")
    assert filled().ravel().tolist() == list(range(int(np.prod(shape))))
