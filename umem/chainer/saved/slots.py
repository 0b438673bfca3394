"""The slots of Chainer's tape: where a function holds the arrays that its backward reads.

The one place that knows them. Of Chainer 7.8, whose privates these are, because there is no public
way to let go of what is retained: ``VariableNode._data`` is where retained inputs are, and outputs
too; ``FunctionNode._retained_output_data`` has retained outputs once more; what else backward
reads, its state, are attributes of the function, of an old-style one's `chainer.Function`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from chainer.function import FunctionAdapter

from umem.chainer.function_facts import is_array, owner_of
from umem.chainer.saved.function_state import NODE_ATTRIBUTES


class Slot:
    """A place of the tape that holds an array; its owner is held weakly.

    Args:
        owner: a variable's node, a function, or the `chainer.Function` behind one.
        name: the attribute of it.
        index: the place in that, where it is a tuple.
    """

    __slots__ = ("_index", "_name", "_owner")

    def __init__(self, owner: Any, name: str, index: int | None = None) -> None:
        self._owner = weakref.ref(owner)
        self._name, self._index = name, index

    @property
    def key(self) -> tuple[int, str, int | None]:
        """The same for two slots that are one place, while its owner is alive."""
        return id(self._owner()), self._name, self._index

    def owner(self) -> Any:
        """Who holds it; None once that is gone."""
        return self._owner()

    def get(self) -> Any:
        """The array that is there now; None where it is empty, or gone with its owner."""
        value = getattr(self._owner(), self._name, None)
        return value if self._index is None or value is None else value[self._index]

    def put(self, array: Any) -> None:
        """Have an array there, or None; where the owner or its tuple is gone, do nothing."""
        owner = self._owner()
        if owner is None:
            return
        if self._index is not None:
            values = getattr(owner, self._name)
            if values is None:
                return
            array = (*values[: self._index], array, *values[self._index + 1 :])
        setattr(owner, self._name, array)

    def maker(self) -> Any:
        """The function that the array belongs to: whose output or state it is; None: nobody's."""
        owner: Any = self._owner()
        return owner.creator_node if self._name == "_data" else owner

    @property
    def is_state(self) -> bool:
        """Whether it is an attribute of a function's own."""
        return self._name not in ("_data", "_retained_output_data")


def node_slot(node: Any) -> Slot:
    """Return the slot of a variable's node."""
    return Slot(node, "_data")


def slots_of(func: Any) -> Iterator[Slot]:
    """Yield the slots of all that a function which was applied reads in backward.

    The program may hold an old-style function, whose state is left out.
    """
    yield from retained_slots(func)
    if not isinstance(func, FunctionAdapter):
        for name, value in list(vars(func).items()):
            if name not in NODE_ATTRIBUTES and is_array(value):
                yield Slot(func, name)


def retained_slots(func: Any) -> Iterator[Slot]:
    """Yield the slots of retained inputs, then those of retained outputs, the function's first."""
    for index in func._input_indexes_to_retain or ():
        yield node_slot(func.inputs[index])
    for place, index in enumerate(func._output_indexes_to_retain or ()):
        yield Slot(func, "_retained_output_data", place)
        node = func.outputs[index]()
        if node is not None:
            yield node_slot(node)


def state_slots(func: Any, names: Iterable[str]) -> list[Slot]:
    """Return the slots of a function's state, whose attributes are known by name."""
    owner = owner_of(func)
    return [Slot(owner, name) for name in names]


# -- all outputs of a function at once -------------------------------------------------------------


def output_nodes(func: Any) -> Iterator[tuple[int, Any]]:
    """Yield the variable nodes of a function's outputs that are alive, each with its index."""
    for index, reference in enumerate(func.outputs):
        node = reference()
        if node is not None:
            yield index, node


def empty_outputs(func: Any) -> list[int]:
    """Empty every slot that holds an output; return the indexes of those that nodes held."""
    held = []
    for index, node in output_nodes(func):
        if node._data is not None:
            held.append(index)
            node._data = None
    func._retained_output_data = None
    return held


def refill_outputs(func: Any, outputs: Sequence[Any], held: Iterable[int]) -> None:
    """Put outputs back where `empty_outputs` took them from.

    Args:
        func: the function.
        outputs: all of them.
        held: indexes of those whose nodes, where they are alive, hold them.
    """
    for index in held:
        node = func.outputs[index]()
        if node is not None:
            node._data = outputs[index]
    if func._output_indexes_to_retain is not None:
        func._retained_output_data = tuple([outputs[i] for i in func._output_indexes_to_retain])


def lacks_outputs(func: Any) -> bool:
    """Tell whether outputs that a function retains were emptied."""
    return func._output_indexes_to_retain is not None and func._retained_output_data is None


def held_array(node: Any) -> Any:
    """Return the array of a variable's node: the tape's, or the program's variable's; or None."""
    if node._data is not None:
        return node._data
    variable = node.get_variable_or_none()
    return None if variable is None else variable.array


# -- the graph behind variables --------------------------------------------------------------------


def functions_behind(nodes: Iterable[Any]) -> list[Any]:
    """Return the functions that lead to some variable nodes, each once, in no order."""
    found: dict[Any, None] = {}
    pending = [node.creator_node for node in nodes]
    while pending:
        func = pending.pop()
        if func is not None and func not in found and func.inputs is not None:
            found[func] = None
            pending += [x.creator_node for x in func.inputs if x.requires_grad]
    return list(found)
