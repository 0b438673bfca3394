"""Sums of gradients equal to a plain backward's, whatever the order of its steps.

Floating-point sums depend on their order. If a value has several users, Chainer adds their
gradients up as backward reaches them. A plan reaches them in another order; a gradient that arrives
too early then waits for those that a plain backward adds before it (`GradientSums`).

Cost: the memory of waiting gradients; nothing if the two orders agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chainer import _backprop_utils

from umem.chainer.function_facts import gives_all_gradients
from umem.chainer.recompute.tape import Call

Contended = dict[int, dict[int, tuple[int, ...]]]
"""By call and input index, the plain-backward positions of all calls that add to the gradient."""


def plain_order(nodes: Iterable[Any], calls: Iterable[Call]) -> dict[int, int] | None:
    """Predict the order of Chainer's own backward from some variable nodes.

    Chainer takes the function of the highest rank; among several, the one that a gradient has
    reached first (``_backprop_to_all``).

    Args:
        nodes: the roots of the backward, in their order.
        calls: the pass's calls.

    Returns:
        By call, its position; None if that depends on gradients that a function may leave out, or
        if backward reaches a function that is not one of the calls.
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
        order: by call, its position in the planned forward; the planned backward is its reverse.
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

    def step(self, original: Any, call: int, func: Any, *args: Any) -> None:
        """Run a backward step, and insert its gradients at their plain-backward positions.

        Contended sums are added up until an earlier gradient is missing; others at once.

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
        """Add up the leading gradients, until a call before them in plain order has not run."""
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
