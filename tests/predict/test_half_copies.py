"""What half precision takes on NumPy, by tracemalloc, and what is said of it from float32."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from umem.compat.installation import find_package

if find_package() is None:
    pytest.skip("Chainer is not installed", allow_module_level=True)

import umem
import umem.chainer
from umem.predict.cupy_differences import own_sizes, packed_images
from umem.predict.techniques.half_widths import in_half
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Event, Free, Mark, Op, TapeEntry

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

Step = Callable[[int], None]
turned_on: list[Any] = []


@pytest.fixture(autouse=True)
def half_precision_is_off_afterwards() -> Iterator[None]:
    yield
    while turned_on:
        turned_on.pop().undo()


def perceptron(width: int, depth: int) -> Any:
    hidden = [part for _ in range(depth) for part in (L.Linear(width, width), F.relu)]
    return chainer.Sequential(L.Linear(300, width), F.relu, *hidden, L.Linear(width, 10))


def convolutions(width: int) -> Any:
    return chainer.Sequential(
        L.Convolution2D(3, width, 3, pad=1), L.BatchNormalization(width), F.relu,
        L.Convolution2D(width, width, 3, pad=1), F.relu, L.Linear(width * 256, 10),
    )  # fmt: skip


def stepping(model: Any, shape: tuple[int, ...], half: bool) -> Step:
    optimizer = chainer.optimizers.Adam().setup(model)
    if half:
        turned_on.append(umem.chainer.half_precision(model, optimizer))
    random = np.random.RandomState(0)

    def loss(x: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(model(x), t)

    def step(batch: int) -> None:
        x = random.rand(batch, *shape).astype(np.float32)
        optimizer.update(loss, x, random.randint(0, 10, batch).astype(np.int32))

    return step


def traced_peak(make: Callable[[], Step], batch: int) -> int:
    """By tracemalloc, what a settled step takes at most, with its model and optimizer."""
    gc.collect()
    tracemalloc.start()
    try:
        step = make()
        for _ in range(4):
            step(batch)
        gc.collect()
        tracemalloc.reset_peak()
        step(batch)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def said(make: Callable[[], Step], batch: int) -> int:
    trace = umem.record_at(make(), (batch // 2, batch))
    return in_half(Trace(trace.events, trace.backend, trace.meta)).peak_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "depth", "batch"), [(256, 1, 1024), (128, 3, 1024)])
def test_a_perceptron_in_halves_takes_what_is_said(width: int, depth: int, batch: int) -> None:
    half = traced_peak(lambda: stepping(perceptron(width, depth), (300,), True), batch)
    single = said(lambda: stepping(perceptron(width, depth), (300,), False), batch)
    assert single == pytest.approx(half, rel=0.08)  # tracemalloc has Python's objects, too


@pytest.mark.thorough
def test_a_convolutional_network_in_halves_takes_what_is_said() -> None:
    half = traced_peak(lambda: stepping(convolutions(32), (3, 16, 16), True), 16)
    single = said(lambda: stepping(convolutions(32), (3, 16, 16), False), 16)
    assert single == pytest.approx(half, rel=0.08)


def test_gradients_in_float32_are_there_one_at_a_time() -> None:
    def make() -> Step:
        return stepping(perceptron(512, 4), (300,), True)

    sizes = [p.size for p in perceptron(512, 4).params()]
    half, single, states = 2, 4, 8
    kept = sum(sizes) * (half + half + single + states)  # parameter, gradient, master, m and v
    peak = traced_peak(make, 8)
    largest = max(sizes)
    assert peak < kept + 4 * single * largest + (2 << 20) < kept + single * sum(sizes) + (2 << 20)


def test_the_batch_in_float32_is_seen_by_a_recorder() -> None:
    step = stepping(perceptron(64, 1), (300,), True)
    for _ in range(3):
        step(32)
    with umem.record() as recorder:
        step(32)
    found = {a.nbytes for a in recorder.trace.events if isinstance(a, Alloc) and a.kind == "input"}
    assert 32 * 300 * 4 in found


# -- images in larger arrays ---------------------------------------------------------------------


def entry(number: int, gradient_bytes: int) -> TapeEntry:
    return TapeEntry(number, (-1,), (), False, True, False, gradient_bytes)


def op(name: str, phase: str, reads: list[Access], writes: list[Access], one: Any = None) -> Op:
    return Op(name, phase, tuple(reads), tuple(writes), 1, 1, workspace_bytes=0, entry=one)


def with_borders() -> Trace:
    """A transposed convolution, then a convolution, and the gradient of the second's input."""
    events: list[Event] = [
        Alloc(0, 100, "input", "x", uploaded=True),
        Alloc(1, 500, "activation", "Deconvolution2DFunction"),
        op("Deconvolution2DFunction", "forward", [Access(0, 0, 100)], [Access(1, 10, 480)],
           entry(0, 400)),
        Alloc(2, 300, "activation", "Convolution2DFunction"),
        op("Convolution2DFunction", "forward", [Access(1, 10, 480)], [Access(2, 0, 300)],
           entry(1, 300)),
        Alloc(3, 500, "gradient", "Deconvolution2DFunction"),
        op("Deconvolution2DFunction", "backward", [Access(2, 0, 300)], [Access(3, 10, 480)]),
        Mark("backward", 1),
        Free(3), Free(2), Free(1),
    ]  # fmt: skip
    return Trace(events, "numpy")


