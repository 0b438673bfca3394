"""Recomputation planned for a budget, on Chainer's own tape, without touching the model.

A *pass* is a forward and the backward after it. The first two passes of a graph are observed: they
evict arrays in forward, and follow a first plan in backward. Then umem makes a plan from the
measured times and workspace, and every later pass of the same graph follows it: it drops arrays in
forward, recomputes them block by block in backward, and drops them again after their last use.

Source: Kusumoto et al., "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation" (NeurIPS 2019), with the cost model of `umem.planner.saved`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from umem._common.files import whole
from umem.chainer.recompute.facts import Experience
from umem.chainer.recompute.offloaded import OffloadTarget
from umem.chainer.recompute.runner import PassRunner
from umem.chainer.recompute.seen import Budget, Carried, SeenGraph, Target, cap_advice
from umem.chainer.recompute.training import Training
from umem.chainer.tap import is_subscribed
from umem.errors import StateError
from umem.planner import Method, PoolGaps, ScheduleUsage, actions, usage
from umem.units import RelativeSize, format_bytes, parse_size

__all__ = ["Recompute"]

CARD = "card"
_on: list[Recompute] = []


class Recompute:
    """Train within a memory budget: ``with umem.chainer.Recompute("12GiB"): ...``.

    Losses, gradients, parameters and running statistics equal a plain run's, to the bit. A pass
    that departs from the planned graph keeps every array from that point on.

    Args:
        budget: the bytes that a step may take in total (parameters, gradients, optimizer state,
            inputs, saved tensors and workspace; on CuPy also the gaps of its pool), as an int or
            text; ``"card"``, the GPU's free memory when the first pass begins; ``"60%"`` of a plain
            step's peak; or ``"min"``, the least budget that recomputes nothing twice.
        method: a method of `umem.planner.plan`.
        strict: raise an error if no plan fits a share such as "60%", as for a size. Otherwise the
            step takes the least possible, and one `RecomputeWarning` is given.
        thrash: "warn" or "error", if a pass without a plan spends more time on recomputing than on
            the rest.
        offload: also offload values and prefetch them, where that takes less time than
            recomputing: True for CuPy's arrays, to pinned host memory; for NumPy's, the folder
            for their files. See `fates` and docs/reference/offload.md. Passes without a plan only
            recompute.
        debug: keep checksums, to find arrays that are edited between forward and backward, and
            functions that give another result when they are recomputed. Slow.

    Cost: nothing while not entered. On NumPy the first two calls of each function and shape are
    slow (umem measures their workspace), and so is the first pass that follows a plan (umem
    measures its peak).

    Raises:
        SizeError: on construction, if the budget is invalid.
        StateError, FileError: on entering with ``offload``, if the folder cannot be used, or arrays
            are NumPy's and no folder is given; with CuPy, in the first forward. Nothing is created.
        BudgetError: in the first forward that would follow a plan, if no plan fits a size, or a
            share with ``strict``; names the least that fits. Nothing was dropped, and training can
            continue outside the block.
        UnsupportedError: in forward: ChainerX arrays or a static graph; "card" on NumPy.
        OutOfMemoryError: CuPy's, in a pass, if dropping every recomputable array does not help;
            lists the attempts.
        RecomputeError: before a backward that reads arrays which cannot be recomputed; nothing has
            changed. With ``debug``, in backward: an array was edited, or a result differs.

    Thread-safety: works in the thread that entered it. Another thread may run backward on a graph
    of that thread; it first recomputes every dropped array. Never run on a GPU yet.
    """

    def __init__(
        self,
        budget: int | str,
        method: Method = "auto",
        *,
        strict: bool = False,
        thrash: Literal["warn", "error"] = "warn",
        offload: bool | str | Path = False,
        debug: bool = False,
    ) -> None:
        target = Target(_parsed(budget), method, strict, thrash, is_card=budget == CARD)
        below = None if offload is False else OffloadTarget(offload)
        self._training = Training(target, debug=debug, offload=below)
        self._runner = PassRunner(self._training)

    def __enter__(self) -> Recompute:
        """Begin to plan the passes of this thread.

        Raises:
            StateError: this or another Recompute, or an Offload, is on. Nothing has changed.
            StateError, FileError: as `OffloadTarget.start`; this Recompute is off again.
        """
        if self in _on:
            raise StateError("this Recompute is entered already")
        if _on:
            raise StateError("a Recompute is on already; one step has one budget")
        if is_subscribed("Mover"):
            raise StateError("an Offload is on: Recompute(budget, offload=...) replaces it")
        _on.append(self)
        try:
            self._runner.start()
        except BaseException:  # a signal, too
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Stop, and restore Chainer's own behaviour.

        Raises:
            MemoryError: an offloaded array does not fit into memory. If the block raised an error,
                that error propagates instead.
        """
        try:
            self._leave()
        except MemoryError:
            if kind is None:
                raise

    def _leave(self) -> None:
        """Stop, and restore Chainer's own behaviour; a second time does nothing."""
        if self in _on:
            try:
                self._runner.stop()
            finally:
                _on.remove(self)

    # -- results ---------------------------------------------------------------------------

    @property
    def predicted_bytes(self) -> int | None:
        """Return the total peak that the largest graph's plan predicts; None before it exists."""
        largest = self._largest()
        return None if largest is None or largest.plan is None else largest.plan.peak_bytes

    @property
    def measured_bytes(self) -> int | None:
        """Return the peak of the first pass that followed that plan; None before.

        Also None if CuPy's allocator calls no memory hooks. On NumPy the peak includes Python's own
        objects, some 7 KB for each function call.
        """
        largest = self._largest()
        return None if largest is None else largest.measured_bytes

    @property
    def graphs(self) -> tuple[SeenGraph, ...]:
        """Return every graph that was seen, the oldest first."""
        return tuple(self._training.graphs)

    def fates(self) -> tuple[ValueFate, ...]:
        """Return the fate of each value of the largest planned graph; empty before there is one."""
        largest = self._largest()
        return () if largest is None else fates_of(largest)

    @property
    def planned_count(self) -> int:
        """Return the number of passes that followed a plan from beginning to end."""
        return self._training.graphs.planned_count

    @property
    def pass_count(self) -> int:
        """Return the number of passes so far: forwards that had a backward."""
        return self._training.pass_count

    def summary(self) -> str:
        """Describe the results in a line: the peak, the time, and how many passes were planned.

        The time is forward and backward of the passes that followed a plan, relative to Chainer's
        own part of it: without recomputing, and without the cost of following the plan.
        """
        count, plain = self.pass_count, self._training.plain_count
        if not count:
            return "no pass was seen: no backward ran in the block's thread"
        parts = [f"{self.planned_count} of {count} passes followed a plan"]
        if plain:
            parts.append(f"{plain} fit without a plan")
        largest = self._largest()
        if largest is None:
            parts.append(_why_not_planned(self.graphs))
        else:
            parts.append(_peaks(largest))
        graphs = self._training.graphs
        if graphs.followed_seconds > graphs.own_seconds:
            ratio = graphs.followed_seconds / (graphs.followed_seconds - graphs.own_seconds)
            parts.append(f"forward and backward took {ratio:.2f} times as long as without")
        if self.online_count:
            parts.append(f"{self.online_count} had no plan and were decided call by call")
        return "; ".join(parts)

    @property
    def online_count(self) -> int:
        """Return the number of passes that had no plan, because their graph had not repeated."""
        return self._training.experience.count

    def _largest(self) -> SeenGraph | None:
        """Return the planned graph whose plain step takes the most; None without a plan."""
        found = [(s.plan.plain_bytes, s) for s in self.graphs if s.plan is not None]
        return max(found, key=lambda pair: pair[0], default=(0, None))[1]

    def report(self, picture: str | Path | None = None) -> str:
        """Describe the plan of each graph that was seen, predicted and measured.

        Args:
            picture: also write the predicted memory over the step, before and after, as PNG.

        Raises:
            StateError: there is no plan for ``picture``.
            MissingDependencyError: matplotlib is missing for it.
            OSError: its file cannot be written; an existing one is unchanged.
        """
        if picture is not None:
            self.draw(picture)
        online = describe_online(self._training.experience)
        graphs = self._training.graphs
        lines = [*map(describe, graphs), *online, *describe_gaps(graphs.gaps), *graphs.warnings]
        return "\n".join(lines) or "no graph was seen yet"

    def draw(self, path: str | Path) -> None:
        """Write a picture of the predicted memory over the step, before and after the plan.

        Raises:
            StateError: there is no plan to draw.
            MissingDependencyError: matplotlib is missing.
            OSError: the file cannot be written; an existing one is unchanged.
        """
        from umem.reports import draw_steps

        largest = self._largest()
        if largest is None:
            raise StateError("no graph is planned yet: a plan is made after two passes")
        wanted = self._training.graphs.target.budget
        budget = wanted if isinstance(wanted, int) else None
        with whole(Path(path), force=True) as file:
            draw_steps(*curves(largest), budget, largest.measured_bytes, file)


