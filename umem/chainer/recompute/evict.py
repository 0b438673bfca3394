"""The policy of a pass without a plan: it drops nothing until bytes run out, and then evicts.

As long as the pass fits, each function is recorded, and the bytes of its outputs are added up. When
they come near the budget, umem counts the bytes that are really held. If those are too many, it
makes a call of each function so far. From then on it evicts arrays before a call would exceed the
budget, in forward and in backward. Before each step of backward it rematerializes the arrays that
the step reads; afterwards it drops them for good. Backward keeps Chainer's order.

A pass of a graph whose plain step fits has no budget to evict for. It is compared with the graph by
the class of each function, and the bytes of its outputs and of its inputs from outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import chainer

from umem.chainer.forward_state import Configurations
from umem.chainer.function_facts import gives_all_gradients, owner_of
from umem.chainer.recompute.account import Arrays
from umem.chainer.recompute.facts import Experience, FunctionKind, Observed, meter_of, shape_of
from umem.chainer.recompute.pass_policies import FollowPlan, PassPolicy, PassSoFar, other_call
from umem.chainer.recompute.pressure import AHEAD, Pressure, Room
from umem.chainer.recompute.seen import SeenGraph, TapeAction
from umem.chainer.recompute.tape import Call, Leaves
from umem.chainer.saved.slots import held_array
from umem.devices import work_seconds
from umem.trace.recording import root_of

FROM_EARLIER = "it continues an earlier pass"
UNPLANNED = 0.3
"""The bytes that forward keeps if neither a budget nor a plan says it, as a factor of the geometric
mean of all bytes computed and the most of one call. The root is Kirisame et al.'s (theorem 3.1);
with this factor the first passes of four networks took 0.90 to 1.12 of blocks of sqrt(n) calls."""


class Ran(NamedTuple):
    """Record of a function that was applied: the facts that cannot be found out later.

    Attributes:
        func: a weak reference to it.
        leaves: its input arrays that no function has made; None for the others.
        config: Chainer's configuration.
        stash: attributes that forward may have set to arrays, and that were None before.
        seconds: its time.
        outputs: its outputs, if it may not be recomputed; None otherwise.
    """

    func: Any
    leaves: tuple[Any, ...]
    config: dict[str, Any]
    stash: tuple[str, ...]
    seconds: float
    outputs: tuple[Any, ...] | None = None


class Evict(PassPolicy):
    """Keeps one pass within a budget, without a plan.

    Cost: some microseconds for each function, as long as the pass fits (bench/dynamic.py).

    Args:
        room: the budget.
        learns: whether each call is observed, because its graph is being learned.
        known: graphs whose plain step fits and that the pass may repeat, the likeliest first;
            empty if no known graph is expected.
        experience: facts on functions from earlier passes.
        debug: whether calls keep checksums.
        prepare: called with a function and its inputs before it is observed.
        tell: warns the user; see `Pressure`.

    Attributes:
        is_pressed: whether the pass is followed call by call.
        evicts: False if nothing is evicted, for the rest of a pass that has left its plan.
    """

    def __init__(
        self,
        room: Room,
        *,
        learns: bool = False,
        known: Sequence[SeenGraph] = (),
        experience: Experience | None = None,
        debug: bool = False,
        prepare: Callable[[Any, Any], None] = lambda func, inputs: None,
        tell: Callable[[str, bool], None] = lambda text, thrashes: None,
    ) -> None:
        experience = experience or Experience()
        self._room, self._experience = room, experience
        self.learns, self.applies, self.evicts = learns, not learns, True
        self._most, self._is_plannable = 0, True
        self._plan: FollowPlan | None = None
        self._prepare = prepare
        self._checks = debug
        self._kinds, self._configs = experience.kinds, Configurations()
        self._known, self.seen = known, known[0] if known else None
        self._ran: list[tuple[Any, ...]] = []
        self._leaves: Leaves = {}
        self._made = self._looked = self._read = 0
        self._roots: dict[int, int] = {}
        self._pressure: Pressure | None = Pressure(room, experience, tell)
        self.is_pressed = debug or learns
        self._next_look = float("inf")
        if room.budget is not None:
            self._next_look = (room.rest_bytes - experience.rise_bytes) / 2

    def has_graph(self) -> bool:
        """Tell whether a live recorded function has no call yet."""
        ran = self._ran
        return bool(ran) and (ran[-1][0]() is not None or any(one[0]() is not None for one in ran))

    def has_run(self, func: Any) -> bool:
        """Tell whether a function is recorded and has no call yet; False if all surely fits."""
        return (
            func is not None
            and not self.is_alone
            and any(ran[0]() is func for ran in reversed(self._ran))
        )

    def is_unusual(self, calls: Sequence[Any]) -> bool:
        """Return False if the arrays that backward reads are surely alive or can be recomputed."""
        return self.learns

    @property
    def is_alone(self) -> bool:
        """True if nothing is evicted, because a plain step fits."""
        return self.seen is not None

    # -- forward ---------------------------------------------------------------------------

    def _apply_alone(self, now: PassSoFar, proceed: Any, func: Any, inputs: Any) -> Any:
        """Apply a function, and refuse the pass if the function is not the learned one."""
        outputs = proceed(func, inputs)
        if func.inputs is not None:
            made = sum([y._data[0].nbytes for y in outputs])
            trace(now, func, made, leaves_of(inputs))
            self._ran.append((weakref.ref(func),))
            if now.integrity == "intact" and not self._is_among_known(now):
                now.refuse(other_call(len(self._ran) - 1, func.label))
        return outputs

    def _is_among_known(self, now: PassSoFar, *, ends: bool = False) -> bool:
        """Tell whether a known graph begins like the pass so far, and ``ends`` there.

        The pass counts as the first that does.
        """
        count = len(self._ran)
        for seen in self._known:
            trails = seen.tape.trails
            if trails[count - 1 : count] == (now.trail,) and (not ends or len(trails) == count):
                self.seen = seen
                return True
        return False

    def has_ended(self, now: PassSoFar) -> bool:
        """Tell whether a graph that is known ends here; True if none was expected."""
        return self.seen is None or self._is_among_known(now, ends=True)

    def apply(self, now: PassSoFar, proceed: Any, func: Any, inputs: Any) -> Any:
        """Apply a function, and only record it if its class is known and the pass is not pressed.

        Written out, because each function of each pass pays for a microsecond here.
        """
        if self.seen is not None:
            return self._apply_alone(now, proceed, func, inputs)
        kind = self._kinds.get(func.__class__)
        if kind is None or self.is_pressed or not kind.is_plain:
            return self._apply_closely(now, proceed, func, inputs)
        stash = new_stash(kind, func) if kind.stash else ()
        leaves = leaves_of(inputs)
        start = work_seconds()
        outputs = proceed(func, inputs)
        seconds = work_seconds() - start
        if func.inputs is not None:
            made = 0
            for y in outputs:
                made += y._data[0].nbytes
            self._ran.append((weakref.ref(func), leaves, self._configs.now(), stash, seconds))
            trace(now, func, made, leaves)
            self._made += made
            if self._made > self._next_look:
                self._look(now)
        return outputs

    def _apply_closely(self, now: PassSoFar, proceed: Any, func: Any, inputs: Any) -> Any:
        """Apply a function whose class is not plain, or in a pressed pass, and observe it.

        In a pressed pass it makes room first; it measures the rise of memory if that is needed.
        """
        kind = self._kinds[type(owner_of(func))]
        # It may change an array that it holds, as a normalisation does with running statistics.
        # A call that has read the array is recomputed from a copy, which `_prepare` gives to calls.
        if not self.is_pressed and self._has_read(vars(owner_of(func)).values()):
            self._press(now)
        self._prepare(func, inputs)
        before, stash, leaves = kind.look(func), new_stash(kind, func), leaves_of(inputs)
        arrays = [x._data[0] if isinstance(x, chainer.Variable) else x for x in inputs]
        base = sum([x.nbytes for x in arrays])
        memory = kind.forward(shape_of(leaves))
        if self.is_pressed and self._pressure is not None and now.integrity == "intact":
            self._pressure.make_room_for(memory.expected_bytes(base), func)
        start = work_seconds()
        if memory.wants(base):
            outputs = memory.run(lambda: proceed(func, inputs), meter_of(arrays), base)
            self._experience.rose(memory.risen_bytes)
        else:
            outputs = proceed(func, inputs)
        seconds = work_seconds() - start
        if before is not None:
            kind.learn(func, before)
            stash = tuple(n for n in kind.stash if before.state.get(n) is None)
        if func.inputs is None:
            return outputs
        made = [y._data[0] for y in outputs]
        count = sum([y.nbytes for y in made])
        trace(now, func, count, leaves)
        config, held = self._configs.now(), None if kind.again else tuple(made)
        ran = Ran(weakref.ref(func), leaves, config, stash, seconds, held)
        if self.is_pressed:
            self._follow(now, func, kind, ran, (arrays, made))
        else:
            self._ran.append(ran)
            self._made += count
            if self._made > self._next_look:
                self._look(now)
        return outputs

    def _has_read(self, values: Iterable[Any]) -> bool:
        """Tell whether a call has read one of these arrays from outside."""
        values = [value for value in values if hasattr(value, "dtype")]
        if values:
            for ran in self._ran[self._read :]:
                self._room.read(ran[1])
            self._read = len(self._ran)
        return any(map(self._room.has, values))

    def _look(self, now: PassSoFar) -> None:
        """Count the bytes that are really held, and press the pass if they come near the budget.

        Cost: proportional to the functions since the last count; arrays counted then are assumed to
        be alive.
        """
        roots = self._roots
        for reference, leaves, _, stash, *_ in self._ran[self._looked :]:
            self._room.read(leaves)
            func = reference()
            if func is not None:
                for array in held_by(func, stash):
                    root = array if array.base is None else root_of(array)
                    roots[id(root)] = root.nbytes
        self._looked = len(self._ran)
        self._made = sum(self._roots.values())
        self._next_look = rest = self._room.rest_bytes - self._experience.rise_bytes
        if self._room.budget is None or now.integrity != "intact":
            self._next_look = float("inf")
        elif self._made > rest * (1 - 1 / AHEAD):
            self._press(now)

    def _press(self, now: PassSoFar) -> None:
        """Follow the pass call by call from now on; make calls of the functions so far."""
        self.is_pressed = True
        known: dict[int, Any] = {}
        for ran in [Ran(*ran) for ran in self._ran]:
            func = ran.func()
            if func is not None and func.inputs is not None:  # else it was cut out of the graph
                kind = self._kinds[type(owner_of(func))]
                arrays = inputs_of(func, ran.leaves), ran.outputs or outputs_of(func)
                self._follow(now, func, kind, ran, arrays, known)
        self._ran = []

    def _follow(
        self,
        now: PassSoFar,
        func: Any,
        kind: FunctionKind,
        ran: Ran,
        arrays: Any,
        known: Any = None,
    ) -> None:
        """Make a call of a function that has run, and account for its arrays.

        Args:
            now: the pass.
            func, kind: the function and its class.
            ran: the record of its application.
            arrays: its inputs and its outputs; None for freed ones.
            known: see the argument ``roots`` of `Account.add`.
        """
        self._room.read(ran.leaves)
        call = Call(
            now.number, len(now.calls), func, arrays[0], arrays[1], self._leaves, now.reads,
            ran.config, self._checks,
        )  # fmt: skip
        sources = call.sources
        is_known = all(
            s.array is not None if s.call is None else not s.call.is_lost for s in sources
        )
        call.learn(kind.again and is_known, ran.stash)
        call.hold_by_graph()
        func._umem_call = call
        now.calls.append(call)
        if call.from_elsewhere:
            now.refuse(FROM_EARLIER)
        if self._pressure is not None:
            self._pressure.add(call, kind, arrays, ran.seconds, known)

    def observed(self, call: Call, observed: Observed, arrays: Arrays) -> None:
        """Account for a call that has been observed, and evict until few enough bytes are held.

        Args:
            call, observed: the call, and its facts.
            arrays: its inputs and its outputs.
        """
        assert self._pressure is not None
        kind = self._kinds[type(owner_of(call.func))]
        self._room.read(source.array for source in call.sources)
        self._pressure.add(call, kind, arrays, observed.cost, None)
        call.hold_by_graph()
        self._made += observed.nbytes
        self._most = max(self._most, observed.nbytes + observed.workspace_bytes)
        gradients = [call.output_count == 1] * call.output_count  # of several, some may have none
        self._is_plannable = self._is_plannable and gives_all_gradients(call.func, gradients)
        if self._room.budget is not None:  # beside the workspace of the next call
            self._pressure.keep_to(self._room.rest_bytes - 2 * self._most)
        elif self._is_plannable:
            self._pressure.keep_to(0)
        else:
            self._pressure.keep_to(round(UNPLANNED * (self._made * self._most) ** 0.5))

    # -- backward --------------------------------------------------------------------------

    def follow(self, plan: FollowPlan) -> None:
        """Let backward follow a plan that was made at the end of forward."""
        self._plan = plan

    def may_go_alone(self, now: PassSoFar) -> bool:
        """Tell whether the backward that begins fits with nothing evicted; else press the pass."""
        if self.is_alone:
            return True
        if self.is_pressed or now.integrity != "intact" or now.phase == "over":
            return not self.is_pressed
        if self._room.budget is None:
            self._look(now)
            return True
        share = self._experience.backward_share
        if share is not None:
            if not self._has_room_for(share):
                self._look(now)
            if not self.is_pressed and self._has_room_for(share):
                return True
        if not self.is_pressed:
            self._press(now)
        return False

    def _has_room_for(self, share: float) -> bool:
        return self._made * (1 + share) + self._room.parameter_bytes <= self._room.rest_bytes

    def begin_backward(self, calls: Sequence[Any]) -> None:
        """Account for the gradients of parameters that exist already."""
        if self.is_pressed and self._pressure is not None:
            self._pressure.begin_backward(call.func for call in calls if call.has_graph)

    @property
    def _pressure_now(self) -> Pressure | None:
        """Return the `Pressure` in backward; None if a plan makes room, or nothing is evicted."""
        return self._pressure if self.evicts and self._plan is None else None

    def before_backward(self, call: Call) -> Iterator[TapeAction]:
        """Yield the planned actions up to this step; none without a plan."""
        return iter(()) if self._plan is None else self._plan.before_backward(call)

    def ensure(self, now: PassSoFar, call: Call) -> None:
        """Restore the arrays that this step reads, and make room for those that it computes."""
        if (pressure := self._pressure_now) is None:
            call.ensure()
        else:
            pressure.before(call, now.retry_after_oom)

    def step(self, proceed: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Run a step of backward; measure its time, and in a pass without facts its memory."""
        if (pressure := self._pressure_now) is None:
            proceed(func, *args)
        else:
            pressure.step(proceed, call, func, args, measures=not self.learns)

    def after_backward(self, call: Call) -> Iterator[TapeAction]:
        """Drop the arrays of a call whose step is over; yield the planned drops."""
        if (pressure := self._pressure_now) is not None:
            pressure.after(call)
        return iter(()) if self._plan is None else self._plan.after_backward(call)

    def end(self, popped: Collection[int]) -> Iterator[TapeAction]:
        """Yield the remaining planned drops."""
        return iter(()) if self._plan is None else self._plan.end(popped)

    def learn(self, now: PassSoFar) -> None:
        """Add the facts of the pass, whose backward has run, to the experience."""
        pressure, experience = self._pressure, self._experience
        assert pressure is not None
        if self.is_pressed and now.integrity == "intact":
            pressure.learn()
        kept = max(pressure.kept_bytes, self._made)
        beside = kept * (experience.backward_share or 0.0) + self._room.parameter_bytes
        plain = self._room.fixed_bytes + round(kept + beside)
        experience.ended(plain, pressure.peak_bytes, pressure.seconds, pressure.rerun_seconds)

    def make_room(self, now: PassSoFar, busy: Collection[int]) -> bool:
        """Press the pass, and evict half of what it holds; tell whether any was evicted."""
        if self._pressure is None or self.is_alone:
            return False
        if self._pressure_now is None:
            return super().make_room(now, busy)
        if not self.is_pressed:
            self._press(now)
        if self.learns:
            self._room.budget, self._is_plannable = None, True  # from now on keep the least
        return self._pressure.evict_half([call for call in now.calls if call.index in busy])

    def release(self) -> None:
        """Release all records: a second backward recomputes on demand."""
        self._ran, self._leaves = [], {}
        self._pressure = self._plan = None


