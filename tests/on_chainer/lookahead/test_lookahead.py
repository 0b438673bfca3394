"""Lookahead prefetch gains on the virtual GPU, changes no bit, and never gets in the way."""

from __future__ import annotations

import gc
import importlib
import io
import json
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import _backprop_utils, function_node, optimizer
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from project import ROOT
from traced_graphs import check

import umem
import umem.devices.cuda
from umem.chainer import LookaheadPrefetch
from umem.chainer.demo_workload import Workload
from umem.chainer.lookahead import session as lookahead_session
from umem.devices import Device
from umem.devices.cuda import cuda_reason
from umem.errors import DeviceNotFoundError, LookaheadWarning, StateError
from umem.memory import CudaSideStream
from umem.trace import Alloc, Hint, Op
from umem.trace.recording import active

pytestmark = pytest.mark.thorough

NODES, STEPS = 8_000, 5
WRAPPED = (
    (function_node.FunctionNode, "apply"),
    (_backprop_utils, "backprop_step"),
    (_backprop_utils.GradTable, "pop"),
    (optimizer.UpdateRule, "update"),
    (optimizer.GradientMethod, "update"),
)


def wrapped() -> list[Any]:
    return [getattr(owner, name) for owner, name in WRAPPED]


@pytest.fixture(autouse=True)
def _chainer_is_as_it_was() -> Iterator[None]:
    before = wrapped()
    yield
    assert wrapped() == before


# -- the gain ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.generate(NODES, STEPS)


@pytest.fixture(scope="module")
def plain(workload: Workload) -> Callable[[float], tuple[int, Any]]:
    """What a factor means in VRAM, and losses and seconds without help; each run once."""
    with umem.virtual_gpu("v100-16gb") as gpu, umem.managed():
        next(workload.train(lambda step: None))
    known: dict[float, tuple[int, Any]] = {}

    def at(factor: float) -> tuple[int, Any]:
        if factor not in known:
            vram = round(gpu.figures.peak_bytes / factor)
            known[factor] = vram, train_gcn(workload, vram)
        return known[factor]

    return at


def train_gcn(
    workload: Workload, vram: int, help_with: AbstractContextManager[Any] | None = None
) -> tuple[list[float], list[float]]:
    """The losses, and the simulated seconds of each step."""
    with umem.virtual_gpu("v100-16gb", vram) as gpu, umem.managed(), help_with or nullcontext():
        losses = list(workload.train(lambda step: None))
    return losses, list(gpu.figures.step_seconds)


@pytest.mark.parametrize(
    ("factor", "depth", "at_most"),
    [(1.5, 1, 0.3), (1.5, 2, 0.3), (1.5, 3, 0.3), (1.25, 2, 0.3), (2.0, 2, 0.4)],
)
def test_a_step_of_the_gcn_takes_less_time(workload, plain, factor, depth, at_most):
    vram, (plain_losses, seconds) = plain(factor)
    losses, helped = train_gcn(workload, vram, LookaheadPrefetch(depth))
    assert losses == plain_losses
    assert helped[0] == seconds[0]  # it learns
    assert helped[1] < seconds[1]
    assert helped[-1] <= at_most * seconds[-1]


def test_where_everything_fits_nothing_is_moved(workload, plain):
    vram, unhelped = plain(0.8)
    lookahead = LookaheadPrefetch()
    assert train_gcn(workload, vram, lookahead) == unhelped
    report = lookahead.report()
    assert (report.fetched_bytes, report.sent_bytes) == (0, 0)
    assert report.followed_count == STEPS - 1


# -- small programs under pressure -------------------------------------------------------------

WIDTH = 728
ROWS = 32
"""Parameters of just over a block, activations of less."""
VRAM = "12MiB"


