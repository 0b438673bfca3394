"""umem.chainer.gcn: the sparse product, its gradients, and the layers on it."""

import sys
import weakref

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import umem.chainer  # isort: skip
import chainer
import chainer.functions as F
from chainer import gradient_check
from chainer.utils.type_check import InvalidType

from umem.chainer import gcn
from umem.chainer.gcn import GCN, Adjacency, GraphConvolution, SparseMatMul, sparse_matmul
from umem.errors import DeviceError, MissingDependencyError
from umem.graphs import karate_club, normalised_adjacency, rmat


def random_matrix(rows, columns, dtype=np.float32, seed=0):
    """A CSR matrix with empty rows, and its float64 equal, dense."""
    rng = np.random.RandomState(seed)
    dense = rng.uniform(-1, 1, (rows, columns)) * (rng.uniform(size=(rows, columns)) < 0.4)
    dense = dense.astype(dtype)
    dense[rows // 2] = 0
    return scipy.sparse.csr_matrix(dense), dense.astype(np.float64)


def random_array(shape, dtype=np.float32, seed=1):
    return np.random.RandomState(seed).uniform(-1, 1, shape).astype(dtype)


# The product


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float16, 1e-3), (np.float32, 1e-6), (np.float64, 1e-14)]
)
@pytest.mark.parametrize("matrix_dtype", [np.float32, np.float64])
def test_product_equals_the_dense_float64_one_in_the_dtype_of_x(dtype, tolerance, matrix_dtype):
    matrix, dense = random_matrix(7, 5, matrix_dtype)
    x = random_array((5, 3), dtype)
    y = sparse_matmul(Adjacency(matrix), x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y.array, dense @ x.astype(np.float64), tolerance, tolerance)


def test_float16_is_summed_in_float32():
    matrix = scipy.sparse.csr_matrix(np.full((1, 4096), 1, np.float32))
    x = np.full((4096, 1), 1, np.float16)  # a float16 sum of ones stops at 2048
    assert sparse_matmul(Adjacency(matrix), x).array.item() == 4096


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_product_of_any_shape_and_memory_layout(rows, columns, width, seed):
    matrix, dense = random_matrix(rows, columns, seed=seed)
    x = random_array((2 * width, columns), seed=seed)[::2].T
    y = sparse_matmul(Adjacency(matrix), x)
    np.testing.assert_allclose(y.array, dense @ x, 1e-5, 1e-6)


@pytest.mark.parametrize("shape", [(7, 5), (6, 6)])
def test_gradient_and_second_gradient_are_those_of_the_product(shape):
    adjacency = Adjacency(random_matrix(*shape, np.float64)[0])
    x, gy = random_array((shape[1], 3), np.float64), random_array((shape[0], 3), np.float64)
    ggx = random_array((shape[1], 3), np.float64, seed=2)

    def product(x):
        return sparse_matmul(adjacency, x)

    exact = {"dtype": np.float64, "rtol": 1e-7, "atol": 1e-7}
    gradient_check.check_backward(product, x, gy, **exact)
    gradient_check.check_double_backward(lambda x: product(x) ** 2, x, gy, ggx, **exact)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gradient_is_the_transposed_product_in_the_dtype_of_x(dtype):
    matrix, dense = random_matrix(7, 5)
    x, gy = chainer.Variable(random_array((5, 3), dtype)), random_array((7, 3), dtype)
    y = sparse_matmul(Adjacency(matrix), x)
    y.grad = gy
    y.backward()
    assert x.grad.dtype == dtype
    np.testing.assert_allclose(x.grad, dense.T @ gy, 2e-3, 2e-3)


def test_backward_repeats_its_bits():
    adjacency = Adjacency(normalised_adjacency(rmat(500, 3000, 1, 1)))
    x, gy = random_array((500, 16)), random_array((500, 16))

    def gradient():
        variable = chainer.Variable(x)
        y = sparse_matmul(adjacency, variable)
        y.grad = gy
        y.backward()
        return variable.grad

    np.testing.assert_array_equal(gradient(), gradient())


