"""Whoever listens to Chainer may come and go in any order; Chainer is then as it was."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from project import ROOT

import umem

import umem.chainer  # isort: skip
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer import tap
from umem.errors import LeftOnWarning, StateError

STEPS = 7


def functions() -> list[Any]:
    """Chainer's functions at every place where umem may listen."""
    return [vars(point.owner)[point.name] for point in tap.POINTS]


class Training:
    """A small network with dropout and normalisation, trained a step at a time."""

    def __init__(self) -> None:
        np.random.seed(0)
        self.model = chainer.Sequential(
            L.Linear(6, 8), L.BatchNormalization(8), F.dropout, F.tanh, L.Linear(8, 8), F.relu,
            L.Linear(8, 3),
        )  # fmt: skip
        self.optimizer = chainer.optimizers.MomentumSGD(0.1).setup(self.model)
        self.x = np.random.randn(5, 6).astype("f")
        self.numbers: list[bytes] = []

    def step(self) -> None:
        """Forward, backward, update; keeps the bits of every number."""
        loss = F.mean(self.model(self.x) ** 2)
        self.model.cleargrads()
        loss.backward()
        self.numbers += [p.grad.tobytes() for p in self.model.params()]
        self.optimizer.update()
        self.numbers += [loss.array.tobytes(), self.model[1].avg_mean.tobytes()]
        self.numbers += [p.array.tobytes() for p in self.model.params()]


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    """The numbers of plain Chainer."""
    training = Training()
    for _ in range(STEPS):
        training.step()
    return training.numbers


@contextmanager
def memory_report() -> Iterator[None]:
    """A MemoryReport, from the moment that a trainer starts it to the moment that it is over."""
    updater = SimpleNamespace(iteration=0, epoch_detail=0.0)
    report = umem.chainer.MemoryReport()
    report.initialize(SimpleNamespace(updater=updater, elapsed_time=0.0))
    try:
        yield
    finally:
        report.finalize()


PARTIES: dict[str, Callable[[], Any]] = {
    "record": umem.record,
    "recompute": lambda: umem.chainer.Recompute("min"),
    "lookahead": umem.chainer.LookaheadPrefetch,
    "report": memory_report,
    "virtual": lambda: umem.virtual_gpu("t4", vram="32MiB"),
}


def come_and_go(training: Training, names: Any, leaving: Any, error: Exception | None) -> None:
    """Enter in one order, leave in another, with a step between any two."""
    entered = {}
    for name in names:
        entered[name] = PARTIES[name]()
        entered[name].__enter__()
        training.step()
    for name in leaving:
        raised = (None, None, None) if error is None else (type(error), error, None)
        try:
            entered.pop(name).__exit__(*raised)
        except ZeroDivisionError:
            assert error is not None
        if entered:
            training.step()


@pytest.mark.thorough
@pytest.mark.parametrize("names", list(itertools.permutations(PARTIES, 2)), ids="-".join)
def test_two_may_come_and_go_in_any_order(names: Any, plain: list[bytes]) -> None:
    before = functions()
    for leaving in itertools.permutations(names):
        training = Training()
        with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed():
            come_and_go(training, names, leaving, ZeroDivisionError())
        assert all(now is then for now, then in zip(functions(), before, strict=True))
        for _ in range(STEPS - 3):
            training.step()
        assert training.numbers == plain


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:LookaheadPrefetch")  # an order that is new, said once
@pytest.mark.parametrize("names", list(itertools.permutations(PARTIES, 3)), ids="-".join)
def test_three_may_come_and_go_in_any_order(names: Any, plain: list[bytes]) -> None:
    before = functions()
    for leaving in itertools.permutations(names):
        training = Training()
        with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed():
            come_and_go(training, names, leaving, None)
        assert all(now is then for now, then in zip(functions(), before, strict=True))
        for _ in range(STEPS - 5):
            training.step()
        assert training.numbers == plain


