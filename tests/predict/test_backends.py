"""What a NumPy trace is corrected by is what Chainer's own GPU code allocates.

The oracle is that code itself: it runs on NumPy arrays, with kernels that compute nothing and
allocate what CuPy's would, their outputs, while tracemalloc watches.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.functions.activation import relu
from chainer.functions.normalization import batch_normalization
from hypothesis import given, settings
from project import ROOT
from strategies import traces
from traced_graphs import check

import umem
from umem.errors import StateError
from umem.predict.cupy_differences import (
    CORRECTIONS,
    CUDNN_LIMIT_BYTES,
    HALVED,
    OWN,
    WITH_CUDNN,
    WITHOUT_CUDNN,
    on_gpu,
)
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Free, Hint, Op

pytestmark = pytest.mark.thorough

# -- Chainer's GPU code on NumPy arrays --------------------------------------------------------


class GpuArray(np.ndarray[Any, Any]):
    """A NumPy array with what CuPy's have more."""

    def reduced_view(self) -> GpuArray:
        return self


def array(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32).view(GpuArray)


def empty(shape: Any, dtype: Any = np.float32) -> Any:
    return np.empty(shape, dtype).view(GpuArray)


def elementwise(ins: str, outs: str, operation: str, name: str, **options: Any) -> Any:
    """A kernel that allocates the outputs that it is not given."""
    inputs, outputs = len(ins.split(",")), len(outs.split(","))

    def kernel(*args: Any) -> Any:
        if len(args) == inputs + outputs:
            return args[-1]
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
        made = [empty(shape, arrays[0].dtype) for _ in range(outputs)]
        return made[0] if outputs == 1 else made

    return kernel


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], int]]:
    """Measures the workspace of a call of GPU code."""
    cupy = SimpleNamespace(
        empty=empty,
        empty_like=np.empty_like,
        tensordot=np.tensordot,
        rollaxis=np.rollaxis,
        maximum=np.maximum,
        ndarray=GpuArray,
        random=SimpleNamespace(rand=lambda *shape, dtype: empty(shape, dtype)),
    )
    monkeypatch.setattr(cuda, "cupy", cupy)
    monkeypatch.setattr(cuda, "elementwise", elementwise)
    kernel = elementwise("T y, T gy", "T gx", "", "")
    monkeypatch.setattr(relu, "_relu_grad2_kernel", kernel, raising=False)

    def workspace(call: Callable[[], Any]) -> int:
        tracemalloc.start(1)
        try:
            made = call()
            left, peak = tracemalloc.get_traced_memory()
            del made
        finally:
            tracemalloc.stop()
        return peak - left

    yield workspace


def recorded(step: Callable[[], Any]) -> Trace:
    """A step on NumPy, with the workspace of each operation."""
    step()
    with umem.record() as timed:
        kept = step()
    del kept
    with umem.record(measure="workspace") as calibration:
        kept = step()
    del kept
    return timed.trace.with_workspace(calibration.trace)


def corrected(step: Callable[[], Any], name: str) -> int:
    """The workspace of the only operation of that name, as corrected."""
    (op,) = (op for op in on_gpu(recorded(step)).ops if op.name == name)
    assert op.workspace_bytes is not None
    return op.workspace_bytes


def near(nbytes: int) -> Any:
    return pytest.approx(nbytes, rel=0.01, abs=65536)  # NumPy's buffers, Python's objects


X = (8, 16, 32, 32)
N = 8 * 16 * 32 * 32 * 4


def backward(function: Callable[[Any], Any]) -> Callable[[], Any]:
    """A step that applies a function and goes back through it."""
    x = array(*X).view(np.ndarray)

    def step() -> Any:
        v = chainer.Variable(x)
        y = function(v)
        y.grad = np.ones_like(y.array)
        y.backward()
        return v

    return step


def test_dropout_needs_random_numbers(gpu: Any) -> None:
    from chainer.functions.noise.dropout import Dropout

    x, func = array(*X), Dropout(0.5)
    oracle = gpu(lambda: func.forward_gpu((x,)))
    assert oracle == near(N)
    assert corrected(backward(F.dropout), "Dropout") == near(oracle)


