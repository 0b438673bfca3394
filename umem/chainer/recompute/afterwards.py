"""Graphs that outlive the block that made them: what was dropped comes back for backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainer import function_hook

from umem.chainer.recompute.tape import Call
from umem.chainer.recompute.whole_graph import bring_one, check, functions


def watch_over(calls: Iterable[Call]) -> None:
    """Have the calls of graphs that are alive make again what backward reads, when it comes.

    Cost: a checksum of each array from outside that they read, because what changes such an array
    from now on is not seen.
    """
    alive = [call for call in calls if call.has_graph]
    hook = _MakeAgain()
    for call in alive:
        call.func.add_hook(hook)
        for source in call.sources:
            if source.call is None:
                call.reads.watch(source.array)


class _MakeAgain(function_hook.FunctionHook):
    """Makes arrays again before the backward of each function."""

    name = "umem.recompute"

    def __init__(self) -> None:
        self._expected: set[int] = set()

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """Make sure of what the function retained; of the whole graph where a backward begins.

        Raises:
            RecomputeError: something cannot be made again; where a backward begins, nothing has
                changed.
        """
        if id(function) not in self._expected:
            nodes = [node for reference in function.outputs if (node := reference()) is not None]
            found = functions(nodes)
            check(found)
            self._expected = set(map(id, found))
        self._expected.discard(id(function))
        bring_one(function)
