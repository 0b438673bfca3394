"""From what was learned of a graph to what a pass has to do."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from umem.chainer.recompute.learning import Due, Learned
from umem.chainer.recompute.sums import contended
from umem.errors import BudgetError, SizeError
from umem.planner import Graph, simulate
from umem.planner import plan as make_plan
from umem.planner.plans import Method, Plan
from umem.planner.referee import Simulation, referee
from umem.planner.schedule import Action, actions
from umem.units import format_bytes, parse_bytes

Budget = int | float | None
"""Bytes in total, a share of a plain step's, or None for the least."""


def check_budget(budget: int | str) -> Budget:
    """What a user may give as a budget.

    Raises:
        SizeError: it is none.
    """
    if budget == "min":
        return None
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise SizeError(
                f'a share of a plain step is above "0%" and at most "100%"; got {budget!r}'
            )
        return share
    if isinstance(budget, float):
        raise SizeError(
            f'a budget is bytes as an int, a size like "12GiB", a share like "60%", or '
            f'"min"; got {budget!r}'
        )
    return parse_bytes(budget, "budget")


def prepare(learned: Learned, budget: Budget, method: Method, *, strict: bool = True) -> str | None:
    """Plan a graph that was learned; where a plain step fits, there is nothing to plan.

    Returns what to tell the user where a share of a plain step cannot be had, and the plan is the
    least there is. With ``strict``, that is an error as it is for bytes.

    Raises:
        BudgetError: nothing fits; names the least that does, the floor and what forces it.
    """
    whole = graph_of(learned, packs=False)
    keep_all = make_plan(whole, None, "store_all", model="saved")
    learned.keep_all_bytes = learned.constant(False, plain=True) + plain(learned).peak_bytes
    room = _room(learned, budget)
    learned.fits = room is not None and room >= learned.keep_all_bytes
    twice = 2 * learned.keep_all_bytes - learned.outside_bytes
    learned.fits_twice = room is not None and room >= twice
    if learned.fits or (room or 0) >= learned.constant(False) + keep_all.peak_bytes:
        _carry(learned, whole, keep_all, packs=False)
        return None
    graph, said = graph_of(learned, packs=True), None
    try:
        plan = _within(learned, graph, room, method)
    except BudgetError as error:
        if strict or not isinstance(budget, float):
            raise
        said = f"{error}. The budget is a share, so this graph is run at its least"
        plan = _within(learned, graph, None, method)
    _carry(learned, graph, plan, packs=True)
    return said


def plain(learned: Learned) -> Simulation:
    """A step as Chainer takes it by itself.

    What is saved goes when all of backward is over, and backward has Chainer's own order, in which
    what reads inputs alone comes last: its gradients wait.
    """
    graph = graph_of(learned, packs=False, plain=True)
    stream = list(actions(graph, make_plan(graph, None, "store_all", model="saved")))
    start = next((i for i, a in enumerate(stream) if a.kind == "backward"), len(stream))
    late = [a for a in stream[start:] if a.kind in ("drop", "drop_stash")]
    frees = {a.node: a for a in stream[start:] if a.kind == "free"}
    backward: list[Action] = []
    for name in _plain_order(learned, graph):
        backward += [Action("backward", name), *([frees[name]] if name in frees else [])]
    return referee(graph, [*stream[:start], *backward, *late])


def _plain_order(learned: Learned, graph: Graph) -> Iterator[str]:
    """Backward's order: users first, then as it was seen; what it did not reach as soon as can be.

    What was not reached may be reached by a later backward of the same graph.
    """
    g, place = graph.numbered, {name: index for index, name in enumerate(learned.names)}
    waits = [len(users) for users in g.succs]
    ready = [(learned.plain.get(place[n], -1), v) for v, n in enumerate(g.names) if not waits[v]]
    heapq.heapify(ready)
    while ready:
        _, v = heapq.heappop(ready)
        yield g.names[v]
        for x in g.preds[v]:
            waits[x] -= 1
            if not waits[x]:
                heapq.heappush(ready, (learned.plain.get(place[g.names[x]], -1), x))


def _room(learned: Learned, budget: Budget) -> int | None:
    if budget is None:
        return None
    if isinstance(budget, float):
        return round(budget * learned.keep_all_bytes)
    return budget - learned.slack_bytes


