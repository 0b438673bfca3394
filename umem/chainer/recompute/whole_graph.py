"""Backward without a plan: first all arrays that it reads are restored, or it is refused.

It may be a second backward, or one from other roots, after an update, into an earlier graph, in
another thread, or inside another backward. The arrays that it will read are looked up before it
begins, so that an array that cannot be recomputed is an error before anything has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from chainer import function_hook

from umem.chainer.recompute.seen import Roots
from umem.chainer.recompute.tape import Call, InputSource, bring_inputs, needed_again, source_of
from umem.chainer.saved.slots import functions_behind
from umem.errors import RecomputeError


def functions(nodes: Iterable[Any]) -> list[Any]:
    """List the functions that lead to some variable nodes, readers before producers."""
    return sorted(functions_behind(nodes), key=lambda func: -plain_rank(func))


def roots_of(nodes: Iterable[Any]) -> Roots:
    """Return the calls and outputs at which a backward begins, sorted."""
    sources = [source_of(node, None) for node in nodes]
    return tuple(sorted((s.call.index, s.output) for s in sources if s.call is not None))


def plain_rank(func: Any) -> int:
    """Return the rank that Chainer gave to a function."""
    call = getattr(func, "_umem_call", None)
    return int(func.rank if call is None else call.plain_rank)


def check(funcs: Iterable[Any]) -> None:
    """Check that all arrays that the backward of some functions reads can be restored.

    Cost: proportional to the number of functions.

    Raises:
        RecomputeError: one was freed and can neither be recomputed nor fetched; names the function
            that made it. Nothing has changed.
    """
    wanted: list[Call] = []
    for func in funcs:
        call = getattr(func, "_umem_call", None)
        wanted += _lost_inputs(func, call)
        if call is not None and call.lacks_own():
            wanted.append(call)
    for one in needed_again(wanted):
        if one.is_offloaded and one.has_func:
            continue
        if not one.again or not one.has_func:
            raise RecomputeError(
                f"backward needs the outputs of {one.label!r}, which were dropped: it must not run "
                "twice, or its graph was cut. Nothing has changed"
            )
        for source in one.sources:
            if source.call is None:
                one.reads.find(source.array, one.label)


def bring(funcs: Iterable[Any]) -> set[int]:
    """Restore the arrays that backward reads, and Chainer's ranks. Returns the passes' numbers."""
    numbers = set()
    for func in funcs:
        call = getattr(func, "_umem_call", None)
        if call is not None:
            numbers.add(call.number)
            call.set_rank(call.plain_rank)
        bring_one(func)
    return numbers


def bring_one(func: Any) -> None:
    """Restore the arrays that the backward of one function reads; only the graph holds them."""
    call = getattr(func, "_umem_call", None)
    for one in bring_inputs(func, _sources(func)) if call is None else call.ensure():
        one.release_values()


def make_whole(calls: Iterable[Call]) -> None:
    """Restore the arrays that the backward of some calls reads."""
    for call in calls:
        if call.has_graph and call.func.inputs is not None:
            bring_one(call.func)


def reaches_more(calls: Iterable[Call], order: Mapping[int, int], nodes: Iterable[Any]) -> bool:
    """Tell whether a backward from these nodes reaches calls that the recorded one did not.

    Their place in the order is then unknown. A variable may have been cut when the graph was
    learned, or its gradient not requested.
    """
    more = [
        call
        for call in calls
        if call.index not in order
        and call.has_graph
        and any(x.requires_grad for x in call.func.inputs or ())
    ]
    return bool(more) and not {call.func for call in more}.isdisjoint(functions(nodes))


def _sources(func: Any) -> list[InputSource]:
    return [source_of(node, node._data) for node in func.inputs]


def _lost_inputs(func: Any, call: Call | None) -> Iterator[Call]:
    """Yield the calls that made retained inputs of a function which are not alive."""
    sources = _sources(func) if call is None else call.sources
    for index in func._input_indexes_to_retain or ():
        made, output, _ = sources[index]
        if func.inputs[index]._data is None and made is not None and not made.find(output):
            yield made


def watch_over(calls: Iterable[Call]) -> None:
    """Hook the functions of live graphs, so that backward restores the arrays that it reads.

    Cost: a checksum of each array from outside that they read, because later changes of such an
    array are not reported.
    """
    alive = [call for call in calls if call.has_graph]
    hook = _MakeAgain()
    for call in alive:
        call.func.add_hook(hook)
        for source in call.sources:
            if source.call is None:
                call.reads.watch(source.array)


class _MakeAgain(function_hook.FunctionHook):
    """Restores saved tensors before the backward of each function."""

    name = "umem.recompute"

    def __init__(self) -> None:
        self._expected: set[int] = set()

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """Restore the arrays that a function's backward reads; check the whole graph at first.

        Raises:
            RecomputeError: an array cannot be recomputed; when a backward begins, nothing has
                changed.
        """
        if id(function) not in self._expected:
            nodes = [node for reference in function.outputs if (node := reference()) is not None]
            found = functions(nodes)
            check(found)
            self._expected = set(map(id, found))
        self._expected.discard(id(function))
        bring_one(function)
