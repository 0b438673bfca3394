"""`umem.chainer.diet`: it keeps live steps to a budget, and leaves no trace where it is undone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from project import ROOT

import umem
from umem.errors import BudgetError, ScalingError, SizeError, StateError
from umem.units import KIB, MIB

import umem.chainer  # isort: skip
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from umem.chainer.dial.as_it_was import as_it_was
from umem.chainer.dial.diets import diet_of
from umem.predict.dieting import PARTS

pytestmark = pytest.mark.thorough


class Net(chainer.Chain):
    """Linear layers with dropout; ``norm`` adds batch normalisation."""

    def __init__(
        self, width: int = 256, depth: int = 6, norm: bool = False, ratio: float = 0.1
    ) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(*[L.Linear(width, width) for _ in range(depth)])
            if norm:
                self.norm = L.BatchNormalization(width)
        self.has_norm, self.ratio = norm, ratio

    def forward(self, x: Any, t: Any) -> Any:
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), self.ratio)
        x = self.norm(x) if self.has_norm else x
        return F.softmax_cross_entropy(x, t)


def data(size: int, width: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, width)).astype(np.float32)
    return x, rng.integers(0, width, size).astype(np.int32)


class Run:
    """A model in training whose steps can be taken apart, or not."""

    def __init__(self, rule: str = "Adam", *, split: bool = True, **options: Any) -> None:
        np.random.seed(0)
        self.model = Net(**options)
        self.optimizer = getattr(chainer.optimizers, rule)().setup(self.model)
        self._split, self._width = split, options.get("width", 256)

    def step(self, size: int) -> None:
        if self._split:
            self.optimizer.update(self.model, *data(size, self._width))
        else:
            self.optimizer.update(lambda: self.model(*data(size, self._width)))

    def diet(self, budget: int | str, **options: Any) -> Any:
        options = {"size": 512, "sizes": (64, 128), "quiet": True, **options}
        return umem.chainer.diet(self.model, self.optimizer, self.step, budget, **options)

    def parameters(self) -> list[Any]:
        return [param.array.copy() for param in self.model.params()]

    def plain_bytes(self) -> int:
        with self.diet("100GiB") as found:
            return int(found.chosen.plain.peak_bytes)


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# -- recording leaves no trace -----------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_recording_leaves_model_optimizer_and_random_state_as_they_were(norm: bool) -> None:
    dieted, plain = Run(norm=norm), Run(norm=norm)
    for run in (dieted, plain):
        np.random.seed(1)
        random.seed(1)
        run.step(32)
    draws = []
    for run in (dieted, plain):
        np.random.seed(2)
        random.seed(2)
        if run is dieted:
            run.diet("100GiB").undo()
        for _ in range(2):
            run.step(32)
        draws.append((np.random.rand(), random.random()))
    assert draws[0] == draws[1]
    assert same(dieted.parameters(), plain.parameters())
    assert dieted.optimizer.t == plain.optimizer.t == 3
    if norm:
        assert np.array_equal(dieted.model.norm.avg_mean, plain.model.norm.avg_mean)
    for one, other in zip(dieted.model.params(), plain.model.params(), strict=True):
        assert one.update_rule.t == other.update_rule.t
        assert all(
            np.array_equal(v, other.update_rule.state[k]) for k, v in one.update_rule.state.items()
        )


def test_an_optimizer_that_has_no_state_yet_has_none_after_recording() -> None:
    run = Run()
    run.diet("100GiB").undo()
    assert all(param.update_rule.state is None for param in run.model.params())
    assert run.optimizer.t == 0


def test_a_step_that_fails_while_it_is_recorded_leaves_all_as_it_was() -> None:
    run, before = Run(), Run().parameters()

    def step(size: int) -> None:
        run.step(size)
        if size == 128:
            raise ValueError("no more data")

    with pytest.raises(ScalingError, match="fails at size 128"):
        umem.chainer.diet(run.model, run.optimizer, step, "1GiB", size=512, sizes=(64, 128))
    assert same(run.parameters(), before) and run.optimizer.t == 0


# -- what is turned on -------------------------------------------------------------------------


def test_a_step_that_fits_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    with run.diet("1GiB", quiet=False) as found:
        assert found.chosen.best.names == ()
    said = capsys.readouterr().out
    assert "it fits: nothing is turned on" in said and "simulated" in said


def test_without_splitting_results_are_the_same_bits() -> None:
    dieted, plain = Run(split=False), Run(split=False)
    budget = round(0.75 * dieted.plain_bytes())
    np.random.seed(3)
    with dieted.diet(budget) as found:
        assert found.chosen.best.rank == 0 and found.chosen.best.budget is not None
        for _ in range(5):
            dieted.step(512)
        assert "passes followed a plan" in found.report()
    np.random.seed(3)
    for _ in range(5):
        plain.step(512)
    assert same(dieted.parameters(), plain.parameters())


def test_micro_batches_give_the_same_results_up_to_rounding() -> None:
    dieted, plain = (Run("SGD", ratio=0.0) for _ in range(2))  # parts have masks of their own
    budget = round(0.5 * dieted.plain_bytes())
    with dieted.diet(budget, without=["recompute"]) as found:
        assert found.chosen.best.change.micro_batch in (256, 128, 64, 32)
        assert found.chosen.best.exactness == "up to rounding, dropout's masks aside"
        for _ in range(3):
            dieted.step(512)
    begun = plain.parameters()
    for _ in range(3):
        plain.step(512)
    for one, other, first in zip(dieted.parameters(), plain.parameters(), begun, strict=True):
        # Rounding alone may have a unit of relu pass a sample in one run and not in the other.
        assert np.linalg.norm(one - other) < 0.01 * np.linalg.norm(other - first)


def test_states_of_eight_bits_and_micro_batches_together_and_undone() -> None:
    run = Run(width=512, depth=4)
    least = sum(4 * param.array.nbytes for param in run.model.params())
    without = ["half precision", "recompute", "workspace"]
    with run.diet(round(1.05 * least), without=without) as found:
        change = found.chosen.best.change
        assert change.small_states and change.micro_batch is not None
        for _ in range(2):
            run.step(512)
        assert type(run.optimizer).__name__ == "Adam8bit"
    assert type(run.optimizer) is chainer.optimizers.Adam
    run.step(64)


def test_half_precision_is_the_last_resort_and_is_undone() -> None:
    run = Run(split=False)
    found = run.diet(
        round(0.9 * run.plain_bytes()), without=["recompute", "8-bit states", "workspace"]
    )
    assert found.chosen.best.change.half and found.chosen.best.exactness == "half precision"
    assert all(param.array.dtype == np.float16 for param in run.model.params())
    run.step(64)
    found.undo()
    found.undo()  # a second time does nothing
    assert all(param.array.dtype == np.float32 for param in run.model.params())


def test_batch_normalisation_is_recomputed_and_not_split() -> None:
    run = Run(norm=True)
    with run.diet(round(0.75 * run.plain_bytes())) as found:
        assert all(one.change.micro_batch is None for one in found.chosen.tried)
        for _ in range(3):
            run.step(512)


def test_a_live_step_keeps_to_the_budget() -> None:
    import gc
    import tracemalloc

    budget = round(0.5 * Run(depth=4).plain_bytes())
    tracemalloc.start()
    try:
        run = Run(depth=4)
        with run.diet(budget) as found:
            for _ in range(4):
                run.step(512)
            lasting = sum(
                array.nbytes
                for param in run.model.params()
                for array in (param.array, param.grad, *param.update_rule.state.values())
                if isinstance(array, np.ndarray)
            )
            peaks = []
            for _ in range(3):  # what else lives and dies in this process counts as well
                gc.collect()
                between = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                run.step(512)
                peaks.append(tracemalloc.get_traced_memory()[1] - between + lasting)
            peak = min(peaks)
    finally:
        tracemalloc.stop()
    assert found.chosen.best.peak_bytes <= budget
    assert peak <= 1.05 * budget, f"{peak} of {budget}: {found.report()}"


def test_on_a_virtual_gpu_the_budget_is_of_its_pool() -> None:
    run = Run(depth=3)
    with umem.virtual_gpu("t4"), run.diet("16MiB", size=2048) as found:
        assert found.chosen.plain.taken_bytes > 16 * MIB
        assert found.chosen.best.taken_bytes <= 16 * MIB
        assert " MiB with the pool's gaps, " in found.report()


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["much", "50%", 0, -5, 1.5, None, True])
def test_a_budget_that_is_no_size_is_refused(budget: Any) -> None:
    with pytest.raises(SizeError, match="budget"):
        Run().diet(budget)


def test_a_budget_below_the_parameters_is_refused_before_anything_runs() -> None:
    run = Run()
    with pytest.raises(BudgetError, match="no room for the parameters alone"):
        umem.chainer.diet(run.model, run.optimizer, pytest.fail, 100 * KIB)


def test_where_nothing_fits_the_least_is_named_and_nothing_is_on() -> None:
    run = Run(depth=2)
    held = sum(param.array.nbytes for param in run.model.params())
    with pytest.raises(BudgetError, match=r"the least that was found is .* bytes\), with"):
        run.diet(held + KIB)
    assert type(run.optimizer) is chainer.optimizers.Adam
    assert all(param.array.dtype == np.float32 for param in run.model.params())
    run.step(64)


@pytest.mark.parametrize("step", [None, 5, "step"])
def test_a_step_that_is_no_function_is_refused(step: Any) -> None:
    run = Run()
    with pytest.raises(StateError, match="a step is a function of the batch size"):
        umem.chainer.diet(run.model, run.optimizer, step, "1GiB")


def test_an_optimizer_that_is_none_or_not_set_up_or_anothers_is_refused() -> None:
    run = Run()
    for optimizer, said in (
        ("adam", "an optimizer that goes by gradients"),
        (chainer.optimizers.Adam(), "optimizer.setup"),
        (Run().optimizer, "another model"),
    ):
        with pytest.raises(StateError, match=said):
            umem.chainer.diet(run.model, optimizer, run.step, "1GiB")


def test_a_model_that_is_none_or_has_no_arrays_yet_is_refused() -> None:
    run = Run()
    with pytest.raises(StateError, match=r"for a chainer\.Link"):
        umem.chainer.diet("model", run.optimizer, run.step, "1GiB")
    lazy = chainer.Sequential(L.Linear(None, 4))
    optimizer = chainer.optimizers.SGD().setup(lazy)
    with pytest.raises(StateError, match="/0/W has no array yet: run the model once"):
        umem.chainer.diet(lazy, optimizer, run.step, "1GiB")


def test_a_step_that_does_not_update_the_optimizer_is_refused() -> None:
    run = Run()
    for step in (Run().step, lambda size: run.model(*data(size, 256))):
        with pytest.raises(StateError, match="the step has no update of the Adam that was given"):
            umem.chainer.diet(run.model, run.optimizer, step, "1GiB", sizes=(64, 128), quiet=True)
    run.step(64)
    assert run.optimizer.t == 1


def test_parameters_that_have_no_array_yet_have_the_least_of_recomputation() -> None:
    lazy = chainer.Sequential(*[part for _ in range(6) for part in (L.Linear(None, 256), F.relu)])
    optimizer = chainer.optimizers.SGD().setup(lazy)
    ones = np.ones((512, 256), np.float32)

    def step(size: int) -> None:
        optimizer.update(lambda x: F.mean(lazy(x) ** 2), ones[:size])

    with as_it_was(lazy, optimizer):
        trace = umem.record_at(step, (64, 128))
    budget = round(0.9 * trace.at(512).peak_bytes)
    others = [part for part in PARTS if part != "recompute"]
    with diet_of(trace, lazy, optimizer, budget, size=512, without=others) as found:
        assert found.chosen.best.budget == "min"
        step(512)
    with diet_of(trace, lazy, optimizer, budget, size=512, without=others) as found:
        assert isinstance(found.chosen.best.budget, int)


@pytest.mark.parametrize("without", ["recompute", ["magic"]])
def test_parts_that_are_not_known_are_refused(without: Any) -> None:
    with pytest.raises(StateError, match="without has some of"):
        Run().diet("1GiB", without=without)


def test_an_optimizer_without_small_states_gets_something_else() -> None:
    run = Run("RMSprop", split=False)
    with run.diet(round(0.7 * run.plain_bytes())) as found:
        assert not any(one.change.small_states for one in found.chosen.tried)
        run.step(64)


def test_the_code_of_its_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "diet.md"
    _, code, *_ = page.read_text(encoding="utf-8").split("```python\n")
    names: dict[str, Any] = {}
    exec(code.partition("```")[0], names)
    assert names["diet"].chosen.best.names
    assert capsys.readouterr().out.count("umem diet for 16.0 MiB") == 2
