"""Convolutions and poolings under a cap: Chainer's results, the cap kept, and nothing left on."""

from __future__ import annotations

import threading
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import umem.chainer  # isort: skip
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import gradient_check

from umem.chainer import checkpoint, workspace
from umem.chainer.chunking.capped import cap_here
from umem.errors import SizeError, StateError, WorkspaceWarning

TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-11}
OBJECTS = 64 << 10
"""Room for Python's own objects beside arrays, in bytes."""


def normal(*shape: int, dtype: str = "f", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def whole_numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-8, 9, shape).astype("f")


def results(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """The output, the gradients of all inputs, and where there are samples those of these."""
    inputs = [chainer.Variable(array.copy()) for array in arrays]
    y = function(*inputs)
    weights = normal(*y.shape, dtype=y.dtype, seed=1)
    grads = chainer.grad([F.sum(y * y * weights)], inputs, enable_double_backprop=True)
    found = [y, *grads]
    if y.size and y.dtype != np.float16:
        found += chainer.grad([sum(F.mean(g * g) for g in grads)], inputs)
    return [v.array for v in found if v is not None]


def capped(cap: int, function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkspaceWarning)
        with workspace(cap):
            return results(function, *arrays)


def assert_near(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        b = b.astype("d")
        most = np.abs(b[np.isfinite(b)]).max(initial=0)  # halves may overflow, in both
        np.testing.assert_allclose(a.astype("d"), b, rtol=0, atol=tolerance * most + 1e-30)


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [a.tobytes() for a in found] == [b.tobytes() for b in expected]


# -- the same as Chainer's whole computation -----------------------------------------------------


@st.composite
def convolutions(draw: Any) -> tuple[bool, dict[str, Any], list[np.ndarray], str]:
    """Whether it is a deconvolution, its arguments, and its arrays."""
    ndim = draw(st.integers(1, 3))
    several = st.tuples(*[st.integers(1, 3)] * ndim)
    groups, each, outputs = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    kernel, dilate = draw(several), draw(st.tuples(*[st.integers(1, 2)] * ndim))
    pad = draw(st.tuples(*[st.integers(0, 2)] * ndim))
    image = tuple(
        d * (k - 1) + 1 + draw(st.integers(0, 5)) for k, d in zip(kernel, dilate, strict=True)
    )
    is_back = draw(st.booleans())
    dtype = draw(st.sampled_from(sorted(TOLERANCE)))
    options: dict[str, Any] = {
        "stride": draw(several), "pad": pad, "dilate": dilate, "groups": groups,
    }  # fmt: skip
    if is_back:
        image = tuple(size + 2 * p for size, p in zip(image, pad, strict=True))
        shape = (each * groups, outputs, *kernel)
    else:
        shape = (outputs * groups, each, *kernel)
        options["cover_all"] = draw(st.booleans())
    x = normal(draw(st.integers(0, 4)), each * groups, *image, dtype=dtype)
    arrays = [x * x.dtype.type(0.2), normal(*shape, dtype=dtype, seed=2)]
    if draw(st.booleans()):
        arrays.append(normal(outputs * groups, dtype=dtype, seed=3))
    return is_back, options, arrays, dtype


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(convolutions(), st.sampled_from([1, 300, 3_000, 30_000, 1 << 30]))
def test_every_convolution_is_chainers_up_to_rounding(
    case: tuple[bool, dict[str, Any], list[np.ndarray], str], cap: int
) -> None:
    is_back, options, arrays, dtype = case

    def function(*inputs: Any) -> Any:
        return (F.deconvolution_nd if is_back else F.convolution_nd)(*inputs, **options)

    with np.errstate(over="ignore"):
        assert_near(capped(cap, function, *arrays), results(function, *arrays), TOLERANCE[dtype])


CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "plain": (lambda *a: F.convolution_2d(*a, pad=1), ((5, 4, 9, 11), (6, 4, 3, 3), (6,))),
    "strided, dilated": (
        lambda *a: F.convolution_2d(*a, stride=(2, 1), pad=(1, 2), dilate=(2, 3)),
        ((5, 4, 9, 11), (6, 4, 3, 2)),
    ),
    "one place": (F.convolution_2d, ((5, 4, 25, 25), (6, 4, 1, 1), (6,))),
    "one small place": (F.convolution_2d, ((5, 4, 3, 3), (6, 4, 1, 1))),
    "groups": (lambda *a: F.convolution_2d(*a, groups=2), ((5, 4, 9, 11), (6, 2, 3, 3), (6,))),
    "each channel": (lambda *a: F.convolution_2d(*a, groups=4), ((5, 4, 9, 9), (4, 1, 3, 3))),
    "back": (
        lambda *a: F.deconvolution_2d(*a, stride=2, pad=1, outsize=(18, 22)),
        ((5, 4, 9, 11), (4, 6, 3, 3), (6,)),
    ),
    "back, groups": (
        lambda *a: F.deconvolution_2d(*a, stride=2, pad=1, groups=2),
        ((5, 4, 9, 11), (4, 3, 3, 3), (6,)),
    ),
    "no samples": (F.convolution_2d, ((0, 4, 9, 11), (6, 4, 3, 3), (6,))),
}


@pytest.mark.parametrize("cap", [1, 2_000, 20_000, 1 << 30])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_images_is_chainers_up_to_rounding(name: str, cap: int) -> None:
    function, shapes = CONVOLUTIONS[name]
    arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    assert_near(capped(cap, function, *arrays), results(function, *arrays), 1e-4)


def test_types_that_differ_give_the_type_of_the_images() -> None:
    x, kernel = normal(3, 2, 6, 6), normal(4, 2, 3, 3, dtype="d")
    whole = F.convolution_nd(x, kernel).array
    with workspace(2_000):
        assert_near([F.convolution_nd(x, kernel).array], [whole], 1e-6)


def test_gradients_are_those_of_finite_differences() -> None:
    x, kernel, bias = normal(3, 4, 5, 6, dtype="d"), normal(4, 2, 3, 3, dtype="d"), np.ones(4)

    def function(*inputs: Any) -> Any:
        return F.average_pooling_2d(F.convolution_2d(*inputs, pad=1, groups=2), 2) ** 2

    with workspace(3_000):
        y = function(x, kernel, bias)
        gradient_check.check_backward(function, (x, kernel, bias), normal(*y.shape, dtype="d"))


X, X3 = normal(5, 4, 9, 11), normal(2, 4, 5, 6, 7)
POOLINGS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "max": (lambda x: F.max_pooling_2d(x, 3, 2, 1), X),
    "max, not all": (lambda x: F.max_pooling_2d(x, (2, 3), 2, 1, cover_all=False), X),
    "max of volumes": (lambda x: F.max_pooling_nd(x, 3, 2, 1, cover_all=False), X3),
    "average": (lambda x: F.average_pooling_2d(x, 3, 2, 1), X),
    "average of volumes": (lambda x: F.average_pooling_nd(x, 3, 2, 1), X3),
    "average of what is there": (lambda x: F.average_pooling_nd(x, 3, 2, 1, pad_value=None), X),
    "spatial pyramid": (lambda x: F.spatial_pyramid_pooling_2d(x, 2, pooling="max"), X),
}