def test_product_keeps_neither_its_input_nor_its_output_for_backward():
    x = chainer.Variable(random_array((6, 2)))
    y = sparse_matmul(Adjacency(random_matrix(6, 6)[0]), x)
    arrays = weakref.ref(x.array), weakref.ref(y.array)
    creator = y.creator
    del x, y
    assert [array() for array in arrays] == [None, None]
    assert creator.inputs[0].data is None


def test_function_node_shows_the_matrix_it_multiplies_by():
    adjacency = Adjacency(random_matrix(7, 5)[0])
    x, gy = chainer.Variable(random_array((5, 2))), chainer.Variable(random_array((7, 2)))
    y = sparse_matmul(adjacency, x)
    assert isinstance(y.creator, SparseMatMul)
    assert y.creator.matrix is adjacency.matrix
    (gx,) = chainer.grad([y], [x], [gy], enable_double_backprop=True)
    assert gx.creator.matrix is adjacency.transpose


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((5, 2), np.int32),
        np.zeros(5, np.float32),
        np.zeros((5, 2, 2), np.float32),
        np.zeros((7, 2), np.float32),
    ],
)
def test_product_with_another_shape_or_dtype_is_a_type_error_of_chainer(x):
    with pytest.raises(InvalidType, match="SparseMatMul"):
        sparse_matmul(Adjacency(random_matrix(7, 5)[0]), x)


def test_product_of_arrays_on_two_devices_says_how_to_bring_them_together(monkeypatch):
    adjacency = Adjacency(random_matrix(7, 5)[0])

    class Elsewhere:
        __name__ = "cupy"

    monkeypatch.setattr(
        gcn.cuda, "get_array_module", lambda a: np if a is adjacency.matrix.data else Elsewhere()
    )
    with pytest.raises(DeviceError, match=r"a numpy matrix and x is a cupy array; bring both to"):
        sparse_matmul(adjacency, random_array((5, 2)))


# The adjacency


def test_adjacency_of_a_symmetric_matrix_keeps_one_matrix():
    matrix = normalised_adjacency(karate_club())
    adjacency = Adjacency(matrix)
    assert adjacency.matrix is adjacency.transpose is matrix


@pytest.mark.parametrize("shape", [(7, 5), (6, 6)])
def test_adjacency_of_another_matrix_keeps_the_transpose_as_csr(shape):
    matrix, dense = random_matrix(*shape)
    adjacency = Adjacency(matrix)
    assert adjacency.transpose.format == "csr"
    np.testing.assert_array_equal(adjacency.transpose.toarray(), dense.T)
    assert adjacency.transposed.matrix is adjacency.transpose
    assert adjacency.transposed.transpose is matrix


def test_adjacency_with_equal_pattern_but_other_values_is_not_symmetric():
    matrix = scipy.sparse.csr_matrix(np.array([[0, 2], [1, 0]], np.float32))
    adjacency = Adjacency(matrix)
    np.testing.assert_array_equal(adjacency.transpose.toarray(), [[0, 1], [2, 0]])


@pytest.mark.parametrize("symmetric", [True, False])
def test_adjacency_sent_to_the_cpu_is_equal_and_stays_one_matrix_if_symmetric(symmetric):
    matrix = normalised_adjacency(karate_club()) if symmetric else random_matrix(5, 5)[0]
    adjacency = Adjacency(matrix)
    for sent in (adjacency.to_cpu(), adjacency.to_device("@numpy")):
        assert (sent.matrix is sent.transpose) == symmetric
        assert abs(sent.matrix - matrix).sum() == 0
        assert abs(sent.transpose - matrix.T).sum() == 0


@pytest.mark.parametrize(
    ("matrix", "described"),
    [
        (scipy.sparse.csc_matrix(np.eye(2, dtype=np.float32)), "csc csc_matrix of float32"),
        (scipy.sparse.csr_matrix(np.eye(2, dtype=np.int64)), "csr csr_matrix of int64"),
        (np.eye(2, dtype=np.float32), "ndarray of float32"),
        (None, "NoneType"),
    ],
)
def test_adjacency_of_something_else_says_what_it_needs(matrix, described):
    with pytest.raises(TypeError, match=f"needs a CSR matrix .* got {described}$"):
        Adjacency(matrix)


def test_adjacency_without_scipy_names_the_extra(monkeypatch):
    adjacency = Adjacency(random_matrix(5, 5)[0])
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'scipy.*chainer\)$"):
        adjacency.to_cpu()


