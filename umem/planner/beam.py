"""Beam search over evictions and recomputations, call by call.

A value may be recomputed any number of times, just before the step of backward that needs it. The
search walks through a step: forward, then backward in the reverse order. It evicts values only when
memory is short; then each possible eviction is a state of its own. Of the states at one moment the
beam follows the cheapest, ranked by the cost recomputed so far plus a bound of the remaining cost,
from below (each missing call once) to above (no recomputed value is held for a later step), and by
the bytes in use. A second walk also recomputes, at each step, one value that only later steps need,
while its inputs are in memory. A plan that is known to fit is never pruned.

The problem is Jain et al., "Checkmate", MLSys 2020, in the order of a tape: in forward, no call
runs twice, and no value is evicted before its last reader has run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from umem.planner.beam_facts import (
    NEVER,
    ONE,
    PARTIAL,
    Facts,
    Floats,
    Known,
    Masks,
    Rows,
    has,
    joined,
    one_row,
    word,
)
from umem.planner.plans import Reruns
from umem.planner.step_table import mask_of, numbers

WIDTH = 800
"""At most this many states are followed at a moment.

With it, plans of up to 24 nodes are within a few percent of the optimum (bench/planners.py). Half
and twice of it make the same 210 plans (bench/planner_constants.py).
"""
FULL_WIDTH = 24
"""At most this many nodes are searched with `WIDTH`; with more, the width shrinks with their cube.

So the work grows slowly with the nodes. With 12, one of 210 plans of up to 24 nodes has 5.6 points
of a forward pass more overhead (bench/planner_constants.py); more was not measured.
"""
LEAST_WIDTH = 24
"""At least this many states are followed, however large the graph. A guess."""
PROTECTED = 4
"""At most this many states that can still become the known plan are never pruned.