def test_an_image_is_as_large_as_its_gradient_says() -> None:
    assert own_sizes(with_borders()) == {1: 400, 3: 400}
    packed = packed_images(with_borders())
    assert packed.peak_bytes == 100 + 400 + 300 + 400
    for one in packed.ops:
        for access in (*one.reads, *one.writes):
            assert access.stop <= {0: 100, 1: 400, 2: 300, 3: 400}[access.tensor]


def test_a_trace_without_images_is_left_as_it_is() -> None:
    trace = Trace([Alloc(0, 8, "input", "x"), op("ReLU", "forward", [Access(0, 0, 8)], [])])
    assert packed_images(trace) is trace


@pytest.mark.parametrize("embedded", [False, True])
def test_the_first_state_of_an_lstm_has_the_type_of_what_the_link_is_given(embedded: bool) -> None:
    class Cell(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.embed, self.cell, self.score = (
                    L.EmbedID(9, 32),
                    L.LSTM(32, 64),
                    L.Linear(64, 4),
                )

    def trace(half: bool) -> Trace:
        model = Cell()
        optimizer = chainer.optimizers.SGD().setup(model)
        if half:
            turned_on.append(umem.chainer.half_precision(model, optimizer, scale=16.0))
        x = np.zeros(16, "i4") if embedded else np.ones((16, 32), "f4")

        def step() -> None:
            model.cell.reset_state()
            total: Any = 0
            for _ in range(3):
                total += F.mean(model.score(model.cell(model.embed(x) if embedded else x)) ** 2)
            model.cleargrads()
            total.backward()
            optimizer.update()

        step()
        with umem.record() as recorder:
            step()
        return recorder.trace

    def sizes(trace: Trace, kind: str, label: str) -> set[int]:
        allocs = [event for event in trace.events if isinstance(event, Alloc)]
        return {each.nbytes for each in allocs if (each.kind, each.label) == (kind, label)}

    said = in_half(trace(half=False))
    found = trace(half=True)
    whole = 16 * 64 * (2 if embedded else 4)
    assert sizes(said, "activation", "LSTM") == sizes(found, "activation", "LSTM") == {whole}
    cast = {16 * 256 * 2, 16 * 64 * 4}  # gradients of what it was given, and of the last output
    made = sizes(said, "gradient", "LSTMGrad") | sizes(said, "gradient", "Cast")
    assert (cast <= made) != embedded