@pytest.mark.parametrize("cap", [1, 500, 5_000, 1 << 30])
@pytest.mark.parametrize("name", POOLINGS)
def test_a_pooling_is_chainers_to_the_bit(name: str, cap: int) -> None:
    function, x = POOLINGS[name]
    assert_same(capped(cap, function, x), results(function, x))


def test_a_pooling_of_whole_images_and_of_halves_is_chainers_up_to_rounding() -> None:
    for function, x in (
        (lambda x: F.average_pooling_2d(x, (9, 11)), X),
        (lambda x: F.average_pooling_2d(x, 3, 2, 1), X.astype("e")),
    ):
        tolerance = TOLERANCE[x.dtype.name]
        assert_near(capped(5_000, function, x), results(function, x), tolerance)


def test_the_place_of_a_largest_value_is_chainers_with_ties_and_what_is_no_number() -> None:
    x = np.random.default_rng(0).integers(0, 3, (4, 3, 9, 9)).astype("f")
    x[0, :, 2:5, 3], x[1] = np.nan, -np.inf
    y, places = F.max_pooling_2d(x, 3, 2, 1, return_indices=True)
    with workspace(1_000):
        found, at = F.max_pooling_2d(x, 3, 2, 1, return_indices=True)
    np.testing.assert_array_equal(found.array, y.array)
    np.testing.assert_array_equal(at, places)


