"""Recomputation planned for a budget, on Chainer's own tape, without touching the model.

A *pass* is a forward and the backward after it. The first pass of a graph is recorded for its
times, the second for its workspace, both keeping everything; then a plan is made, and every later
pass of the same graph follows it: arrays are dropped as the plan says, made again block by block
in backward, and let go after their last use.

Source: Kusumoto et al., "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation" (NeurIPS 2019), with the cost model of `umem.planner.saved`.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import chainer
from chainer import _backprop, _backprop_utils, configuration, function_node

from umem.chainer.tape import NOT_AGAIN, Call, Signature, root_bytes
from umem.errors import BudgetError, SizeError, StateError
from umem.planner import Graph, Node, Plan
from umem.planner import plan as make_plan
from umem.planner.plans import Method
from umem.planner.schedule import Action, actions
from umem.units import format_bytes, parse_bytes


@dataclass
class _Learned:
    """What is known of a graph: its calls, and once it is planned how to run it."""

    signatures: list[Signature]
    nodes: list[Node]
    edges: list[tuple[str, str]]
    constant_bytes: int
    seconds: float
    measured: bool = False
    plan: Plan | None = None
    keep_all_bytes: int = 0
    after_forward: dict[int, list[Action]] = field(default_factory=dict)
    backward: list[Action] = field(default_factory=list)
    order: list[int] = field(default_factory=list)


class _Pass:
    """One forward and its backward."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.follows: _Learned | None = None
        self.deviated = False
        self.calls: list[Call] = []
        self.seconds: list[float] = []
        self.workspace: list[int] = []
        self.backward_workspace: dict[int, int] = {}
        self.next_action = 0
        self.went_back = False


