"""Mends for CuPy without a device and without cuDNN, through a stand-in for CuPy."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import pytest

from tests.compat.test_shims import load
from umem.compat import cuda_devices
from umem.compat.requirement import holds


@pytest.fixture
def fake_cupy(monkeypatch):
    """Put a CuPy of the given version in place, with or without cuDNN; return the maker."""

    def make(version: str = "14.0.0", cudnn: bool = False, devices: int = 1) -> None:
        for name in (
            "cupy",
            "cupy.cuda",
            "cupy.cuda.cublas",
            "cupy._util",
            "cupyx",
            "cupyx.scipy",
            "cupyx.scipy.linalg",
            "cupyx.scipy.special",
        ):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name in ("cupy.cuda.cudnn", "cupy.cudnn"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if cudnn else None)
        cupy: Any = sys.modules["cupy"]
        cupy.__version__, cupy.cuda = version, sys.modules["cupy.cuda"]
        cupy.cuda.cublas = sys.modules["cupy.cuda.cublas"]
        for holder, name in (
            (cupy, "ndarray"),
            (cupy.cuda, "Device"),
            (cupy.cuda, "Event"),
            (cupy.cuda, "Stream"),
        ):
            setattr(holder, name, type(name, (), {}))
        sys.modules["cupy._util"].PerformanceWarning = Warning  # type: ignore[attr-defined]
        cupy.get_default_memory_pool = cupy.get_default_pinned_memory_pool = object
        cupy.memoize = lambda for_each_device: lambda function: function
        monkeypatch.setattr(cuda_devices, "count", lambda module: devices)

    return make


def test_cuda_available(fake_cupy):
    fake_cupy(devices=0)
    assert load("chainer.backends.cuda", without="cuda-available").available is True
    mended = load("chainer.backends.cuda")
    assert mended.available is False
    with pytest.raises(RuntimeError, match="no CUDA device"):
        mended.check_cuda_available()
    fake_cupy(devices=1)
    assert load("chainer.backends.cuda").available is True


def test_cudnn_warning(fake_cupy):
    fake_cupy("14.0.0")
    if holds("cupy>=14.0"):
        with pytest.warns(UserWarning, match="Please reinstall CuPy"):
            load("chainer.backends.cuda", without="cudnn-warning").check_cuda_available()
    load("chainer.backends.cuda").check_cuda_available()


def test_cudnn_warning_stays_where_reinstalling_helps(fake_cupy):
    fake_cupy("13.0.0")
    with pytest.warns(UserWarning, match="Please reinstall CuPy"):
        load("chainer.backends.cuda").check_cuda_available()


def test_nccl_warning(fake_cupy):
    fake_cupy()

    def missing(name: str) -> Any:
        warnings.warn("\nnccl library could not be loaded.", stacklevel=2)
        raise AttributeError(name)

    sys.modules["cupy.cuda"].__getattr__ = missing  # type: ignore[method-assign]
    updater = "chainer.training.updaters.multiprocess_parallel_updater"
    with pytest.warns(UserWarning, match="nccl library"):
        load(updater, without="nccl-warning")
    load(updater)
