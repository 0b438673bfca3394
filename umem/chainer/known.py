"""The graphs that were learned, and which of them a pass may be one of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chainer

from umem.chainer.learning import Learned, look_outside, state_bytes
from umem.chainer.tape import Call, Signature
from umem.chainer.wiring import owner_of

REMEMBERED = 32
"""So many graphs without a plan are remembered."""


class Known:
    """What is known of graphs, in the order in which they were first seen."""

    def __init__(self) -> None:
        self.graphs: list[Learned] = []
        self._without_state: set[int] = set()
        self._has_new_state = False

    def add(self, learned: Learned) -> None:
        """Remember one more; of those without a plan the oldest may be forgotten."""
        self.graphs.append(learned)
        unplanned = [known for known in self.graphs if known.plan is None]
        if len(unplanned) > REMEMBERED:
            self.graphs.remove(unplanned[0])

    def find(self, signatures: list[Signature]) -> Learned | None:
        """The graph of these calls."""
        return next((one for one in self.graphs if one.signatures == signatures), None)

    def alike(self, func: Any, inputs: Any) -> list[Learned]:
        """Those that may be the one that begins with this call."""
        kind = type(owner_of(func))
        arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
        shapes = [(array.shape, array.dtype) for array in arrays]
        return [
            one for one in self.graphs
            if one.signatures[0][0] is kind
            and [entry[2:] for entry in one.signatures[0][1]] == shapes
        ]  # fmt: skip

    # -- what optimizers keep --------------------------------------------------------------

    def look_outside(
        self, learned: Learned, calls: list[Call], gradients: Mapping[int, int], others: list[Any]
    ) -> None:
        """See what there is beside a graph's own arrays; `umem.chainer.learning.look_outside`."""
        look_outside(learned, calls, gradients, others)
        for key, reference in learned.parameters.items():
            parameter = reference()
            if parameter is not None and not state_bytes(parameter.update_rule):
                self._without_state.add(key)

    def after_update(self, parameter: Any) -> None:
        """An optimizer has changed a parameter, and may have made its state."""
        if id(parameter) in self._without_state and state_bytes(parameter.update_rule):
            self._without_state.discard(id(parameter))
            self._has_new_state = True

    def count_states(self) -> None:
        """Plans that were made before an optimizer had its state are to be made anew."""
        if not self._has_new_state:
            return
        self._has_new_state = False
        for learned in self.graphs:
            if learned.count_states() and learned.plan is not None:
                learned.plan = learned.refused = learned.measured_bytes = None
                learned.followed = False