class Recompute:
    """Train within a budget: ``with umem.chainer.Recompute("12GiB"): ...``.

    Args:
        budget: bytes in total that a step may take (parameters, gradients, optimizer state,
            inputs, saved arrays and workspace), as an int or text; ``"60%"`` of what keeping
            everything takes; ``"min"``, the least that can be done.
        method: a method of `umem.planner.plan`.

    Gradients are those of a plain run. Backward takes functions in the exact reverse of the order
    in which they were called, so sums of three and more gradients may be taken in another order.
    A pass whose graph is not the planned one keeps everything from where it differs.

    Raises:
        SizeError: on making it: not a budget.
        BudgetError: in the first forward that would follow a plan: nothing fits; names the least
            that does. Nothing was dropped.

    Thread-safety: for one thread. Never run on a GPU yet.
    """

    def __init__(self, budget: int | str, method: Method = "auto") -> None:
        self._budget = _check_budget(budget)
        self._method: Method = method
        self._learned: list[_Learned] = []
        self._pass: _Pass | None = None
        self._rank = 0
        self._inside = False
        self._traces = False
        self._restores: list[Callable[[], None]] = []

    def __enter__(self) -> Recompute:
        if self._restores:
            raise StateError("this Recompute is entered already")
        self._wrap(function_node.FunctionNode, "apply", self._apply)
        self._wrap(_backprop_utils, "backprop_step", self._backprop_step)
        self._wrap(_backprop, "_backprop_to_all", self._backprop_to_all)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._restores:
            self._restores.pop()()
        self._stop_tracing()
        now, self._pass = self._pass, None
        if now is not None and kind is None and not now.went_back:
            for call in now.calls:  # the graph may still be used
                if call.has_graph:
                    call.ensure()

    def report(self) -> str:
        """What was planned for each graph that was seen, for a person."""
        lines = [_describe(learned) for learned in self._learned]
        return "\n".join(lines) or "no graph was seen yet"

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._restores.append(lambda: setattr(owner, name, original))

    # -- forward ---------------------------------------------------------------------------

    def _apply(self, original: Any) -> Any:
        def apply(func: Any, inputs: Any) -> Any:
            if self._inside or not configuration.config.enable_backprop:
                return original(func, inputs)
            now = self._current()
            before = {id(value) for value in func.__dict__.values()}
            self._inside = True
            if self._traces:
                tracemalloc.reset_peak()
            start = time.perf_counter()
            try:
                outputs = original(func, inputs)
            finally:
                self._inside = False
            if func.inputs is not None:
                now.seconds.append(time.perf_counter() - start)
                now.workspace.append(self._workspace())
                self._called(now, func, inputs, outputs, before)
            return outputs

        return apply

    def _workspace(self) -> int:
        if not self._traces:
            return 0
        left, peak = tracemalloc.get_traced_memory()
        return max(0, peak - left)

    def _current(self) -> _Pass:
        """The pass that is going forward; a new one after a backward."""
        if self._pass is None or self._pass.went_back:
            if self._pass is not None:
                self._rank = self._pass.base + 2 * self._longest(self._pass) + 1
            for learned in self._learned:
                if learned.measured and learned.plan is None:
                    self._make_plan(learned)
            self._pass = _Pass(self._rank)
            if any(not learned.measured for learned in self._learned):
                self._start_tracing()
        return self._pass

    def _longest(self, now: _Pass) -> int:
        return max([len(now.calls), *(len(learned.order) for learned in self._learned)])

    def _called(
        self, now: _Pass, func: Any, inputs: Any, outputs: Any, before: set[int]
    ) -> None:
        call = Call(len(now.calls), func, inputs, outputs, before)
        func._umem_call = call
        now.calls.append(call)
        learned = self._follow(now, call)
        place = self._longest(now) + call.index if learned is None else learned.order[call.index]
        func.rank = now.base + place
        for _, node in call.nodes():
            node._rank = func.rank + 1
        if learned is None:
            call.values = None if not now.deviated else call.values
            return
        for action in learned.after_forward.get(call.index, ()):
            _carry_out(action, now.calls)

    def _follow(self, now: _Pass, call: Call) -> _Learned | None:
        """The plan that the pass follows, as long as it is the planned graph."""
        if call.index == 0:
            for learned in reversed(self._learned):
                if learned.plan is not None and learned.signatures[0] == call.signature:
                    now.follows = learned
                    break
        if now.follows is None or now.deviated:
            return None
        signatures = now.follows.signatures
        if call.index >= len(signatures) or signatures[call.index] != call.signature:
            now.deviated = True
            return None
        return now.follows

    # -- backward --------------------------------------------------------------------------

    def _backprop_to_all(self, original: Any) -> Any:
        def backprop_to_all(*args: Any, **kwargs: Any) -> None:
            now = self._pass
            if now is not None and not now.went_back:
                self._settle(now)
            original(*args, **kwargs)
            if now is not None:
                self._finish(now)

        return backprop_to_all

    def _backprop_step(self, original: Any) -> Any:
        def backprop_step(func: Any, *args: Any) -> None:
            call = getattr(func, "_umem_call", None)
            now = self._pass
            if call is None or now is None or self._inside:
                original(func, *args)
                return
            if now.follows is not None and call in now.calls[call.index : call.index + 1]:
                self._before_backward(now, call)
            self._inside = True
            if self._traces:
                tracemalloc.reset_peak()
            try:
                original(func, *args)
            finally:
                self._inside = False
            now.backward_workspace[call.index] = self._workspace()

        return backprop_step

    def _before_backward(self, now: _Pass, call: Call) -> None:
        """Carry out what the plan has before this step, and make sure of what it reads."""
        learned = now.follows
        assert learned is not None
        if not now.deviated:
            stop = now.next_action
            while stop < len(learned.backward) and not (
                learned.backward[stop].kind == "backward"
                and _number(learned.backward[stop]) == call.index
            ):
                stop += 1
            if stop < len(learned.backward):
                for action in learned.backward[now.next_action : stop]:
                    _carry_out(action, now.calls)
                now.next_action = stop + 1
        call.ensure()

    def _settle(self, now: _Pass) -> None:
        """Forward is over: a graph that was not seen before is learned."""
        if now.follows is not None or not now.calls:
            return
        signatures = [call.signature for call in now.calls]
        for learned in self._learned:
            if learned.signatures == signatures:
                return
        self._learned.append(_learn(now))

    def _finish(self, now: _Pass) -> None:
        now.went_back = True
        if now.follows is not None:
            if not now.deviated:
                for action in now.follows.backward[now.next_action :]:
                    _carry_out(action, now.calls)
                now.next_action = len(now.follows.backward)
            return
        if self._traces:
            signatures = [call.signature for call in now.calls]
            for learned in self._learned:
                if learned.signatures == signatures and not learned.measured:
                    _measure(learned, now)
            self._stop_tracing()

    # -- planning --------------------------------------------------------------------------

    def _make_plan(self, learned: _Learned) -> None:
        graph = Graph(learned.nodes, learned.edges)
        whole = make_plan(graph, None, "store_all", model="saved")
        learned.keep_all_bytes = learned.constant_bytes + whole.peak_bytes
        budget = self._budget
        if isinstance(budget, float):
            budget = round(budget * learned.keep_all_bytes)
        room = None if budget is None else budget - learned.constant_bytes
        try:
            if room is not None and room <= 0:
                raise BudgetError("the parameters alone need more")
            learned.plan = make_plan(graph, room, self._method, model="saved")
        except BudgetError as error:
            least = learned.constant_bytes + make_plan(graph, model="saved").peak_bytes
            raise BudgetError(
                f"a budget of {format_bytes(budget)} is too small; the least for this graph is "
                f"{format_bytes(least)}, of which {format_bytes(learned.constant_bytes)} are "
                f"parameters, gradients, state and inputs ({error})"
            ) from None
        position = {name: place for place, name in enumerate(sum(learned.plan.blocks, ()))}
        learned.order = [position[node.name] for node in learned.nodes]
        _sort_actions(learned, list(actions(graph, learned.plan)))

    def _start_tracing(self) -> None:
        if not self._traces and not tracemalloc.is_tracing():
            tracemalloc.start(1)
            self._traces = True

    def _stop_tracing(self) -> None:
        if self._traces:
            tracemalloc.stop()
            self._traces = False


