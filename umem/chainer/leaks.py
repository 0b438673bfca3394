"""Variables that outlive the region that made them without having been returned."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from chainer import function_node, variable

from umem.errors import StateError


def seal(functions: Iterable[Any]) -> None:
    """Cut what these functions made off their graph; backward through it raises `StateError`.

    Cost: nothing where no Variable is left over. The values stay readable.
    """
    for function in list(functions):
        for output in function.outputs or ():
            node = output()
            if node is not None and node.requires_grad:
                node._creator_node = _DeadEnd(node)


class _DeadEnd(function_node.FunctionNode):
    """Stands where the creator of a Variable was."""

    def __init__(self, node: Any) -> None:
        beginning = variable.Variable(np.empty(0, np.float32)).node
        # Both Variable.backward and chainer.grad ask each node for this before they go on.
        beginning._check_old_style_gradient = _refuse
        self.inputs, self.outputs = (beginning,), (weakref.ref(node),)
        self.rank = max(node.rank - 1, 0)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        """Not reached where Chainer asks the nodes first."""
        _refuse()


def _refuse() -> None:
    raise StateError(
        "backward goes through a Variable that a checkpointed region made and did not return "
        "(kept on a link, or in a list): return it from the region, in a list, tuple or dict"
    )
