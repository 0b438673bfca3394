"""Hints: what they reach, in bytes; what they are given for; what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import scipy.sparse
from project import ROOT

import umem
from umem.devices import Location
from umem.devices.virtual import VirtualGPU
from umem.errors import DeviceError, HintError, LimitError, SizeError, StateError
from umem.memory.hints import PRESETS, arrays_in
from umem.trace import Access, Alloc, Hint
from umem.units import BLOCK_BYTES, MIB


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with umem.virtual_gpu("v100-16gb", vram="64MiB") as device:
        yield device


@pytest.fixture
def managed(gpu: VirtualGPU) -> Iterator[Any]:
    with umem.managed() as memory:
        yield memory.xp


class Net(chainer.Chain):
    """A linear layer and a batch normalisation: parameters, and persistent arrays."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(10, 20)
            self.norm = L.BatchNormalization(20)
            self.unset = L.Linear(None, 5)

    def forward(self, x: Any) -> Any:
        return F.sum(self.norm(self.linear(x)))


def ids(arrays: Any) -> set[int]:
    return {id(array) for array in arrays}


# -- what holds arrays -------------------------------------------------------------------------


def test_arrays_are_found_in_any_nesting_each_once() -> None:
    a, b, c = np.ones(1), np.ones(2), np.ones(3)
    found = list(arrays_in([a, (b, {"x": c, "y": [a, None]}, []), {"z": (b,)}, None]))
    assert list(map(id, found)) == [id(a), id(b), id(c)]
    assert list(arrays_in(None)) == list(arrays_in([])) == list(arrays_in(())) == []


def test_a_variable_gives_its_array_and_its_gradient() -> None:
    x = chainer.Variable(np.ones(3, "f"))
    assert ids(arrays_in(x)) == {id(x.array)}
    x.grad = np.zeros(3, "f")
    assert ids(arrays_in([x, x.array])) == {id(x.array), id(x.grad)}
    assert list(arrays_in(chainer.Variable())) == []
    assert list(arrays_in(chainer.Parameter())) == []


def test_a_link_gives_parameters_gradients_and_what_it_keeps_for_good() -> None:
    net = Net()
    net(np.ones((4, 10), "f")).backward()
    expected = [net.norm.avg_mean, net.norm.avg_var]
    for param in net.params(include_uninit=False):
        expected += [param.array, param.grad]
    assert ids(arrays_in(net)) == ids(a for a in expected if a is not None)


def test_an_optimizer_gives_what_only_its_update_reads() -> None:
    net = Net()
    optimizer = chainer.optimizers.Adam().setup(net)
    assert list(arrays_in(optimizer)) == []
    optimizer.update(net, np.ones((4, 10), "f"))
    states = [p.update_rule.state for p in net.params(include_uninit=False)]
    assert ids(arrays_in(optimizer)) == ids(s[key] for s in states for key in ("m", "v"))


def test_an_optimizer_of_half_precision_gives_its_float32_copies_too() -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        layer = L.Linear(4, 3)
        optimizer = chainer.optimizers.MomentumSGD().setup(layer)
        optimizer.use_fp32_update()
        optimizer.update(lambda: F.sum(layer(np.ones((2, 4), np.float16))))
    found = list(arrays_in(optimizer))
    assert [array.dtype for array in found] == [np.float32] * 4
    assert id(layer.W.update_rule._fp32_param.array) in ids(found)


def test_an_optimizer_without_a_model_says_what_to_do() -> None:
    with pytest.raises(HintError, match=r"Adam has no model yet; call its setup\(model\)"):
        list(arrays_in(chainer.optimizers.Adam()))


@pytest.mark.parametrize("kind", [scipy.sparse.csr_matrix, scipy.sparse.csc_array])
def test_a_sparse_matrix_gives_its_three_parts(kind: Any) -> None:
    matrix = kind(np.eye(3, dtype="f"))
    assert ids(arrays_in(matrix)) == ids([matrix.data, matrix.indices, matrix.indptr])


