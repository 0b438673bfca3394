"""Mends for SciPy, h5py, protobuf, ONNX and Python: each module breaks without its mend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.compat.test_shims import chainer, load
from umem.compat.requirement import holds


@pytest.mark.parametrize("batch", [(), (2,)])
def test_sparse_float16(batch):
    pytest.importorskip("scipy")
    rng = np.random.RandomState(0)
    a = (rng.rand(*batch, 3, 4) * (rng.rand(*batch, 3, 4) > 0.5)).astype("float16")
    b = rng.rand(*batch, 4, 5).astype("float16")
    name = "chainer.functions.math.sparse_matmul"
    if holds("scipy>=1.15"):  # SciPy before took float16 without supporting it
        with pytest.raises(ValueError, match="float16"):
            load(name, without="sparse-float16").sparse_matmul(chainer.utils.to_coo(a), b)
    y = load(name).sparse_matmul(chainer.utils.to_coo(a), b).array
    assert y.dtype == np.float16
    expected = np.matmul(a.astype(float), b.astype(float))
    np.testing.assert_allclose(y, expected, rtol=2e-3)


def test_hdf5_text(tmp_path):
    h5py = pytest.importorskip("h5py")
    if not holds("h5py>=3.0"):
        pytest.skip("h5py 2 gives text")
    with h5py.File(tmp_path / "snapshot.h5", "w") as file:
        file["name"] = "resnet"
        file["epoch"] = 3

        def read(key: str, value: Any, without: str | None = None) -> Any:
            module = load("chainer.serializers.hdf5", without)
            return module.HDF5Deserializer(file)(key, value)

        assert read("name", "", without="hdf5-text") == "b'resnet'"
        assert read("name", "") == "resnet"
        assert read("name", None) == "resnet"
        assert read("epoch", 0) == 3
        assert read("epoch", None).dtype.kind == "i"


@pytest.mark.skipif(not holds("protobuf>=4.0"), reason="protobuf 3 takes the generated code")
def test_caffe_descriptors(tmp_path):
    name = "chainer.links.caffe.protobuf3.caffe_pb2"
    with pytest.raises((TypeError, ImportError)):
        load(name, without="caffe-descriptors")

    from chainer.links.caffe import CaffeFunction
    from chainer.links.caffe.protobuf3 import caffe_pb2

    net = caffe_pb2.NetParameter(name="net", input=["x"])
    layer = net.layer.add(name="ip", type="InnerProduct", bottom=["x"], top=["y"])
    layer.inner_product_param.num_output = 2
    weight = np.arange(6, dtype="f").reshape(2, 3)
    for array in (weight, np.array([10, 20], "f")):
        blob = layer.blobs.add(data=array.ravel().tolist())
        blob.shape.dim.extend(array.shape)
    (tmp_path / "net.caffemodel").write_bytes(net.SerializeToString())
    model = CaffeFunction(str(tmp_path / "net.caffemodel"))
    x = np.array([[1, 2, 3]], "f")
    (y,) = model(inputs={"x": x}, outputs=["y"])
    np.testing.assert_allclose(y.array, x @ weight.T + [10, 20])


def test_set_daemon(monkeypatch):
    def launched(without: str | None = None) -> Any:
        module = load("chainer.iterators.multiprocess_iterator", without)
        pools = SimpleNamespace(Pool=lambda **kwargs: None)
        monkeypatch.setattr(module, "multiprocessing", pools)
        loop = SimpleNamespace(
            n_processes=1,
            dataset=[],
            mem_size=0,
            mem_bulk=None,
            maxtasksperchild=None,
            _interruption_testing=False,
            _run=lambda: None,
        )
        thread = module._PrefetchLoop.launch_thread(loop)
        thread.join()
        return thread

    with pytest.raises(DeprecationWarning, match="setDaemon"):
        launched(without="set-daemon")
    assert launched().daemon


def test_onnx_advice(monkeypatch):
    def message(without: str | None = None) -> str:
        module = load("onnx_chainer.export", without)
        monkeypatch.setattr(module, "_available", False)
        with pytest.raises(ImportError) as caught:
            module._check_available()
        return str(caught.value)

    assert "onnx<1.7" in message(without="onnx-advice")
    assert "pip install onnx\n" in message()


@pytest.mark.parametrize(
    "module, name",
    [("onnx_chainer.functions.array", "onnx-arrays"), ("onnx_chainer.functions.math", "onnx-math")],
)
def test_onnx_arrays_and_onnx_math(module, name):
    pytest.importorskip("onnx")
    with pytest.raises(ImportError):
        load(module, without=name)
    load(module)


def test_onnx_export():
    pytest.importorskip("onnx")
    assert load("onnx_chainer.export", without="onnx-export")._available is False
    assert load("onnx_chainer.export")._available is True


def test_onnx_constants():
    onnx = pytest.importorskip("onnx")
    array = np.array([2, -1])
    with pytest.raises(AttributeError, match="mapping"):
        broken = load("onnx_chainer.context", without="onnx-constants")
        broken._tensor_from_array_for_constant(array, "shape")
    tensor = load("onnx_chainer.context")._tensor_from_array_for_constant(array, "shape")
    assert onnx.numpy_helper.to_array(tensor).tolist() == [2, -1]


class Perceptron(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.convolution = chainer.links.Convolution2D(3, 4, 3)
            self.linear = chainer.links.Linear(36, 5)

    def forward(self, x: Any) -> Any:
        h = chainer.functions.max_pooling_2d(chainer.functions.relu(self.convolution(x)), 2)
        return chainer.functions.softmax(
            self.linear(chainer.functions.cast(chainer.functions.reshape(h, (2, -1)), "float32"))
        )


@pytest.mark.parametrize("opset", [9, 10, 11])
def test_onnx_export_gives_the_model_that_chainer_computes(opset):
    pytest.importorskip("onnx")
    import onnx.reference
    import onnx_chainer

    model, x = Perceptron(), np.random.RandomState(0).rand(2, 3, 8, 8).astype("f")
    with chainer.using_config("train", False):
        exported = onnx_chainer.export(model, x, opset_version=opset)
        expected = model(x).array
    onnx.checker.check_model(exported)
    (y,) = onnx.reference.ReferenceEvaluator(exported).run(None, {"Input_0": x})
    np.testing.assert_allclose(y, expected, atol=1e-6)
