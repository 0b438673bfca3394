"""The graphs that were learned, and which of them a pass may be one of."""

from __future__ import annotations

import weakref
from typing import Any

import chainer

from umem.chainer.recompute.learning import Learned, state_bytes
from umem.chainer.recompute.tape import Signature
from umem.chainer.recompute.wiring import owner_of

REMEMBERED = 32
"""So many graphs without a plan are remembered."""


class Known:
    """What is known of graphs, in the order in which they were first seen."""

    def __init__(self) -> None:
        self.graphs: list[Learned] = []
        self._updated: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._has_new = False

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
            one
            for one in self.graphs
            if one.signatures[0][0] is kind
            and [entry[2:] for entry in one.signatures[0][1]] == shapes
        ]

    # -- what optimizers keep --------------------------------------------------------------

    @property
    def updated(self) -> list[Any]:
        """The parameters that optimizers have updated and that are there."""
        found = [reference() for reference, _ in self._updated.values()]
        return [parameter for parameter in found if parameter is not None]

    def after_update(self, parameter: Any) -> None:
        """An optimizer has changed a parameter, and may have made its state."""
        if parameter.array is None:
            return
        nbytes = state_bytes(parameter.update_rule)
        reference, before = self._updated.get(id(parameter), (None, 0))
        if reference is None or reference() is not parameter or before != nbytes:
            self._updated[id(parameter)] = (weakref.ref(parameter), nbytes)
            self._has_new = True

    def count_updated(self) -> None:
        """Plans that were made before an optimizer had its state are to be made anew."""
        if not self._has_new:
            return
        self._has_new = False
        updated = self.updated
        for learned in self.graphs:
            if learned.count_updated(updated) and learned.plan is not None:
                learned.forget_plan()