class Net(chainer.Chain):
    """Linear layers and ReLU, of which the first ``count`` are used."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(*[L.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: Any, count: int | None = None, fail: bool = False) -> Any:
        for layer in list(self.layers)[:count]:
            x = F.relu(layer(x))
        if fail:
            raise RuntimeError("in forward")
        return F.mean(x * x)


class FailsBackward(chainer.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grads: Any) -> Any:
        raise RuntimeError("in backward")


class Program:
    """A net, its optimizer and batches, all from fixed seeds."""

    def __init__(self) -> None:
        np.random.seed(1)
        self.net = Net()
        self.optimizer = chainer.optimizers.MomentumSGD(0.1).setup(self.net)
        self.random = np.random.default_rng(2)
        self.losses: list[bytes] = []

    def step(self, rows: int = ROWS, update: bool = True, **options: Any) -> None:
        x = self.random.standard_normal((rows, WIDTH), dtype=np.float32)
        loss = self.net(x, **options)
        self.net.cleargrads()
        loss.backward()
        if update:
            self.optimizer.update()
        self.losses.append(loss.array.tobytes())

    def bits(self) -> list[bytes]:
        """Losses, parameters and gradients."""
        params = sorted(self.net.namedparams())
        arrays = [a for _, p in params for a in (p.array, p.grad) if a is not None]
        return [*self.losses, *[a.tobytes() for a in arrays]]


def train(work: Callable[[Program], None], vram: str = VRAM, depth: int = 2) -> Any:
    """Run with and without help; the bits must be the same. Returns the report."""
    found, report = [], None
    for help_with in (None, LookaheadPrefetch(depth)):
        with umem.virtual_gpu("v100-16gb", vram), umem.managed(), help_with or nullcontext():
            program = Program()
            work(program)
            found.append(program.bits())
        if help_with is not None:
            report = help_with.report()
    assert found[0] == found[1]
    return report


def test_results_are_the_same_bits_and_every_iteration_is_helped():
    def work(program: Program) -> None:
        for _ in range(4):
            program.step()

    report = train(work)
    assert (report.iteration_count, report.followed_count, report.mismatch_count) == (4, 3, 0)
    assert report.fetched_bytes > 0 and report.sent_bytes > 0
    assert report.off is None and report.simulated


def test_a_last_small_batch_is_said_once_then_known():
    def work(program: Program) -> None:
        for rows in (ROWS, ROWS, ROWS, 8, ROWS, ROWS, 8, ROWS, 8):
            program.step(rows)

    with pytest.warns(LookaheadWarning, match="iteration 3 takes an unknown order") as said:
        report = train(work)
    assert len(said) == 1
    assert (report.followed_count, report.mismatch_count) == (7, 1)


def test_graphs_that_alternate_are_both_helped_without_a_word():
    def work(program: Program) -> None:
        for number in range(7):
            program.step(count=(None, 2)[number % 2])

    report = train(work)
    assert (report.followed_count, report.mismatch_count) == (5, 1)


def test_graphs_that_never_repeat_are_not_helped_and_nothing_piles_up():
    def work(program: Program) -> None:
        for number in range(8):
            program.step(ROWS - number)
            if number == 7 and (sessions := [r for r in active() if hasattr(r, "array")]):
                session = sessions[0]._listener.__self__
                assert len(session._learned) == lookahead_session.ORDERS

    with pytest.warns(LookaheadWarning, match="learned instead") as said:
        report = train(work)
    assert len(said) == 1
    assert (report.followed_count, report.mismatch_count) == (0, 7)


def test_an_iteration_that_ends_early_is_a_mismatch():
    def work(program: Program) -> None:
        for _ in range(3):
            program.step()
        program.optimizer.update()
        program.optimizer.update()
        program.step()

    with pytest.warns(LookaheadWarning, match="learned instead"):
        report = train(work)
    assert (report.iteration_count, report.mismatch_count) == (6, 1)


@pytest.mark.filterwarnings("ignore:LookaheadPrefetch:umem.errors.LookaheadWarning")
@pytest.mark.parametrize("when", ["forward", "backward", "update"])
def test_after_an_exception_training_goes_on(when):
    def fail(program: Program) -> None:
        if when == "forward":
            program.step(fail=True)
        elif when == "backward":
            x = program.random.standard_normal((ROWS, WIDTH), dtype=np.float32)
            loss = program.net(FailsBackward().apply((chainer.Parameter(x),))[0])
            loss.backward()
        else:
            program.optimizer.add_hook(broken, name="broken")
            program.step()

    def broken(optimizer: Any) -> None:
        raise RuntimeError("in update")

    def work(program: Program) -> None:
        for _ in range(3):
            program.step()
        with pytest.raises(RuntimeError, match=f"in {when}"):
            fail(program)
        if when == "update":
            program.optimizer.remove_hook("broken")
        for _ in range(4):
            program.step()

    report = train(work)
    assert report.iteration_count == 7
    assert report.followed_count >= 5


def test_without_an_update_nothing_is_moved_and_nothing_grows(monkeypatch):
    monkeypatch.setattr(lookahead_session, "LONGEST", 60)

    def work(program: Program) -> None:
        for _ in range(5):
            program.step(update=False)

    report = train(work)
    assert report.iteration_count == report.fetched_bytes == 0
    assert report.off == "60 operations without an optimizer's update"


def test_evaluations_between_updates_are_passed_over():
    def work(program: Program) -> None:
        for number in range(5):
            program.step()
            if number % 2:
                with chainer.no_backprop_mode(), chainer.using_config("train", False):
                    program.net(np.ones((5, WIDTH), np.float32), count=3)

    report = train(work)
    assert (report.followed_count, report.mismatch_count) == (4, 0)


def test_gradients_that_add_up_over_several_backwards_are_one_iteration():
    def work(program: Program) -> None:
        for _ in range(3):
            program.net.cleargrads()
            for _ in range(2):
                x = program.random.standard_normal((ROWS, WIDTH), dtype=np.float32)
                program.net(x).backward()
            program.optimizer.update()

    report = train(work)
    assert (report.followed_count, report.mismatch_count) == (2, 0)
    assert report.fetched_bytes > 0


def test_it_goes_with_checkpoints():
    def work(program: Program) -> None:
        for _ in range(3):
            x = chainer.Variable(program.random.standard_normal((ROWS, WIDTH), dtype=np.float32))
            loss = umem.chainer.checkpoint(program.net, x)
            program.net.cleargrads()
            loss.backward()
            program.optimizer.update()

    report = train(work)
    assert (report.followed_count, report.mismatch_count) == (2, 0)


# -- beside other things -----------------------------------------------------------------------


def test_a_recording_inside_sees_the_same_operations_and_the_hints():
    ops, kinds = [], []
    for help_with in (nullcontext(), LookaheadPrefetch()):
        with umem.virtual_gpu("v100-16gb", VRAM), umem.managed(), help_with:
            program = Program()
            program.step()
            with umem.record() as recorder:
                program.step()
                program.step()
        check(recorder.trace)
        ops.append([(op.name, op.phase) for op in recorder.trace.ops])
        hints = [event for event in recorder.trace.events if isinstance(event, Hint)]
        assert {hint.place for hint in hints} == (
            {0, "cpu"} if isinstance(help_with, LookaheadPrefetch) else set()
        )
        assert all(hint.overlap for hint in hints)
        allocs = [event for event in recorder.trace.events if isinstance(event, Alloc)]
        made = ("activation", "gradient", "stash")  # what is older is an input, once hinted at
        kinds.append([(event.kind, event.label) for event in allocs if event.kind in made])
    assert ops[0] == ops[1] and kinds[0] == kinds[1]


def test_a_recording_outside_sees_them_too():
    with umem.virtual_gpu("v100-16gb", VRAM), umem.managed(), umem.record() as recorder:
        with LookaheadPrefetch():
            program = Program()
            for _ in range(3):
                program.step()
    assert any(isinstance(event, Hint) for event in recorder.trace.events)
    assert sum(isinstance(event, Op) for event in recorder.trace.events) > 0


def test_another_virtual_gpu_inside_does_no_harm():
    with umem.virtual_gpu("v100-16gb", VRAM), umem.managed(), LookaheadPrefetch() as lookahead:
        program = Program()
        program.step()
        with umem.virtual_gpu("t4", VRAM), umem.managed():
            program.step()
        program.step()
    assert lookahead.report().followed_count == 2


def test_nothing_lives_longer():
    def deaths(help_with: AbstractContextManager[Any]) -> list[list[bool]]:
        alive: list[list[bool]] = []
        with umem.virtual_gpu("v100-16gb", VRAM), umem.managed(), help_with:
            program = Program()
            for _ in range(3):
                x = program.random.standard_normal((ROWS, WIDTH), dtype=np.float32)
                h = program.net.layers[0](x)
                y = F.relu(h)
                loss = F.mean(y * y)
                program.net.cleargrads()
                loss.backward()
                refs = [weakref.ref(v.array) for v in (h, y, loss)]
                refs += [weakref.ref(x), weakref.ref(program.net.layers[0].W.grad)]
                alive.append([r() is not None for r in refs])
                program.optimizer.update()
                del h, y, loss
                alive.append([r() is not None for r in refs])
                del x
                program.net.cleargrads()
                alive.append([r() is not None for r in refs])
        return alive

    gc.collect()
    gc.disable()
    try:
        assert deaths(nullcontext()) == deaths(LookaheadPrefetch())
    finally:
        gc.enable()


def test_threads_are_followed_each_by_its_own():
    reports: dict[int, Any] = {}

    def work(number: int) -> None:
        with umem.virtual_gpu("v100-16gb", VRAM), umem.managed():
            with LookaheadPrefetch() as lookahead:
                net = Net(3)
                opt = chainer.optimizers.SGD(0.1).setup(net)
                for _ in range(3):
                    opt.update(net, np.ones((ROWS, WIDTH), np.float32))
            reports[number] = lookahead.report()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reports[n].followed_count for n in range(2)] == [2, 2]
    assert all(report.mismatch_count == 0 for report in reports.values())


def test_other_threads_are_not_followed():
    with umem.virtual_gpu("v100-16gb", VRAM), umem.managed(), LookaheadPrefetch() as lookahead:
        thread = threading.Thread(target=lambda: Program().step())
        thread.start()
        thread.join()
    assert lookahead.report().iteration_count == 0


def test_without_managed_memory_it_lets_go():
    with umem.virtual_gpu("v100-16gb"), LookaheadPrefetch() as lookahead:
        program = Program()
        before = len(active())
        program.step()
        assert len(active()) == before - 1
        program.step()
    assert lookahead.report().off == "no array is in managed memory"
    assert "no array is in managed" in str(lookahead.report())


def test_a_hint_that_fails_ends_the_help_and_nothing_else(monkeypatch):
    def refuse(self: Any, array: Any, to: Any, stream: Any) -> int:
        raise umem.errors.DeviceError("the driver refused the hint")

    with umem.virtual_gpu("v100-16gb", VRAM) as gpu, umem.managed():
        with LookaheadPrefetch() as lookahead:
            program = Program()
            program.step()
            monkeypatch.setattr(type(gpu), "prefetch", refuse)
            with pytest.warns(LookaheadWarning, match="stopped: the driver refused"):
                program.step()
            program.step()
    assert lookahead.report().off == "the driver refused the hint"
    assert lookahead.report().iteration_count == 1


# -- the block ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, None, "2"])
def test_a_depth_is_an_int_from_1_up(depth):
    with pytest.raises(ValueError, match="depth must be an int from 1 up"):
        LookaheadPrefetch(depth)


@pytest.mark.skipif(cuda_reason() is None, reason="there is a CUDA device")
def test_without_a_device_there_is_an_error_and_nothing_is_left():
    before = wrapped()
    with pytest.raises(DeviceNotFoundError, match="virtual_gpu"):
        LookaheadPrefetch().__enter__()
    assert wrapped() == before and active() == ()


def test_one_block_is_enough():
    with umem.virtual_gpu("v100-16gb"), LookaheadPrefetch() as lookahead:
        for other in (lookahead, LookaheadPrefetch()):
            with pytest.raises(StateError, match="leave that one first"):
                other.__enter__()


def test_it_can_be_entered_again_and_learns_again():
    lookahead = LookaheadPrefetch()
    with umem.virtual_gpu("v100-16gb", VRAM), umem.managed():
        program = Program()
        for _ in range(2):
            with lookahead:
                program.step()
                program.step()
            assert lookahead.report().followed_count == 1


def test_it_prints_its_report():
    lookahead = LookaheadPrefetch()
    with umem.virtual_gpu("v100-16gb", VRAM), umem.managed(), lookahead:
        program = Program()
        for _ in range(2):
            program.step()
    text = io.StringIO()
    lookahead.print_report(text)
    assert text.getvalue() == f"{lookahead.report()}\n"
    assert "2: 1 in a known order, 0 that left it" in text.getvalue()
    assert "(simulated)" in text.getvalue()


def test_arrays_are_gone_after_the_block():
    with umem.virtual_gpu("v100-16gb", VRAM), umem.managed():
        with LookaheadPrefetch():
            program = Program()
            program.step()
        ref = weakref.ref(program.net.layers[0].W.array)
        del program
        gc.collect()
        assert ref() is None


# -- the stream on CUDA, as far as it can be seen without one ----------------------------------


class FakeCuPy:
    """Streams and events that write down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.captures = False
        self.cuda = self
        self.events = 0

    def Stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        side = type("Side", (), {})()
        side.wait_event = lambda event: self.log.append(f"side waits for {event.operation}")
        return side

    def Event(self, disable_timing: bool) -> Any:
        assert disable_timing
        event = type("Event", (), {"operation": None})()
        event.record = lambda stream: setattr(event, "operation", self.events)
        return event

    def get_current_stream(self) -> Any:
        self.events += 1
        return type("Current", (), {"ptr": 0})()

    def is_captured(self, stream: int) -> bool:
        return self.captures