def test_the_gradient_of_relu_needs_nothing(gpu: Any) -> None:
    x, gy = array(*X), array(*X)
    oracle = gpu(lambda: relu.ReLUGrad2(x).forward_gpu((gy,)))
    assert oracle == near(0)
    assert corrected(backward(F.relu), "ReLUGrad2") == near(oracle)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.sigmoid, "SigmoidGrad"),
        (F.tanh, "TanhGrad"),
        (F.elu, "ELUGrad"),
        (F.softplus, "SoftplusGrad"),
        (F.clipped_relu, "ClippedReLUGrad2"),
    ],
)
def test_gradients_of_activations_need_nothing(gpu: Any, function: Any, name: str) -> None:
    gradients = {cls.__name__: cls for cls in _classes(chainer.FunctionNode)}
    y, gy = array(*X), array(*X)
    made: dict[str, Callable[[], Any]] = {
        "SigmoidGrad": lambda: gradients[name]((y,)).forward_gpu((y, gy)),
        "TanhGrad": lambda: gradients[name](None).forward_gpu((y, gy)),
        "ELUGrad": lambda: gradients[name](1.0, y).forward_gpu((y,)),
        "SoftplusGrad": lambda: gradients[name]((1.0,)).forward_gpu((y, gy)),
        "ClippedReLUGrad2": lambda: gradients[name](y, 20.0).forward_gpu((gy,)),
    }
    oracle = gpu(made[name])
    assert oracle == near(0)
    assert corrected(backward(function), name) == near(oracle)


def _classes(base: type) -> Iterator[type]:
    for sub in base.__subclasses__():
        yield sub
        yield from _classes(sub)


def test_batch_normalisation_needs_x_hat_on_the_way_back(gpu: Any) -> None:
    impl = batch_normalization.GeneralBatchNormalizationImpl()
    gy, x, gamma = array(*X), array(*X), array(16)
    expander, axis = (None, slice(None), None, None), (0, 2, 3)
    other = SimpleNamespace()  # any module but NumPy: the code for CuPy
    oracle = gpu(
        lambda: impl.backward(
            axis, gamma, gy, x, None, other, expander, array(16), array(16), 1e-5, array(16), None
        )
    )
    assert oracle == near(N)
    link = L.BatchNormalization(16)
    assert corrected(backward(link), "BatchNormalizationGrad") == near(oracle)
    assert corrected(backward(link), "BatchNormalization") == 0
    y = gpu(lambda: batch_normalization._apply_bn_fwd(other, x, *[array(1, 16, 1, 1)] * 4))
    assert y == near(0)


def test_max_pooling_makes_no_columns_and_its_indexes_are_int32(gpu: Any) -> None:
    from chainer.functions.pooling.max_pooling_nd import MaxPoolingND, MaxPoolingNDGrad

    x, func = array(*X), MaxPoolingND(2, 2)
    oracle = gpu(lambda: func.forward_gpu((x,)))
    assert func.indexes.dtype == np.int32
    y = array(8, 16, 16, 16)
    assert oracle == near(0) == near(gpu(lambda: MaxPoolingNDGrad(func).forward_gpu((y,))))
    step = backward(lambda v: F.max_pooling_2d(v, 2))
    assert corrected(step, "MaxPoolingND") == corrected(step, "MaxPoolingNDGrad") == 0
    events = on_gpu(recorded(step)).events
    (indexes,) = (e for e in events if isinstance(e, Alloc) and e.label in HALVED)
    assert indexes.nbytes == func.indexes.nbytes == N // 4


def test_average_pooling_makes_no_columns(gpu: Any) -> None:
    from chainer.functions.pooling.average_pooling_nd import AveragePoolingND

    x, func = array(*X), AveragePoolingND(2, 2, pad_value=0)
    assert gpu(lambda: func.forward_gpu((x,))) == near(0)
    step = backward(lambda v: F.average_pooling_nd(v, 2))
    assert corrected(step, "AveragePoolingND") == corrected(step, "AveragePoolingNDGrad") == 0


