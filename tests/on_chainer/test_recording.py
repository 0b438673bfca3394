"""What a recorder sees of Chainer, and that what it watches stays as it is, bit for bit."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from recompute_cases import OldStyle
from traced_graphs import check

import umem
from umem.chainer.flops import estimator
from umem.chainer.gcn import GCN, Adjacency
from umem.devices.cuda import cuda_reason
from umem.errors import OutOfMemoryError
from umem.graphs import normalised_adjacency, rmat
from umem.trace import Alloc, Event, Mark, Op, Trace
from umem.trace.recording import inside

# -- programs ----------------------------------------------------------------------------------


class Residual(chainer.Chain):
    """Convolutions with batch normalisation, dropout, pooling and an input used twice."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 16, 3, pad=1)
            self.norm = L.BatchNormalization(16)
            self.second = L.Convolution2D(16, 16, 3, pad=1, nobias=True)
            self.out = L.Linear(None, 10)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.norm(self.first(x)))
        h = h + F.dropout(self.second(h), 0.3)
        return self.out(F.max_pooling_2d(h, 2))


class Recurrent(chainer.Chain):
    """An LSTM over six steps, on top of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(50, 64)
            self.cell = L.LSTM(64, 96)
            self.out = L.Linear(96, 10)

    def forward(self, x: Any) -> Any:
        self.cell.reset_state()
        for column in range(x.shape[1]):
            h = self.cell(self.embed(x[:, column]))
        return self.out(h)


def images(rng: Any) -> tuple[Any, Any]:
    return rng.standard_normal((24, 3, 24, 24), dtype=np.float32), labels(rng, 24)


def rows(rng: Any) -> tuple[Any, Any]:
    return rng.standard_normal((512, 300), dtype=np.float32), labels(rng, 512)


def nodes(rng: Any) -> tuple[Any, Any]:
    return rng.standard_normal((600, 300), dtype=np.float32), labels(rng, 600)


def words(rng: Any) -> tuple[Any, Any]:
    return rng.integers(0, 50, (256, 6)).astype(np.int32), labels(rng, 256)


def labels(rng: Any, count: int) -> Any:
    return rng.integers(0, 10, count).astype(np.int32)


def mlp(*between: Callable[[Any], Any]) -> Any:
    return chainer.Sequential(
        L.Linear(300, 400), F.relu, L.Linear(400, 400), *between, F.dropout, L.Linear(400, 10)
    )


class Graphs(chainer.Chain):
    """A graph network with its graph."""

    def __init__(self) -> None:
        super().__init__()
        graph = rmat(600, 4000, 300, 10, seed=1)
        self.adjacency = Adjacency(normalised_adjacency(graph))
        with self.init_scope():
            self.net = GCN(300, 64, 10, layers=3, dropout=0.2)

    def forward(self, x: Any) -> Any:
        return self.net(self.adjacency, x)


class Penalty(chainer.Chain):
    """A gradient penalty: the gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.net = chainer.Sequential(L.Linear(300, 200), F.tanh, L.Linear(200, 10))

    def forward(self, x: Any) -> Any:
        x = chainer.Variable(x)
        y = self.net(x)
        (gx,) = chainer.grad([y], [x], enable_double_backprop=True)
        return y + F.mean(gx * gx)


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "mlp": (mlp, rows),
    "residual": (Residual, images),
    "lstm": (Recurrent, words),
    "gcn": (Graphs, nodes),
    "old style": (lambda: mlp(lambda h: OldStyle()(h)), rows),
    "double backprop": (Penalty, rows),
}


class Run:
    """A model, its data and its optimizer; `step` trains once and gives the loss."""

    def __init__(self, name: str, optimizer: Any = None) -> None:
        make, data = PROGRAMS[name]
        np.random.seed(0)
        self.model = make()
        self.x, self.t = data(np.random.default_rng(1))
        self.optimizer = (optimizer or chainer.optimizers.Adam()).setup(self.model)

    def step(self) -> float:
        loss = F.softmax_cross_entropy(self.model(self.x), self.t)
        self.model.cleargrads()
        loss.backward()
        self.optimizer.update()
        return float(loss.array)

    def bits(self) -> list[bytes]:
        params = sorted(self.model.namedparams())
        arrays = [a for _, p in params for a in (p.array, p.grad, *p.update_rule.state.values())]
        arrays += [getattr(link, name) for link in self.model.links() for name in link._persistent]
        return [np.asarray(a).tobytes() for a in arrays]


