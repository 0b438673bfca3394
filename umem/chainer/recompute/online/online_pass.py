"""A pass whose graph is not expected back: what has to go is decided as it goes.

It is left alone as long as it fits: each function is noted, and the bytes that it makes are added
up. Where they come near the budget, what is really held is counted. Where that is too much, what
has run is looked up, and from then on arrays go before a call would pass the budget, in forward
and in backward; what a step of backward reads is made again before it, and goes for good after
it. Backward keeps Chainer's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import chainer

from umem.chainer.function_facts import owner_of
from umem.chainer.recompute.lower import Lower
from umem.chainer.recompute.online.graph_arrays import held_by, inputs_of, leaves_of, outputs_of
from umem.chainer.recompute.online.kinds import Experience, FunctionKind, rise_of
from umem.chainer.recompute.online.late_call import (
    Configurations,
    LateCall,
    Ran,
    new_stash,
    shape_of,
)
from umem.chainer.recompute.online.pressure import AHEAD, Pressure
from umem.chainer.recompute.online.room import Room
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.seen import Roots
from umem.trace.recording.storage import root_of

FROM_EARLIER = "it goes on from an earlier pass"


class OnlinePass(Pass):
    """One forward and its backward, under a budget.

    Args:
        number: passes are numbered.
        room: the budget.
        experience: what passes so far have shown.
        debug: whether to keep checksums.
        on_second: called where its graph goes backward after an update.
        prepare: called before a call that is looked at, with its function and inputs.
        told: tells the user that what runs again takes too long.
        lower: where what is moved goes.

    Attributes:
        is_pressed: whether it is followed call by call.
        trail: a number that two passes of one graph have in common.
    """

    is_online = True

    def __init__(
        self,
        number: int,
        room: Room,
        experience: Experience,
        debug: bool,
        on_second: Callable[[Sequence[Any]], None],
        prepare: Callable[[Any, Any], None],
        told: Callable[[str, bool], None],
        lower: Lower,
    ) -> None:
        super().__init__(number, (), debug, on_second)
        self.reads.stop_copying()
        self._room, self._experience, self._told = room, experience, told
        self._prepare = prepare
        self._checks = debug
        self._kinds, self._configs = experience.kinds, Configurations()
        self._ran: list[tuple[Any, ...]] = []
        self._last: Any = None
        self._made = self._looked = self._read = 0
        self._roots: dict[int, int] = {}
        self._lower = lower
        self._pressure = Pressure(room, experience, told, lower)
        self.is_pressed = debug
        self.trail = 0
        self._next_look = float("inf")
        if room.budget is not None:
            self._next_look = (room.rest_bytes - experience.rise_bytes) / 2

    # -- as any other pass -----------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """False: it is not learned."""
        return False

    @property
    def is_unusual(self) -> bool:
        """True where backward may read what is neither there nor can be made again."""
        return self.never is not None or self.reads.is_changed

    @property
    def goes_on(self) -> bool:
        """True where the next call is one of it."""
        if self.went_back or self.is_stale:
            return False
        return self._last is None or self._last() is not None or self._is_alive

    @property
    def _is_alive(self) -> bool:
        return any(ran[0]() is not None for ran in reversed(self._ran)) or any(
            call.has_graph for call in reversed(self.calls)
        )

    # -- forward ---------------------------------------------------------------------------

    def run(self, proceed: Any, func: Any, inputs: Any) -> Any:
        """Apply a function: by itself where there is nothing to decide.

        Written out: a microsecond here is one for each function of each pass.
        """
        kind = self._kinds.get(func.__class__)
        if kind is None or self.is_pressed or not kind.is_plain:
            return self._run_closely(proceed, func, inputs)
        stash = new_stash(kind, func) if kind.stash else ()
        leaves = leaves_of(inputs)
        start = perf_counter()
        outputs = proceed(func, inputs)
        seconds = perf_counter() - start
        if func.inputs is not None:
            made = 0
            for y in outputs:
                made += y._data[0].nbytes
            self._last = reference = weakref.ref(func)
            self._ran.append((reference, leaves, self._configs.now(), stash, seconds))
            self.trail = hash((self.trail, kind, made))
            self._made += made
            if self._made > self._next_look:
                self._look()
        return outputs

    def _run_closely(self, proceed: Any, func: Any, inputs: Any) -> Any:
        kind = self._kinds.of(type(owner_of(func)))
        if kind.changes and not self.is_pressed and self._has_read(vars(owner_of(func)).values()):
            self._press()
        self._prepare(func, inputs)
        before, stash, leaves = kind.look(func), new_stash(kind, func), leaves_of(inputs)
        arrays = [x._data[0] if isinstance(x, chainer.Variable) else x for x in inputs]
        base = sum([x.nbytes for x in arrays])
        rise = kind.forward(shape_of(leaves))
        if self.is_pressed:
            self._pressure.make_room_for(rise.nbytes(base), func)
        start = perf_counter()
        if rise.wants(base):
            outputs, risen = rise_of(lambda: proceed(func, inputs), arrays)
            if risen is not None:
                rise.learn(base, risen)
                self._experience.rose(risen)
        else:
            outputs = proceed(func, inputs)
        seconds = perf_counter() - start
        if before is not None:
            kind.learn(func, before)
            stash = tuple(n for n in kind.stash if before.state.get(n) is None)
        if func.inputs is None:
            return outputs
        made = [y._data[0] for y in outputs]
        count = sum([y.nbytes for y in made])
        self._last = reference = weakref.ref(func)
        self.trail = hash((self.trail, kind, count))
        config, held = self._configs.now(), None if kind.again else tuple(made)
        ran = Ran(reference, leaves, config, stash, seconds, held)
        if self.is_pressed:
            self._follow(func, kind, ran, (arrays, made))
        else:
            self._ran.append(ran)
            self._made += count
            if self._made > self._next_look:
                self._look()
        return outputs

    def _has_read(self, values: Iterable[Any]) -> bool:
        """Whether a call has read one of these arrays from outside."""
        values = [value for value in values if hasattr(value, "dtype")]
        if values:
            for ran in self._ran[self._read :]:
                self._room.read(ran[1])
            self._read = len(self._ran)
        return any(map(self._room.has, values))

    def has_run(self, func: Any) -> bool:
        """Tell whether a function is one of this pass, which is left alone so far."""
        if self.went_back or self.is_pressed or func is None:
            return False
        return any(ran[0]() is func for ran in reversed(self._ran))

    def _look(self) -> None:
        """Count what is really held, and follow the pass from here on where that is too much.

        Cost: of what has run since the last look; what was held then counts as if it still were.
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
        if self._room.budget is None or self.never is not None:
            self._next_look = float("inf")
        elif self._made > rest * (1 - 1 / AHEAD):
            self._press()

    def _press(self) -> None:
        """Follow the pass call by call from now on: look up what has run."""
        self.is_pressed = True
        known: dict[int, Any] = {}
        for ran in [Ran(*ran) for ran in self._ran]:
            func = ran.func()
            if func is not None:
                kind = self._kinds.of(type(owner_of(func)))
                arrays = inputs_of(func, ran.leaves), outputs_of(func)
                self._follow(func, kind, ran, arrays, known)
        self._ran = []

    def _follow(
        self, func: Any, kind: FunctionKind, ran: Ran, arrays: Any, known: Any = None
    ) -> None:
        self._room.read(ran.leaves)
        checked = arrays if self._checks else None
        call = LateCall(self.number, len(self.calls), ran, kind, self.reads, checked)
        func._umem_call = call
        self.calls.append(call)
        if call.from_elsewhere:
            self.refuse(FROM_EARLIER)
        self._pressure.add(call, arrays, ran.seconds, known)

    # -- backward --------------------------------------------------------------------------

    def fits(self) -> bool:
        """Whether backward, which is about to begin, may go as it goes."""
        if self.is_pressed or self.never is not None:
            return not self.is_pressed
        if self._room.budget is None:
            self._look()
            return True
        share = self._experience.backward_share
        if share is not None:
            if not self._has_room_for(share):
                self._look()
            if not self.is_pressed and self._has_room_for(share):
                return True
        if not self.is_pressed:
            self._press()
        return False

    def _has_room_for(self, share: float) -> bool:
        return self._made * (1 + share) + self._room.parameter_bytes <= self._room.rest_bytes

    def begin_backward(self, roots: Roots) -> None:
        """Backward begins at these roots."""
        self.roots = roots

    def end_forward(self, refuse: str | None) -> None:
        """Forward is over."""
        self.forward_is_over = True
        if refuse is not None:
            self.refuse(refuse)
        if self.is_pressed:
            self._pressure.begin_backward(call.func for call in self.calls if call.has_graph)

    def before(self, call: Any) -> None:
        """Have there what this step reads, and room for what it makes."""
        if self._leaves_alone(call):
            call.ensure()
        else:
            self._pressure.before(call)

    def step(self, proceed: Any, call: Any, func: Any, args: tuple[Any, ...]) -> None:
        """Take the step itself."""
        self.popped.setdefault(call.index, len(self.popped))
        if self._leaves_alone(call):
            proceed(func, *args)
        else:
            self._pressure.step(proceed, call, func, args)

    def after(self, call: Any, workspace: int, seconds: float) -> None:
        """Let go what nothing reads after this step."""
        if not self._leaves_alone(call):
            self._pressure.after(call)

    def _leaves_alone(self, call: Any) -> bool:
        """Whether backward just goes through a call, and what is missing is made again."""
        return self.never is not None or self.went_back or call.reads is not self.reads

    def finish(self, whole: bool) -> bool:
        """Backward is over; whether it was the first one."""
        first, self.went_back = not self.went_back, True
        if first and whole:
            self._learn()
        return first

    def _learn(self) -> None:
        """Add what the pass has shown."""
        pressure, experience = self._pressure, self._experience
        if self.is_pressed and self.never is None:
            pressure.learn()
        kept = max(pressure.kept_bytes, self._made)
        beside = kept * (experience.backward_share or 0.0) + self._room.parameter_bytes
        plain = self._room.fixed_bytes + round(kept + beside)
        experience.ended(
            plain,
            pressure.peak_bytes,
            pressure.seconds,
            pressure.rerun_seconds,
            pressure.sent_bytes,
        )

    def let_go(self) -> None:
        """Hold no more than its graph does."""
        super().let_go()
        self._ran = []
        self._pressure = Pressure(self._room, self._experience, self._told, self._lower)
