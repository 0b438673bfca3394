"""The slots of Chainer's tape: where a function holds the arrays that its backward reads.

The one place that knows them. Of Chainer 7.8, whose privates these are, because there is no public
way to let go of what is retained: ``VariableNode._data`` is where retained inputs are, and outputs
too; ``FunctionNode._retained_output_data`` has retained outputs once more; what else backward
reads, its state, are attributes of the function, of an old-style one's `chainer.Function`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from gc import get_referents
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer.function import FunctionAdapter

from umem.chainer.function_facts import is_array, owner_of
from umem.planner.from_trace import DRAWS

_PLAIN = frozenset((
    int, float, bool, str, type(None), type, *(type(np.dtype(code)) for code in np.typecodes["All"])
))  # fmt: skip
"""Classes whose instances hold no arrays."""
_PLAIN_OR_TUPLE = _PLAIN | {tuple}
NODE_ATTRIBUTES = frozenset((
    "inputs", "outputs", "rank", "stack", "lazy_grad_sum", "_input_layouts", "_output_layouts",
    "_input_indexes_to_retain", "_output_indexes_to_retain", "_output_count",
    "_retained_output_data", "_use_cudnn", "_local_function_hooks", "_n_local_function_hooks",
))  # fmt: skip
"""Attributes that function nodes have anyway, Chainer's private ones too: graph, layouts, retained
arrays, which are inputs and outputs and followed as those."""


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


# -- the state that a function keeps on itself -----------------------------------------------------


def values_on(func: Any) -> list[Any]:
    """Return the values of a function's attributes, perhaps with its class.

    To ask for ``__dict__`` makes a dictionary of what Python up to 3.12 keeps without one, and
    Chainer's own use of the function slower from then on: about a microsecond an operation.
    """
    values = get_referents(func)
    if dict in map(type, values):  # it has a dictionary already
        values = list(func.__dict__.values())
    return values


def holds_nothing(func: Any) -> bool:
    """Tell cheaply that a function certainly holds no arrays in attributes of its own.

    It is where all that is on it is plain, but for the tuples that `FunctionNode.apply` makes: two
    of layouts, two of a graph, and what was retained, of which indexes may be None.
    """
    kinds = [*map(type, get_referents(func))]
    # Chainer's privates, read because each may be one more tuple; there is no public way to ask.
    tuple_count = 2 if func.inputs is None else 4
    if func._input_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._output_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._retained_output_data is not None:
        tuple_count += 1
    return kinds.count(tuple) == tuple_count and _PLAIN_OR_TUPLE.issuperset(kinds)


def arrays_on(func: Any) -> list[tuple[str, Any]]:
    """Return the arrays that a function holds as attributes; sparse matrices are taken apart."""
    found: list[tuple[str, Any]] = []
    for key, value in func.__dict__.items():
        if key not in NODE_ATTRIBUTES and value.__class__ not in _PLAIN:
            find_arrays(key, value, found)
    return found


def arrays_in(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the arrays in named values."""
    found: list[tuple[str, Any]] = []
    for key, value in items:
        find_arrays(key, value, found)
    return found


def find_arrays(key: str, value: Any, found: list[tuple[str, Any]]) -> None:
    """Append the arrays in a value to a list, each with its path."""
    if is_array(value):
        found.append((key, value))
    elif isinstance(value, (list, tuple)):
        found += [(key, item) for item in value if item.__class__ not in _PLAIN and is_array(item)]
    elif hasattr(value, "indptr") and hasattr(value, "indices"):
        parts = ("data", "indices", "indptr")
        found += [(f"{key}.{part}", getattr(value, part)) for part in parts]
    elif isinstance(value, chainer.Function):  # an old-style function behind its adapter
        found += arrays_on(value)
    elif isinstance(value, chainer.FunctionNode):  # max pooling, whose gradient reads its indexes
        held = value.__dict__.items()
        found += [
            (name, item) for name, item in held if name not in NODE_ATTRIBUTES and is_array(item)
        ]


class Stash:
    """The state that one call keeps on itself for its backward: dropped, packed, never redrawn.

    A dropout's mask is one bit an element while nobody reads it. That holds for
    `chainer.functions.dropout` on arrays of NumPy or CuPy, whose mask is zero or one scale; masks
    that the user gave, and cuDNN's own states, stay as they are.

    Args:
        kind: the function's class.

    Attributes:
        names: the attributes that hold it.
        is_dropped: whether it was let go.
    """

    __slots__ = ("_draws", "_has_mask", "_packed", "is_dropped", "names")

    def __init__(self, kind: type) -> None:
        self.names: tuple[str, ...] = ()
        self.is_dropped = False
        self._draws = kind.__name__ in DRAWS
        self._has_mask = kind.__name__ == "Dropout" and kind.__module__.startswith("chainer.")
        self._packed: Packed | None = None

    def learn(self, names: tuple[str, ...]) -> None:
        """These attributes hold it."""
        self.names = names

    def drop(self, func: Any) -> None:
        """Let it go, unless it is what was drawn."""
        if func is None or self._draws or not self.names:
            return
        for slot in state_slots(func, self.names):
            slot.put(None)
        self.is_dropped = True

    def arrays(self, func: Any) -> list[Any]:
        """What it is, where each attribute holds one array; none where one does not."""
        found = [] if func is None else [slot.get() for slot in state_slots(func, self.names)]
        return found if all(hasattr(array, "dtype") for array in found) else []

    def restore(self, func: Any, arrays: Sequence[Any]) -> None:
        """Put back what `arrays` has returned."""
        for slot, array in zip(state_slots(func, self.names), arrays, strict=True):
            slot.put(array)
        self.is_dropped = False

    def came_back(self) -> None:
        """The function has run again, and made it."""
        self.is_dropped = False

    def pack(self, func: Any) -> None:
        """Keep a dropout's mask as bits."""
        if func is None or not self._has_mask or "mask" not in self.names or func.mask is None:
            return
        if self._packed is None:
            self._packed = pack(func.mask)
        if self._packed is not None:
            func.mask = None

    def unpack(self, func: Any) -> bool:
        """Have a packed mask back on the function; whether there was one."""
        if self._packed is None or func.mask is not None:
            return False
        func.mask = unpack(self._packed)
        return True


def packing(func: Any, arrays: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
    """Return the bytes of a dropout's mask, as it is and as bits; zero for any other function."""
    if type(func).__name__ != "Dropout" or "mask" not in arrays:
        return 0, 0
    mask = arrays["mask"][0]
    return mask.nbytes, -(-mask.size // 8)


class Packed(NamedTuple):
    """A mask as bits, and what it takes to have it back."""

    bits: Any
    scale: Any
    shape: tuple[int, ...]


def pack(mask: Any) -> Packed | None:
    """The mask as bits; None where it is no array in C order of zeros and one other value."""
    if mask is None or not mask.flags.c_contiguous or not mask.size:
        return None
    xp = chainer.backend.get_array_module(mask)
    scale = mask.max()
    kept = mask != 0
    if not bool((mask[kept] == scale).all()):
        return None
    return Packed(xp.packbits(kept), scale, mask.shape)


def unpack(packed: Packed) -> Any:
    """The mask, bit for bit."""
    xp = chainer.backend.get_array_module(packed.bits)
    count = 1
    for length in packed.shape:
        count *= length
    flags = xp.unpackbits(packed.bits)[:count].astype(bool).reshape(packed.shape)
    return packed.scale * flags
