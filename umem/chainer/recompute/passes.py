"""One forward and the backward after it: following a plan, or learning the graph.

While a graph is being learned, arrays are dropped by the rule of `fallback`, so that
what does not fit gets through. In backward, what is missing is made again on demand, and goes
after its last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer

from umem.chainer.recompute.fallback import Fallback
from umem.chainer.recompute.learning import Learned, Roots, gradient_bytes
from umem.chainer.recompute.observing import Before, Observed, observe
from umem.chainer.recompute.old_gradients import OldGradients
from umem.chainer.recompute.outside import Outside
from umem.chainer.recompute.sums import Sums
from umem.chainer.recompute.tape import Call
from umem.planner.schedule import Kind

_LETS_GO = ("drop", "drop_stash")
HIGH = 1 << 40
"""Ranks of calls that follow a plan lie above all others."""


class Pass:
    """One forward and its backward.

    Args:
        number: passes are numbered.
        known: the graphs that were learned.
        debug: whether to keep checksums.
        outside: the parameters, as optimizers change them.
    """

    def __init__(
        self, number: int, known: Sequence[Learned], debug: bool, outside: Outside
    ) -> None:
        self.number = number
        self._known = known
        self._debug = debug
        self.calls: list[Call] = []
        self.leaves: dict[int, tuple[int, Any]] = {}
        self.seconds: list[float] = []
        self.observed: list[Observed] = []
        self.workspace: list[int] = []
        self.old_gradients: dict[int, int] = {}
        self.follows: Learned | None = None
        self.differs = False
        self.never: str | None = None
        self.went_back = self.is_stale = False
        self.settled = self.is_whole = False
        self.popped: dict[int, int] = {}
        self.backward_workspace: dict[int, int] = {}
        self.roots: Roots = ()
        self.signatures: list[Any] = []
        self.outside = outside
        self._fallback = Fallback()
        self._waits: Call | None = None
        self._next = 0
        self._sums: Sums | None = None
        self._gradients: OldGradients | None = None
        self._nested: set[int] = set()

    @property
    def learns(self) -> bool:
        """Whether it has to observe its calls."""
        return self.follows is None

    @property
    def looks(self) -> bool:
        """Whether the next call may be observed: a pass has left the plan at this one before."""
        return self.follows is None or len(self.calls) in self.follows.forks

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can still be used."""
        return bool(self.calls) and not any(call.has_graph for call in self.calls)

    @property
    def is_unusual(self) -> bool:
        """Whether backward may read what is neither there nor planned to be made again."""
        if self.follows is None or self.never is not None or self.outside.is_changed:
            return True
        plain = self.follows.plain
        return any(call.index in plain and not call.has_func for call in self.calls)

    # -- forward ---------------------------------------------------------------------------

    def add(
        self, func: Any, inputs: Any, outputs: Any, before: Before, seconds: float, workspace: int
    ) -> None:
        """A function was applied."""
        call = Call(
            self.number,
            len(self.calls),
            func,
            inputs,
            outputs,
            self.leaves,
            self.outside,
            self._debug,
        )
        func._umem_call = call
        self.calls.append(call)
        self.seconds.append(seconds)
        self.workspace.append(workspace)
        if call.from_elsewhere:
            self.never = "it goes on from an earlier pass"
        if self.settled and self.follows is not None:
            self._stop_following(self.follows)  # a backward has begun, and forward goes on
        else:
            self._match(call)
        if self.follows is not None:
            self._obey(call, self.follows)
            return
        self.observed.append(observe(call, func, inputs, before, seconds, workspace))
        call.again = self.observed[-1].again
        for x in inputs:
            if isinstance(x, chainer.Parameter) and gradient_bytes(x):
                self.old_gradients[id(x)] = gradient_bytes(x)
        call.stash = self.observed[-1].stash
        self._fall_back(call)

    def _match(self, call: Call) -> None:
        """Follow a plan from the first call on, as long as the graph is the planned one."""
        if call.index == 0:
            self._follow_first(call)
        elif self.follows is not None:
            signatures = self.follows.signatures
            if call.index >= len(signatures) or signatures[call.index] != call.signature:
                self.leave()

    def _follow_first(self, call: Call) -> None:
        for learned in reversed(self._known):
            if learned.plan is not None and learned.signatures[0] == call.signature:
                self.follows = learned
                self.outside.copies = False
                return

    def leave(self) -> None:
        """The graph is not the planned one: follow another plan that fits so far, or none."""
        old = self.follows
        assert old is not None
        old.forks.add(len(self.calls) - 1)
        self.follows = None
        so_far = [call.signature for call in self.calls]
        for learned in reversed(self._known):
            fits = learned.plan is not None and learned.signatures[: len(so_far)] == so_far
            if fits and learned is not old:
                self.follows = learned
                for call in self.calls[:-1]:
                    self._obey(call, learned)
                    self.catch_up()
                return
        self._stop_following(old)

    def _stop_following(self, old: Learned) -> None:
        """Keep everything from the last call on."""
        self.follows = None
        self.differs = self.outside.copies = True
        self.observed = list(old.observed[: len(self.calls) - 1])
        self.use_plain_ranks()
        for call in self.calls[:-1]:
            call.let_go()

    def _obey(self, call: Call, learned: Learned) -> None:
        call.again = learned.observed[call.index].again
        call.stash = learned.observed[call.index].stash
        call.set_rank(HIGH + 2 * learned.order[call.index])
        self._waits = call

    def catch_up(self) -> None:
        """Let go what the plan lets go after the last call.

        Not before another one begins: Chainer reads what the function holds once it has run.
        """
        call, learned = self._waits, self.follows
        self._waits = None
        if call is None or learned is None:
            return
        if learned.packs and learned.observed[call.index].mask_bytes:
            call.pack()
        for kind, index in learned.after_forward.get(call.index, ()):
            _carry_out(kind, self.calls[index])

    def _fall_back(self, call: Call) -> None:
        if self.differs or self.never:
            call.let_go()
        else:
            self._fallback.add(call, self.observed[call.index])

    # -- backward --------------------------------------------------------------------------

    def settle(self, refuse: str | None) -> None:
        """Forward is over."""
        if self.settled:
            return
        self.settled = True
        self.catch_up()
        learned = self.follows
        if learned is not None and len(self.calls) < len(learned.signatures):
            self._end_early()
        if refuse is not None:
            self.never = refuse
            self.use_plain_ranks()
        elif self.follows is not None and not self.follows.is_ordered:
            self._gradients = OldGradients(self.follows.plain)
            if self.follows.contended:
                self._sums = Sums(self.follows.plain, self.follows.contended)

    def _end_early(self) -> None:
        self.follows = None
        self.differs = True
        so_far = [call.signature for call in self.calls]
        for learned in reversed(self._known):
            if learned.plan is not None and learned.signatures == so_far:
                self.follows = learned
                self.differs = False
                for call in self.calls:
                    self._obey(call, learned)
                    self.catch_up()
                return
        self.never = "it ended before its plan did"
        self.use_plain_ranks()

    def use_plain_ranks(self) -> None:
        """Have backward go as it would without a plan."""
        for call in self.calls:
            call.set_rank(call.plain_rank)

    def before(self, call: Call) -> None:
        """Carry out what the plan has before this step, and make sure of what it reads."""
        learned = self.follows
        place = -1 if learned is None else learned.places.get(call.index, -1)
        if learned is not None and self.never is None and place >= self._next:
            for kind, index in learned.backward[self._next : place]:
                _carry_out(kind, self.calls[index])
            self._next = place + 1
        call.ensure()

    def step(self, original: Any, call: Call, func: Any, args: tuple[Any, ...]) -> None:
        """Take the step itself."""
        self.popped.setdefault(call.index, len(self.popped))
        if self._gradients is not None:
            self._gradients.begin(call.index, args[2])
        if self._sums is None:
            original(func, *args)
        else:
            self._sums.step(original, call.index, func, args)
        if self._gradients is not None:
            self._gradients.end()

    def goes_backward_inside(self, call: Call) -> None:
        """A call's backward has a backward of its own inside."""
        self._nested.add(call.index)

    @property
    def has_nested(self) -> bool:
        """Whether a call's backward had a backward of its own inside."""
        return bool(self._nested)

    def after(self, call: Call) -> None:
        """Let go what nothing reads after this step."""
        learned = self.follows
        if learned is not None and self.never is None and not self.went_back:
            actions, at = learned.backward, self._next
            while at < len(actions) and actions[at].kind in _LETS_GO:
                _carry_out(actions[at].kind, self.calls[actions[at].call])
                at += 1
            self._next = at
        if self.never is None and not self.differs:
            self._release(call)

    def _release(self, call: Call) -> None:
        known = self.observed if self.follows is None else self.follows.observed
        if known[call.index].again:
            call.drop()
            call.drop_stash()
        call.pack()

    def finish(self, whole: bool) -> None:
        """Backward is over; ``whole``: without an exception."""
        if self._gradients is not None and not whole:
            self._gradients.put_back(self.calls)
        self._gradients = None
        if not self.went_back and self.follows is not None and self.never is None:
            for kind, index in self.follows.backward[self._next :]:
                if kind in _LETS_GO and index in self.popped:
                    _carry_out(kind, self.calls[index])
            self._next = len(self.follows.backward)
        self.went_back = True
        self._sums = None
        self.use_plain_ranks()


def _carry_out(kind: Kind, call: Call) -> None:
    if kind == "drop":
        call.drop()
    elif kind == "drop_stash":
        call.drop_stash()
    elif kind == "recompute" and call.has_graph:
        call.make_again()
