"""Each row of the table of unusual events: a transition, a refusal, or neither.

The table is in docs/reference/recompute.md; docs/design.md has the table of transitions. A row that
changes the state of a pass is played here, beside plain Chainer, and its passes are watched as they
end; for any other row, the test is named that shows what is done.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from project import ROOT
from recompute_cases import Branching, Mlp, rows, same, train

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

from umem.chainer.recompute import graph_store, passes, runner, training
from umem.chainer.recompute.passes import Pass

pytestmark = pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
HERE = ROOT / "tests" / "on_chainer" / "recompute"


class State(NamedTuple):
    """A pass as its first backward ends."""

    rule: str
    integrity: str
    why: str | None


LEARNED, PLANNED = State("Evict", "intact", None), State("FollowPlan", "intact", None)
ALONE = State("Evict", "intact", None)


class Watched:
    """The passes that have ended, and the reasons why passes were refused."""

    def __init__(self) -> None:
        self.ended: list[State] = []
        self.reasons: list[str] = []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    found = Watched()
    finish, refuse = Pass.finish, Pass.refuse

    def watched_finish(self: Pass) -> bool:
        first = finish(self)
        assert self.phase == "over"
        if first:
            found.ended.append(State(type(self.rule).__name__, self.integrity, self.why))
        return first

    def watched_refuse(self: Pass, why: str) -> None:
        found.reasons.append(why)
        refuse(self, why)

    monkeypatch.setattr(Pass, "finish", watched_finish)
    monkeypatch.setattr(Pass, "refuse", watched_refuse)
    yield found


# -- steps, of which all but the last are alike ----------------------------------------------------


class Steps:
    """A step that goes another way from a number on."""

    def __init__(self, last: Callable[[Any, Any, Any], Any], first: int = 3) -> None:
        self.last, self.first, self.count = last, first, 0

    def __call__(self, model: Any, x: Any, t: Any) -> Any:
        self.count += 1
        if self.count > self.first:
            return self.last(model, x, t)
        loss = model.loss(x, t)
        model.cleargrads()
        loss.backward()
        return loss


class Anew(NamedTuple):
    """`Steps`, counted from zero in each run."""

    last: Callable[[Any, Any, Any], Any]
    first: int = 3

    def made(self) -> Steps:
        return Steps(*self)


def by_grad(model: Any, x: Any, t: Any) -> Any:
    loss = model.loss(x, t)
    model.cleargrads()
    chainer.grad([loss], [model[0].W])
    loss.backward()
    return loss


def differentiated_twice(model: Any, x: Any, t: Any) -> Any:
    loss = model.loss(x, t)
    model.cleargrads()
    loss.backward(enable_double_backprop=True)
    return loss


def in_another_thread(model: Any, x: Any, t: Any) -> Any:
    loss = model.loss(x, t)
    model.cleargrads()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


def cut_before_backward(model: Any, x: Any, t: Any) -> Any:
    h = F.tanh(model[0](x))
    for layer in model[1:]:
        h = F.tanh(layer(h))
    loss = F.softmax_cross_entropy(h, t)
    model.cleargrads()
    h.creator_node.inputs[0].creator_node.inputs[0].unchain()
    loss.backward()
    return loss


def failing(model: Any, x: Any, t: Any) -> Any:
    class Fails(chainer.FunctionHook):
        def backward_preprocess(self, function: Any, inputs: Any, gradients: Any) -> None:
            raise KeyError(function.label)

    loss = model.loss(x, t)
    model.cleargrads()
    with pytest.raises(KeyError), Fails():
        loss.backward()
    return loss


def going_on(model: Any, x: Any, t: Any) -> Any:
    """A pass that reads what the one before it has made, which was not cut."""
    state = F.tanh(model[0](x))
    first = F.softmax_cross_entropy(F.tanh(model[1](state)), t)
    model.cleargrads()
    first.backward()
    second = F.softmax_cross_entropy(F.tanh(model[2](x)) + state, t)
    second.backward()
    return second


def twice(model: Any, x: Any, t: Any) -> Any:
    loss = model.loss(x, t)
    model.cleargrads()
    loss.backward()
    loss.cleargrad()
    loss.backward()
    return loss


def updated_between(model: Any, x: Any, t: Any) -> Any:
    """Two losses of one forward, and an update between their backwards."""
    rule = chainer.optimizers.SGD(0.01).setup(model)
    h = F.tanh(model[1](F.tanh(model[0](x))))
    first, second = F.softmax_cross_entropy(h, t), F.mean(h * h)
    model.cleargrads()
    first.backward()
    rule.update()
    second.backward()
    return first


class TwoLosses(Mlp):
    """Two losses of one graph, of which another goes backward from a step on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.left = first

    def loss(self, x: Any, t: Any) -> Any:
        for layer in self:
            x = F.tanh(layer(x))
        losses = F.softmax_cross_entropy(x, t), F.mean(x * x)
        self.left -= 1
        self.other = losses[self.left >= 0]  # which stays alive
        return losses[self.left < 0]