def recorded(name: str, steps: int = 2, **options: Any) -> tuple[Run, Trace]:
    run = Run(name)
    with umem.record(**options) as recorder:
        for _ in range(steps):
            run.step()
    return run, check(recorder.trace)


# -- nothing changes, nothing is missing, nothing stays ----------------------------------------


def watchers() -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    def gpu(block: Callable[[], Any], vram: str) -> Any:
        stack = ExitStack()
        stack.enter_context(umem.virtual_gpu("v100-16gb", vram))
        stack.enter_context(block())
        return stack

    yield "recorder", umem.record
    yield "calibration", lambda: umem.record(measure="workspace")
    yield "unmanaged", lambda: gpu(nullcontext, "1GiB")
    yield "managed", lambda: gpu(umem.managed, "2MiB")


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_watching_changes_no_bit(name: str) -> None:
    plain = Run(name)
    losses = [plain.step() for _ in range(2)]
    for _, watch in watchers():
        run = Run(name)
        with watch():
            assert [run.step() for _ in range(2)] == losses
        assert run.bits() == plain.bits()


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_array_between_operations_and_inside_them_is_accounted_for(name: str) -> None:
    """The trace's peak is tracemalloc's, which knows nothing of operations.

    Tolerance: 3% and 150 kB, for what is no array (Python's objects) and for temporaries of
    Chainer outside any function.
    """
    recorded(name, 1)  # what is loaded and cached once
    _, trace = recorded(name)
    _, calibration = recorded(name, measure="workspace")
    expected = trace.with_workspace(calibration).peak_bytes
    gc.collect()
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        run = Run(name)
        tracemalloc.reset_peak()
        for _ in range(2):
            run.step()
        measured = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert measured == pytest.approx(expected, rel=0.03, abs=150_000)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_alive_at_the_end_is_what_the_program_holds(name: str) -> None:
    run = Run(name)
    with umem.record() as recorder:
        for _ in range(2):
            run.step()
        gc.collect()
        held = [a for p in run.model.params() for a in (p.array, p.grad)]
        held += [
            a
            for p in run.model.params()
            for a in p.update_rule.state.values()
            if isinstance(a, np.ndarray)
        ]
        tensors = {recorder.access(array, "array", "unseen")[0] for array in held}
        recorder.flush()
        trace = check(recorder.trace)
    lives = trace.lifetimes()
    assert not [life for life in lives.values() if life.alloc.label == "unseen"]
    alive = {tensor for tensor, life in lives.items() if life.death is None}
    others = {lives[tensor].alloc.kind for tensor in alive - tensors}
    assert others <= {"input", "activation"} if name == "lstm" else {"input"}
    assert tensors <= alive


def test_the_recorder_holds_no_array_and_no_function() -> None:
    run = Run("residual")
    with umem.record() as recorder:
        loss = F.softmax_cross_entropy(run.model(run.x), run.t)
        run.model.cleargrads()
        loss.backward()
        watched = [weakref.ref(loss.node), weakref.ref(loss.creator_node), weakref.ref(loss.array)]
        watched += [weakref.ref(p.grad) for p in run.model.params()]
        del loss
        run.model.cleargrads()
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched)
    assert len(recorder.trace) > 0


# -- kinds, phases, marks ----------------------------------------------------------------------


def kind_of(recorder: umem.trace.recording.recorder.Recorder, array: Any) -> str:
    access = recorder.known(array)
    assert access is not None
    return str(recorder.trace.lifetimes()[access[0]].alloc.kind)