def _within(learned: Learned, graph: Graph, room: int | None, method: Method) -> Plan:
    constant = learned.constant(True)
    if learned.is_ordered and method in ("auto", "lower_sets_exact"):
        method = "lower_sets"  # which leaves the order of the nodes as it is
    if room is not None and room <= constant:
        raise _too_small(learned, graph, room, method)
    try:
        above = None if room is None else room - constant
        return make_plan(graph, above, method, model="saved")
    except BudgetError:
        raise _too_small(learned, graph, room or 0, method) from None


def _too_small(learned: Learned, graph: Graph, room: int, method: Method) -> BudgetError:
    constant, whole = learned.constant(True), learned.keep_all_bytes
    tightest = make_plan(graph, None, method, model="saved")
    moments = simulate(graph, tightest).timeline
    forced = max(moments, key=lambda moment: moment.during_bytes).action
    least = constant + tightest.peak_bytes
    size, node = floor_of(learned)
    return BudgetError(
        f"a budget of {format_bytes(room)} ({room / whole:.0%} of the plain step's "
        f"{format_bytes(whole)}) is too small: the least is {format_bytes(least)} ({least} bytes, "
        f"{math.ceil(100 * least / whole)}%), which {forced.kind} of {forced.node!r} forces. "
        f"Parameters, state and inputs are {format_bytes(constant)} of it; no plan whatever gets "
        f"below the floor of {format_bytes(constant + size)}, which {node!r} forces"
    )


def floor_of(learned: Learned) -> tuple[int, str]:
    """The most that one call needs at once above the constant, and which call it is.

    The gradients of parameters that are there by then are among what it needs.
    """
    nodes = learned.nodes(packs=True)
    size = {node.name: 0 if node.alias_of else node.nbytes for node in nodes}
    grad = {node.name: node.grad_bytes or 0 for node in nodes}
    inputs: dict[str, list[str]] = {node.name: [] for node in nodes}
    for source, user in _named(learned):
        inputs[user].append(source)
    floor = (0, "nothing")
    stayed = 0
    for index, node in reversed(list(enumerate(nodes))):
        stayed += node.stays_bytes
        read = inputs[node.name]
        forward = sum(size[n] for n in read) + size[node.name] + node.stash_bytes
        forward += node.workspace_bytes + learned.forward_bytes
        backward = 0
        if index not in learned.dead:
            backward = sum(size[n] for n in node.needs or ()) + node.stash_bytes
            backward += grad[node.name] + sum(grad[n] for n in read)
            backward += node.backward_workspace_bytes + stayed
        floor = max(floor, (max(forward, backward), node.name))
    return floor


def _named(learned: Learned) -> list[tuple[str, str]]:
    names = learned.names
    return [(names[a], names[b]) for a, b in learned.edges]


def graph_of(learned: Learned, *, packs: bool, plain: bool = False) -> Graph:
    """The graph that a plan is for, with masks packed or not.

    A plan goes backward in the reverse order of its nodes, unless it takes branches one by one.
    Where the order of a plain backward has to stay, the nodes are in its reverse.
    """
    nodes, edges = learned.nodes(packs, plain=plain), _named(learned)
    graph = Graph(nodes, edges, learned.forward_bytes)
    if plain or not learned.is_ordered:
        return graph
    by_name = {node.name: node for node in nodes}
    order = reversed(list(_plain_order(learned, graph)))
    return Graph([by_name[name] for name in order], edges, learned.forward_bytes)


def _carry(learned: Learned, graph: Graph, plan: Plan, packs: bool) -> None:
    """Sort a plan's actions by when they are due."""
    number = {name: index for index, name in enumerate(learned.names)}
    place = {name: at for at, name in enumerate(sum(plan.blocks, ()))}
    order = [place[name] for name in learned.names]
    after: dict[int, list[Due]] = {}
    stream = list(actions(graph, plan))
    start = next(
        (i for i, a in enumerate(stream) if a.kind in ("recompute", "backward")), len(stream)
    )
    last = -1
    for action in stream[:start]:
        if action.kind == "forward":
            last = max(last, number[action.node])  # forward runs in the user's order
        else:
            after.setdefault(last, []).append(Due(action.kind, number[action.node]))
    backward = [Due(a.kind, number[a.node]) for a in stream[start:] if a.kind != "free"]
    learned.after_forward, learned.backward, learned.order = after, backward, order
    learned.places = {due.call: i for i, due in enumerate(backward) if due.kind == "backward"}
    learned.contended = contended(learned.users, learned.plain, order)
    learned.plan, learned.packs = plan, packs
