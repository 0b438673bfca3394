"""Techniques on traces: steps that are repeated, lookahead's hints, and code that runs."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

import pytest
from traced_graphs import check

import umem
from umem.devices.specs import gpu_spec
from umem.devices.virtual.layout import lay_out
from umem.errors import BudgetError, GraphError, StateError, TraceError
from umem.planner import simulate
from umem.predict.recorded_problem import problems_of
from umem.predict.stepping import Replays
from umem.predict.techniques import recomputation as budgets
from umem.predict.techniques.prefetching import with_moves
from umem.predict.techniques.registry import TECHNIQUES
from umem.predict.techniques.steady_state import steady
from umem.predict.techniques.step_variants import STEPS, StepVariants
from umem.trace import Access, Alloc, Free, Hint, Mark, Op, Trace
from umem.units import BLOCK_BYTES, MIB

needs_chainer = pytest.mark.skipif(find_spec("chainer") is None, reason="Chainer is not installed")
GPU = gpu_spec("v100-16gb")


def network(
    width: int = 8, depth: int = 6, batch: int = 64, dropout: float = 0.2
) -> tuple[Any, Any]:
    """An optimizer and a loss of a small network with normalisation and dropout."""
    import_module("umem.chainer")  # before Chainer, which it makes ready
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy as np

    np.random.seed(0)
    layers = chainer.ChainList(*[L.Linear(width, width) for _ in range(depth)])
    norms = chainer.ChainList(*[L.BatchNormalization(width) for _ in range(depth)])
    model = chainer.Chain(layers=layers, norms=norms)
    x = np.ones((batch, width), np.float32)

    def loss(size: int = batch) -> Any:
        h = x[:size]
        for layer, norm in zip(layers, norms, strict=True):
            h = F.relu(norm(layer(h)))
            h = F.dropout(h, dropout) if dropout else h
        return F.mean(h * h)

    return chainer.optimizers.MomentumSGD().setup(model), loss


def record(optimizer: Any, loss: Any, step_count: int) -> Trace:
    with umem.record() as recorder:
        for _ in range(step_count):
            optimizer.update(loss)
    return recorder.trace


def told(trace: Trace) -> list[Any]:
    """What happens, without numbers of tensors and times; frees as a set at their place."""
    allocs: dict[int, Alloc] = {}
    found: list[Any] = []
    for event in trace.events:
        if isinstance(event, Alloc):
            allocs[event.tensor] = event
            found.append((event.nbytes, event.kind, event.label, event.uploaded))
        elif isinstance(event, Free):
            found.append(("free", allocs.pop(event.tensor)[1:4]))
        elif isinstance(event, Op):
            used = [[allocs[a.tensor][1:4] for a in each] for each in (event.reads, event.writes)]
            found.append((event.name, event.phase, used, event.flops))
        elif event != Mark("backward", event.entry):  # whose number is one of a step's
            found.append(event)
    return found


def in_order(items: list[Any]) -> list[Any]:
    """The same with frees that follow one another sorted."""
    found: list[Any] = []
    for item in items:
        found.append(item)
        at = len(found) - 1
        while at and found[at][0] == found[at - 1][0] == "free" and found[at] < found[at - 1]:
            found[at - 1], found[at] = found[at], found[at - 1]
            at -= 1
    return found


# -- a step, on and on -------------------------------------------------------------------------


@needs_chainer
def test_a_step_that_is_repeated_is_what_recording_several_gives() -> None:
    optimizer, loss = network()
    optimizer.update(loss)
    optimizer.target.cleargrads()
    one, three = record(optimizer, loss, 1), None
    optimizer.target.cleargrads()
    three = record(optimizer, loss, 3)
    repeated = steady(one, 3)
    check(repeated)
    assert in_order(told(repeated)) == in_order(told(three))
    assert repeated.peak_bytes == three.peak_bytes > one.peak_bytes


@needs_chainer
def test_a_step_that_begins_with_what_it_found_is_repeated_with_it() -> None:
    optimizer, loss = network()
    optimizer.update(loss)
    trace = umem.record_at(lambda size: optimizer.update(loss, size), sizes=(32, 64)).at(64)
    assert any(e.uploaded and e.kind == "gradient" for e in trace.events if isinstance(e, Alloc))
    repeated = steady(trace, 3)
    check(repeated)
    kept = sum(
        isinstance(e, Alloc) and e.uploaded and e.kind == "gradient" for e in repeated.events
    )
    assert kept == 0, "training's first step finds none; later ones find those of the step before"
    assert repeated.step_count == 3
    assert repeated.peak_bytes == trace.peak_bytes


@needs_chainer
def test_of_many_steps_the_last_ones_begin_as_training_does() -> None:
    optimizer, loss = network()
    optimizer.update(loss)
    repeated = steady(record(optimizer, loss, 6), 3)
    check(repeated)
    before = takewhile(lambda event: event != Mark("start"), repeated.events)
    assert {event.kind for event in before if isinstance(event, Alloc)} <= {"parameter", "input"}
    assert repeated.step_count == 3


def step(backward: bool = True) -> list[Any]:
    w, x, y, g = (Access(tensor, 0, 8) for tensor in range(4))
    events: list[Any] = [
        Alloc(0, 8, "parameter", "w", True),
        Alloc(1, 8, "input", "x", True),
        Free(1),
        Alloc(1, 8, "input", "x", True),
        Alloc(2, 8, "activation", "f"),
        Op("f", "forward", (w, x), (y,), 4),
        Free(1),
    ]
    if backward:
        events += [Alloc(3, 8, "gradient", "g"), Op("b", "backward", (y,), (g,), 4), Free(2)]
        events += [Op("SGD", "update", (g, w), (w,), 4)]
    return events


def test_what_a_step_leaves_goes_before_the_next_backward() -> None:
    repeated = steady(Trace([*step(), Mark("step")]), 2).events
    second = repeated[len(step()) + 1 :]
    kinds = [type(event).__name__ for event in second]
    assert kinds == [
        "Alloc",
        "Free",
        "Alloc",
        "Alloc",
        "Op",
        "Free",  # x, x, y, f
        "Free",
        "Alloc",
        "Op",
        "Free",
        "Op",
        "Mark",
    ]  # the old g, a new one
    assert second[5] == Free(4)  # tensors are numbered by birth


def test_a_trace_without_a_mark_is_one_step_and_one_of_many_keeps_its_last() -> None:
    assert steady(Trace(step()), 3).step_count == 3
    forward = Trace(step(backward=False))
    check(steady(forward, 3))
    many = steady(steady(Trace(step()), 7), 3)
    check(many)
    assert many.step_count == 3
    assert sum(op.name == "SGD" for op in many.ops) == 3


def test_a_program_without_chainer_that_marks_no_steps_begins_anew() -> None:
    arrays = [Alloc(n, 1024, "array", f"a{n}") for n in range(3)]
    ops = [Op("fill", "array", (), (Access(n, 0, 1024),), 256) for n in range(3)]
    events = [event for pair in zip(arrays, ops, strict=True) for event in pair]
    assert steady(Trace(events, "cupy"), 3).peak_bytes == 3 * 1024
    assert steady(Trace([*events, Mark("step")], "cupy"), 3).peak_bytes == 6 * 1024


def test_an_output_that_somebody_holds_is_there_beside_the_next_one() -> None:
    held = [event for event in step() if event != Free(2)]
    repeated = steady(Trace([*held, Mark("step")]), 2)
    check(repeated)
    outputs = [e.tensor for e in repeated.events if isinstance(e, Alloc) and e.label == "f"]
    assert len(outputs) == 2
    second = repeated.events[len(held) + 1 :]
    run = next(i for i, e in enumerate(second) if isinstance(e, Op))
    assert second.index(Free(outputs[0])) == run + 1


def test_the_first_update_may_differ_from_the_others() -> None:
    y, z = Access(10, 0, 8), Access(11, 0, 8)
    first = [
        Alloc(10, 8, "input", "x", True),
        Alloc(11, 8, "activation", "init"),
        Op("init", "forward", (y,), (z,)),
        Mark("step"),
    ]
    trace = Trace([*first, *steady(Trace(step()), 2).events])
    check(trace)
    assert steady(trace, 3).events == trace.events


def test_a_trace_without_operations_is_refused() -> None:
    with pytest.raises(TraceError, match="no operation"):
        steady(Trace([Mark("step")]), 2)


# -- what recompute plans with -----------------------------------------------------------------


@needs_chainer
def test_the_tape_has_the_bytes_that_the_network_has() -> None:
    optimizer, loss = network()
    optimizer.update(loss)
    trace = record(optimizer, loss, 1)
    (problem,) = problems_of(trace)
    parameters = sum(p.array.nbytes for p in optimizer.target.params())
    statistics = 6 * 2 * 8 * 4  # running means and variances
    x = 64 * 8 * 4
    constant = 2 * parameters + statistics + x  # with the momentum
    assert problem.forward_bytes == parameters == sum(c.stays_bytes for c in problem.calls)
    assert problem.constant_bytes(packs=False) == constant + 6 * x
    assert problem.constant_bytes(packs=True) == constant + 6 * x // 32
    assert [c.stash_bytes for c in problem.calls if c.label == "Dropout"] == [0] * 6


@pytest.mark.thorough
def test_the_least_budget_is_what_the_referee_measures() -> None:
    subject = StepVariants(Trace([*chain_of(12), Mark("step")]))
    (problem,) = subject.problems
    least = problem.least()
    assert least.constant_bytes == 64
    assert subject.least_bytes == 64 + simulate(least.graph, least.plan).peak_bytes
    assert subject.under(None) is subject.under(None)
    assert subject.under(subject.least_bytes).peak_bytes == subject.under(None).peak_bytes
    lowest = problem.least(any_cost=True).peak_bytes
    assert subject.under(lowest).peak_bytes == lowest < subject.least_bytes
    with pytest.raises(BudgetError, match=rf"the least budget is .*; {lowest} bytes for \d"):
        subject.under(lowest - 1)


def test_a_share_is_one_of_what_the_step_takes_as_it_is() -> None:
    # 12 values of 4 MiB, two gradients and 64 bytes: 56 MiB.
    subject = StepVariants(Trace([*chain_of(12), Mark("step")]))
    assert subject.trace.peak_bytes == subject.problems[0].plain_bytes == 56 * MIB + 64
    for share in (0.9, 0.7, 0.55):
        assert subject.under(share).peak_bytes <= share * (56 * MIB + 64)
        assert told(subject.under(share)) == told(subject.under(round(share * (56 * MIB + 64))))
    with pytest.raises(BudgetError) as caught:
        subject.under(0.25)
    least, whole = subject.least_bytes, 56 * MIB + 64
    assert f"a budget of {whole / 4 / MIB:.1f} MiB (25% of" in str(caught.value)
    said = f"{least / MIB:.1f} MiB ({-(-100 * least // whole)}%, {least} bytes; "
    assert said in str(caught.value)


def test_two_budgets_never_read_the_same() -> None:
    subject = StepVariants(Trace([*chain_of(3), Mark("step")]))
    with pytest.raises(BudgetError) as caught:
        subject.under(subject.least_bytes - 1)
    assert f"a budget of {subject.least_bytes - 1} B (" in str(caught.value)
    assert f"the least budget is {subject.least_bytes} B (" in str(caught.value)


def test_nothing_runs_again_for_a_trace_without_backward() -> None:
    subject = StepVariants(Trace(step(backward=False)))
    with pytest.raises(GraphError, match="no backward"):
        budgets.prepare(subject, GPU, "50%")


def test_what_an_operation_of_the_program_s_own_reads_is_kept() -> None:
    """As the loss is that a trainer logs: it is read after the update, and no plan drops it."""
    logged = Op("copy", "array", (Access(3, 0, 4 * MIB),), (), 0)
    events = [*chain_of(8), logged]
    events.remove(Free(3))
    trace = Trace([*events, Mark("step")])
    (problem,) = problems_of(trace)
    assert [call.again for call in problem.calls].index(False) == 2
    found = {option.name: option for option in umem.choose(trace, GPU).options}
    assert found["recompute min"].peak_bytes < found["nothing"].peak_bytes


def chain_of(count: int, nbytes: int = 4 * MIB) -> list[Any]:
    """Calls one after another, each needed by its own backward and the next's."""
    value = [Access(1 + v, 0, nbytes) for v in range(count)]
    grad = [Access(1 + count + v, 0, nbytes) for v in range(count)]
    events: list[Any] = [Alloc(0, 64, "input", "x", True)]
    for v in range(count):
        reads = (value[v - 1],) if v else (Access(0, 0, 64),)
        events += [Alloc(1 + v, nbytes, "activation", "f")]
        events += [Op("f", "forward", reads, (value[v],), 10**6, 2 * nbytes)]
    events += [Alloc(2 * count, nbytes, "gradient", "g")]
    for v in reversed(range(count)):
        if v:
            events += [Alloc(count + v, nbytes, "gradient", "g")]
        reads = (value[v], grad[v], *([value[v - 1]] if v else []))
        writes = (grad[v - 1],) if v else ()
        events += [Op("b", "backward", reads, writes, 10**6, 3 * nbytes)]
        events += [Free(1 + count + v), Free(1 + v)]
    return events