def test_a_convolution_without_cudnn_is_as_on_numpy_with_an_output_more(gpu: Any) -> None:
    from chainer.functions.connection.convolution_2d import Convolution2DFunction

    link = L.Convolution2D(16, 24, 3, pad=1)
    x, w, b = array(*X), link.W.array.view(GpuArray), link.b.array.view(GpuArray)
    func = Convolution2DFunction(stride=1, pad=1)
    func._input_layouts = (None, None, None)
    oracle = gpu(lambda: func.forward_gpu((x, w, b)))
    assert oracle > 9 * N  # nine times the input, and more
    assert corrected(backward(link), "Convolution2DFunction") == near(oracle)


def test_lstm_needs_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from chainer.functions.rnn import lstm

    c, x = array(512, 256), array(512, 1024)

    def step() -> Any:
        one, two = chainer.Variable(c.view(np.ndarray)), chainer.Variable(x.view(np.ndarray))
        out = F.sum(F.lstm(one, two)[1])
        out.backward()
        return out, one, two

    trace = recorded(step)
    monkeypatch.setattr(chainer, "get_cpu_array_types", lambda: ())
    other = SimpleNamespace(empty_like=np.empty_like)  # any module but NumPy
    monkeypatch.setattr(lstm.backend, "get_array_module", lambda *arrays: other)
    monkeypatch.setattr(cuda.cupy, "empty_like", lambda a: empty(a.shape), raising=False)
    assert gpu(lambda: lstm.LSTM().forward((c, x))) == near(0)
    assert gpu(lambda: lstm.LSTMGrad().forward((c, x, c, c, c))) == near(0)
    found = {op.name: op.workspace_bytes for op in on_gpu(trace).ops}
    assert found["LSTM"] == found["LSTMGrad"] == 0


