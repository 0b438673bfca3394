"""The gradients that are there when a backward fails, as a plain backward would leave them.

Chainer takes a parameter's old gradient when backward first comes to it, and puts the sum there
when all is over. After an exception in between, what was taken is gone and the rest is as before.
A planned backward comes to parameters in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from umem.chainer.recompute.tape import Call


class OldGradients:
    """The old gradients that one backward has taken.

    Cost: they live until it is over; nothing where gradients are cleared before.

    Args:
        plain: a call's place in a plain backward.
    """

    def __init__(self, plain: Mapping[int, int]) -> None:
        self._plain = plain
        self._taken: dict[Any, Any] = {}
        self._count = 0
        self._at: int | None = None

    def begin(self, call: int, gradients: Mapping[Any, list[Any]]) -> None:
        """A step begins, with the gradients of its inputs so far."""
        self._at = call
        for node, found in gradients.items():
            if node.creator_node is None and node not in self._taken:
                self._taken[node] = found[0] if found else None

    def end(self) -> None:
        """A step is over."""
        self._at = None
        self._count += 1

    def put_back(self, calls: Iterable[Call]) -> None:
        """Leave what a plain backward would leave that failed in the same call.

        Where no call has failed but something between them (a hook), after as many calls.
        """
        first = self._first_uses(calls)
        last = self._count - 1 if self._at is None else self._plain.get(self._at, -1)
        for node, place in first.items():
            variable = node.get_variable_or_none()
            if variable is None:
                continue
            if place <= last:
                variable.grad_var = None
            elif node in self._taken:
                variable.grad_var = self._taken[node]

    def _first_uses(self, calls: Iterable[Call]) -> dict[Any, int]:
        """By leaf, the place in a plain backward of the first call that comes to it."""
        first: dict[Any, int] = {}
        for call in calls:
            place = self._plain.get(call.index)
            if place is None or not call.has_graph:
                continue
            for node in call.func.inputs:
                if node.creator_node is None and node.requires_grad:
                    first[node] = min(place, first.get(node, place))
        return first