# -- fates of values ----------------------------------------------------------------------------

Fate = Literal["kept", "recomputed", "offloaded", "not needed"]
FATES: tuple[Fate, ...] = ("kept", "recomputed", "offloaded")


class ValueFate(NamedTuple):
    """One row of `umem.chainer.Recompute.fates`.

    Attributes:
        call: the function, with its place in forward.
        what: ``value``, the call's outputs, or ``stash``, its function state.
        nbytes: their bytes.
        fate: ``kept`` from forward into backward, ``recomputed``, ``offloaded`` (and prefetched),
            or ``not needed`` in backward.
    """

    call: str
    what: str
    nbytes: int
    fate: Fate


def fates_of(seen: SeenGraph) -> tuple[ValueFate, ...]:
    """Return the fates of each call's outputs and function state, in the order of forward.

    Empty if the graph has no plan.
    """
    return () if seen.plan is None else tuple(_fates(seen, seen.plan))


def _fates(seen: SeenGraph, carried: Carried) -> Iterator[ValueFate]:
    """Yield the fate of outputs and function state of each call, where they have bytes."""
    plan = carried.solution.plan
    moved = {(move.node, move.what) for move in plan.moves}
    again = {name for block in plan.recomputed for name in block}
    for name, call in zip(seen.problem.names, seen.problem.calls, strict=True):
        for what, nbytes, kept in (
            ("value", call.nbytes, plan.kept),
            ("stash", call.stash_bytes, plan.stashed),
        ):
            fate: Fate = "not needed"
            if (name, what) in moved:
                fate = "offloaded"
            elif name in kept or carried.fits or not call.again:
                fate = "kept"
            elif name in again:
                fate = "recomputed"
            if nbytes:
                yield ValueFate(name, what, nbytes, fate)


