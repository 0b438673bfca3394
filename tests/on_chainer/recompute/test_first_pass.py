"""The first pass of a graph: the order of its backward, what it keeps, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
from chainer_function_cases import CASES

from tests.compat.functions.test_functions import arrays_for, flatten
from tests.compat.test_shims import chainer
from umem.chainer.recompute.gradients import plain_order

F: Any = chainer.functions


class Taken(chainer.FunctionHook):
    """Lists the functions whose backward runs."""

    name = "taken"

    def __init__(self) -> None:
        self.funcs: list[Any] = []

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self.funcs.append(function)


class Place:
    """A call, as far as `plain_order` reads it."""

    has_graph = True

    def __init__(self, index: int, func: Any) -> None:
        self.index, self.func = index, func


def functions_of(nodes: Any) -> list[Any]:
    found: dict[Any, None] = {}
    pending = [node.creator_node for node in nodes]
    while pending:
        func = pending.pop()
        if func is not None and func not in found:
            found[func] = None
            pending += [x.creator_node for x in func.inputs]
    return list(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("some", ["all", "first", "last"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gradient])
def test_the_order_of_a_plain_backward_is_known_before_it_begins(name: str, some: str) -> None:
    if name == "transpose_sequence" and some != "all":
        pytest.skip("Chainer's own backward fails")
    case = CASES[name]
    dtype = "f" if "float32" in case.only else case.only[0]
    leaves = [chainer.Variable(x.astype(dtype)) for x in arrays_for(case)]
    outputs = flatten(case.run(*[F.identity(F.identity(x)) for x in leaves]))
    outputs = {"all": outputs, "first": outputs[:1], "last": outputs[-1:]}[some]
    outputs = [y for y in outputs if y.creator_node is not None]
    if not outputs:
        pytest.skip("the outputs have no graph")
    loss = sum((F.sum(y) for y in outputs[1:]), F.sum(outputs[0]))
    calls = [Place(i, func) for i, func in enumerate(functions_of([loss.node]))]
    order: Any = plain_order([loss.node], calls)  # type: ignore[arg-type]
    with Taken() as taken:
        loss.backward()
    if order is not None:
        by_call = sorted(order, key=order.__getitem__)
        assert [calls[index].func for index in by_call] == taken.funcs