def test_the_gradient_of_an_average_leaves_the_gradient_that_it_is_given() -> None:
    """Chainer's own divides it in place."""
    y = F.average_pooling_nd(chainer.Variable(X), 3, 2, 1, pad_value=None)
    gradient = np.ones_like(y.array)
    with workspace("1MiB"):
        y.grad = gradient
        y.backward()
    assert (gradient == 1).all()


def test_errors_are_chainers() -> None:
    for function in (
        lambda: F.convolution_2d(normal(1, 2, 2, 2), normal(1, 2, 3, 3)),
        lambda: F.convolution_nd(normal(1, 3, 5), normal(2, 1, 3), groups=2),
        lambda: F.convolution_nd(normal(1, 3, 5), normal(2, 2, 3)),
        lambda: F.max_pooling_2d(normal(1, 1, 1, 1), 3, cover_all=False),
    ):
        with pytest.raises(Exception) as plain:
            function()
        with workspace("1MiB"), pytest.raises(type(plain.value)) as found:
            function()
        assert str(found.value) == str(plain.value)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6), st.integers(1, 20), st.lists(st.integers(1, 12), max_size=3), st.booleans()
)
def test_batch_normalisation_is_chainers_to_the_bit(
    sample_count: int, channel_count: int, image: list[int], is_double: bool
) -> None:
    shape, dtype = (sample_count, channel_count, *image), "d" if is_double else "f"
    x, gamma, beta = (normal(*s, dtype=dtype) for s in (shape, (channel_count,), (channel_count,)))

    def everything() -> list[np.ndarray]:
        running = np.zeros_like(gamma), np.ones_like(gamma)

        def function(*inputs: Any) -> Any:
            return F.batch_normalization(*inputs, running_mean=running[0], running_var=running[1])

        return [*results(function, x, gamma, beta), *running]

    whole = everything()
    with workspace(2_000):
        assert_same(everything(), whole)


# -- the cap -------------------------------------------------------------------------------------


def most_beside_results(function: Callable[[], Any]) -> int:
    """The bytes that a call takes at most, beside what it returns."""
    function()  # what is remembered of its shapes
    tracemalloc.start()
    try:
        y = function()
        del y
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        y = function()
        _, peak = tracemalloc.get_traced_memory()
        return peak - before - int(y.nbytes)
    finally:
        tracemalloc.stop()


LARGE = ((8, 32, 40, 40), (32, 32, 3, 3), 1), ((4, 3, 96, 96), (64, 3, 3, 3), 1), (
    (32, 64, 7, 7), (128, 64, 3, 3), 1), ((6, 24, 30, 30), (24, 4, 3, 3), 6,
)  # fmt: skip