@pytest.mark.thorough
@needs_chainer
def test_a_step_that_does_not_fit_is_trained_by_the_line_at_the_time_that_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = [each for each in TECHNIQUES if each.name in ("nothing", "recompute min")]
    monkeypatch.setattr("umem.predict.choosing.TECHNIQUES", some)
    optimizer, loss = network(width=256, depth=16, batch=2048, dropout=0)
    optimizer.update(loss)
    trace = record(optimizer, loss, 1)
    whole = umem.choose(trace, GPU).best.peak_bytes
    gpu = GPU.with_vram(round(0.5 * whole) // (2 * MIB) * 2 * MIB)
    found = {option.name: option for option in umem.choose(trace, gpu).options}
    option = found["recompute min"]
    assert "nothing" not in found and option.moved_bytes == 0
    ends: list[float] = []
    with umem.virtual_gpu("v100-16gb", gpu.usable_bytes) as device:

        def train() -> None:
            for _ in range(6):
                optimizer.update(loss)
                device.synchronize()
                ends.append(device.figures.seconds)

        exec(f"{option.line}\n    train()", {"umem": umem, "train": train})
        moved = device.figures.remote_bytes
    assert ends[-1] - ends[-2] == pytest.approx(option.seconds, rel=0.05)
    assert not moved, "the passes that learn fit as well"


def language_model(length: int = 8) -> Any:
    """A function that trains a recurrent network, whose state is kept between steps."""
    import_module("umem.chainer")
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy as np

    np.random.seed(0)
    model = chainer.Chain(embed=L.EmbedID(500, 32), cell=L.LSTM(32, 64), out=L.Linear(64, 500))

    def loss(words: Any) -> Any:
        model.cell.reset_state()
        return sum(
            F.softmax_cross_entropy(model.out(model.cell(model.embed(words[:, i]))), words[:, i])
            for i in range(length)
        )

    optimizer = chainer.optimizers.Adam().setup(model)
    return lambda size: optimizer.update(loss, np.zeros((size, length), np.int32))


@pytest.mark.thorough
@needs_chainer
@pytest.mark.parametrize(
    ("name", "tight", "learns", "near"), [("hybrid", 0.96, 0, 0.01), ("managed", 0.9, 0, 0.01)]
)
def test_a_state_that_keeps_its_graph_is_placed_as_in_training(
    name: str, tight: float, learns: int, near: float
) -> None:
    """Which tensors lack room depends on where the pool placed the first step's."""
    size = 512
    trace = umem.record_at(language_model(), sizes=(4, 8))
    bare = [
        event._replace(workspace_bytes=None) if isinstance(event, Op) else event
        for event in trace.at(size).events
    ]
    seen = Trace(bare, trace.backend, trace.meta)  # a run on a virtual GPU has no workspace
    whole = umem.choose(seen, GPU).options[0].peak_bytes
    gpu = GPU.with_vram(round(tight * whole))
    found = {option.name: option for option in umem.choose(seen, gpu).options}
    assert "nothing" not in found
    step, ends = language_model(), []
    with umem.virtual_gpu(GPU.name, gpu.usable_bytes) as device:

        def train() -> None:
            for _ in range(learns + STEPS):
                step(size)
                device.synchronize()
                ends.append(device.figures.seconds)

        exec(f"{found[name].line}\n    train()", {"umem": umem, "train": train})
    live = (ends[-1] - ends[learns]) / (STEPS - 1)
    assert found[name].seconds == pytest.approx(live, rel=near)


def test_the_largest_budget_says_why_there_is_none() -> None:
    subject = StepVariants(Trace([*chain_of(40), Mark("step")]))
    with pytest.raises(StateError, match="fits with everything kept"):
        budgets.prepare_largest(subject, GPU)
    with pytest.raises(BudgetError, match=r"the least budget is .* MiB, .* 16.0 MiB of VRAM"):
        budgets.prepare_largest(subject, GPU.with_vram(16 * MIB))


# -- lookahead ---------------------------------------------------------------------------------


def hint_places(trace: Trace) -> list[Any]:
    """After which operation each hint comes, where to, and on what kind of tensor."""
    allocs = {event.tensor: event for event in trace.events if isinstance(event, Alloc)}
    found, count = [], 0
    for event in trace.events:
        count += isinstance(event, Op)
        if isinstance(event, Hint) and event.accesses:  # others are of memory that nobody has
            found.append((count, event.place, event.overlap, allocs[event.accesses[0].tensor][1:4]))
    return found


@pytest.mark.thorough
@needs_chainer
def test_lookahead_on_a_trace_is_what_lookahead_does_on_the_tape() -> None:
    optimizer, loss = network(width=512, depth=8)
    optimizer.update(loss)
    trace = record(optimizer, loss, 4)
    vram = trace.peak_bytes * 2 // 3 // (2 * MIB) * 2 * MIB
    with umem.virtual_gpu("v100-16gb", vram) as gpu, umem.managed():
        with umem.record() as recorder, umem.chainer.LookaheadPrefetch(2) as helped:
            for _ in range(4):
                optimizer.update(loss)
        live = recorder.trace
        reserved, seconds = gpu.usage().reserved_bytes, gpu.figures.step_seconds
    assert helped.report().fetched_bytes and reserved > vram
    layout = lay_out(trace.events, repeats=True)
    assert layout is not None
    helped_layout = with_moves(layout, 2, vram // BLOCK_BYTES)
    hinted = trace.with_events([laid.event for laid in helped_layout.laid])
    hints = [e for e in hinted.events if isinstance(e, Hint) and e.accesses]
    assert not any(isinstance(e, Hint) for e in hinted.events[: hinted.events.index(Mark("step"))])
    assert hint_places(hinted) == hint_places(live)
    fetched = [e.accesses[0].stop - e.accesses[0].start for e in hints if e.place == 0]
    assert sum(fetched) == helped.report().fetched_bytes
    replays, gpu_spec = Replays(), GPU.with_vram(vram)
    replays.lay(hinted, helped_layout)
    step = replays.step(hinted, gpu_spec, "managed")
    assert step.cost.seconds == pytest.approx(sum(seconds[1:]) / 3, rel=0.05)


def test_lookahead_has_nothing_to_say_where_all_has_room() -> None:
    subject = StepVariants(Trace([*chain_of(8), Mark("step")]))
    lookahead = next(t for t in TECHNIQUES if t.name == "managed, lookahead")
    with pytest.raises(StateError, match="it moves nothing"):
        lookahead.prepare(subject, GPU)


# -- the code that turns a technique on --------------------------------------------------------


OF_THE_DIET = ("accumulate", "8-bit", "half precision", "all together")
"""They want a step of an optimizer at two sizes: test_diet.py has their lines."""
WITHOUT_CHAINER = "managed, streaming"
ON_ONE_SIZE = [
    t for t in TECHNIQUES if not t.name.startswith(OF_THE_DIET) and t.name != WITHOUT_CHAINER
]


@cache
def prepared_lines() -> dict[str, str | None]:
    """The line of each technique, mostly on a step that needs more than its GPU has."""
    subject = StepVariants(Trace([*chain_of(60), Mark("step")]))
    tight = GPU.with_vram(96 * MIB)
    narrow = GPU.with_vram(48 * MIB)
    lines: dict[str, str | None] = {}
    convolutions = [
        e._replace(name="Convolution2DFunction", workspace_bytes=24 * MIB) if type(e) is Op else e
        for e in chain_of(60)
    ]
    convolved = StepVariants(Trace([*convolutions, Mark("step")]))
    for technique in ON_ONE_SIZE:
        gpu = narrow if "lookahead" in technique.name else tight
        if technique.name in ("recompute 75%", "recompute 50%", "recompute 25%"):
            gpu = GPU  # their first passes keep everything
        step = convolved if "workspace" in technique.name else subject
        lines[technique.name] = technique.prepare(step, gpu).line
    return lines


@pytest.mark.thorough
@needs_chainer
@pytest.mark.parametrize("name", [technique.name for technique in ON_ONE_SIZE])
def test_the_line_of_every_technique_runs(name: str) -> None:
    line = prepared_lines()[name]
    assert (line is None) == (name == "nothing")
    optimizer, loss = network(depth=24)
    code = f"{line or 'if True:'}\n    for _ in range(3):\n        optimizer.update(loss)\n"
    with umem.virtual_gpu("v100-16gb") as gpu, warnings.catch_warnings():
        # Under Recompute the third step is the first that is planned: lookahead learns it anew.
        warnings.filterwarnings("ignore", category=umem.errors.LookaheadWarning)
        exec(code, {"umem": umem, "optimizer": optimizer, "loss": loss})
        assert len(gpu.figures.step_seconds) == 3


# -- several models in a step ------------------------------------------------------------------


def two_models(nbytes: int = 4 * MIB) -> Trace:
    """As for a GAN: two chains of other lengths, each with an update of its own, twice."""
    events: list[Any] = []
    for number, count in enumerate((6, 9, 6, 9)):
        shift = 1000 * number
        for event in chain_of(count, nbytes):
            if isinstance(event, Op):
                reads, writes = (
                    tuple(a._replace(tensor=a.tensor + shift) for a in each)
                    for each in (event.reads, event.writes)
                )
                events.append(event._replace(reads=reads, writes=writes))
            else:
                events.append(event._replace(tensor=event.tensor + shift))
        events.append(Mark("step"))
    return Trace(events)


def test_where_optimizers_take_turns_a_step_is_a_round_of_them() -> None:
    repeated = steady(two_models(), 3)
    check(repeated)
    counts = [0]
    for event in repeated.events:
        if event == Mark("step"):
            counts.append(0)
        counts[-1] += isinstance(event, Op)
    assert counts == [2 * (6 + 9)] * 3 + [0]


def test_every_kind_of_pass_is_planned() -> None:
    subject = StepVariants(two_models())
    assert [len(problem.calls) for problem in subject.problems] == [6, 9]
    others = subject.trace.peak_bytes - max(problem.plain_bytes for problem in subject.problems)
    assert 0 <= others <= 3 * 64  # parameters of the model that the pass is not of
    assert subject.problems[0].plain_bytes != subject.problems[1].plain_bytes
    least = subject.under(None)
    check(least)
    again = len(list(least.ops)) - len(list(subject.trace.ops))
    wanted = [sum(map(len, p.least().plan.recomputed)) for p in subject.problems]
    assert all(wanted) and again == STEPS * sum(wanted)
    assert least.peak_bytes < subject.trace.peak_bytes


def test_a_graph_that_goes_with_the_steps_function_is_not_there_in_the_next_step() -> None:
    w, x, y = (Access(n, 0, 100) for n in range(3))
    step = [
        Alloc(0, 100, "parameter", "W", True), Mark("start"),
        Alloc(1, 100, "activation", "f"), Op("f", "forward", (w,), (x,)),
        Alloc(2, 100, "gradient", "g"), Op("g", "backward", (x,), (y,)),
        Op("SGD", "update", (y, w), (w,)), Mark("step"),
        Free(1), Free(2),  # when the function returns
    ]  # fmt: skip
    once, thrice = Trace(step), steady(Trace(step), 3)
    assert thrice.step_count == 3 and thrice.peak_bytes == once.peak_bytes == 300
    held = steady(Trace(step[:-2]), 3)  # the loss is held until the next backward
    assert held.peak_bytes == 400
    check(thrice)
