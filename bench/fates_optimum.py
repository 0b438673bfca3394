"""The least time of a step whose values are kept, run again or moved: an integer programme.

That of checkmate.py (Jain et al., MLSys 2020), with what POET adds (Patil et al., ICML 2022): what
is away (A) in which stage, from the end of a call of forward to the beginning of a step of
backward. Stages take as long as what runs in them, or longer (D), and objective is their sum.

Relaxed, so that nothing the referee allows is shut out and the optimum is a bound from below: links
are fluid (any parts of any copies beside each other, of at most a stage's time times the rate; in
the stage of a value's last use what the stage takes longer than its call, in that of a step of
backward what is over before it), a value that ran again may be moved, too, and be moved as well as
run again.
"""

from __future__ import annotations

from checkmate import Optimum, Programme, Stage, Term, programme, stages_of

from umem.planner import Graph, Link, Plan
from umem.planner.graph import Numbered

Absent = tuple[str, int, int, int]
"""``S`` or ``T`` for a value or a stash; its node, its bytes, the call that uses it last."""


def least_time(graph: Graph, plan: Plan, budget_bytes: int, link: Link, seconds: float) -> Optimum:
    """The least time within a budget, in the order of a plan for a tape, in units of cost."""
    g = graph.numbered
    stages = stages_of(g, plan)
    whole = sum(g.cost) + sum(g.backward_cost) or 1
    absents = _absents(g, stages, link)
    away = [("A", s, kind, v) for kind, v, _, last in absents for s in _range(stages, v, last)]
    p = programme(g, stages, budget_bytes, again_in_forward=False, away=away)
    _durations(p, g, stages, whole)
    _ways(p, g, stages, absents)
    _link(p, g, stages, absents, link, whole)
    found = p.solve({("D", s): 1 for s in range(len(stages))}, seconds)
    bound = max(0.0, (found.mip_dual_bound or 0) * whole) if found.status in (0, 1) else 0.0
    word = {0: "optimal", 1: "time-out", 2: "infeasible"}.get(found.status, "failed")
    return Optimum(None if found.x is None else found.fun * whole, bound, word)


def _durations(p: Programme, g: Numbered, stages: list[Stage], whole: float) -> None:
    """A stage takes as long as what runs in it, or longer; in shares of a step that keeps all."""
    for s, stage in enumerate(stages):
        p.variable("D", s, high=100)
        runs: list[Term] = [(("R", s, v), g.cost[v] / whole) for v in stage.nodes]
        p.at_most([(("D", s), -1), *runs], -_own(g, stage) / whole)


def _own(g: Numbered, stage: Stage) -> float:
    """What a stage's step of backward costs."""
    return 0 if stage.steps is None else g.backward_cost[stage.steps]


def _absents(g: Numbered, stages: list[Stage], link: Link) -> list[Absent]:
    """What may be away."""
    forward = [stage.runs for stage in stages if stage.runs is not None]
    place = {v: s for s, v in enumerate(forward)}
    last = list(range(len(forward)))
    for v in forward:
        for x in (v, *g.preds[v]):
            root = g.root[x]
            last[root] = v if place[v] > place[last[root]] else last[root]
    found = [("S", v, g.size[v], place[last[v]]) for v in forward if g.root[v] == v]
    found += [("T", v, g.stash[v], place[v]) for v in forward]
    return [one for one in found if link.takes(one[2])]


def _range(stages: list[Stage], v: int, last: int) -> range:
    """The stages in which something may be away: from the call after its last use on."""
    end = last + 1
    while end < len(stages) and v in stages[end].nodes:
        end += 1
    return range(last + 1, end)


def _ways(p: Programme, g: Numbered, stages: list[Stage], absents: list[Absent]) -> None:
    """What is away was there or away before, leaves in forward, and holds no bytes."""
    turn = sum(stage.runs is not None for stage in stages)
    for kind, v, _, last in absents:
        p.variable("M", kind, v)
        members = [w for w in range(len(g.root)) if g.root[w] == v] if kind == "S" else [v]
        for s in _range(stages, v, last):
            away, before = ("A", s, kind, v), ("A", s - 1, kind, v)
            p.at_most([(away, 1), (("M", kind, v), -1)], 0)
            for w in members:
                p.at_most([(away, 1), ((kind, s, w), 1)], 1)
            if s <= turn:
                if s < turn:
                    p.at_most([(before, 1), (away, -1)], 0)
                there = [((key, s - 1, w), -1) for key in ("R", kind) for w in members]
                p.at_most([(away, 1), (before, -1), *there], 0)
            else:
                p.at_most([(away, 1), (before, -1)], 0)


def _link(
    p: Programme, g: Numbered, stages: list[Stage], absents: list[Absent], link: Link, whole: float
) -> None:
    """Copies are over before what is sent leaves, and before what is fetched is used."""
    turn = sum(stage.runs is not None for stage in stages)
    out: dict[int, list[Term]] = {}
    late: dict[int, list[Term]] = {}  # what is sent in the stage of its last use
    back: dict[int, list[Term]] = {}
    due: dict[int, list[Term]] = {}  # what is fetched in the stage whose step of backward uses it
    for kind, v, nbytes, last in absents:
        moved = ("M", kind, v)
        for s in range(last, turn):
            p.variable("O", s, kind, v)
            (late if s == last else {}).setdefault(s, []).append((("O", s, kind, v), nbytes))
            out.setdefault(s, []).append((("O", s, kind, v), nbytes))
        for s in range(last + 1, turn + 1):
            sent: list[Term] = [(("O", t, kind, v), -1) for t in range(last, s)]
            p.at_most([(("A", s, kind, v), 1), *sent], 0)
        sent = [(("O", t, kind, v), -1) for t in range(last, turn)]
        p.at_most([(moved, 1), *sent], 0)
        fetched: list[Term] = []
        for s in range(turn, len(stages)):
            stage = stages[s]
            if v not in stage.nodes:
                break
            p.variable("I", s, kind, v)
            fetched.append((("I", s, kind, v), -1))
            p.at_most([(("I", s, kind, v), 1), (("A", s, kind, v), 1)], 1)
            back.setdefault(s, []).append((("I", s, kind, v), nbytes))
            needs = {g.root[x] for x in stage.needs} if kind == "S" else {stage.steps}
            if v in needs:
                p.at_most([(moved, 1), *fetched], 0)
                due.setdefault(s, []).append((("I", s, kind, v), nbytes))
            elif kind == "S":
                readers = {w for w in stage.nodes if v in {g.root[x] for x in g.preds[w]}}
                for w in readers:
                    p.at_most([(moved, 1), (("R", s, w), 1), *fetched], 1)
    for terms, rate in ((out, link.out_rate), (back, link.in_rate)):
        for s, some in terms.items():
            p.at_most([*_scaled(some, rate * whole), (("D", s), -1)], 0)
    for s, some in late.items():
        own = g.cost[stages[s].runs or 0] / whole
        p.at_most([*_scaled(some, link.out_rate * whole), (("D", s), -1)], -own)
    for s, some in due.items():
        own = _own(g, stages[s]) / whole
        p.at_most([*_scaled(some, link.in_rate * whole), (("D", s), -1)], -own)


def _scaled(terms: list[Term], by: float) -> list[Term]:
    return [(key, factor / by) for key, factor in terms]