# The layers


@pytest.mark.parametrize(("in_size", "out_size"), [(6, 3), (3, 6), (4, 4)])
def test_layer_equals_the_dense_formula_in_either_order(in_size, out_size):
    matrix, dense = random_matrix(5, 5)
    layer = GraphConvolution(in_size, out_size)
    layer.b.array[:] = random_array(out_size)
    x = random_array((5, in_size))
    expected = dense @ x @ layer.W.array.T.astype(np.float64) + layer.b.array
    np.testing.assert_allclose(layer(Adjacency(matrix), x).array, expected, 1e-5, 1e-6)


@pytest.mark.parametrize(("in_size", "out_size", "width"), [(6, 3, 3), (3, 6, 3), (4, 4, 4)])
def test_layer_makes_the_sparse_product_as_narrow_as_it_can(in_size, out_size, width):
    widths = []

    class Widths(chainer.FunctionHook):
        def forward_preprocess(self, function, inputs):
            if isinstance(function, SparseMatMul):
                widths.append(inputs[0].shape[1])

    with Widths():
        GraphConvolution(in_size, out_size)(
            Adjacency(random_matrix(5, 5)[0]), random_array((5, in_size))
        )
    assert widths == [width]


@pytest.mark.parametrize(("in_size", "out_size"), [(4, 2), (2, 4)])
def test_layer_gradients_are_those_of_the_layer(in_size, out_size):
    adjacency = Adjacency(random_matrix(5, 5, np.float64)[0])
    with chainer.using_config("dtype", np.float64):
        layer = GraphConvolution(in_size, out_size)
    gradient_check.check_backward(
        lambda x, *parameters: layer(adjacency, x),
        random_array((5, in_size), np.float64),
        random_array((5, out_size), np.float64),
        params=[layer.W, layer.b],
        dtype=np.float64,
        rtol=1e-7,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    ("layers", "widths"), [(1, [(2, 9)]), (2, [(4, 9), (2, 4)]), (3, [(4, 9), (4, 4), (2, 4)])]
)
def test_gcn_has_the_layers_asked_for(layers, widths):
    model = GCN(9, hidden=4, classes=2, layers=layers)
    assert [layer.W.shape for layer in model] == widths
    assert model(Adjacency(random_matrix(5, 5)[0]), random_array((5, 9))).shape == (5, 2)


def test_gcn_equals_the_dense_formula():
    matrix, dense = random_matrix(5, 5)
    model, x = GCN(6, hidden=4, classes=3), random_array((5, 6))
    h = x.astype(np.float64)
    for number, layer in enumerate(model):
        h = dense @ (np.maximum(h, 0) if number else h) @ layer.W.array.T + layer.b.array
    np.testing.assert_allclose(model(Adjacency(matrix), x).array, h, 1e-5, 1e-6)


def functions_run(model):
    names = []

    class Names(chainer.FunctionHook):
        def forward_preprocess(self, function, inputs):
            names.append(function.label)

    with Names():
        model(Adjacency(random_matrix(5, 5)[0]), random_array((5, 4)))
    return names


def test_gcn_drops_out_hidden_values_while_it_trains_and_only_then():
    model = GCN(4, hidden=4, classes=4, layers=3, dropout=0.5)
    assert functions_run(model).count("Dropout") == 2
    with chainer.using_config("train", False):
        assert "Dropout" not in functions_run(model)


def test_gcn_without_dropout_makes_no_mask():
    assert "Dropout" not in functions_run(GCN(4, hidden=4, classes=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "GCN: layers must be 1 or more; got 0"),
        ({"dropout": 1.0}, "GCN: dropout must be from 0 to below 1; got 1.0"),
        ({"dropout": -0.1}, "GCN: dropout must be from 0 to below 1; got -0.1"),
    ],
)
def test_gcn_argument_out_of_range_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        GCN(4, 4, 4, **arguments)


