"""The first pass of a graph: the order of its backward, what it keeps, and what it takes."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chainer_function_cases import CASES
from recompute_cases import MODELS, Deep, larger, same, train

import umem.chainer
from tests.compat.functions.test_functions import arrays_for, flatten
from tests.compat.test_shims import chainer
from umem.chainer.recompute import training
from umem.chainer.recompute.gradients import plain_order
from umem.chainer.recompute.graph_store import MANY, Graphs
from umem.chainer.recompute.late_plan import LatePlan
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.pressure import Room
from umem.chainer.recompute.tape import Call
from umem.trace.recording import HostMeter, root_of

F: Any = chainer.functions
L: Any = chainer.links


class Taken(chainer.FunctionHook):
    """Lists the functions whose backward runs."""

    name = "taken"

    def __init__(self) -> None:
        self.funcs: list[Any] = []

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self.funcs.append(function)


class Place:
    """A call, as far as `plain_order` reads it."""

    has_graph = True

    def __init__(self, index: int, func: Any) -> None:
        self.index, self.func = index, func


def functions_of(nodes: Any) -> list[Any]:
    found: dict[Any, None] = {}
    pending = [node.creator_node for node in nodes]
    while pending:
        func = pending.pop()
        if func is not None and func not in found:
            found[func] = None
            pending += [x.creator_node for x in func.inputs]
    return list(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gradient])
def test_the_order_of_a_plain_backward_is_known_before_it_begins(name: str) -> None:
    """Of all outputs; of several, from the first and from the last alone, too."""
    case = CASES[name]
    dtype = "f" if "float32" in case.only else case.only[0]

    def outputs() -> list[Any]:
        leaves = [chainer.Variable(x.astype(dtype)) for x in arrays_for(case)]
        return flatten(case.run(*[F.identity(F.identity(x)) for x in leaves]))

    made = outputs()
    if all(y.creator_node is None for y in made):
        pytest.skip("the outputs have no graph")
    check_order(made)
    if len(made) > 1 and name != "transpose_sequence":  # of which Chainer's own backward fails
        check_order(outputs()[:1])
        check_order(outputs()[-1:])


def check_order(outputs: list[Any]) -> None:
    """Go backward from a sum of outputs, and compare the order with what was said of it."""
    outputs = [y for y in outputs if y.creator_node is not None]
    if not outputs:
        return
    loss = sum((F.sum(y) for y in outputs[1:]), F.sum(outputs[0]))
    calls = [Place(i, func) for i, func in enumerate(functions_of([loss.node]))]
    order: Any = plain_order([loss.node], calls)  # type: ignore[arg-type]
    with Taken() as taken:
        loss.backward()
    if order is not None:
        by_call = sorted(order, key=order.__getitem__)
        assert [calls[index].func for index in by_call] == taken.funcs


class Peak:
    """The peak of arrays in one step, whatever resets the peak of tracemalloc inside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reset = tracemalloc.reset_peak
        self.nbytes = self._objects = 0
        monkeypatch.setattr(tracemalloc, "reset_peak", self.reset)
        monkeypatch.setattr(Graphs, "plan_first", self.planning(Graphs.plan_first))

    def reset(self) -> None:
        self.nbytes = max(self.nbytes, tracemalloc.get_traced_memory()[1] - self._objects)
        self._reset()

    def planning(self, plan: Any) -> Any:
        def planned(graphs: Any, now: Any) -> Any:
            self.reset()
            before = tracemalloc.get_traced_memory()[0]
            found = plan(graphs, now)
            self._objects += tracemalloc.get_traced_memory()[0] - before
            self._reset()
            return found

        return planned