@pytest.mark.parametrize("cap", [300_000, 1 << 20])
@pytest.mark.parametrize(("images", "kernel", "groups"), LARGE)
def test_a_convolution_and_its_gradients_keep_to_the_cap(
    images: tuple[int, ...], kernel: tuple[int, ...], groups: int, cap: int
) -> None:
    x, w = normal(*images), normal(*kernel)
    options = {"pad": 1, "groups": groups}
    y = F.convolution_2d(chainer.Variable(x), chainer.Variable(w), **options)
    gy, func = np.ascontiguousarray(y.array), y.creator
    calls = {
        "outputs": lambda: F.convolution_2d(x, w, **options).array,
        "images": lambda: F.deconvolution_2d(gy, w, **options).array,
        "kernel": lambda: func.backward((1,), (chainer.Variable(gy),))[0].array,
    }
    with workspace(cap):
        found = {name: most_beside_results(call) for name, call in calls.items()}
    assert all(nbytes <= cap + OBJECTS for nbytes in found.values()), found
    assert min(most_beside_results(call) for call in calls.values()) > 2 * cap


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_kernel_of_one_place_keeps_to_the_cap_on_any_layout(dtype: str) -> None:
    """Where samples do not lie as a BLAS wants them, they are copied a part at a time."""
    x = np.asfortranarray(normal(2, 64, 100, 100, dtype=dtype))
    w = normal(4, 64, 1, 1, dtype=dtype)
    with workspace("256KiB"):
        most = most_beside_results(lambda: F.convolution_2d(x, w).array)
        found = F.convolution_2d(x, w).array
    assert most < (256 << 10) + OBJECTS
    assert_near([found], [F.convolution_2d(x, w).array], TOLERANCE[dtype])


def test_a_pooling_keeps_to_the_cap() -> None:
    x = normal(8, 32, 40, 40)
    with workspace("256KiB"):
        maximum = most_beside_results(lambda: F.max_pooling_2d(x, 3, 1, 1).array)
        average = most_beside_results(lambda: F.average_pooling_2d(x, 3, 1, 1).array)
    assert maximum - x.size * 4 <= (256 << 10) + OBJECTS  # int32 places are kept for backward
    assert average <= (256 << 10) + OBJECTS


def test_batch_normalisation_keeps_to_the_cap() -> None:
    x, ones = normal(8, 32, 40, 40), np.ones(32, "f")
    y = F.batch_normalization(chainer.Variable(x), ones, ones)
    gradients = [chainer.Variable(normal(*x.shape))]
    calls = {
        "forward": lambda: F.batch_normalization(x, ones, ones).array,
        "backward": lambda: y.creator.backward((0,), gradients)[0].array,
    }
    with workspace("1MiB"):
        found = {name: most_beside_results(call) for name, call in calls.items()}
    assert all(nbytes <= (1 << 20) + OBJECTS for nbytes in found.values()), found
    assert min(most_beside_results(call) for call in calls.values()) > 2 << 20


def test_a_cap_below_a_row_uses_a_row_and_says_so_once() -> None:
    x, w = normal(2, 64, 20, 20), normal(8, 64, 3, 3)
    with pytest.warns(
        WorkspaceWarning, match=r"100 B is too small .* Convolution2DFunction: 41\.1 KiB"
    ) as said:
        with workspace(100):
            most = most_beside_results(lambda: F.convolution_2d(x, w).array)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert most < 20 * 64 * 9 * 4 + OBJECTS


def test_a_cap_of_a_byte_computes_all_the_same() -> None:
    x, w = normal(2, 4, 5, 5), normal(3, 4, 3, 3)
    link = L.BatchNormalization(4)
    plain = [F.convolution_2d(x, w).array, link(x).array]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkspaceWarning)
        with workspace(1):
            found = [F.convolution_2d(x, w).array, link(x).array]
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_results_are_contiguous_and_repeat_to_the_bit() -> None:
    x, w = normal(6, 8, 20, 20), normal(8, 8, 3, 3)
    with workspace("64KiB"):
        first, second = F.convolution_2d(x, w).array, F.convolution_2d(x.copy(), w.copy()).array
    assert first.flags.c_contiguous
    assert_same([first], [second])


# -- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CONVOLUTIONS if n != "no samples"])
def test_exact_is_chainer_to_the_bit_and_to_the_layout(name: str) -> None:
    function, shapes = CONVOLUTIONS[name]
    arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    whole = results(function, *arrays)
    with workspace(20_000, exact=True):
        for _ in range(2):  # compared; then in parts, or whole
            found = results(function, *arrays)
            assert_same(found, whole)
            assert [a.strides for a in found] == [a.strides for a in whole]