# -- facts of a function that has run --------------------------------------------------------------


def new_stash(kind: FunctionKind, func: Any) -> tuple[str, ...]:
    """Return the names of the function state that the next forward may set, None so far."""
    owner = owner_of(func)
    return tuple(name for name in kind.stash if getattr(owner, name, None) is None)


def trace(now: PassSoFar, func: Any, made: int, leaves: Iterable[Any]) -> None:
    """Mix a function, and the bytes that it made and read, into its pass's trail."""
    read = 0
    for leaf in leaves:
        if leaf is not None:
            read += leaf.nbytes
    now.trail = hash((now.trail, func.__class__, made, read))


def leaves_of(inputs: Any) -> tuple[Any, ...]:
    """Return the arrays among inputs that no function has made; None for the others."""
    found = []
    for x in inputs:
        if not isinstance(x, chainer.Variable):
            found.append(x)
        elif x._node._creator_node is None:
            found.append(x._data[0])
        else:
            found.append(None)
    return tuple(found)


def _array_of(node: Any) -> Any:
    """Return the array behind a variable node; None if nothing holds it."""
    return None if node is None else held_array(node)


def inputs_of(func: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return the inputs of a function that has run; None for freed ones."""
    return [
        _array_of(node) if leaf is None else leaf
        for node, leaf in zip(func.inputs, leaves, strict=True)
    ]


def outputs_of(func: Any) -> list[Any]:
    """Return the outputs of a function that has run; None for freed ones."""
    found = [_array_of(reference()) for reference in func.outputs]
    retained = func._retained_output_data
    if retained:
        for place, array in zip(func._output_indexes_to_retain, retained, strict=True):
            found[place] = array
    return found


def held_by(func: Any, stash: Iterable[str]) -> Iterator[Any]:
    """Yield the live outputs and function state of a function."""
    for array in outputs_of(func):
        if array is not None:
            yield array
    if stash:
        owner = owner_of(func)
        for name in stash:
            array = getattr(owner, name, None)
            if hasattr(array, "base"):
                yield array
