"""Function calls of a region: their inputs and source lines, compared with the second run's."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer import function_node, variable

from umem.errors import RecomputeCountError, RecomputeDtypeError, RecomputeShapeError, StateError

_INSIDE = tuple(str(Path(str(m.__file__)).parent) + os.sep for m in (chainer, sys.modules["umem"]))


class RegionCall(NamedTuple):
    """One function call of a region: the facts that the second run must match, and its line."""

    label: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    line: str


def call_of(func: Any, in_data: Sequence[Any]) -> RegionCall:
    """Describe a call of a function on arrays, with the source line that is running now."""
    shapes = tuple(x.shape for x in in_data if x is not None)
    return RegionCall(func.label, shapes, tuple(x.dtype for x in in_data if x is not None), _line())


def outside(outputs: Sequence[Any], functions: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a variable node made outside a region, and a function inside that reads it.

    A node that several functions read appears once for each; nodes that require no gradient are
    omitted.

    Args:
        outputs: variables that the region made; only functions behind them are followed.
        functions: the function nodes of the region.
    """
    found = [y.creator_node for y in outputs if y.creator_node in functions]
    seen = set(found)
    while found:
        func = found.pop()
        for node in func.inputs:
            creator = node.creator_node
            if creator not in functions:
                if node.requires_grad:
                    yield node, func
            elif creator not in seen:
                seen.add(creator)
                found.append(creator)


def check_call(index: int, before: Sequence[RegionCall], call: RegionCall) -> None:
    """Check that call ``index`` of the second run equals the same call of the first run.

    Raises:
        RecomputeCountError: another function, or one more. RecomputeShapeError,
        RecomputeDtypeError: its inputs have other shapes or types.
    """
    if index >= len(before):
        raise RecomputeCountError(
            f"the second run has one function more than the first: {call.label!r} ({call.line})"
        )
    first = before[index]
    if call.label != first.label:
        raise RecomputeCountError(
            f"function {index + 1} was {first.label!r} in the first run ({first.line}) and is "
            f"{call.label!r} in the second ({call.line})"
        )
    if call.shapes != first.shapes:
        raise RecomputeShapeError(
            f"{call.label!r} had inputs of shapes {first.shapes} in the first run and "
            f"{call.shapes} in the second ({call.line})"
        )
    if call.dtypes != first.dtypes:
        raise RecomputeDtypeError(
            f"{call.label!r} had inputs of types {_names(first.dtypes)} in the first run and "
            f"{_names(call.dtypes)} in the second ({call.line})"
        )


def _names(dtypes: Sequence[Any]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def _line() -> str:
    """Return the present source line outside Chainer and umem."""
    # CPython's private: inspect.stack() would read the source of every frame.
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_INSIDE):
            return sys.intern(f"{frame.f_code.co_filename}, line {frame.f_lineno}")
        frame = frame.f_back
    return "no line outside Chainer"


def seal(functions: Iterable[Any]) -> None:
    """Detach a region's variables from their graph; backward through them raises `StateError`.

    Cost: nothing if no Variable is left over. The values stay readable.
    """
    for function in list(functions):
        for output in function.outputs or ():
            node = output()
            if node is not None and node.requires_grad:
                # By the private attribute: the property's setter would also change the node's rank.
                node._creator_node = _DeadEnd(node)


class _DeadEnd(function_node.FunctionNode):
    """A creator node that raises on backward."""

    def __init__(self, node: Any) -> None:
        beginning = variable.Variable(np.empty(0, np.float32)).node
        # Both Variable.backward and chainer.grad ask each node for this before they continue.
        beginning._check_old_style_gradient = _refuse
        self.inputs, self.outputs = (beginning,), (weakref.ref(node),)
        self.rank = max(node.rank - 1, 0)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        """Raise StateError; not reached if Chainer asks the nodes first."""
        _refuse()


def _refuse() -> None:
    raise StateError(
        "backward goes through a Variable that a checkpointed region made and did not return "
        "(kept on a link, or in a list): return it from the region, in a list, tuple or dict"
    )