@pytest.mark.parametrize("x", ["text", 3, 1.5, object(), iter([]), np.float32(1), scipy.sparse])
def test_what_holds_no_arrays_is_refused(x: Any) -> None:
    for value in (x, [np.ones(3), x], {"key": x}):
        with pytest.raises(HintError, match="holds no arrays that umem knows of"):
            list(arrays_in(value))


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(HintError, match="hold themselves"):
        list(arrays_in(loop))


# -- bytes and places --------------------------------------------------------------------------


def test_prefetch_returns_the_bytes_it_moved(gpu: VirtualGPU, managed: Any) -> None:
    a, b = managed.ones(5 * MIB, "u1"), managed.ones(3 * MIB, "u1")
    assert umem.prefetch([a, {"b": b}, a], "cpu") == 8 * MIB
    assert umem.location(a) == Location(True, last_prefetch="cpu", resident_bytes=0)
    assert umem.prefetch(a) == 5 * MIB
    assert umem.location(a) == Location(True, last_prefetch=0, resident_bytes=5 * MIB)
    both = umem.location([a, b])
    assert (both.last_prefetch, both.resident_bytes) == (None, 5 * MIB)
    assert umem.prefetch([], strict=True) == umem.prefetch(managed.empty(0)) == 0


@pytest.mark.parametrize(
    ("view", "spans"),
    [
        (lambda a: a, [(0, 8 * MIB)]),
        (lambda a: a[2:4], [(2 * MIB, 4 * MIB)]),
        (lambda a: a[::-1], [(0, 8 * MIB)]),
        (lambda a: a.T[: MIB // 2], [(i * MIB, i * MIB + MIB // 2) for i in range(8)]),
        (lambda a: a[1::4, 10:20], [(MIB + 10, MIB + 20), (5 * MIB + 10, 5 * MIB + 20)]),
        (lambda a: a[:, ::2], [(0, 8 * MIB - 1)]),  # the driver moves pages, so gaps go along
        (lambda a: a[3:3], [(0, 0)]),
        (lambda a: a[3:3, ::-1], [(0, 0)]),
    ],
)
def test_a_hint_reaches_exactly_the_bytes_of_a_view(
    managed: Any, view: Callable[[Any], Any], spans: list[tuple[int, int]]
) -> None:
    a = managed.empty((8, MIB), "u1")
    with umem.record() as recorder:
        assert umem.advise(view(a), "read_mostly") == sum(high - low for low, high in spans)
    accesses = tuple(Access(0, low, high) for low, high in spans)
    assert recorder.trace.events[1:] == [Hint("read_mostly", accesses)]


def test_where_parts_differ_the_location_is_unknown(managed: Any) -> None:
    a, b = managed.ones(4 * MIB, "u1"), managed.ones(4 * MIB, "u1")
    umem.advise(a, "preferred_location", "cpu")
    umem.advise(a, "read_mostly")
    both = umem.location((a, b))
    assert (both.preferred, both.read_mostly, both.accessed_by) == (None, False, ())
    assert both.resident_bytes == 8 * MIB
    umem.advise(b, "preferred_location", "cpu")
    assert umem.location((a, b)).preferred == "cpu"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_its_advice_and_takes_it_back(managed: Any, name: Any) -> None:
    a = managed.ones(4 * MIB, "u1")
    plain = umem.location(a)
    assert umem.preset(a, name) == 4 * MIB
    found = umem.location(a)
    given = dict(PRESETS[name])
    expected = {"cpu": "cpu", "gpu": 0, None: None}[given.get("preferred_location")]
    assert found.preferred == expected
    assert found.accessed_by == ((0,) if "accessed_by" in given else ())
    assert found.read_mostly == ("read_mostly" in given)
    assert umem.preset(a, name, unset=True) == 4 * MIB
    assert umem.location(a) == plain


def test_optimizer_state_can_be_left_on_the_host(gpu: VirtualGPU, managed: Any) -> None:
    layer = L.Linear(1024, 2048)
    optimizer = chainer.optimizers.Adam().setup(layer)

    def step() -> None:
        optimizer.update(lambda: F.sum(layer(np.ones((2, 1024), "f"))))

    step()
    state = [p.update_rule.state[key] for p in layer.params() for key in ("m", "v")]
    nbytes = sum(array.nbytes for array in state)
    assert umem.preset(optimizer, "optimizer_state", strict=True) == nbytes
    assert umem.prefetch(optimizer, "cpu") == nbytes
    assert umem.location(layer.W.update_rule.state["m"]).resident_bytes == 0
    before = gpu.figures.remote_bytes
    step()
    assert umem.location(layer.W.update_rule.state["m"]).resident_bytes == 0
    assert gpu.figures.remote_bytes - before >= 2 * 2 * layer.W.array.nbytes  # read and written


# -- presets of new memory ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_memory_of_a_preset_has_its_advice_from_the_first_byte(gpu: VirtualGPU, name: Any) -> None:
    with umem.managed() as memory:
        plain = memory.xp.ones(4 * MIB, "u1")
        umem.preset(plain, name)
        with umem.managed(preset=name):
            a = memory.xp.ones(4 * MIB, "u1")
        after = memory.xp.ones(4 * MIB, "u1")
    given, found = umem.location(plain), umem.location(a)
    for field in ("preferred", "accessed_by", "read_mostly"):
        assert getattr(found, field) == getattr(given, field)
    assert umem.location(after) == Location(True, resident_bytes=4 * MIB)


def test_small_arrays_of_a_preset_share_no_block_with_others(gpu: VirtualGPU) -> None:
    with umem.managed() as memory:
        plain = memory.xp.ones(1000)
        with umem.managed(preset="random"):
            umem.prefetch(memory.xp.ones(1000))
        assert umem.location(plain).preferred is None


def test_streamed_memory_stays_on_the_host_and_is_read_over_the_bus(gpu: VirtualGPU) -> None:
    with umem.managed(preset="streaming") as memory:
        a = memory.xp.ones(32 * MIB, "u1")
        umem.prefetch(a, "cpu")
        with umem.managed():
            a.sum()
    assert umem.location(a).resident_bytes == 0
    assert gpu.figures.remote_bytes >= 32 * MIB


def test_a_limit_bounds_the_memory_of_all_presets_together(gpu: VirtualGPU) -> None:
    with umem.managed() as memory:
        memory.xp.ones(12 * MIB, "u1")  # free again, and cached
    with umem.managed("16MiB", preset="random") as memory:
        kept = memory.xp.ones(8 * MIB, "u1")
        with umem.managed("16MiB"), pytest.raises(LimitError, match=r"8\.0 MiB of the limit"):
            memory.xp.ones(12 * MIB, "u1")
        with pytest.raises(SizeError, match=r"below the 8\.0 MiB"), umem.managed("4MiB"):
            raise AssertionError("entered")
    assert gpu.usage().managed_bytes == kept.nbytes


@pytest.mark.parametrize("name", ["stream", "", 3, [], {}])
def test_an_unknown_preset_is_refused_before_the_block(name: Any) -> None:
    with pytest.raises(HintError, match="preset must be one of streaming, random, read_mostly"):
        umem.managed(preset=name)


# -- what cannot be given ----------------------------------------------------------------------


def test_strict_refuses_before_anything_moves(gpu: VirtualGPU) -> None:
    with umem.managed() as memory:
        managed = memory.xp.ones(4 * MIB, "u1")
    plain = gpu.xp.ones((2, MIB), "u1")
    for hint in (
        lambda x: umem.prefetch(x, "cpu", strict=True),
        lambda x: umem.advise(x, "read_mostly", strict=True),
        lambda x: umem.preset(x, "streaming", strict=True),
    ):
        with pytest.raises(HintError, match=r"shape \(2, 1048576\) is not managed.*leave strict"):
            hint([managed, plain])
    assert umem.location(managed) == Location(True, resident_bytes=4 * MIB)
    assert umem.prefetch(gpu.xp.empty(0), strict=True) == 0


@pytest.mark.parametrize("advice", ["readmostly", "", None, 3, [], {}, "prefetch", "discard"])
def test_unknown_advice_is_refused(managed: Any, advice: Any) -> None:
    a = managed.ones(3)
    with pytest.raises(HintError, match="advice must be one of read_mostly, preferred_location, "):
        umem.advise(a, advice)
    with pytest.raises(HintError, match="preset must be one of streaming, random, read_mostly"):
        umem.preset(a, advice)


@pytest.mark.parametrize("place", ["gpu", "", -1, True, 1.5, (), b"cpu"])
def test_what_is_no_place_is_refused(managed: Any, place: Any) -> None:
    a = managed.ones(3)
    for hint in (lambda: umem.prefetch(a, place), lambda: umem.advise(a, "accessed_by", place)):
        with pytest.raises(HintError, match="a GPU's ordinal or 'cpu'; got"):
            hint()


def test_location_of_nothing_is_refused(managed: Any) -> None:
    for nothing in ([], None, {"a": []}):
        with pytest.raises(HintError, match="no array to locate"):
            umem.location(nothing)


def test_an_array_of_another_device_is_refused(managed: Any) -> None:
    class Foreign:
        __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012
        base = None
        nbytes = 4

    Foreign.__module__ = "cupy._core.core"
    with pytest.raises(DeviceError, match=r"not on this virtual GPU; use memory\.xp"):
        umem.prefetch(Foreign())


def test_a_hint_outside_its_virtual_gpu_is_refused() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu, umem.managed() as memory:
        a = memory.xp.ones(4 * MIB, "u1")
    with pytest.raises(StateError, match=r"inside its umem\.virtual_gpu block"):
        gpu.prefetch(a, 0, None)
    with umem.virtual_gpu("t4", vram="64MiB"), pytest.raises(StateError, match="inside its"):
        gpu.advise(a, "read_mostly", None, unset=False)


# -- effects -----------------------------------------------------------------------------------


def test_a_hint_on_a_host_array_uploads_it_first(gpu: VirtualGPU, managed: Any) -> None:
    with umem.record() as recorder:
        assert umem.advise(np.ones(4 * MIB, "u1"), "read_mostly") == 4 * MIB
    assert recorder.trace.events[0] == Alloc(0, 4 * MIB, "input", "array", True)
    assert gpu.figures.uploaded_bytes == 4 * MIB


def test_read_mostly_data_is_dropped_and_not_copied_out() -> None:
    moved = []
    for advised in (False, True):
        with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu, umem.managed() as memory:
            a = memory.xp.ones(20 * MIB, "u1")
            umem.prefetch(a, "cpu")  # the host has a copy from now on
            if advised:
                umem.advise(a, "read_mostly")
            a.sum()
            before = gpu.figures.migrated_out_bytes
            memory.xp.ones(64 * MIB, "u1")
            moved.append(gpu.figures.migrated_out_bytes - before)
    assert moved[0] - moved[1] == 10 * BLOCK_BYTES


def test_a_prefetch_on_a_stream_overlaps_with_what_runs(managed: Any) -> None:
    seconds = []
    for stream in (None, object()):
        with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu, umem.managed() as memory:
            work, later = memory.xp.ones(4 * MIB), memory.xp.ones(16 * MIB, "u1")
            umem.prefetch(later, "cpu")
            for _ in range(50):
                work += 1
            umem.prefetch(later, stream=stream)
            for _ in range(50):
                work += 1
            later += 1
            seconds.append(gpu.figures.seconds)
    assert seconds[1] < seconds[0]


# -- the page ----------------------------------------------------------------------------------

PAGE = (ROOT / "docs/reference/hints.md").read_text(encoding="utf-8")


def test_the_page_names_every_preset() -> None:
    assert {*re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)} == {*PRESETS}