@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_gradients_and_state_are_told_apart(name: str) -> None:
    run = Run(name)
    with umem.record() as recorder:
        run.step()
        for param in run.model.params():
            assert kind_of(recorder, param.array) == "parameter"
            assert kind_of(recorder, param.grad) == "gradient"
            for key in ("m", "v"):
                assert kind_of(recorder, param.update_rule.state[key]) == "state"
        assert kind_of(recorder, run.t) == "input"
    kinds: dict[str, set[bool]] = {}
    for event in recorder.trace.events:
        if isinstance(event, Alloc) and ".running_" not in event.label:
            kinds.setdefault(event.kind, set()).add(event.uploaded)
    assert kinds.pop("parameter") == {True}
    assert kinds.pop("input") == {True}
    assert set().union(*kinds.values()) == {False}


def test_what_a_function_keeps_is_stash_and_what_it_was_given_is_input() -> None:
    _, trace = recorded("residual", 1)
    found = {e.label: e for e in trace.events if isinstance(e, Alloc)}
    assert found["Dropout.mask"].kind == "stash"
    assert found["BatchNormalization.inv_std"].kind == "stash"
    assert found["MaxPoolingND.indexes"].kind == "stash"
    mean = found["BatchNormalization.running_mean"]
    assert (mean.kind, mean.uploaded) == ("state", True)
    norms = [op for op in trace.ops if op.name == "BatchNormalization" and op.phase == "forward"]
    assert any(mean.tensor in {a.tensor for a in op.writes} for op in norms)
    _, trace = recorded("gcn", 1)
    found = {e.label: e for e in trace.events if isinstance(e, Alloc)}
    for part in ("data", "indices", "indptr"):
        assert found[f"SparseMatMul.matrix.{part}"][2:5:2] == ("input", True)


def test_what_an_old_style_function_makes_is_stash_that_it_wrote() -> None:
    _, trace = recorded("old style", 1)
    lives = trace.lifetimes()
    (made,) = [life.alloc for life in lives.values() if life.alloc.label == "OldStyle.y"]
    assert (made.kind, made.uploaded, made.nbytes) == ("stash", False, 512 * 400 * 4)
    forward, backward = [op for op in trace.ops if op.name == "OldStyle"]
    assert made.tensor in {access.tensor for access in forward.writes}
    assert made.tensor in {access.tensor for access in backward.reads}
    assert (forward.phase, backward.phase) == ("forward", "backward")


def test_phases_follow_the_step() -> None:
    for name in PROGRAMS:
        _, trace = recorded(name, 2)
        if name == "double backprop":  # it goes back in the middle, on purpose
            continue
        phases = [op.phase for op in trace.ops]
        expected = ["forward", "backward", "update"] * 2
        assert [key for key, _ in itertools.groupby(phases)] == expected


def test_gradients_that_are_added_up_belong_to_backward() -> None:
    for lazy in (False, True):
        with chainer.using_config("lazy_grad_sum", lazy):
            _, trace = recorded("residual", 1)
        adds = [op for op in trace.ops if op.name == "_ + _"]
        assert [op.phase for op in adds] == ["forward", "backward"]
        written = trace.lifetimes()[adds[1].writes[0].tensor].alloc
        assert written.kind == "gradient"


def test_each_update_ends_with_a_mark() -> None:
    run, trace = recorded("mlp", 3)
    ends = [index for index, event in enumerate(trace.events) if event == Mark("step")]
    updates = [i for i, e in enumerate(trace.events) if isinstance(e, Op) and e.phase == "update"]
    assert trace.step_count == len(ends) == 3
    assert len(updates) == 3 * len(list(run.model.params()))
    assert all(len([u for u in updates if u < end]) % 6 == 0 for end in ends)
    with umem.record() as recorder:
        run.optimizer.update(lambda: F.sum(run.model(run.x)))
        with pytest.raises(ZeroDivisionError):
            run.optimizer.update(lambda: 1 / 0)
    assert check(recorder.trace).step_count == 1


def test_a_parameter_that_is_not_updated_is_not_written() -> None:
    run = Run("mlp")
    layers = list(run.model)
    unused = L.Linear(3, 3)
    run.model.append(unused)
    run.optimizer.setup(run.model)
    run.model[0].disable_update()
    with umem.record() as recorder:
        h = run.x
        for layer in layers:
            h = layer(h)
        loss = F.sum(h)
        run.model.cleargrads()
        loss.backward()
        run.optimizer.update()
        frozen = recorder.known(run.model[0].W.array)
    assert frozen is not None
    updates = [op for op in check(recorder.trace).ops if op.phase == "update"]
    assert frozen[0] not in {access.tensor for op in updates for access in op.writes}
    assert len(updates) == 4 + len(list(unused.params()))  # Chainer gives those zero gradients


