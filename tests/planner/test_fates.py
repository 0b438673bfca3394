"""Plans of three fates: the referee's rules and times of copies, and what plans promise."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_referee import graphs
from umem.errors import BudgetError, GraphError
from umem.planner import Graph, Link, Move, Node, Plan, plan, simulate
from umem.planner.link_timetable import timetable
from umem.planner.plans import reruns_of
from umem.planner.problem import CallFacts, Problem
from umem.planner.referee import referee
from umem.planner.rematerialize import plan_of
from umem.planner.schedule import Action, actions

INFINITE = float("inf")


def chain(count: int = 4, **options: Any) -> Graph:
    """Calls of 10 bytes and a cost of 1, one after another."""
    names = [f"n{v}" for v in range(count)]
    return Graph([Node(name, 10, 1, **options) for name in names], pairwise(names))


def moved(graph: Graph, *moves: Move, link: Link | None = None) -> Any:
    """A plan that keeps everything and moves these."""
    names = graph.names
    keep = plan(graph, None, "store_all", model="saved")
    blocks = tuple((name,) for name in names)
    return dataclasses.replace(
        keep, blocks=blocks, recomputed=((),) * len(names), frees_early=True, moves=moves, link=link
    )


links = st.builds(
    Link,
    st.sampled_from([0.5, 2, 7, 40]),
    st.sampled_from([0.5, 2, 7, 40]),
    st.sampled_from([0, 6]),
)


# -- the actions of moves --------------------------------------------------------------------------


def test_a_value_is_sent_after_its_last_use_leaves_and_is_fetched_where_the_plan_says():
    graph = chain(4)
    stream = list(actions(graph, moved(graph, Move("n0", "value", "n2", "n2"))))
    assert stream == [
        Action("forward", "n0"),
        Action("forward", "n1"),
        Action("send", "n0"),
        Action("forward", "n2"),
        Action("leave", "n0"),
        Action("forward", "n3"),
        Action("backward", "n3"),
        Action("drop", "n3"),
        Action("free", "n3"),
        Action("fetch", "n0"),
        Action("backward", "n2"),
        Action("drop", "n2"),
        Action("free", "n2"),
        Action("backward", "n1"),
        Action("drop", "n1"),
        Action("free", "n1"),
        Action("backward", "n0"),
        Action("drop", "n0"),
        Action("free", "n0"),
    ]


def test_bytes_are_free_between_leaving_and_fetching():
    graph = chain(4)
    before = simulate(graph, moved(graph)).timeline
    found = simulate(graph, moved(graph, Move("n0", "value", "n1", "n1")))
    away, gone = False, {}
    for moment in found.timeline:
        away = moment.action.kind == "leave" or (away and moment.action.kind != "fetch")
        gone[moment.action] = away
    for moment in before:
        same = next(m for m in found.timeline if m.action == moment.action)
        assert same.after_bytes == moment.after_bytes - 10 * gone[moment.action]
    assert (found.sent_bytes, found.fetched_bytes) == (10, 10)


def test_copies_go_beside_what_computes_and_what_needs_them_waits():
    graph = chain(4)  # forward to 4, each step of backward takes 2
    way = moved(graph, Move("n0", "value", "n3", "n2"))  # sent at 2, fetched at 6, used at 8
    assert simulate(graph, way).seconds == 12, "a copy takes no time without a link"
    assert simulate(graph, way, link=Link(5, 5)).seconds == 12
    assert simulate(graph, way, link=Link(4, 5)).seconds == 12.5, "it leaves at 4.5"
    assert simulate(graph, way, link=Link(5, 4)).seconds == 12.5, "it is back at 8.5"
    assert simulate(graph, way, link=Link(4, 4)).seconds == 13
    assert simulate(graph, way, link=Link(1, 1)).seconds == 28, "leaves at 12, is back at 24"
    assert simulate(graph, moved(graph, *way.moves, link=Link(1, 1))).seconds == 28


def test_stashes_move_too():
    graph = chain(3, stash_bytes=100)
    found = simulate(graph, moved(graph, Move("n0", "stash", "n1", "n0")))
    whole = simulate(graph, moved(graph))
    assert found.peak_bytes == whole.peak_bytes - 100
    kinds = [a.kind for a in actions(graph, moved(graph, Move("n0", "stash", "n1", "n0")))]
    assert [kind for kind in kinds if "stash" in kind and kind != "drop_stash"] == [
        "send_stash", "leave_stash", "fetch_stash",
    ]  # fmt: skip


def test_views_move_with_their_base():
    graph = Graph(
        [Node("x", 10, 1), Node("view", 10, 1, alias_of="x"), Node("y", 10, 1), Node("z", 10, 1)],
        [("x", "view"), ("view", "y"), ("y", "z")],
    )
    found = simulate(graph, moved(graph, Move("x", "value", "y", "y")))
    stream = [m for m in found.timeline if m.action.node in ("x", "view")]
    assert Action("leave", "x") in [m.action for m in stream]
    with pytest.raises(GraphError, match="offloads the value of 'view': there is none"):
        simulate(graph, moved(graph, Move("view", "value", "y", "y")))


@pytest.mark.parametrize(
    ("move", "said"),
    [
        (Move("n0", "value", "n0", "n0"), "leave of 'n0': it was not sent: 'n0'"),
        (Move("n1", "value", "n3", "n0"), "backward of 'n2': it needs a value not in memory: 'n1'"),
        (Move("n0", "stash", "n2", "n0"), "offloads the stash of 'n0': there is none"),
        (Move("n9", "value", "n2", "n0"), "names 'n9', which is not a node"),
        (Move("n0", "value", "n9", "n0"), "names 'n9', which is not a node"),
    ],
)
def test_the_referee_refuses_a_move_that_does_not_hold(move, said):
    graph = chain(4)
    with pytest.raises(GraphError, match=said):
        simulate(graph, moved(graph, move))


def test_the_referee_refuses_what_moves_twice_or_never_comes_back():
    graph = chain(2)
    twice = [Move("n0", "value", "n1", "n0")] * 2
    with pytest.raises(GraphError, match="send of 'n0': it is on its way"):
        simulate(graph, moved(graph, *twice))
    stream = [a for a in actions(graph, moved(graph, twice[0])) if a.kind != "fetch"]
    with pytest.raises(GraphError, match="not in memory: 'n0'"):
        referee(graph, stream)
    stream = [a for a in actions(graph, moved(graph, twice[0])) if a.kind != "leave"]
    with pytest.raises(GraphError, match="fetch of 'n0': it is not away"):
        referee(graph, stream)


def test_moves_hold_on_a_tape_alone():
    graph = chain(2)
    way = moved(graph, Move("n0", "value", "n1", "n0"))
    with pytest.raises(GraphError, match="needs the model 'saved'"):
        list(actions(graph, way, liveness=False))


@pytest.mark.parametrize("rate", [-1, float("nan"), INFINITE, 10**400, "fast", None, True])
def test_a_rate_that_is_none_is_refused_by_its_name(rate):
    with pytest.raises(GraphError, match=r"a link's out_rate is .*, not a finite number of bytes"):
        Link(rate, 1)
    with pytest.raises(GraphError, match=r"a link's in_rate is .*, not a finite number of bytes"):
        Link(1, rate)
    with pytest.raises(GraphError, match=r"smallest_bytes is -1, not a count of bytes"):
        Link(1, 1, -1)
    with pytest.raises(GraphError, match="'a': backward_cost is -1, not a finite number"):
        Node("a", 1, 1, backward_cost=-1)


# -- a step told once more, by brute force ---------------------------------------------------------


class Retold:
    """The bytes and the time of a plan, worked out from its fields and the nodes alone."""

    def __init__(self, graph: Graph, found: Plan, link: Link) -> None:
        self.nodes = {node.name: node for node in graph.nodes}
        self.inputs: dict[str, set[str]] = {name: set() for name in self.nodes}
        for source, user in graph.edges:
            self.inputs[user].add(source)
        for node in graph.nodes:
            self.inputs[node.name] |= {node.alias_of} - {None}
        self.forward_bytes, self.link = graph.forward_bytes, link
        order = [name for block in found.blocks for name in block]
        self.steps = [("run", name) for name in order]
        lasts = [block[-1] for block in found.blocks]
        again = dict(zip(lasts, found.recomputed, strict=True))
        for name in reversed(order):
            self.steps += [("run", other) for other in again[name]] + [("back", name)]
        self.turn = len(order)
        self.reads = [self.reads_at(at) for at in range(len(self.steps))]
        self.makes = [self.makes_at(at) for at in range(len(self.steps))]
        self.ways = {}  # by what moves: its last use, leaving, coming back, its first use
        for move in found.moves:
            uses = [at for at in range(len(self.steps)) if self.touches(at, move)]
            leaves = order.index(move.leaves_after)
            back = self.steps.index(("back", move.fetched_before))
            while self.steps[back - 1][0] == "run" and back > self.turn:
                back -= 1
            last = max(at for at in uses if at < self.turn)
            self.ways[move] = last, leaves, back, min(at for at in uses if at >= self.turn)

    def base(self, name: str) -> str:
        """What a value lies in."""
        while (alias := self.nodes[name].alias_of) is not None:
            name = alias
        return name

    def reads_at(self, at: int) -> set[tuple[str, str]]:
        kind, name = self.steps[at]
        if kind == "run":
            return {("value", x) for x in self.inputs[name]}
        read = {("value", x) for x in (name, *self.inputs[name]) if self.nodes[x].saved}
        return read | ({("stash", name)} if self.nodes[name].stash_bytes else set())

    def makes_at(self, at: int) -> set[tuple[str, str]]:
        kind, name = self.steps[at]
        made = {("value", name), ("stash", name)} if kind == "run" else set()
        return made if self.nodes[name].stash_bytes else made - {("stash", name)}

    def touches(self, at: int, move: Move) -> bool:
        used = self.reads[at] | self.makes[at]
        return any(what == move.what and self.base(name) == move.node for what, name in used)

    def there(self, cell: tuple[str, str], at: int) -> bool:
        """Whether something was made by then, and is read then or later before it is made again."""
        if cell in self.reads[at] | self.makes[at]:
            return True
        if not any(cell in self.makes[before] for before in range(at)):
            return False
        for later in range(at + 1, len(self.steps)):
            if cell in self.makes[later]:
                return False
            if cell in self.reads[later]:
                return True
        return False

    def gradients(self, at: int) -> int:
        """The bytes of gradients during a computation, and of those that stay."""
        backed = [name for kind, name in self.steps[: at + 1] if kind == "back"]
        begun = {x for name in backed for x in (name, *self.inputs[name])}
        kind, name = self.steps[at]
        alive = begun - set(backed) | ({name} if kind == "back" else set())
        own = [self.nodes[x] for x in alive]
        held = sum(
            (0 if n.alias_of else n.nbytes) if n.grad_bytes is None else n.grad_bytes for n in own
        )
        return held + sum(self.nodes[x].stays_bytes for x in backed)

    def bytes_during(self, at: int) -> int:
        kind, name = self.steps[at]
        node = self.nodes[name]
        held = {self.base(x) for x in self.nodes if self.there(("value", x), at)}
        stashed = {x for x in self.nodes if self.there(("stash", x), at)}
        for move, (_, leaves, back, _) in self.ways.items():
            if leaves < at < back:
                (held if move.what == "value" else stashed).discard(move.node)
        total = sum(self.nodes[x].nbytes for x in held)
        total += sum(self.nodes[x].stash_bytes for x in stashed) + self.gradients(at)
        total += self.forward_bytes if at < self.turn else 0
        return total + (node.workspace_bytes if kind == "run" else node.backward_workspace_bytes)

    def peak(self) -> int:
        return max(map(self.bytes_during, range(len(self.steps))))

    def size(self, move: Move) -> int:
        node = self.nodes[move.node]
        return node.nbytes if move.what == "value" else node.stash_bytes

    def seconds(self) -> float:
        now = out = back_at = 0.0
        sent: dict[Move, float] = {}
        come: dict[Move, float] = {}
        for at, (kind, name) in enumerate(self.steps):
            coming = [m for m, way in self.ways.items() if way[2] == at]
            for move in sorted(coming, key=lambda m: self.ways[m][3]):
                back_at = come[move] = max(back_at, now) + self.size(move) / self.link.in_rate
            now = max([now, *(come[m] for m, way in self.ways.items() if way[3] == at)])
            cost = self.nodes[name].cost
            now += cost if kind == "run" else 2 * cost
            going = [m for m, way in self.ways.items() if way[0] == at]
            for move in sorted(going, key=lambda m: -self.ways[m][3]):
                out = sent[move] = max(out, now) + self.size(move) / self.link.out_rate
            now = max([now, *(sent[m] for m, way in self.ways.items() if way[1] == at)])
        return now


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(graphs(), links, st.data())
def test_bytes_and_times_are_those_of_the_step_told_once_more(graph, link, data):
    least = plan(graph, None, model="saved", link=link).peak_bytes
    budget = data.draw(st.integers(least, least + 60), "budget")
    found = plan(graph, budget, model="saved", link=link)
    done, retold = simulate(graph, found), Retold(graph, found, link)
    assert done.peak_bytes == retold.peak()
    assert done.seconds == pytest.approx(retold.seconds(), rel=1e-9)
    assert done.sent_bytes == done.fetched_bytes == sum(map(retold.size, found.moves))


def test_the_least_that_a_plan_takes_is_a_budget_that_it_keeps():
    nodes = [
        Node("n0", 12, 0),
        Node("n1", 9, 1, saved=True),
        Node("n2", 8, 0, recomputable=False),
        Node("n3", 0, 0, stash_bytes=11, grad_bytes=7, workspace_bytes=30,
             backward_workspace_bytes=30),
        Node("n4", 0, 0, saved=True, alias_of="n2", recomputable=False, stays_bytes=40),
        Node("n5", 0, 0, recomputable=False),
        Node("n6", 0, 0, recomputable=False, grad_bytes=7, backward_workspace_bytes=30,
             stays_bytes=40),
    ]  # fmt: skip
    edges = [("n0", "n2"), ("n2", "n3"), ("n0", "n3"), ("n2", "n4"), ("n1", "n4"), ("n0", "n5"),
             ("n1", "n6"), ("n3", "n6")]  # fmt: skip
    graph, link = Graph(nodes, edges), Link(40, 40, 0)
    least = plan(graph, None, model="saved", link=link).peak_bytes
    assert plan(graph, least, model="saved", link=link).peak_bytes == least
    with pytest.raises(BudgetError, match=rf"the smallest budget is {least} B"):
        plan(graph, least - 1, model="saved", link=link)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(graphs(max_nodes=20), st.data())
def test_a_timetable_has_the_bytes_of_the_referee(graph, data):
    low = plan(graph, None, "lower_sets", model="saved").peak_bytes
    budget = data.draw(st.integers(low, low + 60), "budget")
    known = plan(graph, budget, "lower_sets", model="saved")
    reruns = reruns_of(graph, known)
    moments = simulate(graph, plan_of(graph, reruns, None, "")).timeline
    runs = ("forward", "recompute", "backward")
    during = [moment.during_bytes for moment in moments if moment.action.kind in runs]
    assert timetable(graph, reruns).used == during


# -- plans -----------------------------------------------------------------------------------------


def seconds(graph: Graph, budget: int, link: Link | None, method: str = "auto") -> float:
    """The time of a plan in units of cost; infinite where there is none."""
    try:
        return simulate(graph, plan(graph, budget, method, model="saved", link=link)).seconds
    except BudgetError:
        return INFINITE


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(graphs(), links, st.data())
def test_plans_of_three_fates_fit_and_are_never_slower_than_one_of_them(graph, link, data):
    least = plan(graph, None, model="saved", link=link)
    budget = data.draw(st.integers(least.peak_bytes, least.peak_bytes + 60), "budget")
    found = plan(graph, budget, model="saved", link=link)
    done = simulate(graph, found, budget_bytes=budget)
    assert done.peak_bytes == found.peak_bytes <= budget == found.budget_bytes
    alone = seconds(graph, budget, None), seconds(graph, budget, link, "store_all")
    assert done.seconds <= min(alone) + 1e-9
    compute = sum(3 * node.cost for node in graph.nodes) + done.overhead
    bound = max(compute, done.sent_bytes / link.out_rate, done.fetched_bytes / link.in_rate)
    assert done.seconds >= bound - 1e-9
    nodes = {node.name: node for node in graph.nodes}
    for move in found.moves:
        node = nodes[move.node]
        nbytes = node.nbytes if move.what == "value" else node.stash_bytes
        assert nbytes >= max(1, link.smallest_bytes) and node.alias_of is None


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from([(0, 1), (1, 0), (0, 0)]), st.integers(0, 60))
def test_over_a_link_of_no_rate_nothing_moves(graph, rates, more):
    budget = plan(graph, None, model="saved").peak_bytes + more
    found = plan(graph, budget, model="saved", link=Link(*rates))
    assert found == plan(graph, budget, model="saved")
    assert not found.moves


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(graphs(max_nodes=6), links)
def test_below_the_least_with_moves_the_error_names_it(graph, link):
    least = plan(graph, None, model="saved", link=link).peak_bytes
    assert least <= plan(graph, None, model="saved").peak_bytes
    if least:
        with pytest.raises(BudgetError, match=rf"the smallest budget is .* \({least} bytes\)"):
            plan(graph, least - 1, model="saved", link=link)


def test_what_fits_moves_nothing_and_runs_nothing_again():
    graph = chain(9)
    whole = plan(graph, None, "store_all", model="saved").peak_bytes
    found = plan(graph, whole, model="saved", link=Link(1, 1))
    assert not found.moves and not found.overhead


def test_over_a_fast_link_values_move_and_over_a_slow_one_they_run_again():
    graph = chain(12)
    budget = plan(graph, None, "store_all", model="saved").peak_bytes // 2
    fast = plan(graph, budget, model="saved", link=Link(1000, 1000))
    assert fast.moves and not fast.overhead
    slow = plan(graph, budget, model="saved", link=Link(0.001, 0.001))
    assert slow.overhead and not slow.moves
    assert slow.overhead == plan(graph, budget, model="saved").overhead


def test_a_link_is_for_tapes_and_for_time():
    graph, link = chain(3), Link(1, 1)
    for options in ({"model": "kusumoto"}, {"model": "saved", "objective": "memory"}):
        with pytest.raises(GraphError, match='pass model="saved" and objective="time"'):
            plan(graph, link=link, **options)
    with pytest.raises(GraphError, match=r"a umem\.planner\.Link; got a float"):
        plan(graph, model="saved", link=3.0)


def test_a_backward_that_costs_more_hides_more_of_a_copy():
    def time_of(backward_cost: float) -> float:
        graph = chain(12, backward_cost=backward_cost)
        budget = plan(graph, None, "store_all", model="saved").peak_bytes // 2
        compute = 12 * (1 + backward_cost)
        return seconds(graph, budget, Link(10, 2), "store_all") - compute

    assert time_of(9) < time_of(2) < time_of(0)


# -- problems --------------------------------------------------------------------------------------


def problem(held: int = 3, count: int = 10, **options: Any) -> Problem:
    """Calls of 1000 bytes one after another, of which each so manieth must not run twice."""
    calls = tuple(
        CallFacts(f"f{v}", 1000, 1.0, 1000, again=v % held != 1, needs=(v,)) for v in range(count)
    )
    return Problem(calls, tuple((v - 1, v) for v in range(1, count)), 500, **options)


def test_what_must_not_run_twice_is_moved_where_there_is_a_link():
    one = problem()
    link = Link(1e6, 1e6)
    least, moving = one.least(), one.least(link=link)
    assert moving.peak_bytes < least.peak_bytes
    assert moving.constant_bytes == 500 < least.constant_bytes
    moved_nodes = {move.node for move in moving.plan.moves}
    held = {name for name, call in zip(one.names, one.calls, strict=True) if not call.again}
    assert moved_nodes & held
    found = one.within(moving.peak_bytes, link=link)
    simulate(found.graph, found.plan, budget_bytes=moving.peak_bytes - found.constant_bytes)
    with pytest.raises(BudgetError, match=rf"least budget is .*{moving.peak_bytes} bytes"):
        one.within(moving.peak_bytes - 1, link=link)
    assert one.floor(link)[0] <= moving.peak_bytes


def test_without_a_link_a_problem_has_the_plans_that_it_had():
    one = problem()
    assert one.within(one.least().peak_bytes + 1000).plan.moves == ()
    whole = one.keep_all.peak_bytes
    assert one.within(whole, link=Link(1, 1)) == one.keep_all


@pytest.mark.thorough
def test_keeping_all_is_as_quick_as_can_be_and_the_least_budget_no_quicker():
    source = random.Random(0)
    for count in (5, 9, 14):
        graph = Graph(
            [Node(f"n{v}", source.randrange(1, 9), source.randrange(1, 5)) for v in range(count)],
            [(f"n{v - 1}", f"n{v}") for v in range(1, count)],
        )
        link = Link(2, 2)
        least = plan(graph, None, model="saved", link=link).peak_bytes
        whole = plan(graph, None, "store_all", model="saved").peak_bytes
        assert seconds(graph, whole, link) == sum(3 * node.cost for node in graph.nodes)
        assert seconds(graph, least, link) >= seconds(graph, whole, link)
