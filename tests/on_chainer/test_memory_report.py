"""MemoryReport: what LogReport and PrintReport print of memory, time and the whole run."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from software_programs import needs_compiler, needs_cupy, run

import umem
from umem.errors import TraceError
from umem.trace import Alloc, Event, Free
from umem.trace.recording import active

chainer = pytest.importorskip("umem.chainer").chainer
from chainer import training  # noqa: E402
from chainer.training import extensions  # noqa: E402

from umem.chainer import MemoryReport  # noqa: E402
from umem.chainer import memory_report as module  # noqa: E402

L = chainer.links
MIB = 1 << 20
KINDS = ("parameters", "gradients", "state", "activations", "inputs")
STEP = (1, "iteration")


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(training.trainer, "_get_time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_trainer(
    folder: Path,
    stop: Any,
    report: Any,
    *,
    log: Any = STEP,
    seconds: Callable[[int], None] | None = None,
) -> Any:
    """A trainer of 4 updates an epoch that logs what is reported."""
    model = L.Classifier(L.Linear(8, 4))
    optimizer = chainer.optimizers.Adam().setup(model)
    data = chainer.datasets.TupleDataset(np.ones((16, 8), "f"), np.zeros(16, "i"))
    iterator = chainer.iterators.SerialIterator(data, 4)

    class Updater(training.StandardUpdater):  # type: ignore[misc]
        def update_core(self) -> None:
            super().update_core()
            if seconds is not None:
                seconds(self.iteration)

    trainer = training.Trainer(Updater(iterator, optimizer), stop, out=str(folder))
    trainer.extend(extensions.LogReport(trigger=log))
    trainer.extend(report)
    return trainer


def log_of(trainer: Any) -> list[dict[str, float]]:
    found: list[dict[str, float]] = trainer.get_extension("LogReport").log
    return found


def peak_of(events: list[Event]) -> int:
    live: dict[int, int] = {}
    peak = 0
    for event in events:
        if isinstance(event, Alloc):
            live[event.tensor] = event.nbytes
        elif isinstance(event, Free):
            del live[event.tensor]
        peak = max(peak, sum(live.values()))
    return peak


# -- memory ------------------------------------------------------------------------------------


def test_memory_is_reported_by_kind_and_adds_up_to_the_peak(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, (6, "iteration"), MemoryReport())
    with umem.record() as recorder:
        trainer.run()
    last = log_of(trainer)[-1]
    parameters = 4 * (8 * 4 + 4)
    assert last["memory/parameters_MiB"] * MIB == parameters
    assert last["memory/state_MiB"] * MIB == 2 * parameters
    assert last["memory/inputs_MiB"] * MIB >= 4 * 8 * 4
    assert last["memory/peak_MiB"] * MIB == peak_of(recorder.trace.events)
    assert sum(last[f"memory/{kind}_MiB"] for kind in KINDS) == last["memory/peak_MiB"]
    assert 3 * parameters <= last["memory/current_MiB"] * MIB <= last["memory/peak_MiB"] * MIB
    assert "memory/reserved_MiB" not in last  # CuPy's


def test_print_report_prints_it(tmp_path: Path) -> None:
    out = io.StringIO()
    names = ["iteration", "memory/peak_MiB", "time/step_s", "time/whole_run_min"]
    trainer = make_trainer(tmp_path, (2, "epoch"), MemoryReport(), log=(1, "epoch"))
    trainer.extend(extensions.PrintReport(names, out=out))
    trainer.run()
    rows = [line.split() for line in out.getvalue().replace("\x1b[J", "").splitlines()]
    assert rows[0] == names and [row[0] for row in rows[1:]] == ["4", "8"]
    assert all(len(row) == len(names) and all(float(v) > 0 for v in row) for row in rows[1:])


def test_with_the_trigger_of_the_log_figures_are_those_of_the_moment(tmp_path: Path) -> None:
    report = MemoryReport(trigger=(1, "epoch"))
    trainer = make_trainer(tmp_path, (2, "epoch"), report, log=(1, "epoch"))
    with umem.record() as recorder:
        trainer.run()
    assert len(log_of(trainer)) == 2
    assert log_of(trainer)[1]["memory/peak_MiB"] * MIB == peak_of(recorder.trace.events)


@needs_compiler
@needs_cupy
def test_on_cupy_the_pools_are_measured(kernel_cache: Path, tmp_path: Path) -> None:
    program = f"""
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L
from chainer.training import extensions
class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Convolution2D(3, 8, 3, pad=1)
    def forward(self, x):
        return F.sum(F.relu(self.a(x)))
