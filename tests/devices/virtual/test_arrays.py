"""``memory.xp`` on a virtual GPU: NumPy's results, exact byte ranges, and clear refusals."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import umem
from umem.errors import OutOfMemoryError, UnsupportedError
from umem.trace import Access, Alloc, Free, Op

MIB = 1 << 20
MODERATE = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def xp() -> Iterator[Any]:
    with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed() as memory:
        yield memory.xp


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)


def filled(shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    return (np.arange(count, dtype="float64") - count // 3).astype(dtype).reshape(shape)


def same(found: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found.get(), expected)


# -- results are NumPy's -------------------------------------------------------------------------


@MODERATE
@given(shape=shapes(), data=st.data())
def test_slices_with_any_step_are_numpys(
    xp: Any, shape: tuple[int, ...], data: st.DataObject
) -> None:
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=5))
    plain = filled(shape)
    followed = xp.array(plain)
    same(followed[key], plain[key])
    same(followed[key] + 1, plain[key] + 1)
    followed[key] = 7
    plain[key] = 7
    same(followed, plain)
    followed[key] *= 2
    plain[key] *= 2
    same(followed, plain)


@MODERATE
@given(
    pair=hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, min_side=0, max_side=5),
    function=st.sampled_from(["add", "subtract", "multiply", "maximum", "less", "hypot"]),
    dtypes=st.tuples(*[st.sampled_from(["float32", "float64", "int32", "uint8", "bool"])] * 2),
)
def test_broadcasting_and_types_are_numpys(
    xp: Any, pair: Any, function: str, dtypes: tuple[str, str]
) -> None:
    if function == "subtract" and dtypes == ("bool", "bool"):
        return
    left, right = (
        filled(shape, dtype) for shape, dtype in zip(pair.input_shapes, dtypes, strict=True)
    )
    expected = getattr(np, function)(left, right)
    same(getattr(xp, function)(xp.array(left), xp.array(right)), expected)


@MODERATE
@given(
    shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6),
    name=st.sampled_from(["sum", "prod", "max", "min", "mean", "all", "any"]),
    keepdims=st.booleans(),
    data=st.data(),
)
def test_reductions_are_numpys(
    xp: Any, shape: tuple[int, ...], name: str, keepdims: bool, data: st.DataObject
) -> None:
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    plain = filled(shape) / 3
    found = getattr(xp.array(plain), name)(axis=axis, keepdims=keepdims)
    same(found, getattr(plain, name)(axis=axis, keepdims=keepdims))


@MODERATE
@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_matrix_products_are_numpys(xp: Any, rows: int, inner: int, columns: int) -> None:
    left, right = filled((rows, inner)), filled((inner, columns))
    same(xp.array(left) @ xp.array(right), left @ right)
    same(xp.matmul(xp.array(right).T, xp.array(left).T), right.T @ left.T)


def test_contiguous_is_c_contiguous_also_of_a_transposed_array(xp: Any) -> None:
    plain = filled((3, 5))
    for turned in (xp.array(plain).T, plain.T):
        for dtype in (None, "float64"):
            found = xp.ascontiguousarray(turned, dtype)
            assert type(found) is type(xp.zeros(1)) and found.flags.c_contiguous
            same(found, np.ascontiguousarray(plain.T, dtype))


@MODERATE
@given(shape=shapes(), data=st.data(), dtype=st.sampled_from(["float32", "int64", "bool"]))
def test_copies_are_numpys_and_have_memory_of_their_own(
    xp: Any, shape: tuple[int, ...], data: st.DataObject, dtype: str
) -> None:
    key = data.draw(hnp.basic_indices(shape))
    plain = filled(shape)
    followed = xp.array(plain)
    for copied, expected in (
        (followed[key].copy(), plain[key]),
        (followed[key].astype(dtype), plain[key].astype(dtype)),
        (xp.copy(followed[key]), plain[key]),
        (xp.ascontiguousarray(followed[key]), plain[key]),
        (followed[key].reshape(-1), plain[key].reshape(-1)),
        (followed[key].ravel(), plain[key].ravel()),
    ):
        same(copied, np.asarray(expected))
    apart = followed.copy()
    followed[...] = 0
    same(apart, plain)
    target = xp.zeros(shape)
    xp.copyto(target, apart)
    same(target, plain)


def test_creation_functions_are_numpys(xp: Any) -> None:
    for name, arguments in (
        ("zeros", ((2, 3), "float32")),
        ("ones", ((2, 3),)),
        ("full", ((2, 3), 7)),
        ("full", ((2, 3), 7.5, "float32")),
        ("arange", (3, 20, 4)),
        ("array", ([[1, 2], [3, 4]],)),
        ("array", ([1.5, 2.5], "int8")),
        ("asarray", (3.5,)),
    ):
        same(getattr(xp, name)(*arguments), getattr(np, name)(*arguments))
    like = xp.array(filled((3, 2), "int16"))
    for name in ("zeros_like", "ones_like"):
        same(getattr(xp, name)(like), getattr(np, name)(like.get()))
    same(xp.full_like(like, 9), np.full((3, 2), 9, "int16"))
    assert xp.empty_like(like).shape == xp.empty((3, 2)).shape == (3, 2)
    assert xp.asarray(like) is like and xp.float32 is np.float32 and xp.newaxis is None


def test_operators_work_in_place_and_with_numbers(xp: Any) -> None:
    plain = filled((4, 5))
    followed = xp.array(plain)
    same_object = followed
    for change in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
        followed, plain = change(followed, 3), change(plain, 3)
    assert followed is same_object
    same(followed, plain)
    same(2 - followed, 2 - plain)
    same(-(abs(followed) ** 2), -(abs(plain) ** 2))
    same(followed > 1, plain > 1)
    same(
        xp.add(followed, 1, where=followed > 0, out=xp.zeros((4, 5))),
        np.add(plain, 1, where=plain > 0, out=np.zeros((4, 5))),
    )
    same(followed.sum(where=followed > 0), plain.sum(where=plain > 0))


def test_functions_of_two_results_give_followed_ones(xp: Any) -> None:
    plain = filled((4, 5))
    quotient, rest = xp.divmod(xp.array(plain), 3)
    same(quotient, plain // 3)
    same(rest, plain % 3)
    outs = xp.zeros((4, 5)), xp.zeros((4, 5))
    found = xp.divmod(xp.array(plain), 3, out=outs)
    assert found[0] is outs[0] and found[1] is outs[1]
    same(outs[1], plain % 3)


def test_scalars_text_and_pickles(xp: Any) -> None:
    array = xp.array([1.5, 2.5])
    assert float(array[1]) == 2.5 and int(array.sum()) == 4 and bool((array > 0).all())
    assert str(array) == str(array.get()) and "followed" in repr(array)
    assert f"{float(array.max()):.1f}" == "2.5"
    assert array.tolist() == [1.5, 2.5] and array.item(0) == 1.5 and len(array) == 2
    loaded = pickle.loads(pickle.dumps(array))
    assert type(loaded) is np.ndarray and loaded.tolist() == [1.5, 2.5]
    assert [float(value) for value in array] == [1.5, 2.5]
    assert copy.deepcopy(array).tolist() == [1.5, 2.5]
    assert type(array.get()) is np.ndarray and type(xp.asnumpy(array)) is np.ndarray


# -- what is recorded ----------------------------------------------------------------------------


class Watch:
    """The events since it was made, of one recorder."""

    def __init__(self, recorder: Any) -> None:
        self.recorder, self.start = recorder, len(recorder.trace)

    @property
    def events(self) -> list[Any]:
        return self.recorder.trace.events[self.start :]

    @property
    def op(self) -> Op:
        (found,) = (event for event in self.events if isinstance(event, Op))
        return found


@pytest.fixture
def recorder(xp: Any) -> Iterator[Any]:
    with umem.record() as recorder:
        yield recorder


@MODERATE
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=6), data=st.data())
def test_a_recorded_range_is_the_smallest_that_holds_every_element(
    xp: Any, recorder: Any, shape: tuple[int, ...], data: st.DataObject
) -> None:
    array = xp.zeros(shape, "int16")
    key = data.draw(hnp.basic_indices(shape))
    numbers = np.arange(array.size).reshape(shape)[key]
    watch = Watch(recorder)
    array[key] = 1
    (write,) = watch.op.writes
    if numbers.size == 0:
        assert write.start == write.stop
    else:
        expected = 2 * int(numbers.min()), 2 * int(numbers.max()) + 2
        whole = numbers.size == array.size
        assert (write.start, write.stop) == ((0, array.nbytes) if whole else expected)


def test_every_array_is_allocated_once_and_freed_once(xp: Any, recorder: Any) -> None:
    first = xp.ones(1000)
    view = first[::2]
    second = view + first[1::2]
    second += 1
    del first
    assert not [event for event in recorder.trace.events if isinstance(event, Free)]
    del view, second
    recorder.flush()
    events = recorder.trace.events
    allocated = [event.tensor for event in events if isinstance(event, Alloc)]
    assert sorted(event.tensor for event in events if isinstance(event, Free)) == allocated
    assert len(allocated) == len(set(allocated)) == 2
    assert [event.name for event in events if isinstance(event, Op)] == ["ones", "add", "add"]


def test_a_reshape_that_must_copy_is_an_operation_and_one_that_need_not_is_none(
    xp: Any, recorder: Any
) -> None:
    array = xp.zeros((4, 6), "float32")
    watch = Watch(recorder)
    views = array.reshape(24), array.ravel(), array.T, array[0], array.reshape((2, 12))
    assert not watch.events
    plain = array.view(np.ndarray)
    assert all(np.shares_memory(view.view(np.ndarray), plain) for view in views)
    for make in (lambda: array.T.reshape(-1), lambda: array[:, ::2].ravel()):
        watch = Watch(recorder)
        copied = make()
        assert watch.op.reads[0].tensor == 0 and watch.op.writes[0][1:] == (0, copied.nbytes)
        assert isinstance(watch.events[0], Alloc) and not watch.events[0].uploaded


def test_uploads_are_told_from_results(xp: Any, recorder: Any) -> None:
    xp.array([1.0, 2.0])
    xp.zeros(2)
    allocs = [event for event in recorder.trace.events if isinstance(event, Alloc)]
    assert [(alloc.uploaded, alloc.nbytes) for alloc in allocs] == [(True, 16), (False, 16)]


def test_flops_of_a_product_and_traffic_of_a_sum(xp: Any, recorder: Any) -> None:
    left, right = xp.ones((3, 5)), xp.ones((5, 7))
    watch = Watch(recorder)
    left @ right
    assert watch.op.flops == 2 * 3 * 5 * 7
    assert watch.op.traffic_bytes == 8 * (3 * 5 + 5 * 7 + 3 * 7)
    watch = Watch(recorder)
    left += 1
    assert watch.op.reads == watch.op.writes == (Access(0, 0, 120),)
    assert (watch.op.flops, watch.op.traffic_bytes) == (15, 240)


def test_masks_and_scattered_updates_are_recorded_as_what_they_touch(
    xp: Any, recorder: Any
) -> None:
    array, mask = xp.ones(8), xp.array([True, False] * 4)
    out = xp.zeros(8)
    watch = Watch(recorder)
    xp.add(array, 1, where=mask, out=out)
    assert {read.tensor for read in watch.op.reads} == {0, 1}
    assert {write.tensor for write in watch.op.writes} == {2}
    watch = Watch(recorder)
    xp.add.at(array, [0, 0, 3], 1)
    assert array.tolist() == [3, 1, 1, 2, 1, 1, 1, 1]
    assert {write.tensor for write in watch.op.writes} == {0}
    assert not [event for event in watch.events if isinstance(event, Alloc)]


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["sort", "where", "dot", "concatenate", "einsum", "linalg", "random", "sum", "nothing"]
)
def test_names_outside_the_subset_are_refused_and_say_so(xp: Any, name: str) -> None:
    assert not hasattr(xp, name)
    with pytest.raises(UnsupportedError, match=rf"xp\.{name} is not followed by the virtual GPU"):
        getattr(xp, name)
    with pytest.raises(NotImplementedError):
        getattr(xp, name)


@pytest.mark.parametrize("name", ["sort", "dot", "argmax", "cumsum", "round", "clip", "flatten"])
def test_methods_outside_the_subset_are_refused_and_compute_nothing(
    xp: Any, recorder: Any, name: str
) -> None:
    array = xp.array([3.0, 1.0, 2.0])
    watch = Watch(recorder)
    assert not hasattr(array, name)
    with pytest.raises(UnsupportedError, match=rf"ndarray\.{name} is not followed"):
        getattr(array, name)
    assert array.tolist() == [3, 1, 2] and not watch.events


@pytest.mark.parametrize(
    "call",
    [
        lambda a: np.sort(a),
        lambda a: np.concatenate([a, a]),
        lambda a: np.where(a > 0, a, 0),
        lambda a: np.copyto(a, 0),
        lambda a: np.sum(a, out=a[:1]),
    ],
)
def test_numpys_own_functions_are_refused(xp: Any, call: Any) -> None:
    array = xp.array([3.0, 1.0, 2.0])
    with pytest.raises(UnsupportedError, match=r"numpy\.\w+ is not followed"):
        call(array)
    assert array.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "key",
    [
        [0, 1],
        np.array([0, 1]),
        np.array([True, False, True]),
        (slice(None), [0]),
        (np.array([0]), slice(None)),
        (None, np.array([2, 1])),
        True,
        np.True_,
    ],
    ids=repr,
)
def test_fancy_indexing_is_refused_and_changes_nothing(xp: Any, recorder: Any, key: Any) -> None:
    array = xp.array(filled((3, 3)))
    watch = Watch(recorder)
    with pytest.raises(UnsupportedError, match="indexing with"):
        array[key]
    with pytest.raises(UnsupportedError, match="indexing with"):
        array[key] = 5
    assert not watch.events
    same(array, filled((3, 3)))


def test_an_index_that_is_an_array_of_the_device_is_refused(xp: Any) -> None:
    array = xp.array(filled((3, 3)))
    for key in (xp.array([0, 1]), array > 0):
        with pytest.raises(UnsupportedError, match="indexing with"):
            array[key]


def test_integers_of_any_kind_index(xp: Any) -> None:
    array = xp.array(filled((3, 3)))
    for key in (1, np.int64(1), np.uint8(1), -2):
        same(array[key], filled((3, 3))[key])
    with pytest.raises(IndexError):
        array[5]


def test_a_numpy_array_that_meets_a_followed_one_is_refused(xp: Any, recorder: Any) -> None:
    array, stranger = xp.ones(3), np.arange(3.0)
    watch = Watch(recorder)
    for meet in (
        lambda: array + stranger,
        lambda: stranger * array,
        lambda: xp.maximum(array, stranger),
        lambda: np.add(array, array, out=stranger),
        lambda: xp.add(array, 1, where=stranger > 1, out=array),
        lambda: operator.iadd(array, stranger),
        lambda: operator.setitem(array, slice(None), stranger),
        lambda: operator.iadd(stranger, array),
    ):
        with pytest.raises(UnsupportedError, match=r"memory\.xp\.asarray"):
            meet()
    assert not watch.events
    assert array.tolist() == [1, 1, 1] and stranger.tolist() == [0, 1, 2]
    same(array + xp.asarray(stranger), [1.0, 2.0, 3.0])
    same(array + np.float64(2) + np.array(1.0), [4.0, 4.0, 4.0])


# -- memory --------------------------------------------------------------------------------------


def test_an_array_that_did_not_fit_leaves_no_trace_of_itself() -> None:
    with umem.virtual_gpu("v100-16gb", vram="20MiB") as gpu, umem.unmanaged() as memory:
        kept = memory.xp.ones(12 * MIB, "uint8")
        with umem.record() as recorder:
            for _ in range(3):
                with pytest.raises(OutOfMemoryError):
                    kept + kept
        live = gpu.model.counters.live_bytes
        assert live == 12 * MIB and gpu.usage().reserved_bytes == 12 * MIB
        assert kept.max() == 1
    assert not [event for event in recorder.trace.events if isinstance(event, Op)]


def test_after_its_block_an_array_is_a_plain_numpy_array_to_work_with() -> None:
    with umem.virtual_gpu("t4", vram="64MiB"), umem.managed() as memory:
        array = memory.xp.array(filled((3, 4)))
    plain = filled((3, 4))
    np.testing.assert_array_equal(np.sort(array, axis=0), np.sort(plain, axis=0))
    np.testing.assert_array_equal(np.concatenate([array, plain]), np.concatenate([plain, plain]))
    np.testing.assert_array_equal(array[[0, 2]], plain[[0, 2]])
    np.testing.assert_array_equal(array + plain, plain + plain)
    np.testing.assert_array_equal(np.sum(a=array, axis=0), plain.sum(0))
    out = array[:1]
    np.sum(array, axis=0, keepdims=True, out=out)
    np.testing.assert_array_equal(out, plain.sum(0, keepdims=True))
    array[[1]] = 9
    assert array.argmax() == 0 + int(np.asarray(array).argmax())
    array += plain
    assert array.get()[1, 0] == 9 + plain[1, 0]


def test_arrays_of_one_virtual_gpu_come_to_another_as_uploads() -> None:
    with umem.virtual_gpu("t4", vram="64MiB"), umem.managed() as memory:
        array = memory.xp.ones(MIB, "uint8")
    with umem.virtual_gpu("t4", vram="64MiB") as other, umem.managed():
        assert int((array + array).max()) == 2
    assert other.figures.uploaded_bytes == MIB