Without any, and without following that plan, 4 or more of 45 plans of graphs of 3 to 6 nodes miss
the optimum (tests/planner/test_rematerialize.py). Half and twice of it make the same 210 plans
(bench/planner_constants.py).
"""


class Weights(NamedTuple):
    """The weights of one ranking of states.

    Attributes:
        above: of the upper bound of a state's cost, against the lower one; 0 to 1.
        used: of the bytes in use.
    """

    above: float
    used: float


class Walk(NamedTuple):
    """The parameters of one search.

    Attributes:
        rankings: the rankings of states, which share the beam's width.
        extra: at most this many values are recomputed at a step of backward for later ones.
    """

    rankings: tuple[Weights, ...]
    extra: int


class Beam:
    """One beam search through forward and backward; the states are rows of arrays.

    Args:
        facts: the graph.
        budget: the most bytes at once.
        walk: the parameters of the search.
        known: a plan that fits, to be beaten; None: any plan that fits will do.
        once: recompute each call at most once.

    Attributes:
        saw_all: False once a state was pruned that might have led to a cheaper plan.
    """

    def __init__(
        self, facts: Facts, budget: int, walk: Walk, known: Known | None, *, once: bool = False
    ) -> None:
        self.f, self.g, self.budget = facts, facts.g, budget
        self._rankings, self._extra, self._known = walk.rankings, walk.extra, known
        self._width = max(LEAST_WIDTH, int(WIDTH * min(1, FULL_WIDTH / facts.count) ** 3))
        self._most = NEVER / 2 if known is None else known.cost - PARTIAL
        self._once = once
        self._step = facts.count - 1
        self._to_come = 0  # calls of forward that are still to run
        self._log: list[Rows] = []
        self.saw_all = True

    def run(self) -> Reruns | None:
        """Search, and return the calls to recompute before each step of backward.

        None if no plan is found that fits the budget and beats the known one.
        """
        rows = one_row()
        for v in range(self.f.count):
            rows = self._forward(rows, v)
        self._to_come = 0
        for step in reversed(range(self.f.count)):
            self._step = step
            rows = self._backward(rows)
        if not len(rows.cost):
            return None
        place = int(rows.cost.argmin())
        found: list[tuple[int, ...]] = []
        for rows in reversed(self._log):  # of step 0, 1, ...
            found.append(tuple(numbers(int(rows.ran[place]))))
            place = int(rows.origin[place])
        return tuple(found)

    # -- the walk --------------------------------------------------------------------------

    def _forward(self, rows: Rows, v: int) -> Rows:
        """Run a call forward in every state, evict until each fits, and drop dead values."""
        f, g = self.f, self.g
        self._to_come = f.all & ~f.below[v]
        rows = rows._replace(
            values=rows.values | word(1 << v),
            stashes=rows.stashes | word(f.stashed & 1 << v),
            used=rows.used + g.size[v] + g.stash[v],
        )
        read = mask_of(x for x in range(v + 1) if f.last_user[x] >= v)
        room = self.budget - g.forward_bytes - g.workspace[v]
        rows = self._fit(rows, room, read | 1 << v, 1 << v)
        return self._free(rows, f.below[v] & ~read & ~f.useful[-1], 0)

    def _backward(self, rows: Rows) -> Rows:
        """Run a step of backward in every state, with each way to recompute missing values."""
        f, step = self.f, self._step
        rows = rows._replace(origin=np.arange(len(rows.cost)))
        rows = self._free(rows, f.all & ~f.useful[step], f.all & ~f.below[step])
        rows = self._ask(rows)
        for v in range(step + 1):
            runs = has(rows.pending, v)
            if runs.any():
                rows = joined([self._rerun(rows.some(runs), v), rows.some(~runs)])
        needs, own = f.needs[step], f.stashed & 1 << step
        rows = self._fit(rows, self.budget - f.beside[step].during, needs, own)
        rows, _ = self._hopeful(rows)
        rows = self._free(rows, 0, own)
        if step:
            rows = self._free(rows, f.all & ~f.useful[step - 1], 0)
        rows = rows.undominated()
        self._log.append(rows)
        return rows

    def _ask(self, rows: Rows) -> Rows:
        """Mark the calls to recompute before this step as pending; return variants of each state.

        Beside the calls that the step needs, a variant recomputes the known plan's calls, or up to
        `_extra` values that only later steps need.
        """
        f, step = self.f, self._step
        values, missing = rows.values, np.zeros_like(rows.values)
        if f.stashed >> step & 1:  # recomputed for its function state, it remakes its value
            missing = word(1 << step) * ~has(rows.stashes, step)
            values = values & ~((missing != 0) * word(f.group[step]))
        gone = f.bytes_of(rows.values & ~values, np.zeros_like(values))
        wanted = word(f.needs[step]) | (missing != 0) * word(f.preds[step])
        pending = missing | f.closure(wanted, values, step)
        nothing = np.zeros_like(pending)
        rows = rows._replace(values=values, pending=pending, ran=nothing, used=rows.used - gone)
        rows = joined([rows, *self._as_known(rows)])
        for _ in range(self._extra):
            rows = self._one_more(rows)
        return rows.some(self._may(rows)) if self._once else rows

    def _may(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Tell in which states no value to recompute now or later was recomputed before."""
        wanted = word(self.f.wanted[self._step]) | rows.pending
        missed = self.f.closure(wanted, rows.values, self._step) | rows.pending
        found: npt.NDArray[np.bool_] = missed & rows.spent == 0
        return found

    def _as_known(self, rows: Rows) -> list[Rows]:
        """Branch: return the states that can follow the known plan, its recomputations pending.

        A state can if it holds the plan's values, and its cost so far is no more than the plan's.
        """
        known, step = self._known, self._step
        if known is None or not known.runs[step]:
            return []
        holds = (word(known.values[step + 1]) & ~rows.values) == 0
        holds &= rows.cost <= known.so_far[step + 1] + PARTIAL
        same = rows.some(holds)
        return [same._replace(pending=same.pending | word(known.runs[step]) & ~same.values)]

    def _one_more(self, rows: Rows) -> Rows:
        """Branch: add to the states those that recompute one more value now, for a later step."""
        f, step, parts = self.f, self._step, [rows]
        there = rows.values | rows.pending
        missed = f.closure(np.full_like(there, word(f.wanted[step])), there, step)
        for v in range(step):
            some = rows.some(has(missed, v))
            if len(some.cost):
                wanted = np.full_like(some.values, word(1 << v))
                more = f.closure(wanted, some.values | some.pending, v)
                parts.append(some._replace(pending=some.pending | more))
        return self._pruned(joined(parts))

    def _rerun(self, rows: Rows, v: int) -> Rows:
        """Recompute a pending call in every state, and evict until each fits."""
        f, g, bit = self.f, self.g, word(1 << v)
        apart = (rows.values & word(f.group[v])) == 0
        stash = g.stash[v] * ~has(rows.stashes, v)
        rows = rows._replace(
            values=rows.values | bit,
            stashes=rows.stashes | word(f.stashed & 1 << v),
            pending=rows.pending & ~bit,
            ran=rows.ran | bit,
            spent=rows.spent | bit if self._once else rows.spent,
            cost=rows.cost + f.cost[v],
            used=rows.used + apart * g.size[v] + stash,
        )
        room = self.budget - f.beside[self._step].before - g.workspace[v]
        own = f.stashed & 1 << self._step | 1 << v
        return self._fit(rows, room, f.preds[v] | 1 << v, own, at=v)

    # -- evicting --------------------------------------------------------------------------

    def _free(self, rows: Rows, values: int, stashes: int) -> Rows:
        """Free masks of dead values and function state in every state; return the states.

        Values that share bytes are freed only if all of them are dead.
        """
        gone = mask_of(v for root in self.f.roots for v in numbers(self._whole(root, values)))
        if not gone and not stashes:
            return rows
        lost = self.f.bytes_of(rows.values & word(gone), rows.stashes & word(stashes))
        return rows._replace(
            values=rows.values & ~word(gone),
            stashes=rows.stashes & ~word(stashes),
            used=rows.used - lost,
        )

    def _whole(self, root: int, values: int) -> int:
        """Return the mask of the values in a node's bytes if all are dead; otherwise 0."""
        group = self.f.group[root]
        return group if group & ~values == 0 else 0

    def _fit(self, rows: Rows, room: int, values: int, stashes: int, at: int | None = None) -> Rows:
        """Evict until each state fits, branching over every way to do so.

        Args:
            rows: the states.
            room: the most bytes of values and function state.
            values, stashes: masks of the values and function state that are read now; they stay.
            at: the number of the call that is being recomputed, if any. Values that the step of
                backward reads later may be evicted too, if they are recomputed after this call.
        """
        fits = rows.used <= room
        if fits.all():
            return rows
        done: list[Rows] = []
        while True:
            done.append(rows.some(fits))
            rows = rows.some(~fits)
            parts = self._without_one(rows, values, stashes, at) if len(rows.cost) else []
            if not parts:
                return self._pruned(joined(done))
            rows = self._pruned(joined(parts))
            fits = rows.used <= room

    def _without_one(self, rows: Rows, values: int, stashes: int, at: int | None) -> list[Rows]:
        """Branch: from each state, one for each value or function state that can be evicted."""
        f, parts = self.f, []
        later = np.zeros_like(rows.values) if at is None else self._read_later(rows, at)
        passed = 0 if at is None else f.below[at]
        for v in f.roots:
            group = word(f.group[v])
            can = (rows.values & group) != 0
            can &= (rows.values & later & group & word(passed)) == 0
            if not f.group[v] & values and can.any():
                some = rows.some(can)
                again = some.values & later[can] & group
                some = some._replace(values=some.values & ~group, used=some.used - self.g.size[v])
                parts.append(
                    some if at is None or not again.any() else self._asked(some, again, at)
                )
        for v in numbers(f.stashed & ~stashes):
            can = has(rows.stashes, v)
            if can.any():
                some = rows.some(can)
                kept = some.stashes & ~word(1 << v)
                parts.append(some._replace(stashes=kept, used=some.used - self.g.stash[v]))
        return parts

    def _read_later(self, rows: Rows, at: int) -> Masks:
        """Return, by state, the values that the step and its recomputations after a call read."""
        f, found = self.f, np.full_like(rows.values, word(self.f.needs[self._step]))
        for w in range(at + 1, self._step + 1):
            found |= (rows.pending >> np.uint64(w) & ONE) * word(f.preds[w])
        return found

    def _asked(self, rows: Rows, again: Masks, at: int) -> Rows:
        """Mark evicted values and their missing inputs as pending.

        States are discarded in which a missing input is not after the running call in forward.
        """
        f, pending = self.f, rows.pending | again
        good = np.ones(len(pending), bool)
        for w in range(self._step, at, -1):
            lacks = (pending >> np.uint64(w) & ONE) * word(f.preds[w]) & ~rows.values & ~pending
            good &= (lacks & word(f.below[at])) == 0
            pending |= lacks
        return rows._replace(pending=pending).some(good)

    # -- the states that the beam follows --------------------------------------------------

    def _pruned(self, rows: Rows) -> Rows:
        """Keep the best states of each ranking, up to the beam's width."""
        f, to_come = self.f, word(self._to_come)
        rows = rows.distinct()
        if len(rows.cost) <= self._width:
            return rows
        rows, least = self._hopeful(rows)
        if len(least) <= self._width:
            return rows
        values, stashes = rows.values | to_come, rows.stashes | to_come
        self.saw_all = False
        most: Floats | float = 0.0
        if any(ranking.above for ranking in self._rankings):
            most = rows.cost + f.most_left(values, stashes, self._step)
        chosen = np.zeros(len(least), bool)
        share = self._width // len(self._rankings)
        for ranking in self._rankings:
            rank = (1 - ranking.above) * least + ranking.above * most
            rank = rank + ranking.used * f.byte_share * rows.used
            chosen[np.argpartition(rank, share)[:share]] = True
        chosen[self._protected(rows, to_come)] = True
        return rows.some(chosen)

    def _hopeful(self, rows: Rows) -> tuple[Rows, Floats]:
        """Return the states that may still beat the known plan, and the least cost of each."""
        to_come = word(self._to_come)
        least = rows.cost + self.f.least_left(
            rows.values | to_come, rows.stashes | to_come, self._step
        )
        hopeful = least < self._most
        return rows.some(hopeful), least[hopeful]

    def _protected(
        self, rows: Rows, to_come: np.uint64
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the rows, at most `PROTECTED`, that can still become the known plan or beat it."""
        known = self._known
        if known is None:
            return np.zeros(0, np.int64)
        next_ = self._step + 1 if self._to_come else self._step
        there = rows.pending | to_come
        holds = (word(known.values[next_]) & ~(rows.values | there)) == 0
        holds &= (word(known.stashes[next_]) & ~(rows.stashes | there)) == 0
        cost = rows.cost + self.f.cost_of(rows.pending)
        so_far = known.so_far[next_]
        places = np.flatnonzero(holds & (cost <= so_far + PARTIAL))
        return places[np.lexsort((rows.used[places], cost[places]))[:PROTECTED]]