def test_exact_computes_in_parts_what_is_the_same() -> None:
    """Of whole numbers, whose sums have the same bits in any order: a BLAS may sum in several."""
    x, w = whole_numbers(8, 16, 32, 32), whole_numbers(16, 16, 1, 1)
    with workspace("64KiB", exact=True):
        F.convolution_2d(x, w)
        most = most_beside_results(lambda: F.convolution_2d(x, w).array)
    assert most < x.nbytes + OBJECTS < most_beside_results(lambda: F.convolution_2d(x, w).array)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exact_is_not_deceived_by_a_tie(dtype: str) -> None:
    """Few results come out alike by chance, with sums in another order."""
    for seed in range(40):
        with workspace("1MiB", exact=True):
            for call in range(4):
                arrays = normal(4, 1, 6, 3, seed=100 * seed + call), normal(1, 1, 2, 3)
                x, w = (chainer.Variable(a.astype(dtype)) for a in arrays)
                found = F.convolution_2d(x, w, pad=1)
                with workspace(None):
                    assert_same([found.array], [F.convolution_2d(x, w, pad=1).array])


def test_exact_takes_the_size_of_a_result_as_a_list() -> None:
    x, w = normal(2, 3, 5, 5), normal(3, 2, 3, 3)
    whole = F.deconvolution_nd(x, w, outsize=[7, 7]).array
    with workspace("64KiB", exact=True):
        for _ in range(2):
            assert_same([F.deconvolution_nd(x, w, outsize=[7, 7]).array], [whole])


def test_exact_changes_the_gradient_that_an_average_is_given_as_chainer_does() -> None:
    """Where a sum hands one gradient to two, Chainer's own division is seen by the other."""

    def gradients() -> list[np.ndarray]:
        x, other = chainer.Variable(X), chainer.Variable(X)
        average = F.average_pooling_nd(x, 3, 2, 1, pad_value=None)
        y = average + F.max_pooling_nd(other, 3, 2, 1, cover_all=False)
        y.grad = np.ones_like(y.array)
        y.backward()
        return [x.grad, other.grad]

    whole = gradients()
    with workspace("1MiB", exact=True):
        for _ in range(2):
            assert_same(gradients(), whole)


# -- blocks, the process, threads ----------------------------------------------------------------


def cap() -> int | None:
    found = cap_here()
    return None if found is None else found.nbytes


def test_blocks_nest_and_wrap_functions() -> None:
    with workspace("16MiB"):
        assert cap() == 16 << 20
        with workspace(1000):
            assert cap() == 1000
            with workspace(None):
                assert cap() is None
        assert cap() == 16 << 20
        assert workspace("2MiB")(cap)() == 2 << 20
    assert cap() is None


def test_the_process_has_a_cap_until_it_is_disabled() -> None:
    block = workspace("16MiB").enable()
    try:
        seen: list[int | None] = []
        thread = threading.Thread(target=lambda: seen.append(cap()))
        thread.start()
        thread.join()
        assert seen == [16 << 20]
        with workspace("1MiB"):
            assert cap() == 1 << 20
        with pytest.raises(StateError, match=r'workspace\("16.0MiB"\) is enabled'):
            workspace("1MiB").enable()
    finally:
        block.disable()
    assert cap() is None
    with pytest.raises(StateError, match="not enabled"):
        block.disable()


def test_a_block_is_of_its_thread() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[int | None] = []

    def other() -> None:
        inside.wait()
        with workspace(77):
            seen.append(cap())
        seen.append(cap())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with workspace(1000):
        inside.set()
        assert done.wait(30)
        assert cap() == 1000
    thread.join()
    assert seen == [77, None]


