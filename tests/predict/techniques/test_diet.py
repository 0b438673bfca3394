"""Micro-batches, small states and half precision on traces: each is as a live step under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from traced_graphs import check

import umem
from umem.compat.installation import find_package
from umem.devices.specs import gpu_spec
from umem.errors import BudgetError, StateError
from umem.predict.diet_places import HostArrays, PlainPool
from umem.predict.dieting import Chosen, cheapest
from umem.predict.techniques.changing import smaller_batches
from umem.predict.techniques.half_widths import in_half
from umem.predict.techniques.micro_batches import accumulated
from umem.predict.techniques.small_states import BLOCK, with_small_states
from umem.predict.techniques.step_variants import StepVariants
from umem.trace import Access, Alloc, Event, Free, Mark, Op, Trace
from umem.trace.trace import tail
from umem.units import BLOCK_BYTES, MIB

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

import umem.chainer  # isort: skip
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

GPU = gpu_spec("v100-16gb")


class Shared(chainer.Chain):
    """A linear layer that is used twice, dropout, layer normalisation and a score."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.shared, self.score = L.Linear(width, width), L.Linear(width, 10)
            self.norm = L.LayerNormalization(width)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.dropout(F.relu(self.shared(self.norm(x))), 0.2)
        h = F.relu(self.shared(h)) + h
        return F.softmax_cross_entropy(self.score(h), t)


class Convolutional(chainer.Chain):
    """Two convolutions, a pooling and a score."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Convolution2D(3, 16, 3, pad=1), L.Convolution2D(16, 32, 3)
            self.score = L.Linear(32 * 7 * 7, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.max_pooling_2d(F.relu(self.first(x)), 2)
        return F.softmax_cross_entropy(self.score(F.relu(self.second(h))), t)


def images(size: int) -> tuple[Any, Any]:
    return np.ones((size, 3, 18, 18), np.float32), np.zeros(size, np.int32)


def rows(size: int, width: int = 256) -> tuple[Any, Any]:
    return np.ones((size, width), np.float32), np.zeros(size, np.int32)


class Viewing(chainer.Chain):
    """A vector whose gradient comes through two views of it, and a number that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.score = L.Linear(256, 10)
            self.scales = chainer.Parameter(1.0, (256,))
            self.shift = chainer.Parameter(0.5, ())

    def forward(self, x: Any, t: Any) -> Any:
        scales = F.broadcast_to(F.expand_dims(F.reshape(self.scales, (16, 16)), 0), (1, 16, 16))
        h = x * F.broadcast_to(F.reshape(scales, (1, 256)), x.shape)
        return F.softmax_cross_entropy(self.score(h + F.broadcast_to(self.shift, x.shape)), t)


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[int], tuple[Any, Any]]]] = {
    "shared": (lambda: Shared(256), rows),
    "convolutional": (Convolutional, images),
}


def trained(name: str, rule: str = "Adam") -> tuple[Any, Any, Callable[[int], None]]:
    """A model, its optimizer, and a function that trains one step on a batch of a size."""
    make, inputs = NETWORKS[name]
    np.random.seed(0)
    model = make()
    optimizer = getattr(chainer.optimizers, rule)().setup(model)
    return model, optimizer, lambda size: optimizer.update(model, *inputs(size))


def ops_of(trace: Trace) -> list[tuple[str, str]]:
    return [(op.name, op.phase) for op in trace.ops]


def state_bytes(trace: Trace) -> int:
    return sum(e.nbytes for e in trace.events if isinstance(e, Alloc) and e.kind == "state")


# -- micro-batches -----------------------------------------------------------------------------