@pytest.mark.thorough
def test_a_script_that_recomputes_may_be_recorded_without_workspace(tmp_path: Any) -> None:
    """The recorder leaves in the middle of the block: both go on as if the other were not there."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import umem, umem.chainer, chainer\n"
        "from chainer import function_node\n"
        "from tests.on_chainer.test_tap import Training, functions\n"
        "before, training = functions(), Training()\n"
        "with umem.chainer.Recompute('min') as memory:\n"
        "    for _ in range(7):\n"
        "        training.step()\n"
        "assert memory.planned_count >= 4, memory.planned_count\n"
        "print('as it was:', function_node.FunctionNode.apply.__module__)\n"
    )
    command = [sys.executable, "-m", "umem", "run", "--record", str(tmp_path / "t.gz")]
    done = subprocess.run(
        [
            *command,
            "--no-workspace",
            "--force",
            str(script),
            str(ROOT),
            str(ROOT / "tests" / "support"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "as it was: chainer.function_node" in done.stdout


def test_each_is_told_once_and_the_outermost_first() -> None:
    told: list[str] = []

    class Listener(tap.Subscriber):
        def __init__(self, name: str, place: int) -> None:
            self.name, self.place = name, place

        def apply(self, proceed: Any, func: Any, inputs: Any) -> Any:
            told.append(self.name)
            return proceed(func, inputs)

    listeners = [Listener("inner", 5), Listener("outer", -5), Listener("between", 0)]
    for listener in (*listeners, listeners[0]):  # one of them twice
        tap.subscribe(listener)
    F.tanh(np.zeros(2, "f"))
    assert told == ["outer", "between", "inner"]
    for listener in (*listeners, listeners[1]):
        tap.unsubscribe(listener)


def test_nothing_is_replaced_where_nobody_listens() -> None:
    before = dict(zip(tap.POINTS, functions(), strict=True))

    class Listener(tap.Subscriber):
        def update(self, proceed: Any, rule: Any, parameter: Any) -> None:
            proceed(rule, parameter)

    listener = Listener()
    tap.subscribe(listener)
    try:
        changed = {p.event for p in tap.POINTS if vars(p.owner)[p.name] is not before[p]}
    finally:
        tap.unsubscribe(listener)
    assert changed == {"update"}


def test_another_thread_may_end_what_this_one_began(plain: list[bytes]) -> None:
    training = Training()
    recorder = umem.record()
    recorder.__enter__()
    training.step()
    thread = threading.Thread(target=lambda: recorder.__exit__(None, None, None))
    thread.start()
    thread.join()
    for _ in range(STEPS - 1):
        training.step()
    assert training.numbers == plain


def test_threads_come_and_go_while_others_train(plain: list[bytes]) -> None:
    """Each trains with its own recorder; NumPy's global generator allows one network at a time."""
    found: list[Any] = []
    lock = threading.Lock()

    def train() -> None:
        try:
            for _ in range(5):
                with umem.record() as recorder:
                    y = F.tanh(chainer.Variable(np.ones((3, 3), "f")))
                    F.sum(y).backward()
                with lock:
                    found.append([op.name for op in recorder.trace.ops])
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all(names == found[0] for names in found)


def test_a_patch_that_somebody_puts_over_ours_is_kept_and_said() -> None:
    owner = chainer.function_node.FunctionNode
    original = vars(owner)["apply"]
    seen = []
    recorder = umem.record()
    recorder.__enter__()
    ours = vars(owner)["apply"]

    def theirs(func: Any, inputs: Any) -> Any:
        seen.append(func.label)
        return ours(func, inputs)

    owner.apply = theirs
    try:
        with pytest.warns(LeftOnWarning, match=r"FunctionNode\.apply: .* stays"):
            recorder.__exit__(None, None, None)
        assert vars(owner)["apply"] is theirs
        with umem.record() as again:  # over theirs, which is left as it is
            F.tanh(np.zeros(2, "f"))
        assert [op.name for op in again.trace.ops] == ["Tanh"]
        assert vars(owner)["apply"] is theirs
        assert seen == ["Tanh"]
    finally:
        owner.apply = original


def test_what_is_below_anothers_patch_records_nothing_any_more() -> None:
    owner = chainer.function_node.FunctionNode
    original = vars(owner)["apply"]
    recorder = umem.record()
    recorder.__enter__()
    ours = vars(owner)["apply"]
    owner.apply = lambda func, inputs: ours(func, inputs)
    try:
        with pytest.warns(LeftOnWarning):
            recorder.__exit__(None, None, None)
        with umem.record() as again:
            F.tanh(np.zeros(2, "f"))
        assert len(list(again.trace.ops)) == 1  # not twice
    finally:
        owner.apply = original


def test_leaving_twice_changes_nothing(plain: list[bytes]) -> None:
    training = Training()
    memory = umem.chainer.Recompute("min")
    memory.__enter__()
    training.step()
    memory.__exit__(None, None, None)
    memory.__exit__(None, None, None)
    for _ in range(STEPS - 1):
        training.step()
    assert training.numbers == plain


def test_chainer_imported_anew_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes are others than those that umem knows: nothing would be seen."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "chainer"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("chainer")
    with pytest.raises(StateError, match="imported anew"):
        umem.record().__enter__()
    with pytest.raises(StateError, match="imported anew"):
        umem.chainer.Recompute("min").__enter__()


def test_an_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(11):
        left = iter(range(count))

        def put(patch: Any, left: Any = left, real: Any = tap._Patch.put) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            real(patch)

        before = functions()
        with monkeypatch.context() as patched:
            patched.setattr(tap._Patch, "put", put)
            with pytest.raises(KeyboardInterrupt):
                umem.chainer.Recompute("min").__enter__()
        assert all(now is then for now, then in zip(functions(), before, strict=True)), count
        with umem.chainer.Recompute("min"):
            pass
