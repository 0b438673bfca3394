"""One forward and the backward after it: its state, and the one place that carries actions out.

The state of a pass is three fields: its ``phase``, its ``rule`` (a policy) and its ``integrity``.
docs/design.md has the table of their transitions. All other attributes record observations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import chainer

from umem.chainer.forward_state import Configurations, ReadArrays
from umem.chainer.recompute.evict import FROM_EARLIER, Evict, leaves_of, trace
from umem.chainer.recompute.facts import Before, Observed, observe
from umem.chainer.recompute.gradients import Contended, GradientSums, contended, plain_order
from umem.chainer.recompute.late_plan import LatePlan
from umem.chainer.recompute.observing import gradient_bytes
from umem.chainer.recompute.pass_policies import ENDED_EARLY, HIGH, FollowPlan, PassPolicy
from umem.chainer.recompute.pressure import Room
from umem.chainer.recompute.seen import Roots, SeenGraph, TapeAction, readers_of
from umem.chainer.recompute.tape import Call, Leaves
from umem.chainer.saved.tiers.tier import Tier
from umem.errors import is_cupys_out_of_memory
from umem.trace.recording import MeteredPools

Phase = Literal["forward", "backward", "over"]
"""Over: a backward of the pass has ended; another one may still follow."""
Integrity = Literal["intact", "refused", "restored"]
"""Refused: backward follows no policy, and everything is kept from then on.