def recorded_in_parts(name: str, part: int, count: int) -> Trace:
    """A live step in parts, whose gradients Chainer adds up."""
    model, optimizer, _ = trained(name)
    whole = NETWORKS[name][1](part * count)

    def step() -> None:
        for number in range(count):
            here = slice(number * part, (number + 1) * part)
            loss = model(*(array[here] for array in whole))
            if number == 0:
                model.cleargrads()
            loss.backward()
            del loss
        optimizer.update()

    step()
    with umem.record() as recorder:
        step()
        recorder.flush()
        start = recorder.stored_count
        step()
    with umem.record(measure="workspace") as calibration:
        step()
    return tail(recorder.trace, start).with_workspace(calibration.trace)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_step_in_micro_batches_is_what_a_live_one_does(name: str, count: int) -> None:
    *_, step = trained(name)
    trace = umem.record_at(step, (8, 16))
    found = accumulated(trace.at(8), trace.at(8 * count), count)
    check(found)
    live = recorded_in_parts(name, 8, count)
    assert ops_of(found) == ops_of(live)
    assert found.peak_bytes == pytest.approx(live.peak_bytes, rel=0.001)


@pytest.mark.parametrize("count", [2, 5])
def test_gradients_that_come_through_views_of_a_parameter_are_added_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NETWORKS, "viewing", (Viewing, rows))
    *_, step = trained("viewing")
    trace = umem.record_at(step, (8, 16))
    found = accumulated(trace.at(8), trace.at(8 * count), count)
    check(found)
    live = recorded_in_parts("viewing", 8, count)
    assert sorted(ops_of(found)) == sorted(ops_of(live))
    assert found.peak_bytes == pytest.approx(live.peak_bytes, rel=0.01)


def test_each_micro_batch_has_its_own_slice_of_the_input() -> None:
    *_, step = trained("shared")
    trace = umem.record_at(step, (8, 16))
    found = accumulated(trace.at(8), trace.at(24), 3)
    inputs = {e.tensor: e for e in found.events if isinstance(e, Alloc) and e.kind == "input"}
    x = max(inputs.values(), key=lambda alloc: alloc.nbytes)
    assert x.nbytes == 24 * 256 * 4
    read = {(a.start, a.stop) for op in found.ops for a in op.reads if a.tensor == x.tensor}
    third = x.nbytes // 3
    assert read == {(n * third, (n + 1) * third) for n in range(3)}


def test_entries_of_a_tape_go_on_from_one_micro_batch_to_the_next() -> None:
    *_, step = trained("shared")
    trace = umem.record_at(step, (8, 16))
    found = accumulated(trace.at(8), trace.at(16), 2)
    numbers = [op.entry.number for op in found.ops if op.entry is not None]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    marks = [e.entry for e in found.events if isinstance(e, Mark) and e.label == "backward"]
    assert sorted(marks) == numbers


def test_the_largest_micro_batch_that_fits_is_chosen() -> None:
    *_, step = trained("convolutional")
    trace = umem.record_at(step, (8, 16))
    gpu = GPU.with_vram(round(0.3 * trace.at(4096).peak_bytes))
    choice = umem.choose(trace, gpu, size=4096)
    found = next(one for one in choice.options if one.name == "accumulate to fit")
    assert found.line is not None
    micro = int(found.line.removesuffix("):").rpartition("=")[2])
    assert found.line == f"with umem.chainer.accumulate(optimizer, micro_batch={micro}):"
    assert found.tolerance == "rounding" and not found.exact
    assert found.peak_bytes is not None and found.peak_bytes <= gpu.usable_bytes
    subject = StepVariants(trace, [gpu], 4096)
    assert subject.changed(micro_batch=micro).fits(gpu)
    assert not subject.changed(micro_batch=2 * micro).fits(gpu)


def test_micro_batches_that_a_trace_leaves_out_take_as_long_as_those_that_it_has() -> None:
    *_, step = trained("convolutional")
    subject = StepVariants(umem.record_at(step, (8, 16)), [GPU], 96)
    all_of_them = subject.changed(micro_batch=8, shown=12)
    some = subject.changed(micro_batch=8)
    prepared = some.prepared("")
    assert prepared.more == 9 and prepared.less is not None
    place = PlainPool(GPU, subject)
    _, peak, seconds, *_ = place.judged(all_of_them, all_of_them.prepared(""))
    assert place.judged(some, prepared)[1] == peak
    assert place.judged(some, prepared)[2] == pytest.approx(seconds, rel=0.01)