@pytest.mark.thorough
@pytest.mark.parametrize("extra", [1.25, 2.0])
def test_the_first_pass_takes_little_more_than_its_budget(
    extra: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = umem.chainer.Recompute("min")
    train(Deep, learned, data=larger, steps=4)
    least, constant = learned.predicted_bytes, learned.graphs[0].facts.constant_bytes
    assert least is not None
    budget = int(extra * least)
    assert budget < 0.9 * learned.graphs[0].problem.plain_bytes
    peak = Peak(monkeypatch)
    meter = HostMeter()
    meter.start()
    try:
        train(Deep, umem.chainer.Recompute(budget), data=larger, steps=1)
        peak.reset()
    finally:
        meter.stop()
    objects = 300_000  # Python's own
    assert peak.nbytes + constant < 1.1 * budget + objects


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", ["min", 1])
def test_no_bit_of_the_first_passes_changes(name: str, budget: Any) -> None:
    """A budget that no plan keeps is an error, after the passes that are observed."""
    memory = umem.chainer.Recompute(budget)
    same(train(name, memory, steps=2), train(name, steps=2))


class Own(chainer.FunctionNode):
    """A function of the user's, of which nothing is known."""

    def forward(self, inputs: Any) -> Any:
        return (inputs[0] * 2,)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        return (grad_outputs[0] * 2,)


def test_with_a_function_of_the_users_own_backward_keeps_chainers_order() -> None:
    def backward(memory: Any) -> tuple[Any, list[Any]]:
        x = chainer.Variable(np.ones((4, 4), "f"))
        with memory or nullcontext():
            y = F.tanh(Own().apply((F.sin(x),))[0]) + F.exp(x)
            with Taken() as taken:
                F.sum(y).backward()
        return x.grad, [func.__class__ for func in taken.funcs]

    memory = umem.chainer.Recompute("min")
    (found, order), (grad, plain) = backward(memory), backward(None)
    assert np.array_equal(found, grad) and order == plain
    assert memory.graphs[0].facts.keeps_order


@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
def test_graphs_that_do_not_come_back_are_not_planned_for_ever() -> None:
    x = chainer.Variable(np.ones((4, 4), "f"))
    with umem.chainer.Recompute("min") as memory:
        planned = []
        for count in range(1, MANY + 3):
            y = x
            for _ in range(count):
                y = F.sin(y)
            F.sum(y).backward()
            planned.append(memory._training.graphs.plans_first)
    assert planned == [True] * (MANY - 1) + [False] * 3


@pytest.mark.parametrize("budget", ["min", 60_000])
def test_a_first_plan_may_keep_the_outputs_of_a_branch_that_is_gone(
    budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it does hangs on the times that were measured: here it always does."""
    layers = [L.Linear(16, 16) for _ in range(24)]
    model = chainer.ChainList(*layers)
    x = np.random.RandomState(0).randn(40, 16).astype("f")
    plan_first = Graphs.plan_first

    def planned(graphs: Any, now: Any) -> Any:
        found = plan_first(graphs, now)
        assert found is not None
        seen, plan = found.seen, found.plan
        assert len(seen.facts.dead) == len(layers)
        kept = {
            call: [action for action in actions if action.call not in seen.facts.dead]
            for call, actions in plan.after_forward.items()
        }
        return LatePlan(seen, replace(plan, after_forward=kept))

    def gradients(mode: Any) -> list[Any]:
        np.random.seed(0)
        with mode:
            for _ in range(2):
                model.cleargrads()
                h: Any = x
                for layer in layers:
                    h = F.tanh(layer(h))
                    F.dropout(h, 0.2)
                F.sum(h * h).backward()
        return [parameter.grad.copy() for parameter in model.params()]

    plain = gradients(nullcontext())
    monkeypatch.setattr(Graphs, "plan_first", planned)
    found = gradients(umem.chainer.Recompute(budget))
    assert all((one == other).all() for one, other in zip(plain, found, strict=True))


class Blocks(chainer.ChainList):
    """Blocks that read the outputs of all blocks before, or that read views of a sum."""

    def __init__(self, count: int, *, dense: bool) -> None:
        widths = [32 * (1 + i) if dense else 32 for i in range(count)]
        super().__init__(*(L.Linear(width, 32) for width in widths))
        self._dense = dense

    def forward(self, x: Any) -> Any:
        h = x
        for layer in self.children():
            y = F.tanh(layer(h))
            if self._dense:
                h = F.concat((h, y))
            else:
                h = F.reshape(F.reshape(h + y, (2, -1, 32)), (-1, 32))
        return F.sum(h * h)


def held_bytes(calls: Any) -> int:
    """Return the bytes of the outputs of calls that are alive; memory counts once."""
    values = [call.value(i) for call in calls for i in range(call.output_count)]
    roots = {id(root): root.nbytes for root in map(root_of, (v for v in values if v is not None))}
    return sum(roots.values())


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_plan_at_the_end_of_forward_takes_no_more_than_it_says(
    dense: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while what it keeps is made again, nor afterwards."""
    np.random.seed(0)
    model = Blocks(16, dense=dense)
    x = np.random.RandomState(0).randn(400, 32).astype("f")
    learned = umem.chainer.Recompute("min")
    with learned:
        for _ in range(4):
            model.cleargrads()
            model(x).backward()
    least, plain = learned.predicted_bytes, learned.graphs[0].problem.plain_bytes
    assert least is not None
    room: list[int] = []
    most: list[int] = []
    plan_backward, run_here = Pass.plan_backward, Call.run_here

    def planned(now: Any, late: LatePlan) -> None:
        room.append(late.plan.solution.plan.peak_bytes)
        with monkeypatch.context() as patch:
            patch.setattr(Call, "run_here", lambda call, inputs: ran(now, call, inputs))
            plan_backward(now, late)
        assert held_bytes(now.calls) <= late.forward_bytes[-1]

    def ran(now: Any, call: Any, inputs: Any) -> Any:
        outputs = run_here(call, inputs)
        most.append(held_bytes(now.calls))
        return outputs

    monkeypatch.setattr(Pass, "plan_backward", planned)
    with umem.chainer.Recompute(round(least + share * (plain - least))):
        model.cleargrads()
        model(x).backward()
    assert len(room) == 1 and most
    assert max(most) <= room[0]


def test_the_first_pass_knows_the_parameters_of_the_model_that_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first function reads one of them; all are in the way."""
    model = Blocks(16, dense=True)
    model.cleargrads()
    found: list[int] = []

    class Seen(Room):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            found.append(self.parameter_bytes)

    monkeypatch.setattr(training, "Room", Seen)
    with umem.chainer.Recompute(1 << 20):
        model(np.zeros((4, 32), "f"))
    assert found == [sum(p.array.nbytes for p in model.params())]
    assert not chainer._get_link_hooks()


def test_a_block_that_ends_in_another_thread_can_be_entered_again() -> None:
    model, memory = Blocks(2, dense=True), umem.chainer.Recompute("min")
    for _ in range(2):
        memory.__enter__()
        other = threading.Thread(target=memory.__exit__, args=(None, None, None))
        other.start()
        other.join()
    model(np.zeros((4, 32), "f"))
    (left,) = chainer._get_link_hooks().values()
    assert not left.parameters
    chainer._get_link_hooks().clear()
