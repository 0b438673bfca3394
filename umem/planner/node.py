"""One function call of the forward pass, with the facts for planning."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from umem.errors import GraphError
from umem.planner.checks import are_names, shown, whole_number

SIZES = ("nbytes", "stash_bytes", "workspace_bytes", "backward_workspace_bytes", "stays_bytes")
"""The fields that count bytes, without ``grad_bytes``, which may be None."""


@dataclass(frozen=True)
class Node:
    """A function call of the forward pass: its outputs, its function state and its cost.

    Args:
        name: the name, unique in its graph.
        nbytes: bytes of its outputs.
        cost: the cost of recomputing it, in any unit; zero or more.
        saved: True if backward needs its outputs.
        alias_of: the input that its output is a view of. A view has no bytes of its own, and
            keeping it keeps its base.
        recomputable: False for a call that must not run twice; its outputs are kept.
        stash_bytes: bytes of function state for its own backward, without outputs.
        grad_bytes: bytes of the gradient of its outputs; None: nbytes, and zero for a view.
        workspace_bytes: temporary memory while it runs.
        backward_workspace_bytes: temporary memory while its backward runs.
        stays_bytes: bytes of parameters' gradients that its backward makes; they stay until the
            step's end.
        needs: the values that its backward reads: its output or inputs, by name; None: all of
            these that are saved.
        backward_cost: the cost of its backward; None: twice its cost.

    Raises:
        GraphError: a field has a wrong type or value; names the node and the field.
    """

    name: str
    nbytes: int
    cost: float
    saved: bool = True
    alias_of: str | None = None
    recomputable: bool = True
    stash_bytes: int = 0
    grad_bytes: int | None = None
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    stays_bytes: int = 0
    needs: tuple[str, ...] | None = None
    backward_cost: float | None = None

    def __post_init__(self) -> None:
        """Check the fields, and convert sizes to int and costs to int or float."""
        if not isinstance(self.name, str) or not self.name:
            raise GraphError(f"a node's name must be text; got {self.name!r}")
        if self.needs is not None:
            if isinstance(self.needs, str) or not are_names(self.needs):
                raise GraphError(f"node {self.name!r}: needs must be a list of names")
            object.__setattr__(self, "needs", tuple(self.needs))
        for key in SIZES:
            self._set_size(key, getattr(self, key))
        if self.grad_bytes is not None:
            self._set_size("grad_bytes", self.grad_bytes)
        self._set_cost("cost", self.cost)
        if self.backward_cost is not None:
            self._set_cost("backward_cost", self.backward_cost)
        if self.alias_of is not None and not isinstance(self.alias_of, str):
            raise GraphError(f"node {self.name!r}: alias_of must be the name of a node")
        if self.alias_of is not None and self.stash_bytes:
            raise GraphError(f"node {self.name!r} is a view; a view cannot have a stash")

    def _set_size(self, key: str, value: Any) -> None:
        size = whole_number(value)
        if size is None or size < 0:
            raise GraphError(f"node {self.name!r}: {key} is {shown(value)}, not a count of bytes")
        object.__setattr__(self, key, size)

    def _set_cost(self, key: str, value: Any) -> None:
        whole = whole_number(value)
        is_real = isinstance(value, (float, np.floating))
        cost = float(value) if is_real else whole
        if cost is None or not 0 <= cost <= sys.float_info.max:
            raise GraphError(
                f"node {self.name!r}: {key} is {shown(value)}, not a finite number of zero or more"
            )
        object.__setattr__(self, key, cost)