def test_batch_normalisation_is_refused_by_name() -> None:
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(32, 32), L.BatchNormalization(32), L.Linear(32, 4))
    optimizer = chainer.optimizers.SGD().setup(model)

    def step(size: int) -> None:
        optimizer.update(lambda: F.mean(model(np.ones((size, 32), np.float32)) ** 2))

    subject = StepVariants(umem.record_at(step, (8, 16)), [GPU], 64)
    with pytest.raises(StateError, match="BatchNormalization takes statistics over all of it"):
        list(smaller_batches(subject))


def test_a_step_of_one_size_or_without_update_or_with_two_optimizers_is_not_split() -> None:
    x, w, y, g = (Access(n, 0, 400) for n in range(4))
    step = [
        Alloc(0, 400, "input", "x", True), Alloc(1, 400, "parameter", "W", True),
        Alloc(2, 400, "activation", "f"), Op("f", "forward", (x, w), (y,)),
        Alloc(3, 400, "gradient", "g"), Op("g", "backward", (y,), (g,)),
    ]  # fmt: skip
    update = [Op("SGD", "update", (w, g), (w,)), Mark("step")]
    with pytest.raises(StateError, match="recorded at one size"):
        list(smaller_batches(StepVariants(Trace([*step, *update]))))
    with pytest.raises(StateError, match="no optimizer's update"):
        accumulated(Trace(step), Trace(step), 2)
    turns = [*step, *update, Op("h", "forward", (x,), (y,)), *update]
    with pytest.raises(StateError, match="take turns"):
        accumulated(Trace(turns), Trace(turns), 2)


# -- states of eight bits ----------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["Adam", "MomentumSGD"])
@pytest.mark.parametrize("name", NETWORKS)
def test_small_states_are_those_of_a_live_step(name: str, rule: str) -> None:
    _, optimizer, step = trained(name, rule)
    trace = umem.record_at(step, (8, 16))
    found = with_small_states(trace)
    check(found)
    umem.chainer.optimizers.quantize_states(optimizer)
    live = umem.record_at(step, (8, 16))
    assert state_bytes(found) == state_bytes(live) < state_bytes(trace) / 3
    assert ops_of(found) == ops_of(live)
    labels = [{e.label for e in t.events if isinstance(e, Alloc)} for t in (found, live)]
    assert labels[0] == labels[1]
    assert found.peak_bytes == pytest.approx(live.peak_bytes, rel=0.01)


def test_small_states_and_embeddings_stay_in_32_bits() -> None:
    model = chainer.Chain(words=L.EmbedID(500, 32), score=L.Linear(32, 4))
    optimizer = chainer.optimizers.Adam().setup(model)
    ids = np.zeros(8, np.int32)
    with umem.record() as recorder:
        optimizer.update(lambda: F.mean(model.score(model.words(ids)) ** 2))
    with pytest.raises(StateError, match="embeddings aside"):
        with_small_states(recorder.trace)


def test_a_rule_without_small_states_is_refused() -> None:
    *_, step = trained("shared", "RMSprop")
    with pytest.raises(StateError, match="Adam and MomentumSGD"):
        with_small_states(umem.record_at(step, (8, 16)))