@pytest.fixture
def xp(monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    """Streams without CuPy, of which the module that knows captures is asked."""
    fake = FakeCuPy()
    monkeypatch.setattr(umem.devices.cuda, "is_captured", fake.is_captured, raising=False)
    return fake


def test_moves_on_cuda_wait_for_the_operations_that_they_must_not_overtake(xp: FakeCuPy) -> None:
    stream = CudaSideStream(xp)
    assert not stream.advance()  # nothing came before operation 1
    assert stream.advance()
    assert stream.during_operation() is stream.after_operation()
    assert xp.log == ["side waits for 1", "side waits for 2"]
    assert stream.advance()
    stream.during_operation()
    assert xp.log[2:] == ["side waits for 2"]


def test_nothing_moves_on_cuda_while_a_stream_is_captured(xp: FakeCuPy) -> None:
    stream = CudaSideStream(xp)
    stream.advance()
    xp.captures = True
    assert not stream.advance()
    xp.captures = False
    assert not stream.advance()  # what was recorded before the capture is long over
    assert stream.advance()
    assert xp.log == []


def test_a_device_that_is_not_simulated_gets_a_stream_of_cupy(monkeypatch):
    from umem.memory import side_stream

    class Real:
        simulated = False
        backend = "cupy"
        xp = FakeCuPy()

    device: Device = Real()  # type: ignore[assignment]
    assert isinstance(side_stream(device), CudaSideStream)


def test_warnings_as_errors_leave_the_program_as_it_was():
    with umem.virtual_gpu("v100-16gb", VRAM), umem.managed(), LookaheadPrefetch() as lookahead:
        program = Program()
        program.step()
        program.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(LookaheadWarning, match="learned instead"):
                program.step(8)
        program.step()
    assert lookahead.report().mismatch_count >= 1


# -- the benchmark -----------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("prefetch")


def test_the_benchmark_runs_and_no_way_beats_the_bound(bench, tmp_path):
    path = tmp_path / "prefetch.json"
    done = CliRunner().invoke(bench.main, ["--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "(simulated)" in done.output
    assert "GCN: at most 1.25 times the bound" in done.output
    report = json.loads(path.read_text())
    assert report["simulated"] is True
    assert [row["way"] for row in report["rows"]] == [
        "managed",
        "managed + prefetch",
        "lookahead 2",
    ]
    for row in report["rows"]:
        assert row["over_bound"] >= 1 and row["in_bytes"] >= row["bound_in_bytes"] > 0
        moved = row["in_bytes"] + row["out_bytes"]
        assert moved >= row["bound_in_bytes"] + row["bound_out_bytes"]
        assert row["step_seconds"] >= row["compute_seconds"]


@pytest.fixture(scope="module")
def bounds() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("paging_bound")
    finally:
        del sys.path[0]


def least_by_trying(touches: int, gaps: list[tuple[int, int, int]], capacity: int) -> int:
    """How often the link runs at least, over every choice of what is kept."""
    least = sum(ways for _, _, ways in gaps)
    for kept in range(1 << len(gaps)):
        chosen = [gap for number, gap in enumerate(gaps) if kept >> number & 1]
        held = [sum(start < time < stop for start, stop, _ in chosen) for time in range(touches)]
        if max(held, default=0) < capacity:
            saved = sum(ways for _, _, ways in chosen)
            least = min(least, sum(ways for _, _, ways in gaps) - saved)
    return least


@given(
    st.lists(st.tuples(st.sampled_from(["touched", "died"]), st.integers(0, 2)), max_size=6).map(
        lambda some: [("touched", (0,)), *((what, (block,)) for what, block in some)]
    ),
    st.integers(1, 3),
)
def test_the_bound_is_the_least_that_any_choice_makes_the_link_carry(bounds, period, capacity):
    touches, gaps = bounds._gaps(period)
    gaps = gaps[:11]
    kept = bounds._best_kept(touches, gaps, capacity)
    carried = sum(ways for (_, _, ways), is_kept in zip(gaps, kept, strict=True) if not is_kept)
    assert carried == least_by_trying(touches, gaps, capacity)


def test_dead_contents_cost_the_bound_nothing_and_what_outlives_its_use_goes_out_alone(bounds):
    dead = [("touched", (0,)), ("died", (0,)), ("touched", (1,)), ("died", (1,))]
    assert bounds.least_moves(dead, 1) == (0, 0)
    late = [("touched", (0,)), ("touched", (1,)), ("died", (0,)), ("died", (1,))]
    assert bounds.least_moves(late, 1) == (0, 1)
    assert bounds.least_moves([("touched", (0,)), ("touched", (1,))], 1) == (2, 2)