def test_without_backprop_nothing_outlives_its_use() -> None:
    run = Run("mlp")
    with chainer.no_backprop_mode(), chainer.using_config("train", False):
        with umem.record() as recorder:
            y = run.model(run.x)
            recorder.flush()
            alive = [
                life.alloc
                for life in check(recorder.trace).lifetimes().values()
                if life.death is None and life.alloc.kind == "activation"
            ]
    assert len(alive) == 1
    assert alive[0].nbytes == y.array.nbytes
    assert {op.phase for op in recorder.trace.ops} == {"forward"}


def test_mixed_precision_is_followed_to_the_float32_copies() -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        layer = L.Linear(64, 32)
        optimizer = chainer.optimizers.Adam(eps=1e-4).setup(layer)
        optimizer.use_fp32_update()
        x = np.ones((8, 64), np.float16)
        with umem.record() as recorder:
            for _ in range(2):
                optimizer.update(lambda: F.sum(layer(x)))
            for param in layer.params():
                assert kind_of(recorder, param.array) == "parameter"
                assert kind_of(recorder, param.update_rule._fp32_param.array) == "state"
    trace = check(recorder.trace)
    copies = [e for e in trace.events if isinstance(e, Alloc) and e.label.endswith(".fp32")]
    assert [e.nbytes for e in copies] == [64 * 32 * 4, 32 * 4]


# -- what goes wrong ---------------------------------------------------------------------------