Restored: all arrays of the graph were made available as well, because the graph is about to be cut.
"""
ATTEMPTS = 8
"""At most this often arrays are dropped for one call: each time half of the rest, so that less than
a hundredth is left after the last."""


class Pass:
    """One forward and its backward.

    Args:
        number: the pass's number.
        rule: its policy.
        debug: whether to keep checksums.
        on_second: called with the calls' signatures when a call is recomputed after an update.
        known: the graphs that were seen, whose plans it may follow.
        tier: the offload target of plans.
        pools: the pools of its arrays' GPU; None on the host.

    Attributes:
        phase, rule, integrity: its state.
        why: the first reason why it is refused; None if it is not.
        calls: in the order of forward; none while its policy needs none.
        observed, workspace: by call, the facts of its forward and the bytes of its workspace.
        old_gradients: by id of a parameter, the bytes of its gradient during forward.
        backward_workspace, backward_seconds: of the steps of its first backward.
        popped: by call, its position in this backward.
        plain_order: by call, its position in Chainer's own backward, if this one has another order;
            None if it has the same.
        has_nested: whether the backward of a call contains another backward.
        has_run_out: whether a GPU's memory has run out in it.
        trail: a hash that two passes of one graph share, if they follow no plan.
        trails: the hash after each call, if calls are observed.
        roots, signatures: where backward began, and the signatures of the calls up to then.
    """

    def __init__(
        self,
        number: int,
        rule: PassPolicy,
        debug: bool,
        on_second: Callable[[Sequence[Any]], None],
        known: Sequence[SeenGraph] = (),
        tier: Tier | None = None,
        pools: MeteredPools | None = None,
    ) -> None:
        self.number = number
        self.phase: Phase = "forward"
        self.rule = rule
        self.integrity: Integrity = "intact"
        self.why: str | None = None
        self._known, self._debug, self._tier = known, debug, tier
        self._configurations = Configurations()
        self.calls: list[Call] = []
        self.observed: list[Observed] = []
        self.workspace: list[int] = []
        self.old_gradients: dict[int, int] = {}
        self.backward_workspace: dict[int, int] = {}
        self.backward_seconds: dict[int, float] = {}
        self.popped: dict[int, int] = {}
        self.plain_order: Mapping[int, int] | None = None
        self.has_nested = self.has_run_out = False
        self.trail = 0
        self.trails: list[int] = []
        self._pools = pools
        self.roots: Roots = ()
        self.signatures = signatures = list[Any]()
        self.reads = ReadArrays(lambda: on_second(signatures))  # which must not hold the pass
        self._leaves: Leaves = {}
        self._sums: GradientSums | None = None
        if not rule.learns:
            self.reads.stop_copying()

    @property
    def learns(self) -> bool:
        """True if its calls are observed."""
        return self.rule.learns

    @property
    def examines_next(self) -> bool:
        """True if the next call should be examined: without a plan, or where a pass has left it."""
        rule = self.rule
        return not isinstance(rule, FollowPlan) or len(self.calls) in rule.seen.forks

    @property
    def continues(self) -> bool:
        """True if the next call belongs to it: no backward has ended, and part of it is alive."""
        if self.phase == "over":
            return False
        if self.calls and (self.calls[-1].has_graph or any(c.has_graph for c in self.calls)):
            return True
        return self.rule.has_graph()

    @property
    def is_unusual(self) -> bool:
        """True if backward may read missing arrays that are not planned to be recomputed."""
        if self.phase == "over" or self.integrity != "intact" or self.reads.is_changed:
            return True
        return self.rule.is_unusual(self.calls)

    # -- integrity -------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """Keep everything from now on; the first reason stays."""
        if self.integrity == "intact":
            self.integrity, self.why = "refused", why

    def keep_everything(self, why: str) -> None:
        """Keep everything from the first call on, and copy no parameters."""
        self.refuse(why)
        self.reads.stop_copying()

    def restore(self) -> bool:
        """Mark all its arrays as restored, which the caller does; False if they were already."""
        first, self.integrity = self.integrity != "restored", "restored"
        return first

    # -- carrying out ----------------------------------------------------------------------

    def carry_out(self, actions: Iterable[TapeAction]) -> None:
        """Carry out actions on its calls, one after another."""
        for action in actions:
            if action.kind == "recompute":
                call = self.calls[action.call]
                self.retry_after_oom(partial(action.carry_out, self.calls, self._tier), call.near)
            elif action.kind == "pack":
                with contextlib.suppress(MemoryError):  # then the mask is not packed
                    action.carry_out(self.calls, self._tier)
            else:
                action.carry_out(self.calls, self._tier)

    def catch_up(self) -> None:
        """Carry out the policy's actions that follow the last call."""
        self.carry_out(self.rule.before_forward())

    def retry_after_oom(
        self,
        run: Callable[[], Any],
        busy: Callable[[], Iterable[Call]] = tuple,
        undo: Callable[[], None] = lambda: None,
        why_once: str | None = None,
    ) -> Any:
        """Run something that allocates; if a GPU's memory runs out, drop arrays and run it again.

        Args:
            run: the function to call; its result is returned.
            busy: returns the calls whose arrays it reads, which are not dropped.
            undo: called before it runs again.
            why_once: the reason why it must not run again; None if it may.

        Raises:
            CudaOutOfMemoryError: nothing more may be dropped; lists the attempts. Work that has run
                is not undone.
        """
        attempt = 0
        while True:
            try:
                return run()
            except MemoryError as error:
                if not is_cupys_out_of_memory(error):
                    raise
                self.has_run_out = True
                may_go_on = why_once is None and attempt < ATTEMPTS
                if not may_go_on or not self._make_room(busy, attempt):
                    raise self._out_of_memory(error, attempt, why_once) from error
            undo()
            attempt += 1

    def _make_room(self, busy: Callable[[], Iterable[Call]], attempt: int) -> bool:
        """Drop arrays of calls that are not busy; tell whether to try again.

        The first attempt is made even if nothing can be dropped, since it merges free memory.
        """
        can_drop = self.integrity == "intact"
        dropped = can_drop and self.rule.make_room(self, {call.index for call in busy()})
        if self._pools is not None:
            self._pools.give_back()
            self._pools.reserve(self._pools.spare())
        return dropped or not attempt

    def _out_of_memory(
        self, error: MemoryError, attempts: int, why_once: str | None
    ) -> MemoryError:
        """Return the error for memory that has run out, after some attempts at making room."""
        from umem.devices.cuda import CudaOutOfMemoryError  # imports CuPy

        if why_once is not None:
            tried = f"Recompute cannot try again: {why_once}"
        elif self.integrity != "intact":
            tried = f"Recompute drops nothing in this pass: {self.why}"
        else:
            times = "once" if attempts == 1 else f"{attempts} times"
            tried = f"Recompute has dropped arrays {times} for it, and that was not enough"
        return CudaOutOfMemoryError(f"{str(error).rstrip('.')}. {tried}.")

    # -- forward ---------------------------------------------------------------------------

    def add(
        self, func: Any, inputs: Any, outputs: Any, before: Before, seconds: float, workspace: int
    ) -> None:
        """Make a `Call` of a function that was applied, and apply the policy to it.

        Only for policies that want calls.

        Args:
            func, inputs, outputs: the function's node, and its arguments and results.
            before: the state before the forward.
            seconds, workspace: of the forward.
        """
        arrays = [x._data[0] if isinstance(x, chainer.Variable) else x for x in inputs]
        call = Call(
            self.number, len(self.calls), func, arrays, [y._data[0] for y in outputs],
            self._leaves, self.reads, self._configurations.now(), self._debug,
        )  # fmt: skip
        func._umem_call = call  # found through Chainer's graph, which holds the call
        self.calls.append(call)
        self.workspace.append(workspace)
        if call.from_elsewhere:
            self.refuse(FROM_EARLIER)
        self._choose_plan(call)
        rule = self.rule
        if isinstance(rule, FollowPlan):
            rule.after_forward(call)
            return
        assert isinstance(rule, Evict)
        trace(self, func, sum(y.nbytes for y in call.values or ()), leaves_of(inputs))
        self.trails.append(self.trail)
        observed = observe(call, func, inputs, before, seconds, workspace)
        self.observed.append(observed)
        call.learn(observed.again, observed.stash)
        for x in inputs:
            if isinstance(x, chainer.Parameter) and gradient_bytes(x):
                self.old_gradients[id(x)] = gradient_bytes(x)
        if rule.evicts and self.integrity == "intact":
            rule.observed(call, observed, (arrays, call.values or ()))
        else:
            call.release_values()

    def _choose_plan(self, call: Call) -> None:
        """Follow a plan from the first call on; at a call that differs, another one or none."""
        rule = self.rule
        if isinstance(rule, FollowPlan):
            if self.phase != "forward":  # a backward has begun, and forward continues
                self._observe_from_now_on(rule.seen)
            elif not rule.seen.tape.has(call.index, call.signature):
                rule.seen.forks.add(call.index)
                so_far = [call.signature for call in self.calls]
                if not self._follow_another(lambda tape: tape.begins_with(so_far), self.calls[:-1]):
                    self._observe_from_now_on(rule.seen)
            else:
                call.signature = rule.seen.tape.signatures[call.index]  # shared: saves memory
        elif call.index == 0 and self._follow_another(lambda tape: tape.has(0, call.signature), ()):
            self.reads.stop_copying()

    def _follow_another(self, fits: Callable[[Any], bool], calls: Sequence[Call]) -> bool:
        """Follow the newest fitting plan of another known graph; tell whether there is one.

        Args:
            fits: whether a graph's tape matches the pass so far.
            calls: the calls that have run; the plan's actions are carried out on them now.
        """
        for seen in reversed(self._known):
            if seen.plan is not None and seen is not self.rule.seen and fits(seen.tape):
                self.rule = rule = FollowPlan(seen, seen.plan)
                for call in calls:
                    rule.after_forward(call)
                    self.catch_up()
                return True
        return False

    def _observe_from_now_on(self, old: SeenGraph) -> None:
        """Leave the plan of a graph: observe, and keep everything, from the last call on."""
        self._keep_the_rest()
        self.reads.copy_from_now_on()
        self.observed = list(old.tape.observed[: len(self.calls) - 1])
        self.trails = list(old.tape.trails[: len(self.calls) - 1])
        self.trail = self.trails[-1] if self.trails else 0
        self.use_plain_ranks()
        for call in self.calls[:-1]:
            call.release_values()

    def _keep_the_rest(self) -> None:
        """Leave the plan: observe calls from now on, and evict nothing."""
        self.rule = rule = Evict(Room(None, (), 0), learns=True)
        rule.evicts = False

    # -- backward --------------------------------------------------------------------------

    def end_forward(self, refuse: str | None, roots: Roots = (), nodes: Sequence[Any] = ()) -> None:
        """Begin backward.

        Args:
            refuse: the reason why it may follow no policy; None if it may.
            roots, nodes: where it begins, as calls and outputs, and as variable nodes.
        """
        self.phase, self.roots = "backward", roots
        rule = self.rule
        if not rule.applies:  # its graph is found again by them
            self.signatures += [call.signature for call in self.calls]
        self.catch_up()
        if isinstance(rule, FollowPlan) and len(self.calls) < len(rule.seen.tape.signatures):
            self._end_early()
        elif not rule.has_ended(self):
            self.refuse(ENDED_EARLY)
        if refuse is not None:
            self.refuse(refuse)
            self.use_plain_ranks()
            return
        rule = self.rule
        rule.begin_backward(self.calls)
        if isinstance(rule, FollowPlan) and not rule.seen.facts.keeps_order:
            self._sum_in_order(rule.seen.facts.order, rule.plan.contended)
        elif rule.learns and rule.evicts and self.integrity == "intact":
            self._go_in_reverse(nodes)

    def _go_in_reverse(self, nodes: Sequence[Any]) -> None:
        """Run backward in the reverse order of forward, if Chainer's own order is known.

        Chainer takes functions by their depth. Functions that read an input of the model, such as
        the embedding of each word, then come last, and their outputs' gradients live until then.
        """
        plain = plain_order(nodes, self.calls)
        if plain is None:
            return
        self.plain_order = plain
        for call in self.calls:
            call.set_rank(HIGH + 2 * call.index)
        sums = contended(readers_of(self.calls), plain, range(len(self.calls)))
        self._sum_in_order(plain, sums)

    def plan_backward(self, late: LatePlan) -> None:
        """Follow a plan from the end of forward on, in a pass that has dropped arrays by its rule.

        Brings the pass to the state of a planned forward first.
        """
        assert isinstance(self.rule, Evict)
        assert self.plain_order is not None
        planned = FollowPlan(late.seen, late.plan)
        self.carry_out(late.drops(self.calls))
        needed = late.missing(self.calls)
        self.rule.follow(planned)  # which makes room from now on: what is made again is not counted
        for call in self.calls:
            if call in needed:
                self.retry_after_oom(call.make_again, call.near)
            planned.after_forward(call)
            self.carry_out(planned.before_forward())
        self._sum_in_order(self.plain_order, late.plan.contended)

    def _sum_in_order(self, plain: Mapping[int, int], sums: Contended) -> None:
        """Make a backward in another order than Chainer's sum gradients in Chainer's order.

        Args:
            plain: by call, its position in a plain backward.
            sums: the inputs whose gradients would be added up in another order.
        """
        if sums:
            self._sums = GradientSums(plain, sums)

    def _end_early(self) -> None:
        so_far = tuple(call.signature for call in self.calls)
        if not self._follow_another(lambda tape: bool(tape.signatures == so_far), self.calls):
            self._keep_the_rest()
            self.refuse("it ended before its plan did")
            self.use_plain_ranks()

    def use_plain_ranks(self) -> None:
        """Restore Chainer's ranks, so that backward has the order of a plain one."""
        for call in self.calls:
            call.set_rank(call.plain_rank)

    def order(self) -> dict[int, int]:
        """Return the position in Chainer's own backward of each call that backward has taken."""
        if self.plain_order is None:
            return dict(self.popped)
        taken = sorted(self.popped, key=self.plain_order.__getitem__)
        return {call: place for place, call in enumerate(taken)}

    def before(self, call: Call) -> None:
        """Carry out the actions due before this step, and restore the arrays that it reads.

        A pass that is refused, restored or over only recomputes these.
        """
        if self.integrity == "intact" and self.phase == "backward":
            self.carry_out(self.rule.before_backward(call))
            self.retry_after_oom(partial(self.rule.ensure, self, call), call.near)
        else:
            call.ensure()

    def step(self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Run a step of backward, with sums of gradients as in a plain backward."""
        self.popped.setdefault(call.index, len(self.popped))
        if self._pools is None:  # copies would count as workspace, which is measured on the host
            self._step(proceed, call, func, args)
            return
        sums: dict[Any, list[Any]] = args[2]
        before = {node: list(found) for node, found in sums.items()}

        def undo() -> None:
            for node, found in sums.items():
                found[:] = before[node]

        self.retry_after_oom(partial(self._step, proceed, call, func, args), call.near, undo)

    def _step(self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Run a step of backward once."""
        run = proceed if self._sums is None else partial(self._sums.step, proceed, call.index)
        if self.integrity == "intact" and self.phase == "backward":
            self.rule.step(run, call, func, args)
        else:
            run(func, *args)

    def after(self, call: Call, workspace: int, seconds: float) -> None:
        """Record a step's workspace bytes and seconds, and carry out the drops due after it."""
        self.backward_workspace[call.index] = workspace
        if self.learns:
            self.backward_seconds[call.index] = seconds
        if self.integrity == "intact":
            self.carry_out(self.rule.after_backward(call))

    def finish(self) -> bool:
        """End a backward; tell whether it was the first."""
        self._sums = None
        first = self.phase != "over"
        if first and self.integrity == "intact":
            self.carry_out(self.rule.end(self.popped))
        self.phase = "over"
        self.use_plain_ranks()
        return first

    def release(self) -> None:
        """Release leaves and the policy's references, and the calls if backward has reached all."""
        self._leaves = {}
        self.rule.release()
        if all(call.index in self.popped or not call.has_graph for call in self.calls):
            self.calls = []