class Ranked(chainer.Chain):
    """A state that is cut, whose rank goes on from step to step."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.state, self.layer = L.LSTM(16, 16), L.Linear(16, 16)

    def loss(self, x: Any, t: Any) -> Any:
        for state in (self.state.h, self.state.c):
            if state is not None:
                state.unchain_backward()
        left, right = self.state(self.layer(x)), self.layer(x)
        for _ in range(12):
            right = F.tanh(self.layer(right))
        return F.softmax_cross_entropy(left * right, t)


def lengths(*numbers: int) -> Callable[[], Any]:
    return lambda: Branching(list(numbers))


class Played(NamedTuple):
    """How a row is played: its model and step, the budget, and how its last pass ends.

    ``last`` is None where that pass does not end by a backward of its own: then ``why`` is the
    reason that is given.
    """

    last: State | None
    make: Any = "mlp"
    step: Any = None
    budget: str = "min"
    steps: int = 6
    why: str | None = None


def refused(why: str, rule: str = "FollowPlan") -> State:
    return State(rule, "refused", why)


GRAD = "chainer.grad goes through it"
PLAYED: dict[str, list[Played]] = {
    "another shape": [Played(PLANNED), Played(ALONE, budget="1GiB")],
    "a pass leaves its plan": [
        Played(LEARNED, lengths(1, 1, 1, 1, 1, 2)),
        Played(
            refused("call 16 (LinearFunction) differs from the plan: this pass keeps everything "
                    "from there on. A graph that repeats gets a plan", "Evict"),
            lengths(1, 1, 1, 1, 1, 2), budget="1GiB",
        ),
    ],
    "three of the last sixteen graphs appeared only once": [
        Played(State("Evict", "intact", None), lengths(1, 2, 3, 4, 5, 6), budget="1GiB"),
    ],
    "an update between two backwards of one forward": [
        Played(
            refused(graph_store.AGAIN, "Evict"), step=updated_between, budget="min", steps=4,
        ),
    ],
    "several graphs alive, or a second backward over one graph": [
        Played(PLANNED, step=Anew(twice)),
    ],
    "a backward in another thread": [
        Played(None, step=Anew(in_another_thread, 5), why=training.ELSEWHERE),
    ],
    "a backward that fails": [Played(PLANNED, step=Anew(failing, 5))],
    "a recurrent state that was cut, from which the graph continues": [
        Played(None, Ranked, steps=24, why=training.OTHER_ORDER),
    ],
    "double backprop, `chainer.grad`": [
        Played(refused(runner.TWICE), step=Anew(differentiated_twice)),
        Played(refused(GRAD), step=Anew(by_grad)),
    ],
    "a graph that continues an earlier one, such as a state that is not cut": [
        Played(refused(passes.FROM_EARLIER, "Evict"), step=going_on),
    ],
    "another loss runs backward than when the graph was learned": [
        Played(refused(training.OTHER_ROOTS), lambda: TwoLosses(4)),
    ],
    "a graph that is cut between forward and backward": [
        Played(
            State("FollowPlan", "restored", training.IT_IS_CUT),
            step=Anew(cut_before_backward),
        ),
    ],
}  # fmt: skip
"""By the beginning of the row."""


CASES = [(row, number) for row, cases in PLAYED.items() for number in range(len(cases))]


@pytest.mark.thorough
@pytest.mark.parametrize(("row", "number"), CASES, ids=[f"{row} {n}" for row, n in CASES])
def test_a_pass_is_in_the_state_that_the_table_says(
    row: str, number: int, watched: Watched
) -> None:
    case = PLAYED[row][number]

    def run(memory: Any = None) -> dict[str, Any]:
        step = case.step.made() if isinstance(case.step, Anew) else case.step
        options = {} if step is None else {"step": step}
        return train(case.make, memory, steps=case.steps, data=rows, **options)

    expected = run()
    same(run(umem.chainer.Recompute(case.budget)), expected)
    assert watched.ended[0] == LEARNED or case.last is None or case.last.rule == "Evict"
    if case.last is not None:
        assert watched.ended[-1] == case.last
    assert case.why is None or case.why in watched.reasons


# -- the table itself ------------------------------------------------------------------------------

OTHERS: dict[str, str] = {
    "a graph that is cut after its backward":
        "a_graph_that_was_cut_has_the_numbers_of_plain_chainer",
    "a pass without a plan needs more than the budget":
        "a_budget_below_what_parameters_take_is_an_error_and_training_goes_on_outside",
    "a pass without a plan spends more time on recomputation than on the rest":
        "a_budget_with_which_most_runs_again_is_said_once_or_an_error",
    "a pass without a plan, where a graph ran backward again after an update":
        "an_update_between_two_backwards_is_refused_once_and_then_exact",
    "a backward after the block was left": "backward_after_the_block",
    "a function that runs a backward of its own":
        "a_function_that_goes_backward_inside_under_a_flag_is_found_while_it_is_learned",
    "an array that a function changes": "a_graph_in_test_mode_reads_its_statistics_as_they_were",
    "a look at the outputs after backward": "an_accuracy_that_is_kept_over_the_update",
    "an optimizer's state that is made later": "state_that_an_optimizer_makes_late_is_counted",
    "a function that must not run twice": "a_function_that_cannot_run_again_is_kept_and_named",
    "a function of your own": "functions_of_the_users_own_are_kept",
    'a share, such as "60%", cannot be reached':
        "a_share_that_cannot_be_had_is_the_least_there_is_and_said_once",
    "a size is too small": "too_small_a_budget_names_the_least_the_floor_and_what_forces_it",
    "a GPU's memory runs out in a pass":
        "memory_that_runs_out_in_a_pass_is_survived_to_the_bit",
    "ChainerX arrays, `static_graph`": "a_static_graph_and_chainerx_arrays_are_refused",
    "an array edited in place": "an_array_that_is_edited_is_found_in_debug_mode",
}  # fmt: skip
"""Rows that are neither, or are played where more is looked at; and the test of each."""


def table() -> list[list[str]]:
    """The cells of each row."""
    lines = (ROOT / "docs" / "reference" / "recompute.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index("| what happens | state of the pass | what is done |")
    found = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            return found
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("row", [row[0] for row in table()])
def test_a_row_is_played_or_has_a_test_of_its_name(row: str) -> None:
    names = {
        node.name
        for path in HERE.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    played = [key for key in PLAYED if row.startswith(key)]
    tests = [name for key, name in OTHERS.items() if row.startswith(key)]
    assert len(played) + len(tests) == 1
    assert all(f"test_{name}" in names for name in tests)


def test_a_row_says_whether_it_is_a_transition_or_a_refusal() -> None:
    assert {row[1].replace(",", ":").partition(":")[0] for row in table()} == {
        "transition",
        "refusal",
        "neither",
    }
    assert all(len(row) == 3 for row in table())


def test_rows_that_are_played_are_in_the_table() -> None:
    found = [row[0] for row in table()]
    for key in (*PLAYED, *OTHERS):
        assert [row for row in found if row.startswith(key)], key