def _check_budget(budget: int | str) -> int | float | None:
    """Bytes, a share of keeping everything, or None for the least."""
    if budget == "min":
        return None
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise SizeError(f'a share of keeping everything is above "0%" and at most "100%"; '
                            f"got {budget!r}")  # fmt: skip
        return share
    return parse_bytes(budget, "budget")


def _learn(now: _Pass) -> _Learned:
    """What a recorded pass says of its graph."""
    names = [f"{call.signature.label}#{call.index}" for call in now.calls]
    memory: dict[int, str] = {}
    nodes, edges = [], []
    for call, name, seconds in zip(now.calls, names, now.seconds, strict=True):
        users = [names[s.call.index] for s in call.sources if s.call is not None]
        edges += [(user, name) for user in dict.fromkeys(users)]
        outputs = call.recorded
        base = next((memory[key] for key, _ in outputs if key in memory), None)
        for key, _ in outputs:
            memory.setdefault(key, name)
        alias = base if base in users else None
        label = call.signature.label
        nodes.append(
            Node(
                name=name,
                nbytes=sum(dict(outputs).values()),
                cost=seconds,
                alias_of=alias,
                recomputable=label not in NOT_AGAIN,
                stash_bytes=0 if alias else call.stash_bytes(),
                needs=tuple(dict.fromkeys(names[c.index] for c in call.needs())),
            )
        )
    signatures = [call.signature for call in now.calls]
    return _Learned(signatures, nodes, edges, _constant_bytes(now.calls), sum(now.seconds))


def _constant_bytes(calls: list[Call]) -> int:
    """Parameters with their gradients and state, inputs, and what was drawn."""
    total, seen = 0, set()
    for call in calls:
        total += call.drawn_bytes()
        for node, source in zip(call.func.inputs, call.sources, strict=True):
            if source.call is not None or source.array is None:
                continue
            key, nbytes = root_bytes(source.array)
            if key in seen:
                continue
            seen.add(key)
            held = node.get_variable_or_none()
            rule = getattr(held, "update_rule", None)
            state = (getattr(rule, "state", None) or {}).values()
            total += nbytes * (2 if isinstance(held, chainer.Parameter) else 1)
            total += sum(getattr(value, "nbytes", 0) for value in state)
    return total


def _measure(learned: _Learned, now: _Pass) -> None:
    """Add the workspace of a calibration pass, and the state that updates have made since."""
    learned.nodes = [
        replace(
            node,
            workspace_bytes=now.workspace[index],
            backward_workspace_bytes=now.backward_workspace.get(index, 0),
        )
        for index, node in enumerate(learned.nodes)
    ]
    learned.constant_bytes = max(learned.constant_bytes, _constant_bytes(now.calls))
    learned.measured = True


def _sort_actions(learned: _Learned, stream: list[Action]) -> None:
    """Which actions follow which call of forward, and what is left for backward."""
    last = -1
    start = next(
        (i for i, action in enumerate(stream) if action.kind in ("recompute", "backward")),
        len(stream),
    )
    for action in stream[:start]:
        if action.kind == "forward":
            last = _number(action)
        else:
            learned.after_forward.setdefault(last, []).append(action)
    learned.backward = stream[start:]


def _number(action: Action) -> int:
    return int(action.node.rpartition("#")[2])


def _carry_out(action: Action, calls: list[Call]) -> None:
    call = calls[_number(action)]
    if action.kind == "drop":
        call.drop()
    elif action.kind == "drop_stash":
        call.drop_stash()
    elif action.kind == "recompute" and call.has_graph:
        call.make_again()


def _describe(learned: _Learned) -> str:
    if learned.plan is None:
        return f"a graph of {len(learned.nodes)} calls: not planned yet"
    again = sum(len(block) for block in learned.plan.recomputed)
    peak = learned.constant_bytes + learned.plan.peak_bytes
    share = learned.plan.overhead / learned.seconds if learned.seconds else 0.0
    return (
        f"a graph of {len(learned.nodes)} calls: predicted peak {format_bytes(peak)} instead of "
        f"{format_bytes(learned.keep_all_bytes)}; {again} calls run again, {share:.0%} of the "
        f"forward pass ({learned.plan.method})"
    )