@pytest.mark.thorough
def test_gcn_learns_the_task_of_a_generated_graph_better_than_chance():
    graph = rmat(2000, 20_000, 32, 4)
    adjacency = Adjacency(normalised_adjacency(graph))
    np.random.seed(0)
    model = GCN(32, hidden=16, classes=4, layers=2)
    optimizer = chainer.optimizers.Adam(0.02).setup(model)
    labels = graph.labels_where(graph.train_mask)
    for _ in range(60):
        optimizer.update(lambda: F.softmax_cross_entropy(model(adjacency, graph.features), labels))
    found = model(adjacency, graph.features).array.argmax(axis=1)
    assert (found == graph.labels)[graph.test_mask].mean() > 0.6


# Recorded, and on a virtual GPU


def test_recorder_sees_the_matrix_once_and_read_by_every_product():
    graph = karate_club()
    adjacency, model = Adjacency(normalised_adjacency(graph)), GCN(34, hidden=8, classes=2)
    with umem.record() as recorder:
        F.sum(model(adjacency, graph.features)).backward()
    trace = recorder.trace
    products = [op for op in trace.ops if op.name == "SparseMatMul"]
    assert [op.phase for op in products] == ["forward"] * 3 + ["backward"] * 3
    matrix = {access.tensor for access in products[0].reads[1:]}
    assert len(matrix) == 3  # data, indices and indptr
    assert all({access.tensor for access in op.reads[1:]} == matrix for op in products)
    assert all(op.flops == 2 * 190 * 8 for op in products[:2])


def test_gcn_on_a_virtual_gpu_computes_the_same_bits():
    graph = karate_club()
    adjacency, model = Adjacency(normalised_adjacency(graph)), GCN(34, hidden=8, classes=2)
    expected = model(adjacency, graph.features).array
    with umem.virtual_gpu("v100-16gb"), umem.managed():
        device = umem.chainer.device()
        model.to_device(device)
        found = model(adjacency.to_device(device), device.send(graph.features)).array
    np.testing.assert_array_equal(found, expected)


# On a GPU


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float16, 2e-3), (np.float32, 1e-5), (np.float64, 1e-6)]
)
@pytest.mark.parametrize("shape", [(70, 50), (60, 60)])
def test_product_and_gradient_on_a_gpu_equal_those_on_the_cpu(cupy, dtype, tolerance, shape):
    matrix, dense = random_matrix(*shape)
    adjacency = Adjacency(matrix).to_gpu()
    x, gy = random_array((shape[1], 8), dtype), random_array((shape[0], 8), dtype)
    variable = chainer.Variable(cupy.asarray(x))
    y = sparse_matmul(adjacency, variable)
    y.grad = cupy.asarray(gy)
    y.backward()
    assert y.dtype == variable.grad.dtype == dtype
    np.testing.assert_allclose(y.array.get(), dense @ x.astype(float), tolerance, tolerance)
    np.testing.assert_allclose(
        variable.grad.get(), dense.T @ gy.astype(float), tolerance, tolerance
    )
    assert abs(adjacency.to_cpu().matrix - matrix).sum() == 0


@pytest.mark.gpu
def test_product_on_a_gpu_repeats_itself(cupy):
    """To rounding: cuSPARSE does not promise that its default algorithm repeats its bits."""
    adjacency = Adjacency(normalised_adjacency(rmat(5000, 50_000, 1, 1))).to_gpu()
    x = cupy.asarray(random_array((5000, 64)))
    products = [sparse_matmul(adjacency, x).array for _ in range(5)]
    for product in products[1:]:
        np.testing.assert_allclose(product.get(), products[0].get(), 1e-5, 1e-6)


@pytest.mark.gpu
def test_gcn_on_a_gpu_learns_what_it_learns_on_the_cpu(cupy):
    graph = karate_club()
    adjacency = Adjacency(normalised_adjacency(graph))
    model = GCN(34, hidden=8, classes=2)
    on_cpu = model(adjacency, graph.features).array
    model.to_device("@cupy:0")
    on_gpu = model(adjacency.to_gpu(), cupy.asarray(graph.features)).array
    np.testing.assert_allclose(on_gpu.get(), on_cpu, 1e-4, 1e-5)


@pytest.mark.gpu
def test_adjacency_left_on_the_cpu_is_an_error_that_says_so(cupy):
    adjacency = Adjacency(normalised_adjacency(karate_club()))
    with pytest.raises(DeviceError, match="a numpy matrix and x is a cupy array"):
        sparse_matmul(adjacency, cupy.zeros((34, 2), np.float32))