OPTIMIZERS = [
    chainer.optimizers.SGD, chainer.optimizers.MomentumSGD,
    chainer.optimizers.CorrectedMomentumSGD, chainer.optimizers.NesterovAG,
    chainer.optimizers.AdaGrad, chainer.optimizers.AdaDelta, chainer.optimizers.Adam,
    chainer.optimizers.AMSGrad, chainer.optimizers.AdaBound, chainer.optimizers.MSVAG,
    chainer.optimizers.RMSprop, chainer.optimizers.RMSpropGraves, chainer.optimizers.SMORMS3,
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_update_needs_nothing(gpu: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link = L.Linear(512, 512, nobias=True)
    optimizer = make().setup(link)
    link.W.grad = np.ones_like(link.W.array)
    optimizer.update()
    rule = link.W.update_rule
    for cls in type(rule).__mro__:  # kernels are kept on the class
        for name in [n for n in vars(cls) if n.endswith("_kernel")]:
            monkeypatch.setattr(cls, name, None)
    assert gpu(lambda: rule.update_core_gpu(link.W)) == near(0)
    trace = recorded(optimizer.update)
    (measured,) = (op for op in trace.ops if op.phase == "update")
    (op,) = (op for op in on_gpu(trace).ops if op.phase == "update")
    assert measured.workspace_bytes and measured.workspace_bytes > link.W.array.nbytes / 2
    assert op.workspace_bytes == 0


def test_an_update_that_keeps_a_float32_copy_stays_as_it_was_measured() -> None:
    master, w = Alloc(0, 80, "state", "Adam.fp32"), Alloc(1, 40, "parameter", "W")
    op = Op("Adam", "update", (), (Access(0, 0, 80), Access(1, 0, 40)), workspace_bytes=70)
    trace = Trace([master, w, op])
    assert [op.workspace_bytes for op in on_gpu(trace).ops] == [70]
    plain = Trace([w, op._replace(writes=(Access(1, 0, 40),))])
    assert [op.workspace_bytes for op in on_gpu(plain).ops] == [0]


# -- the table ---------------------------------------------------------------------------------


def test_every_correction_names_operations_and_places_that_chainer_has() -> None:
    known = {
        cls.__name__ for base in (chainer.FunctionNode, chainer.Function) for cls in _classes(base)
    }
    rules = {cls.__name__.removesuffix("Rule") for cls in _classes(chainer.optimizer.UpdateRule)}
    root = Path(chainer.__file__).parent
    names: list[str] = []
    for each in (*CORRECTIONS, *WITHOUT_CUDNN):
        names += each.ops
        pattern, _, function = each.source.partition(", ")
        texts = [path.read_text(encoding="utf-8") for path in root.glob(pattern)]
        assert any(f"def {function.split('.')[-1]}(" in text for text in texts), each.source
    assert set(names) <= known | rules
    assert len(set(names)) == len(names)


def test_the_page_on_the_virtual_gpu_lists_every_correction() -> None:
    page = (ROOT / "docs" / "virtual-gpu.md").read_text(encoding="utf-8")
    for each in (*CORRECTIONS, *OWN, *WITHOUT_CUDNN, *WITH_CUDNN):
        assert each.source in page
        for name in each.ops:
            assert f"`{name}`" in page, name
    for label, source in HALVED.items():
        assert f"`{label}`" in page and source in page


# -- any trace ---------------------------------------------------------------------------------


@given(traces())
@settings(deadline=None)
def test_a_corrected_trace_holds_together_and_others_are_left_alone(trace: Trace) -> None:
    renamed = [
        e._replace(label="MaxPoolingND.indexes") if isinstance(e, Alloc) else e
        for e in trace.events
    ]
    found = on_gpu(Trace(renamed, "numpy"))
    check(found)
    assert found.peak_bytes <= Trace(renamed).peak_bytes
    assert on_gpu(found) is found  # never twice
    for backend in ("cupy", "model"):
        other = Trace(trace.events, backend)
        assert on_gpu(other) is other
    assert on_gpu(trace, "off") is trace


def test_halved_tensors_are_halved_wherever_they_are_used() -> None:
    indexes = Alloc(0, 800, "stash", "MaxPoolingND.indexes")
    op = Op("MaxPoolingND", "forward", (), (Access(0, 80, 800),), 1, 1000, workspace_bytes=50)
    hint = Hint("prefetch", (Access(0, 0, 800),), 0)
    again = Alloc(0, 800, "array", "other")
    whole = Op("f", "array", (Access(0, 0, 800),), (), 0, 800)
    found = on_gpu(Trace([indexes, op, hint, Free(0), again, whole])).events
    assert found[0] == indexes._replace(nbytes=400)
    assert found[1] == Op(
        "MaxPoolingND", "forward", (), (Access(0, 40, 400),), 1, 640, workspace_bytes=0
    )
    assert found[2] == Hint("prefetch", (Access(0, 0, 400),), 0)
    assert found[4:] == [again, whole]


def test_with_cudnn_convolutions_stay_within_its_limit() -> None:
    def conv(workspace: int) -> Op:
        return Op("Convolution2DFunction", "forward", (), (), workspace_bytes=workspace)

    trace = Trace([conv(100), conv(1 << 30)])
    assert [op.workspace_bytes for op in on_gpu(trace, "cudnn").ops] == [100, CUDNN_LIMIT_BYTES]
    assert [umem.replay(trace, "t4", correct=c).peak_bytes for c in ("auto", "off", "cudnn")] == [
        1 << 30,
        1 << 30,
        8 << 20,
    ]


def test_what_was_not_measured_is_not_invented() -> None:
    trace = Trace([Op("Dropout", "forward", (), (), 100), Op("Adam", "update", (), ())])
    assert [op.workspace_bytes for op in on_gpu(trace).ops] == [None, None]


@pytest.mark.parametrize("wrong", ["on", True, None, "CUDNN"])
def test_unknown_corrections_are_refused(wrong: Any) -> None:
    with pytest.raises(StateError, match="correct must be one of auto, cudnn, off"):
        umem.replay(Trace([]), "t4", correct=wrong)