def test_a_state_that_is_freed_takes_its_scales_along() -> None:
    size = 4 * 8192
    w, m = Access(0, 0, size), Access(1, 0, size)
    found = with_small_states(Trace([
        Alloc(0, size, "parameter", "W", True), Alloc(1, size, "state", "Adam.m"),
        Op("Adam", "update", (w, m), (w, m)), Mark("step"), Free(1),
    ]))  # fmt: skip
    check(found)
    allocs = [e.nbytes for e in found.events if isinstance(e, Alloc)]
    assert allocs == [size, 8192, 4 * 8192 // BLOCK]
    assert sum(isinstance(e, Free) for e in found.events) == 2


# -- half precision ----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_half_precision_is_near_a_live_step(name: str) -> None:
    model, optimizer, step = trained(name)
    trace = umem.record_at(step, (64, 128))
    found = in_half(trace)
    check(found)
    with umem.chainer.half_precision(model, optimizer):
        live = umem.record_at(step, (64, 128))
    assert state_bytes(found) == state_bytes(live)
    assert found.peak_bytes == pytest.approx(live.peak_bytes, rel=0.05)
    masters = [
        [e.nbytes for e in t.events if isinstance(e, Alloc) and e.label.endswith(".fp32")]
        for t in (found, live)
    ]
    assert sorted(masters[0]) == sorted(masters[1])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_half_precision_of_a_recurrent_network_is_near_a_live_step() -> None:
    """Its first state has the type of what it reads, and the loss keeps a cast."""
    np.random.seed(0)
    model = chainer.ChainList(L.EmbedID(600, 64), L.LSTM(64, 64), L.Linear(64, 600))
    optimizer = chainer.optimizers.Adam().setup(model)
    embed, cell, score = model

    def step(batch: int) -> None:
        cell.reset_state()
        words = np.ones((batch, 5), np.int32)
        optimizer.update(
            lambda: sum(F.softmax_cross_entropy(score(cell(embed(w))), w) for w in words.T)
        )

    found = in_half(umem.record_at(step, (64, 128)))
    check(found)
    with umem.chainer.half_precision(model, optimizer):
        live = umem.record_at(step, (64, 128))
    peaks = [  # of tensors: NumPy's own copies are as large as such a small step
        t.map(lambda e: e._replace(workspace_bytes=0) if isinstance(e, Op) else e).peak_bytes
        for t in (found, live)
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)
    kept = [
        sorted(
            (e.label, e.nbytes)
            for e in t.events
            if isinstance(e, Alloc) and e.label in ("LSTM", "LinearFunction", "Cast")
            if e.kind == "activation"
        )
        for t in (found, live)
    ]
    assert kept[0] == kept[1]


def test_a_step_in_half_precision_is_not_halved_again() -> None:
    *_, step = trained("shared")
    half = in_half(umem.record_at(step, (8, 16)))
    with pytest.raises(StateError, match="already"):
        in_half(half)


# -- together ----------------------------------------------------------------------------------


def test_techniques_go_together_only_where_none_is_enough() -> None:
    *_, step = trained("convolutional")
    trace = umem.record_at(step, (8, 16))
    whole = trace.at(4096).peak_bytes
    roomy = umem.choose(trace, GPU.with_vram(round(0.6 * whole)), size=4096)
    reasons = {one.name: str(one.reason) for one in roomy.dropped}
    assert "alone makes it fit" in reasons["accumulate, recompute min"]
    assert "alone makes it fit" in reasons["all together"]


def heavy_states() -> Trace:
    """Parameters and states take most of the step."""
    model = chainer.Sequential(L.Linear(1024, 1024), F.relu, L.Linear(1024, 1024))
    optimizer = chainer.optimizers.Adam().setup(model)

    def step(size: int) -> None:
        optimizer.update(lambda: F.mean(model(np.ones((size, 1024), np.float32)) ** 2))

    return umem.record_at(step, (8, 16))


@pytest.mark.thorough
def test_together_they_fit_where_none_does_alone() -> None:
    trace = heavy_states()
    plain = trace.at(8192).peak_bytes
    gpu = GPU.with_vram(32 * MIB)
    assert plain > 128 * MIB
    found = {one.name: one for one in umem.choose(trace, gpu, size=8192).options}
    together = found["8-bit, accumulate"]
    assert together.tolerance == "8 bits" and "8-bit states" not in found
    assert together.line is not None
    first, second = together.line.splitlines()
    assert first == "umem.chainer.optimizers.quantize_states(optimizer)"
    assert second.startswith("with umem.chainer.accumulate(optimizer, micro_batch=")


def test_the_cheapest_is_the_most_exact_that_is_about_as_quick() -> None:
    *_, step = trained("convolutional")
    trace = umem.record_at(step, (8, 16))
    plain = trace.at(512).peak_bytes
    kept = cheapest(StepVariants(trace, (), 512, correct="off"), HostArrays(plain))
    assert kept.best == kept.plain and kept.best.names == ()
    tight = cheapest(StepVariants(trace, (), 512, correct="off"), HostArrays(round(0.6 * plain)))
    assert tight.best.fits and tight.best.peak_bytes <= 0.6 * plain
    for other in tight.tried:
        if other.fits and other.rank < tight.best.rank:
            assert tight.best.cost <= 0.95 * other.cost
        if other.fits and other.rank == tight.best.rank:
            assert tight.best.cost <= other.cost


def test_the_choice_does_not_depend_on_times_that_were_measured() -> None:
    *_, step = trained("convolutional")
    trace = umem.record_at(step, (8, 16))
    budget = round(0.4 * trace.at(512).peak_bytes)
    chosen = []
    for factor in (0.01, 1.0, 100.0):  # what was measured, by another machine or a busy one
        skewed = replace(
            trace,
            recordings={
                point: [slower(event, factor) for event in events]
                for point, events in trace.recordings.items()
            },
        )
        chosen.append(
            cheapest(StepVariants(skewed, (), 512, correct="off"), HostArrays(budget)).best
        )
    assert {one.names for one in chosen} == {chosen[0].names} and chosen[0].names
    assert len({one.peak_bytes for one in chosen}) == len({one.cost for one in chosen}) == 1


def slower(event: Event, factor: float) -> Event:
    """An operation of which every other took so many times as long."""
    if not isinstance(event, Op) or event.host_seconds is None or event.flops % 4:
        return event
    return event._replace(host_seconds=factor * event.host_seconds)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["recompute", "accumulate", "workspace", "8-bit states"])