def fates_summary(seen: SeenGraph) -> str:
    """Format in one line the bytes and the number of values of each fate."""
    rows = fates_of(seen)
    parts = []
    for fate in FATES:
        found = [row.nbytes for row in rows if row.fate == fate]
        parts.append(f"{format_bytes(sum(found))} {fate} ({len(found)})")
    return ", ".join(parts)


# -- reports ------------------------------------------------------------------------------------

NAMED = 6
"""At most this many names are written out."""


def describe(seen: SeenGraph) -> str:
    """Describe one graph: predicted and measured bytes, kept and recomputed calls."""
    tape, problem = seen.tape, seen.problem
    head = f"a graph of {len(tape.observed)} calls: "
    if seen.plan is None:
        why = seen.never or seen.refused or "it was not seen often enough yet"
        return f"{head}not planned: {why}"
    plan, constant = seen.plan.solution.plan, seen.plan.solution.constant_bytes
    floor, node = problem.floor()
    left_alone = "a plain step fits, and nothing is dropped"
    moved = {move.node for move in plan.moves if move.what == "value"}
    rerun, again = seen.rerun_seconds, [name for block in plan.recomputed for name in block]
    lines = [
        head + (left_alone if seen.plan.fits else f"planned by {plan.method}"),
        f"  peak: {format_bytes(seen.plan.peak_bytes)} predicted, "
        f"{_or_not(seen.measured_bytes)}; {format_bytes(seen.plan.plain_bytes)} predicted "
        f"for a plain step; the floor is {format_bytes(floor)} ({node})",
        f"  parameters, state and inputs: {format_bytes(constant)} of it",
        f"  the optimizer's update: {format_bytes(problem.update_peak_bytes)}, including "
        f"{format_bytes(problem.update_bytes)} only while it runs",
        f"  overhead: {_share(plan.overhead, tape.seconds)} of the forward pass predicted, "
        + ("not measured yet" if rerun is None else f"{_share(rerun, tape.seconds)} measured"),
        f"  kept: {_names([name for name in plan.kept if name not in moved])}",
        f"  run again: {_names(again)}",
    ]
    if plan.moves:
        lines.append(f"  moved: {_names([move.node for move in plan.moves])}")
        lines.append(f"  in all: {fates_summary(seen)}")
    advised = cap_advice(seen, seen.plan)
    if advised is not None:
        lines.append(f"  {advised}")
    stay = [n for n, o in zip(problem.names, tape.observed, strict=True) if not o.again]
    if stay:
        lines.append(f"  cannot run again, and are kept: {_names(stay)}")
    return "\n".join(lines)