class Failing(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Raises in forward or in backward."""

    def __init__(self, where: str) -> None:
        self.where = where

    def forward(self, inputs: Any) -> Any:
        self.kept = np.ones_like(inputs[0])
        if self.where == "forward":
            raise ZeroDivisionError
        return (inputs[0] * 2,)

    def backward(self, indexes: Any, grads: Any) -> Any:
        F.relu(grads[0])
        raise ZeroDivisionError


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_function_that_raises_leaves_the_recorder_as_it_was(where: str) -> None:
    x = chainer.Variable(np.ones((10, 10), "f"))
    with umem.record() as recorder:
        with pytest.raises(ZeroDivisionError):
            F.sum(Failing(where).apply((F.relu(x),))[0]).backward()
        assert not inside()
        F.sum(F.relu(x)).backward()
    trace = check(recorder.trace)
    assert [op.phase for op in trace.ops][-4:] == ["forward", "forward", "backward", "backward"]


@pytest.mark.thorough
def test_memory_that_runs_out_in_any_operation_leaves_the_recorder_as_it_was() -> None:
    run = Run("residual")
    with umem.record() as whole:
        run.step()
    allocations = sum(isinstance(event, Alloc) for event in whole.trace.events)

    def full_after(count: int) -> Callable[[Event], None]:
        left = [count]

        def listen(event: Event) -> None:
            if isinstance(event, Alloc):
                left[0] -= 1
                if left[0] < 0:
                    raise OutOfMemoryError("full")

        return listen

    for count in range(0, allocations, 5):
        run = Run("residual")
        with umem.record() as beside:
            with umem.trace.recording.recorder.Recorder(full_after(count)) as recorder:
                with pytest.raises(OutOfMemoryError):
                    run.step()
                assert not inside()
            F.relu(np.ones(4, "f"))
        check(recorder.trace)
        assert [op.phase for op in beside.trace.ops][-1] == "forward"
        check(beside.trace)
        assert not any(op.phase == "update" for op in recorder.trace.ops) or count > 20


class Holding(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Keeps what it makes beside its output, or nothing, however it is told to."""

    def __init__(self, how: str) -> None:
        self.how = how
        if how == "in place of None":
            self.held: Any = None
        elif how == "in place of an option":
            self.held = (1, 2)

    def forward(self, inputs: Any) -> Any:
        if self.how == "retained, not held":
            self.retain_outputs((0,))
        elif self.how == "in a tuple":
            self.held = (3, inputs[0] * 2)
        elif self.how == "in a list":
            self.held = [inputs[0] * 2]
        elif self.how != "nothing":
            self.held = inputs[0] * 2
        return (inputs[0] + 1,)


HOW = (
    "nothing", "retained, not held", "in place of None", "in place of an option", "in a tuple",
    "in a list", "anew",
)  # fmt: skip


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
def test_what_a_function_keeps_is_found_however_it_holds_it(graph: bool) -> None:
    """Functions of one class have other attributes each time."""
    x = chainer.Variable(np.ones((10, 10), "f"))
    kept = []
    for how in (*HOW, *reversed(HOW)):
        with umem.record() as recorder, chainer.using_config("enable_backprop", graph):
            Holding(how).apply((x,))
        kept.append([e.label for e in recorder.trace.events if getattr(e, "kind", "") == "stash"])
    expected = [[] if how in HOW[:2] else ["Holding.held"] for how in HOW]
    assert kept == [*expected, *reversed(expected)]


class Nothing(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """No outputs at all."""

    def forward(self, inputs: Any) -> Any:
        return ()


class Scalars(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Keeps all sorts of things on itself."""

    def forward(self, inputs: Any) -> Any:
        self.things = [1, None, "text", inputs[0], [2], {"a": inputs[0]}, np.float32(1)]
        self.empty = np.empty((0, 3))
        return (inputs[0] + 1,)


def test_odd_functions_are_recorded_too() -> None:
    x = np.ones((3, 4), "f")
    with umem.record() as recorder:
        assert Nothing().apply((x,)) == ()
        Scalars().apply((x,))
        F.concat([x], axis=0)
        F.identity(x)
        F.sum(np.ones((), "f"))
        F.linear(np.ones((0, 4), "f"), x)
    assert len(list(check(recorder.trace).ops)) == 6


def test_functions_that_only_share_a_name_with_chainers_are_recorded() -> None:
    x = np.ones((3, 4), "f")
    names = (
        "MatMul",
        "LinearFunction",
        "Convolution2DFunction",
        "Convolution2DGradW",
        "LSTM",
        "LinearGradWeight",
        "SparseMatMul",
        "Deconvolution2DFunction",
    )
    with umem.record() as recorder:
        for name in names:
            type(name, (Scalars,), {"__module__": "mine"})().apply((x,))
    assert [op.flops for op in check(recorder.trace).ops] == [12] * len(names)


# -- estimated operations ----------------------------------------------------------------------


def flops(func: Callable[[], Any]) -> dict[str, int]:
    """Of each operation of a function and of its gradients."""
    with umem.record() as recorder:
        y = func()
        F.sum(y * y).backward()
    return {op.name: op.flops for op in check(recorder.trace).ops}


def variable(*shape: int) -> Any:
    return chainer.Variable(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))


def test_a_linear_layer_counts_each_multiplication_and_addition() -> None:
    n, size_in, size_out = 3, 5, 7
    count = 2 * len(list(itertools.product(range(n), range(size_in), range(size_out))))
    found = flops(lambda: F.linear(variable(n, size_in), variable(size_out, size_in)))
    for name in ("LinearFunction", "LinearGradData", "LinearGradWeight"):
        assert found[name] == count, name


def convolution_count(n: int, out: tuple[int, int], kernel: tuple[int, ...], groups: int) -> int:
    """Products of a convolution, padding included: one by one."""
    channels_out, channels_in, high, wide = kernel
    places = itertools.product(range(n), range(channels_out), range(out[0]), range(out[1]))
    return 2 * sum(channels_in * high * wide for _ in places)


@pytest.mark.parametrize(("stride", "pad", "groups"), [(1, 0, 1), (1, 1, 1), (2, 1, 2)])
def test_a_convolution_and_its_gradients_count_the_same(stride: int, pad: int, groups: int) -> None:
    n, size_in, size_out, k = 2, 4, 6, 3
    x, w = variable(n, size_in, 8, 9), variable(size_out, size_in // groups, k, k)
    y = F.convolution_2d(x, w, stride=stride, pad=pad, groups=groups)
    count = convolution_count(n, y.shape[2:], w.shape, groups)
    found = flops(lambda: F.convolution_2d(x, w, stride=stride, pad=pad, groups=groups))
    for name in ("Convolution2DFunction", "Deconvolution2DFunction", "Convolution2DGradW"):
        assert found[name] == count, name


def test_a_deconvolution_and_its_gradients_count_the_same() -> None:
    x, w = variable(2, 4, 5, 6), variable(4, 3, 3, 3)
    count = convolution_count(2, (5, 6), (4, 3, 3, 3), 1)  # the convolution that it undoes
    found = flops(lambda: F.deconvolution_2d(x, w, stride=2))
    for name in ("Convolution2DFunction", "Deconvolution2DFunction", "Convolution2DGradW"):
        assert found[name] == count, name


@pytest.mark.parametrize("transa", [False, True])
@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_of_matrices_counts_the_same_however_it_lies(
    transa: bool, transb: bool, batch: tuple[int, ...]
) -> None:
    m, k, n = 4, 5, 6
    a = variable(*batch, *((k, m) if transa else (m, k)))
    b = variable(*batch, *((n, k) if transb else (k, n)))
    with umem.record() as recorder:
        y = F.matmul(a, b, transa=transa, transb=transb)
        F.sum(y * y).backward()
    found = [op.flops for op in recorder.trace.ops if op.name == "MatMul"]
    assert found == [2 * m * k * n * int(np.prod(batch, dtype=int))] * 3


def test_products_with_vectors_are_counted() -> None:
    for left, right, count in (((5,), (5,), 5), ((4, 5), (5,), 20), ((5,), (5, 6), 30)):
        with umem.record() as recorder:
            F.matmul(variable(*left), variable(*right))
        (op,) = recorder.trace.ops
        assert op.flops == 2 * count


def test_a_sparse_product_counts_its_entries() -> None:
    run = Run("gcn")
    with umem.record() as recorder:
        run.model(run.x)
    matrix = run.model.adjacency.matrix
    products = [op for op in recorder.trace.ops if op.name == "SparseMatMul"]
    assert [op.flops for op in products] == [2 * matrix.nnz * columns for columns in (64, 64, 10)]
    assert all(op.pattern == "random" for op in products)
    assert products[0].traffic_bytes == matrix.nnz * (64 * 4 + 8) + 600 * 64 * 4


def test_what_is_not_in_the_table_counts_its_elements() -> None:
    assert estimator(F.activation.relu.ReLU) is estimator(object)
    found = flops(lambda: F.exp(variable(3, 4)))
    assert found["exp"] == 12


# -- the device that goes with it --------------------------------------------------------------


def test_the_chainer_device_is_numpys_on_a_virtual_gpu_and_an_error_without_any() -> None:
    with umem.virtual_gpu("t4", "64MiB"):
        assert umem.chainer.device() == chainer.get_device("@numpy")
    if cuda_reason() is not None:
        with pytest.raises(umem.DeviceNotFoundError, match="no CUDA device"):
            umem.chainer.device()


def test_a_look_up_gathers_its_rows_and_not_the_whole_table() -> None:
    link, rows = chainer.links.EmbedID(1000, 8), np.array([3, 5, 3], np.int32)
    with umem.record() as recorder:
        y = link(rows)
        y.grad = np.ones_like(y.array)
        y.backward()
    look_up, gradient = list(recorder.trace.ops)[:2]
    assert (look_up.name, look_up.pattern) == ("EmbedIDFunction", "random")
    assert look_up.traffic_bytes == 2 * y.array.nbytes + rows.nbytes
    assert (gradient.name, gradient.pattern) == ("EmbedIDGrad", "random")


def test_the_gradient_of_max_pooling_reads_the_indexes() -> None:
    x = chainer.Variable(np.ones((2, 3, 8, 8), np.float32))
    with umem.record() as recorder:
        y = F.max_pooling_2d(x, 2)
        y.grad = np.ones_like(y.array)
        y.backward()
    made = {e.tensor: e.label for e in recorder.trace.events if isinstance(e, Alloc)}
    reads = {op.name: {made[a.tensor] for a in op.reads} for op in recorder.trace.ops}
    assert "MaxPoolingND.indexes" in reads["MaxPoolingNDGrad"]
