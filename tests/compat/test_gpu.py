"""Chainer through the layer on a real GPU; every test skips itself without one.

Expected with CuPy 14: no cuDNN, no advice to reinstall anything, convolutions by im2col.
Expected with CuPy 13 and cuDNN 8 (what its wheels are built for): ``cudnn_enabled`` is True and
convolution, batch normalisation and dropout through cuDNN agree with NumPy.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gpu_fixtures import needs_module

from tests.compat.test_shims import chainer, load
from umem.compat.requirement import holds

F = chainer.functions
L = chainer.links
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not chainer.backends.cuda.available, reason="no CUDA device"),
]


def on_gpu(array: Any) -> Any:
    return chainer.backends.cuda.to_gpu(array)


def on_cpu(array: Any) -> Any:
    return chainer.backends.cuda.to_cpu(array)


class TwoKinds(chainer.Chain):  # type: ignore[misc, name-defined]
    """Parameters in float32 and float16, as the parallel updater gathers them."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.arange(5, dtype="float32"))
            self.b = chainer.Parameter(np.arange(7, dtype="float16") / 4)


def test_the_gradients_that_the_parallel_updater_gathers_come_back():
    from chainer.training.updaters import multiprocess_parallel_updater as updater

    model = TwoKinds()
    model.to_device("@cupy:0")
    for parameter in model.params():
        parameter.grad = parameter.array * 2
    gathered = updater.gather_grads(model)
    expected = np.concatenate([np.arange(5) * 2.0, np.arange(7) / 2.0])
    np.testing.assert_array_equal(on_cpu(gathered), expected.astype("f"))
    updater.scatter_grads(model, gathered * 2)
    np.testing.assert_array_equal(on_cpu(model.a.grad), np.arange(5) * 4)
    np.testing.assert_array_equal(on_cpu(model.b.grad), np.arange(7))


def resize(x: Any, w: Any) -> Any:
    image = F.reshape(x, (1, 1, 4, 3)) * F.broadcast_to(w[0, 0], (1, 1, 4, 3))
    return F.resize_images(image, (5, 7), align_corners=True)


def tree(x: Any, w: Any) -> Any:
    link = L.BinaryHierarchicalSoftmax(3, ((0, 1), 2), dtype=x.dtype)
    link.to_device(x.device)
    return link._func(x, x.xp.array([0, 1, 2, 1], "i"), w[:2])


def sampled(x: Any, w: Any) -> Any:
    samples = x.xp.array([[0, 1], [2, 0], [1, 1], [0, 2]], "i")
    target = x.xp.array([0, 1, 2, 1], "i")
    return F.negative_sampling(x, target, w, lambda shape: samples.copy(), 1)


def gradients(run: Any, dtype: str, device: str) -> list[np.ndarray]:
    """Return the gradients of the sum of squares, computed on a device in a dtype."""
    rng = np.random.RandomState(0)
    xs = [chainer.Variable(rng.rand(*shape).astype(dtype)) for shape in ((4, 3), (3, 3))]
    for x in xs:
        x.to_device(device)
    with chainer.using_config("type_check", False):  # resize_images takes float32 only
        y = run(*xs)
        F.sum(y * y).backward()
    return [on_cpu(x.grad).astype("f") for x in xs]


@pytest.mark.parametrize("run", [resize, tree, sampled])
def test_kernels_that_the_layer_mends_are_right_in_float16(run):
    half, single = gradients(run, "float16", "@cupy:0"), gradients(run, "float32", "@numpy")
    for got, expected in zip(half, single, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2)


def agrees_and_does_not_warn(name: str, mend: str, run: Any) -> None:
    """Hold a mended module against NumPy, and see that without the mend CuPy warns."""
    got, expected = (
        gradients(lambda *xs: run(load(name), *xs), "float32", device)
        for device in ("@cupy:0", "@numpy")
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    if holds("cupy>=14"):
        with pytest.warns(DeprecationWarning, match="scatter_add"):
            gradients(lambda *xs: run(load(name, without=mend), *xs), "float32", "@cupy:0")


def test_scatter_add_get_item():
    def run(module: Any, x: Any, w: Any) -> Any:
        return module.get_item(x, ([0, 2, 0],)) * w

    agrees_and_does_not_warn("chainer.functions.array.get_item", "scatter-add-get-item", run)


def test_scatter_add_function():
    def run(module: Any, x: Any, w: Any) -> Any:
        return module.scatter_add(x, ([0, 2, 0],), w)

    agrees_and_does_not_warn("chainer.functions.array.scatter_add", "scatter-add-function", run)


def test_scatter_add_as_strided():
    def run(module: Any, x: Any, w: Any) -> Any:
        return module.as_strided(x, (3, 3), (1, 1), 0) * w

    agrees_and_does_not_warn("chainer.functions.array.as_strided", "scatter-add-as-strided", run)


def test_scatter_add_transformer():
    def run(module: Any, x: Any, w: Any) -> Any:
        places = F.stack((w, w * w - 1))
        return module.spatial_transformer_sampler(x[None, None], places[None])

    agrees_and_does_not_warn(
        "chainer.functions.array.spatial_transformer_sampler", "scatter-add-transformer", run
    )


def test_scatter_add_sparse():
    def run(module: Any, x: Any, w: Any) -> Any:
        row, column = (x.xp.array(found, "i") for found in ([0, 2, 0, 1], [1, 1, 1, 0]))
        return x[:3] * module.CooMatrix(x.array[:, 0], row, column, (3, 3)).to_dense() * w

    agrees_and_does_not_warn("chainer.utils.sparse", "scatter-add-sparse", run)


def test_nvtx_enabled():
    with chainer.function_hooks.CUDAProfileHook():
        assert on_cpu(F.relu(on_gpu(np.array([-1, 1], "f"))).array).tolist() == [0, 1]


def test_losses_on_the_gpu_are_summed_in_float64():
    summary = chainer.reporter.Summary()
    loss = on_gpu(np.array(7.253, "float16"))
    for _ in range(20_000):
        summary.add(loss)
    mean, std = summary.make_statistics()
    assert mean.dtype == np.float64
    assert float(mean) == pytest.approx(float(np.float16(7.253)), rel=1e-12)
    assert float(std) < 1e-6


@pytest.mark.parametrize("use_cudnn", ["never", "always"])
def test_convolution_agrees_with_numpy_with_cudnn_and_without(use_cudnn):
    rng = np.random.RandomState(0)
    x, w = rng.rand(2, 3, 8, 8).astype("f"), rng.rand(4, 3, 3, 3).astype("f")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with chainer.using_config("use_cudnn", use_cudnn):
            y = F.convolution_2d(on_gpu(x), on_gpu(w), pad=1).array
    expected = F.convolution_2d(x, w, pad=1).array
    np.testing.assert_allclose(on_cpu(y), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not holds("cupy>=14"), reason="CuPy 13 has cuDNN")
def test_cupy_14_has_no_cudnn_and_says_nothing_about_it():
    assert chainer.backends.cuda.cudnn_enabled is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chainer.backends.cuda.check_cuda_available()


@pytest.mark.skipif(holds("cupy>=14"), reason="hardware: CuPy 14 has no cuDNN")
def test_cupy_13_uses_cudnn_where_it_is_installed():
    needs_module("cupy.cuda.cudnn")
    assert chainer.backends.cuda.cudnn_enabled is True
