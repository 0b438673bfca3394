"""Subscriber to Chainer's events, which applies the policy of the current pass to them.

The runner is the one subscriber of recomputation. It finds the pass of an event and tells its
policy as much as that needs. It protects policies from graphs whose backward runs elsewhere: in
another thread, inside another backward, or into an earlier pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import chainer
from chainer import configuration
from chainer.serializer import Deserializer

from umem.chainer.function_facts import owner_of
from umem.chainer.parameter_updates import update_in_chunks
from umem.chainer.recompute.facts import Before, Timed, look, wait_for
from umem.chainer.recompute.observing import check_tape
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.tape import STATISTICS, Call
from umem.chainer.recompute.training import ANOTHER_ARRAY, INTO_EARLIER, IT_IS_CUT, Training
from umem.chainer.recompute.whole_graph import bring, bring_one, check, functions, roots_of
from umem.chainer.step_state import restore_attributes
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.devices import work_seconds
from umem.planner import DRAWS

TWICE = "it is differentiated twice"


class PassRunner(Subscriber):
    """Runs the passes of a training on Chainer's tape, for the thread that starts it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._inside = False
        self._alone = False  # Chainer runs a backward alone
        self._stepping: Call | None = None
        self._depth = 0
        self._earlier = True
        self._thread = 0
        self._own_seconds = 0.0  # of the current pass: all but Chainer's own work

    def start(self) -> None:
        """Subscribe to the events of the calling thread.

        Raises:
            StateError, FileError: the offload target cannot be opened; nothing is subscribed.
        """
        self._thread = threading.get_ident()
        if self._training.offload is not None:
            self._training.offload.start()
        subscribe(self)
        self._training.graphs.links.start()

    def stop(self) -> None:
        """Unsubscribe, and prepare live graphs for a backward outside of the block."""
        self._training.graphs.links.stop()
        unsubscribe(self)
        self._inside = self._alone = False
        self._training.leave()

    # -- forward ---------------------------------------------------------------------------

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Apply a function, and tell the policy of its pass as much about it as that needs."""
        training = self._training
        if self._inside or self._alone or threading.get_ident() != self._thread:
            return proceed(func, inputs)
        now = training.going_on
        if now is None:
            if not configuration.config.enable_backprop:
                return proceed(func, inputs)
            now = training.begin(func, inputs)
            if now is not None:
                self._own_seconds = 0.0
        if now is not None and not now.rule.applies:
            if not configuration.config.enable_backprop:  # for example, a sum of gradients
                return self._retry_after_oom(now, func, inputs, partial(proceed, func, inputs))
            return self._observe(now, proceed, func, inputs)
        self._inside = True
        try:
            if now is None:
                return proceed(func, inputs)
            return self._retry_after_oom(
                now, func, inputs, partial(now.rule.apply, now, proceed, func, inputs)
            )
        finally:
            self._inside = False

    def _retry_after_oom(self, now: Pass, func: Any, inputs: Any, run: Callable[[], Any]) -> Any:
        """Run a function; if the GPU's memory runs out, make room, and run it from its old state.

        The state of CuPy's random numbers cannot be restored, so a function that draws does not run
        again: room is made before it, for three times its largest input.
        """
        if not self._training.graphs.gaps.are_expected:
            return run()
        if now.rule.is_alone:
            return now.retry_after_oom(run, why_once="a plain step was expected to fit")
        owner = owner_of(func)
        if type(owner).__name__ in DRAWS:
            with contextlib.suppress(MemoryError):  # it may still run
                now.retry_after_oom(partial(_could_allocate, inputs))
            return now.retry_after_oom(
                run, why_once=f"{func.label!r} may have drawn random numbers"
            )
        state = dict(vars(owner))
        arrays = [getattr(owner, name, None) for name in STATISTICS]
        copies = [(array, array.copy()) for array in arrays if array is not None]

        def undo() -> None:
            restore_attributes(owner, state)
            for array, copy in copies:
                array[...] = copy

        return now.retry_after_oom(run, undo=undo)

    def _observe(self, now: Pass, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Apply a function, and add a `Call` with its time, workspace and state to the pass."""
        training = self._training
        begun = work_seconds()
        now.catch_up()
        if now.examines_next:  # true at the first call of each pass
            check_tape(func, inputs)
            before = look(func)
        else:
            before = Before(dict(vars(owner_of(func))), [], None)
        self._inside = True
        training.before_call(owner_of(func))
        learns = now.learns
        if learns:
            wait_for(inputs)
        run = Timed(
            partial(self._retry_after_oom, now, func, inputs, partial(proceed, func, inputs)),
            inputs if learns else None,
            by_model=learns and training.offload is not None,
        )
        workspace = 0
        try:
            if training.peaks.measures("workspace"):
                outputs, workspace = training.experience.forward(func, inputs, run)
            else:
                outputs = run()
        finally:
            self._inside = False
        if func.inputs is not None:
            now.add(func, inputs, outputs, before, run.cost, workspace)
            if now.learns and not learns:
                training.left_plan(now)
        self._own_seconds += work_seconds() - begun - run.seconds
        return outputs

    # -- backward --------------------------------------------------------------------------

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Run a backward by the policy of its pass, or without one if it suits none.

        Raises:
            RecomputeError: it needs arrays that cannot be recomputed. Nothing has changed.
        """
        nodes = [node for node, _ in (args[0] if args else kwargs["outputs"])]
        if self._is_elsewhere():
            self._bring_all(nodes)
            proceed(*args, **kwargs)
            return
        now, roots = self._training.now, roots_of(nodes)
        alone = now is not None and not roots and now.rule.may_go_alone(now)
        self._earlier = not alone or self._training.alive.has_any()
        if self._earlier and (now is None or alone or now.is_unusual):
            check(functions(nodes))
        if now is None or (now.rule.is_alone and not alone):
            if now is None:
                self._training.keeps(INTO_EARLIER)
            proceed(*args, **kwargs)
            return
        double = configuration.config.enable_backprop
        whole, self._depth = False, 1
        try:
            self._inside = True  # functions may be recomputed
            self._training.end_forward(now, TWICE if double else None, roots, nodes)
            self._inside, self._alone = False, alone
            proceed(*args, **kwargs)
            whole = True
        finally:
            self._inside = self._alone = False
            self._depth = 0
            self._training.finish(now, whole, self._own_seconds)

    def _is_elsewhere(self) -> bool:
        """Tell whether a backward begins in another thread, or inside of another backward."""
        here = threading.get_ident() == self._thread
        return not here or self._inside or self._depth > 0

    def _bring_all(self, nodes: Iterable[Any]) -> None:
        """Restore the whole graph before some nodes, for a backward that follows no plan.

        Raises:
            RecomputeError: some of its arrays cannot be recomputed. Nothing has changed.
        """
        here = threading.get_ident() == self._thread
        now = self._training.now
        if here and now is not None and self._stepping is not None:
            now.has_nested = True
        found = functions(nodes)
        check(found)
        inside, self._inside = self._inside, self._inside or here
        try:
            numbers = bring(found)
        finally:
            if here:
                self._inside = inside
        self._training.elsewhere(numbers)

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Update a parameter, after copying it for graphs that have read it; record the memory."""
        if rule.enabled:
            self._before_change(parameter.array)
        if threading.get_ident() == self._thread:
            self._training.graphs.links.stop()
        run = partial(proceed, rule, parameter)
        if self._records_updates:
            self._training.graphs.optimizers.update(run, parameter)
        else:
            run()

    @property
    def _records_updates(self) -> bool:
        """True in the block's thread, outside of a measured pass, whose peak recording resets."""
        return threading.get_ident() == self._thread and self._training.peaks.what is None

    def update_core(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Run an update's computation in chunks; its workspace is one chunk's."""
        if threading.get_ident() == self._thread:
            optimizers = self._training.graphs.optimizers
            optimizers.compute(partial(update_in_chunks, proceed, rule, parameter), parameter)
        else:
            update_in_chunks(proceed, rule, parameter)

    def call_hook(self, proceed: Proceed, method: Any, hook: Any) -> None:
        """Call an optimizer's hook, and record its workspace."""
        run = partial(proceed, method, hook)
        if self._records_updates:
            self._training.graphs.optimizers.call_hook(run, hook)
        else:
            run()

    def serialize(self, proceed: Proceed, owner: Any, serializer: Any) -> None:
        """Load or save a link, after copying for graphs the arrays that a loader overwrites."""
        if isinstance(serializer, Deserializer):
            for name in owner._params:
                self._before_change(getattr(owner, name).array)
            for name in owner._persistent:
                self._before_change(getattr(owner, name))
        proceed(owner, serializer)

    def copydata(self, proceed: Proceed, target: Any, source: Any) -> None:
        """Copy data into a parameter, after copying the old data for graphs that have read it."""
        self._before_change(target.array)
        proceed(target, source)

    def _before_change(self, array: Any) -> None:
        """Handle an in-place change of an array, before it, as a graph may have read the array."""
        if hasattr(array, "dtype"):
            self._training.before_update(array, here=threading.get_ident() == self._thread)

    def unchain(self, proceed: Proceed, func: Any) -> None:
        """Cut the graph behind a function, after recomputing arrays that need the whole graph."""
        self._before_cut(func)
        proceed(func)

    def unchain_variable(self, proceed: Proceed, y: Any) -> None:
        """Cut the graph behind a variable or its node, after recomputing as `unchain` does."""
        self._before_cut(y.creator_node, getattr(y, "node", y))
        proceed(y)

    def set_array(self, proceed: Proceed, y: Any, *args: Any, **kwargs: Any) -> None:
        """Give a variable another array, after recomputing as `unchain` does."""
        self._before_cut(y.creator_node, why=ANOTHER_ARRAY)
        proceed(y, *args, **kwargs)

    def _before_cut(self, func: Any, node: Any = None, *, why: str = IT_IS_CUT) -> None:
        """Prepare for a cut behind a function, or behind one of its outputs: ``node``.

        If the function belongs to the current pass, the pass is refused with the reason ``why``.
        """
        call = getattr(func, "_umem_call", None)
        if call is None:
            now = self._training.now
            if now is not None and now.phase != "over" and now.rule.has_run(func):
                now.refuse(why)
            return
        if threading.get_ident() != self._thread:
            self._training.make_whole(call.number)
            self._training.elsewhere({call.number})
            return
        if self._inside:
            return
        self._inside = True
        try:
            self._training.before_cut(call, func, node, why=why)
        finally:
            self._inside = False

    def grad(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """Run ``chainer.grad``; the current pass then follows no policy.

        Raises:
            RecomputeError: it needs arrays that cannot be recomputed. Nothing has changed.
        """
        outputs = args[0] if args else kwargs["outputs"]
        nodes = [y.node for y in outputs]
        if self._is_elsewhere():
            self._bring_all(nodes)
        else:
            check(functions(nodes))
            self._earlier = True
            now = self._training.now
            if now is not None and not now.rule.is_alone:
                self._training.end_forward(now, "chainer.grad goes through it")
        return proceed(*args, **kwargs)

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Run a step of backward: restore the arrays that it reads, then drop unused ones."""
        is_plain = self._alone and not self._earlier
        if is_plain or self._inside or threading.get_ident() != self._thread:
            proceed(func, *args)
            return
        now = self._training.now
        if now is not None and now.rule.is_alone:
            now = None
        call = getattr(func, "_umem_call", None)
        if now is None and call is None and not self._earlier:
            proceed(func, *args)
            return
        self._inside = True
        self._stepping = call
        try:
            if now is None or call is None or call.reads is not now.reads or not now.calls:
                if now is not None:
                    now.refuse(INTO_EARLIER)
                    if call is None or now.phase != "over":
                        self._training.keeps(INTO_EARLIER)
                bring_one(func)
                proceed(func, *args)
                return
            begun = work_seconds()
            now.before(call)
            training, workspace = self._training, 0
            learns = now.learns and training.offload is not None
            run = Timed(
                partial(now.step, proceed, call, func, args),
                [x for x in args[1] if x is not None] if learns else None,
                by_model=learns,
            )
            if training.peaks.measures("workspace"):
                workspace = training.experience.backward(func, args, run)
            else:
                run()
            now.after(call, workspace, run.cost)
            self._own_seconds += work_seconds() - begun - run.seconds
        finally:
            self._inside = False
            self._stepping = None


def _could_allocate(inputs: Any) -> None:
    """Allocate three arrays as large as the largest input, and free them.

    Raises:
        OutOfMemoryError: CuPy's; they do not fit.
    """
    largest = max([getattr(x, "array", x) for x in inputs], key=lambda x: x.nbytes)
    xp = chainer.backend.get_array_module(largest)
    [xp.empty_like(largest) for _ in range(3)]