def test_threads_compute_under_caps_of_their_own() -> None:
    x, w = normal(6, 8, 20, 20), normal(8, 8, 3, 3)
    sizes = (50_000, 200_000, 1 << 20)
    expected, found = {}, {}
    for size in sizes:
        with workspace(size):
            expected[size] = F.convolution_2d(x, w).array

    def compute(size: int) -> None:
        with workspace(size):
            found[size] = [F.convolution_2d(x, w).array for _ in range(5)]

    threads = [threading.Thread(target=compute, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size in sizes:
        assert_same(found[size], [expected[size]] * 5)


@pytest.mark.parametrize("size", [0, -1, "0MiB", "much", "60%", 1.5, True])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(SizeError, match="workspace must be"):
        workspace(size)


# -- together with recomputation -----------------------------------------------------------------


class Net(chainer.Chain):  # type: ignore[misc, unused-ignore]
    """Convolutions, normalisation, dropout and a pooling, twice."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.parts = chainer.Sequential(
                *(
                    chainer.Sequential(
                        L.Convolution2D(channels, 8, 3, pad=1), L.BatchNormalization(8), F.relu,
                        lambda h: F.dropout(h, 0.2), L.Convolution2D(8, 8, 3, pad=1), F.relu,
                        lambda h: F.max_pooling_2d(h, 2),
                    )
                    for channels in (3, 8)
                )
            )  # fmt: skip
            self.up, self.last = L.Deconvolution2D(8, 4, 4, stride=2, pad=1), L.Linear(None, 5)

    def forward(self, x: Any, region: Callable[..., Any]) -> Any:
        for part in self.parts:
            x = region(part, x)
        return self.last(F.average_pooling_2d(self.up(x), 2))


def train(steps: int = 6, region: Callable[..., Any] = lambda f, x: f(x)) -> list[bytes]:
    np.random.seed(0)
    model = Net()
    optimizer = chainer.optimizers.MomentumSGD(0.05).setup(model)
    x, t = normal(6, 3, 16, 16), np.arange(6) % 5
    found = []
    for _ in range(steps):
        loss = F.softmax_cross_entropy(model(x, region), t)
        model.cleargrads()
        loss.backward()
        found += [loss.array.tobytes(), *(p.grad.tobytes() for p in model.params())]
        optimizer.update()
    state = chainer.serializers.DictionarySerializer()
    state.save(model)
    return [*found, *(np.asarray(value).tobytes() for value in state.target.values())]


@pytest.mark.thorough
@pytest.mark.parametrize("budget", ["min", "70%", "100%"])
def test_recomputation_changes_no_bit_under_a_cap(budget: str) -> None:
    with workspace("32KiB"):
        plain = train()
        with umem.chainer.Recompute(budget):
            assert train() == plain
    assert train() != plain  # the cap shows in the last bits


def test_a_checkpoint_changes_no_bit_under_a_cap() -> None:
    with workspace("32KiB"):
        assert train(3, checkpoint) == train(3)


@pytest.mark.parametrize("inner", [None, 3_000])
def test_what_runs_again_in_another_place_has_the_cap_of_forward(inner: int | None) -> None:
    x, w = normal(6, 8, 20, 20), chainer.Parameter(normal(8, 8, 3, 3))

    def gradient(region: Callable[..., Any]) -> bytes:
        w.cleargrad()
        with workspace("32KiB"):
            y = F.sum(region(lambda v: F.convolution_2d(F.tanh(F.convolution_2d(v, w)), w), x))
        with workspace(inner):
            y.backward()
        return bytes(w.grad.tobytes())

    assert gradient(checkpoint) == gradient(lambda f, x: f(x))


def test_a_trace_has_the_capped_workspace() -> None:
    x, w = normal(8, 16, 32, 32), normal(16, 16, 3, 3)
    with umem.record(measure="workspace") as recorder, workspace("128KiB"):
        F.convolution_2d(x, w, pad=1)
    (op,) = recorder.trace.ops
    assert op.workspace_bytes is not None
    assert op.workspace_bytes <= (128 << 10) + OBJECTS
