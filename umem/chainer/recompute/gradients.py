"""Gradients as a plain backward leaves them, whatever order its steps are taken in.

Floating-point sums depend on their order. If a value has several users, Chainer adds their
gradients up as backward reaches them. A plan reaches them in another order; a gradient that arrives
too early then waits for those that a plain backward adds before it (`GradientSums`).

Chainer removes a parameter's old gradient when backward first reaches the parameter, and stores the
sum at the end of backward. After an exception in between, the removed gradients are lost and the
others are unchanged. A planned backward reaches parameters in another order, and would lose other
gradients (see `OldGradients`).

Cost: the memory of waiting gradients; nothing where the two orders agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from chainer import _backprop_utils

from umem.chainer.function_facts import gives_all_gradients
from umem.chainer.recompute.tape import Call

Contended = dict[int, dict[int, tuple[int, ...]]]
"""By call and input index, the plain-backward positions of all calls that add to the gradient."""


def plain_order(nodes: Iterable[Any], calls: Iterable[Call]) -> dict[int, int] | None:
    """Predict the order of Chainer's own backward from some variable nodes.

    Chainer takes the function of the highest rank, and of several the one that a gradient has
    reached first (``_backprop_to_all``).

    Args:
        nodes: the roots of the backward, in their order.
        calls: of the pass.

    Returns:
        By call, its position; None if that depends on gradients that a function may leave out, or
        if a function that backward reaches is not one of the calls.
    """
    own = {id(call.func): call for call in calls if call.has_graph}
    heap: list[tuple[int, int, Any]] = []
    found: set[int] = set()
    with_gradient: set[int] = set()

    def reach(node: Any) -> None:
        with_gradient.add(id(node))
        func = node.creator_node
        if func is not None and id(func) not in found:
            heapq.heappush(heap, (-func.rank, len(found), func))
            found.add(id(func))

    for node in nodes:
        reach(node)
    order: dict[int, int] = {}
    while heap:
        func = heapq.heappop(heap)[2]
        targets = [x for x in func.inputs if x.requires_grad]
        if not targets:
            continue
        call = own.get(id(func))
        reached = [(y := one()) is not None and id(y) in with_gradient for one in func.outputs]
        if call is None or not gives_all_gradients(func, reached):
            return None
        order[call.index] = len(order)
        for node in targets:
            reach(node)
    return order


def contended(
    users: Mapping[Any, Sequence[tuple[int, int]]], plain: Mapping[int, int], order: Sequence[int]
) -> Contended:
    """Find the inputs whose gradients a planned backward would add up in another order.

    Args:
        users: for each value, the calls and inputs that read it.
        plain: by call, its position in a plain backward.
        order: by call, its position in the planned forward, whose reverse the planned backward is.
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
    """Adds up the gradients of one planned backward in the order of a plain one.

    Args:
        plain: by call, its position in a plain backward.
        contended: the inputs whose sums depend on the order; see `contended`.
    """

    def __init__(self, plain: Mapping[int, int], contended: Contended) -> None:
        self._plain = plain
        self._contended = contended
        self._done: set[int] = set()
        self._places: dict[Any, list[int]] = {}

    def step(self, original: Any, call: int, func: Any, args: tuple[Any, ...]) -> None:
        """Run a backward step, and insert its gradients at their plain-backward positions.

        Contended sums are added up as far as no earlier gradient is missing; others at once.

        Args:
            original: Chainer's own backward step.
            call: its index.
            func, args: the arguments of ``original``; ``args[2]`` holds each input's gradients so
                far.
        """
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
        """Add up the leading gradients, as far as every call before them in plain order has run."""
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
    """Holds the old gradients that one planned backward removes, to restore them if it fails.

    A gradient is released once a plain backward would have removed it as well.

    Cost: if the plan runs a step before others that precede it in a plain backward, the old
    gradients of that step live until those have run. Nothing if gradients are cleared before
    backward.

    Args:
        plain: by call, its position in a plain backward.
        calls: the calls of the pass.
    """

    def __init__(self, plain: Mapping[int, int], calls: Sequence[Call]) -> None:
        self._plain = plain
        self._calls = calls
        self._taken: dict[Any, Any] = {}  # None: there was none, or it is not restored
        self._held: set[Any] = set()
        self._to_come = sorted(plain.values(), reverse=True)
        self._done: set[int] = set()
        self._count = 0
        self._at: int | None = None

    def begin(self, call: int, gradients: Mapping[Any, list[Any]]) -> None:
        """Record the beginning of a step, and hold the old gradients of leaves that it removes.

        Args:
            call: the index of the step's call.
            gradients: by input node, its gradients so far.
        """
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
        """Release the gradients that a plain backward removes before its first step to come."""
        place = self._to_come[-1] if self._to_come else len(self._plain)
        for node in [node for node in self._held if self._first_uses.get(node, -1) < place]:
            self._held.discard(node)
            self._taken[node] = None

    def end(self) -> None:
        """Record the end of a step."""
        self._at = None
        self._count += 1

    def put_back(self) -> None:
        """Restore the gradients that a plain backward would leave if it failed in the same call.

        If the exception was raised between calls (by a hook), a plain backward that fails after as
        many calls counts.
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
        """Map each leaf to the plain-backward position of the first call that reaches the leaf."""
        first: dict[Any, int] = {}
        for call in self._calls:
            place = self._plain.get(call.index)
            if place is None or not call.has_graph:
                continue
            for node in call.func.inputs:
                if node.creator_node is None and node.requires_grad:
                    first[node] = min(place, first.get(node, place))
        return first