def test_what_is_not_wanted_is_not_chosen(part: str) -> None:
    *_, step = trained("convolutional")
    trace = umem.record_at(step, (8, 16))
    budget = round(0.5 * trace.at(512).peak_bytes)
    found = cheapest(StepVariants(trace, (), 512, correct="off"), HostArrays(budget), [part])
    for one in found.tried:
        change = one.change
        used = {
            "recompute": one.budget is not None,
            "accumulate": change.micro_batch is not None,
            "workspace": change.cap_bytes is not None,
            "8-bit states": change.small_states,
        }
        assert not used[part]


@pytest.mark.thorough
def test_a_budget_that_nothing_fits_names_the_least_that_was_found() -> None:
    trace = heavy_states()
    subject = StepVariants(trace, (), 64, correct="off")
    with pytest.raises(BudgetError, match="the least that was found is") as caught:
        cheapest(subject, HostArrays(MIB))
    least = named_bytes(caught.value)
    found = cheapest(StepVariants(trace, (), 64, correct="off"), HostArrays(least))
    assert found.best.peak_bytes <= least


def named_bytes(error: BudgetError) -> int:
    """The least bytes that an error names."""
    return int(str(error).partition(" (")[2].partition(" bytes")[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "size"), [("shared", 8192), ("convolutional", 512)])
def test_the_figures_of_a_gpu_have_the_gaps_of_its_pool_and_the_least_is_accepted(
    kind: str, size: int
) -> None:
    *_, step = trained(kind)
    subject = StepVariants(umem.record_at(step, (8, 16)), [GPU], size)

    def chosen(budget: int) -> Chosen:
        return cheapest(subject, PlainPool(GPU.with_vram(budget), subject))

    plain = chosen(64 << 30).plain
    assert plain.fits and plain.taken_bytes > plain.peak_bytes
    between = (plain.taken_bytes + plain.peak_bytes) // 2
    with pytest.raises(BudgetError, match="with the pool's gaps as it is, and the least") as caught:
        chosen(BLOCK_BYTES)
    least = named_bytes(caught.value)
    for budget in (least, between, plain.taken_bytes):
        found = chosen(budget)
        assert found.best.fits and found.best.taken_bytes <= budget
        assert found.plain.fits == (found.plain.taken_bytes <= budget)