def describe_online(found: Experience) -> list[str]:
    """Describe the passes without a plan in one line; an empty list if there were none."""
    if not found.count:
        return []
    again = found.rerun_seconds / found.seconds if found.seconds else 0.0
    return [
        f"{found.count} passes had no plan, because their graph had not repeated: evictions were "
        f"decided call by call; peak {format_bytes(found.peak_bytes)} by account; recomputing took "
        f"{again:.0%} of the time of functions in passes that evicted"
    ]


def describe_gaps(gaps: PoolGaps) -> list[str]:
    """Describe the gaps of a GPU's pool in one line; an empty list before they are measured."""
    if gaps.measured is None:
        return []
    return [
        f"CuPy's pool reserved {gaps.measured:.2f} times the bytes in use; a budget in bytes "
        f"leaves room for {gaps.planned:.2f} times"
    ]


def _peaks(seen: SeenGraph) -> str:
    assert seen.plan is not None
    return (
        f"peak {format_bytes(seen.plan.plain_bytes)} predicted for a plain step, "
        f"{format_bytes(seen.plan.peak_bytes)} for the plan, "
        f"{_or_not(seen.measured_bytes).removesuffix(' yet')}"
    )


def _why_not_planned(graphs: tuple[SeenGraph, ...]) -> str:
    for seen in graphs:
        why = seen.refused or seen.never
        if why is not None:
            return f"not planned: {why}"
    return "nothing was planned: a plan is made for a graph that repeats, after two passes"


def _or_not(count: int | None) -> str:
    return "not measured yet" if count is None else f"{format_bytes(count)} measured"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _names(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = len(names) - NAMED
    text = ", ".join(names[:NAMED])
    return f"{len(names)} calls ({text}{f' and {more} more' if more > 0 else ''})"


def curves(seen: SeenGraph) -> tuple[list[int], list[int]]:
    """Return the predicted bytes over a step's actions: of a plain step, and of the plan."""
    assert seen.plan is not None
    constant = seen.problem.constant_bytes(packs=False, plain=True)
    before = _curve(seen.problem.plain_step, constant)
    if seen.plan.fits:
        return before, before
    solution = seen.plan.solution
    planned = usage(solution.graph, actions(solution.graph, solution.plan))
    return before, _curve(planned, solution.constant_bytes)


def _curve(used: ScheduleUsage, constant: int) -> list[int]:
    return [constant + nbytes for nbytes in used.during_bytes]


def _parsed(budget: int | str) -> Budget:
    """Parse a budget as a user gives it.

    Raises:
        SizeError: the budget is invalid; the message lists the valid forms.
    """
    if budget == "min":
        return None
    if budget == CARD:
        return 0  # until the first pass begins
    size = parse_size(
        budget,
        "budget",
        "%",
        'A budget is bytes as an int, a size like "12GiB", a share like "60%", "min" or "card"',
    )
    return float(size.factor) if isinstance(size, RelativeSize) else size