pool = cp.get_default_memory_pool()
class Watch(cp.cuda.memory_hook.MemoryHook):
    name, peak = "watch", 0
    def malloc_postprocess(self, **allocation):
        self.peak = max(self.peak, pool.used_bytes())
optimizer = chainer.optimizers.Adam().setup(Net().to_device("@cupy:0"))
data = np.ones((16, 3, 24, 24), "f4")
updater = chainer.training.StandardUpdater(
    chainer.iterators.SerialIterator(data, 8), optimizer, device="@cupy:0",
    loss_func=optimizer.target)
trainer = chainer.training.Trainer(updater, (4, "iteration"), out={str(tmp_path)!r})
trainer.extend(umem.chainer.MemoryReport())
trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
with Watch() as watch:
    trainer.run()
last = trainer.get_extension("LogReport").log[-1]
print(last["memory/pools_peak_MiB"] * (1 << 20) == watch.peak)
print(last["memory/reserved_MiB"] * (1 << 20) == pool.total_bytes())
print(last["memory/peak_MiB"] < last["memory/pools_peak_MiB"] < last["memory/reserved_MiB"])
parameters = sum(p.array.nbytes for p in optimizer.target.params())
print(last["memory/parameters_MiB"] * (1 << 20) == parameters)
print(last["memory/inputs_MiB"] * (1 << 20) == data[:8].nbytes)
"""
    assert run(program, kernel_cache).splitlines() == ["True"] * 5


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(12, "iteration"), (3, "epoch")])
def test_step_time_and_the_time_of_the_whole_run(tmp_path: Path, clock: Clock, stop: Any) -> None:
    def seconds(iteration: int) -> None:  # the first is slow, as first steps are
        clock.now += 50.0 if iteration == 0 else 2.0

    trainer = make_trainer(tmp_path, stop, MemoryReport(), seconds=seconds)
    trainer.run()
    log = log_of(trainer)
    assert [entry["time/step_s"] for entry in log] == [50.0] + [2.0] * 11
    seconds_of_run = [entry["time/whole_run_min"] * 60 for entry in log]
    assert seconds_of_run[0] == pytest.approx(12 * 50.0)  # nothing else is known yet
    assert seconds_of_run[1:] == pytest.approx([50.0 + 11 * 2.0] * 11)


def test_step_time_is_a_mean_where_reports_are_rarer(tmp_path: Path, clock: Clock) -> None:
    def seconds(iteration: int) -> None:
        clock.now += float(iteration)

    report = MemoryReport(trigger=(4, "iteration"))
    trainer = make_trainer(tmp_path, (8, "iteration"), report, seconds=seconds)
    trainer.run()
    found = [entry["time/step_s"] for entry in log_of(trainer) if "time/step_s" in entry]
    assert found == [(0 + 1 + 2 + 3) / 4, (4 + 5 + 6 + 7) / 4]


def test_early_stopping_tells_the_longest_time(tmp_path: Path, clock: Clock) -> None:
    def seconds(iteration: int) -> None:
        clock.now += 3.0

    stop = training.triggers.EarlyStoppingTrigger(
        check_trigger=(100, "epoch"), monitor="main/loss", max_trigger=(2, "epoch")
    )
    trainer = make_trainer(tmp_path, stop, MemoryReport(), seconds=seconds)
    trainer.run()
    last = log_of(trainer)[-1]
    assert last["time/whole_run_min"] * 60 == pytest.approx(8 * 3.0)


def test_a_stop_that_nobody_can_foresee_reports_no_time(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lambda trainer: trainer.updater.iteration >= 3, MemoryReport())
    trainer.run()
    assert all("time/whole_run_min" not in entry for entry in log_of(trainer))
    assert all(entry["time/step_s"] > 0 for entry in log_of(trainer))


# -- resuming ----------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_peak_and_its_time(tmp_path: Path, clock: Clock) -> None:
    def seconds(iteration: int) -> None:
        clock.now += 2.0

    def more(iteration: int) -> None:
        seconds(iteration)
        chainer.functions.relu(np.ones(32 * MIB, "i1").view("f8"))  # and as much that it makes

    big = make_trainer(tmp_path, (4, "iteration"), MemoryReport(), seconds=more)
    big.run()
    path = tmp_path / "snapshot.npz"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chainer.serializers.save_npz(path, big)
        again = make_trainer(tmp_path, (8, "iteration"), MemoryReport(), seconds=seconds)
        chainer.serializers.load_npz(path, again)
    again.run()
    last = log_of(again)[-1]
    assert 64 < last["memory/peak_MiB"] < 64.1
    assert sum(last[f"memory/{kind}_MiB"] for kind in KINDS) == last["memory/peak_MiB"]
    assert last["time/whole_run_min"] * 60 == pytest.approx(8 * 2.0, rel=0.005)  # in three figures
    assert last["iteration"] == 8


def test_a_snapshot_without_the_extension_is_no_obstacle() -> None:
    class Old:
        def __call__(self, key: str, value: Any) -> Any:
            raise KeyError(key)

    MemoryReport().serialize(Old())


# -- around it ---------------------------------------------------------------------------------


def test_an_error_in_training_leaves_nothing_on(tmp_path: Path, capsys: Any) -> None:
    def seconds(iteration: int) -> None:
        if iteration == 2:
            raise MemoryError("too much")

    plain = chainer.FunctionNode.apply
    report = MemoryReport(record=tmp_path / "a.umem.gz")
    trainer = make_trainer(tmp_path, (9, "iteration"), report, seconds=seconds)
    with pytest.raises(MemoryError):
        trainer.run()
    assert not active() and chainer.FunctionNode.apply is plain
    assert umem.Trace.load(tmp_path / "a.umem.gz").meta["steps"] == "3"


def test_it_works_beside_a_virtual_gpu(tmp_path: Path) -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu, umem.managed():
        trainer = make_trainer(tmp_path, (3, "iteration"), MemoryReport())
        trainer.run()
    last = log_of(trainer)[-1]
    assert gpu.figures.peak_bytes == last["memory/peak_MiB"] * MIB


# -- the trace ---------------------------------------------------------------------------------


def test_the_third_step_is_saved_with_times_and_workspace(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.umem.gz"
    trainer = make_trainer(tmp_path, (6, "iteration"), MemoryReport(record=str(path)))
    trainer.run()
    trace = umem.Trace.load(path)
    assert trace.step_count == 1 and trace.meta["steps"] == "3"
    assert all(op.host_seconds is not None and op.workspace_bytes is not None for op in trace.ops)


def test_a_file_that_exists_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.umem.gz"
    path.write_text("mine")
    with pytest.raises(TraceError, match="exists"):
        MemoryReport(record=path)
    with pytest.raises(TraceError, match="cannot write"):
        MemoryReport(record=path / "b.umem.gz")
    make_trainer(tmp_path, (5, "iteration"), MemoryReport(record=path, force=True)).run()
    assert umem.Trace.load(path).step_count == 1


def test_a_trace_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "a.umem.gz"

    def seconds(iteration: int) -> None:
        if iteration == 1:
            path.parent.rmdir()

    trainer = make_trainer(tmp_path, (6, "iteration"), MemoryReport(record=path), seconds=seconds)
    trainer.run()
    assert trainer.updater.iteration == 6
    assert "MemoryReport: cannot write the trace" in capsys.readouterr().err
