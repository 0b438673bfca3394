"""Gradients as a plain backward leaves them, whatever order its steps are taken in.

Floating-point sums depend on their order. Where a value has several users, Chainer adds their
gradients up as backward reaches them. A plan reaches them in another order; a gradient that
comes too early then waits until those before it are there.

Chainer takes a parameter's old gradient when backward first comes to it, and puts the sum there
when all is over. After an exception in between, what was taken is gone and the rest is as before; a
planned backward comes to parameters in another order.

Cost: a waiting gradient takes its memory; nothing where the two orders agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from chainer import _backprop_utils

from umem.chainer.recompute.tape import Call

Contended = dict[int, dict[int, tuple[int, ...]]]
"""By call and input: the places in a plain backward of all that add to that input's gradient."""


def contended(
    users: Mapping[Any, Sequence[tuple[int, int]]], plain: Mapping[int, int], order: Sequence[int]
) -> Contended:
    """The inputs whose gradients would be added up in another order.

    Args:
        users: for each value, the calls and inputs that read it.
        plain: a call's place in a plain backward.
        order: a call's place in the planned forward, whose reverse the planned backward is.
    """
    found: Contended = {}
    for readers in users.values():
        calls = {call for call, _ in readers if call in plain}
        places = sorted(plain[call] for call in calls)
        if places != [plain[call] for call in sorted(calls, key=lambda c: -order[c])]:
            for call, place in readers:
                if call in calls:
                    found.setdefault(call, {})[place] = tuple(places)
    return found


class GradientSums:
    """The sums of one backward.

    Args:
        plain: a call's place in a plain backward.
        contended: which inputs to watch.
    """

    def __init__(self, plain: Mapping[int, int], contended: Contended) -> None:
        self._plain = plain
        self._contended = contended
        self._done: set[int] = set()
        self._places: dict[Any, list[int]] = {}

    def step(self, original: Any, call: int, func: Any, args: tuple[Any, ...]) -> None:
        """Take a backward step, and add its gradients where they belong."""
        own = self._plain.get(call)
        watched = self._contended.get(call)
        if own is None or watched is None:
            original(func, *args)
            if own is not None:
                self._done.add(own)
            return
        grads = args[2]
        expected = {func.inputs[i]: places for i, places in watched.items()}
        before = {x: list(grads[x]) for x in expected if x in grads}
        for x in before:
            grads[x].clear()
        lazy, func.lazy_grad_sum = func.lazy_grad_sum, True
        try:
            original(func, *args)
        finally:
            func.lazy_grad_sum = lazy
        self._done.add(own)
        for x, found in grads.items():
            if x in before:
                self._insert(x, before[x], found, own)
                if not lazy:
                    self._add_up(x, found, expected[x])
            elif not lazy:
                _backprop_utils._reduce(found)

    def _insert(self, x: Any, before: list[Any], found: list[Any], own: int) -> None:
        places = self._places.setdefault(x, [-1] * len(before))
        pairs = [*zip(places, before, strict=True), *((own, gradient) for gradient in found)]
        pairs.sort(key=lambda pair: pair[0])
        self._places[x] = [place for place, _ in pairs]
        found[:] = [gradient for _, gradient in pairs]

    def _add_up(self, x: Any, found: list[Any], expected: tuple[int, ...]) -> None:
        """Add up what is complete from the beginning."""
        limit = -1
        for place in expected:
            if place not in self._done:
                break
            limit = place
        places = self._places[x]
        count = sum(1 for place in places if place <= limit)
        if count < 2:
            return
        total: list[Any] = []
        for index in range(count):
            total.append(found[index])
            if index + 1 == count or places[index + 1] != places[index]:
                _backprop_utils._reduce(total)
        found[:count] = total
        places[:count] = [limit]


class OldGradients:
    """The old gradients that one backward has taken, and may have to put back.

    One that a plain backward has taken by then as well is let go.

    Cost: where the plan takes a step before others that a plain backward takes earlier, the old
    gradients of that step live until those are over. Nothing where gradients are cleared before.

    Args:
        plain: a call's place in a plain backward.
        calls: those of the pass.
    """

    def __init__(self, plain: Mapping[int, int], calls: Sequence[Call]) -> None:
        self._plain = plain
        self._calls = calls
        self._taken: dict[Any, Any] = {}  # None: there was none, or nobody puts it back
        self._held: set[Any] = set()
        self._to_come = sorted(plain.values(), reverse=True)
        self._done: set[int] = set()
        self._count = 0
        self._at: int | None = None

    def begin(self, call: int, gradients: Mapping[Any, list[Any]]) -> None:
        """A step begins, with the gradients of its inputs so far."""
        self._at = call
        for node, found in gradients.items():
            if node.creator_node is None and node not in self._taken:
                self._taken[node] = found[0] if found else None
                if found:
                    self._held.add(node)
        self._done.add(self._plain.get(call, -1))
        while self._to_come and self._to_come[-1] in self._done:
            self._to_come.pop()
        if self._held:
            self._let_go()

    def _let_go(self) -> None:
        """Hold no gradient that a plain backward takes before the first step to come."""
        place = self._to_come[-1] if self._to_come else len(self._plain)
        for node in [node for node in self._held if self._first_uses.get(node, -1) < place]:
            self._held.discard(node)
            self._taken[node] = None

    def end(self) -> None:
        """A step is over."""
        self._at = None
        self._count += 1

    def put_back(self) -> None:
        """Leave what a plain backward would leave that failed in the same call.

        Where no call has failed but something between them (a hook), after as many calls.
        """
        last = self._count - 1 if self._at is None else self._plain.get(self._at, -1)
        for node, place in self._first_uses.items():
            variable = node.get_variable_or_none()
            if variable is None:
                continue
            if place <= last:
                variable.grad_var = None
            elif node in self._taken:
                variable.grad_var = self._taken[node]

    @cached_property
    def _first_uses(self) -> dict[Any, int]:
        """By leaf, the place in a plain backward of the first call that comes to it."""
        first: dict[Any, int] = {}
        for call in self._calls:
            place = self._plain.get(call.index)
            if place is None or not call.has_graph:
                continue
            for node in call.func.inputs:
                if node.creator_node is None and node.requires_grad:
                    first[node] = min(place, first.get(node, place))
        return first
