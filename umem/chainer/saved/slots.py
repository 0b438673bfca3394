"""The slots of Chainer's tape: where a function holds the arrays that its backward reads.

Only this module knows them. They are private names of Chainer 7.8, because there is no public way
to drop a retained array: ``VariableNode._data`` holds retained inputs and outputs,
``FunctionNode._retained_output_data`` holds retained outputs again, and all other arrays that
backward reads, the function state, are in attributes of the function; for an old-style function, in
attributes of its `chainer.Function`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from gc import get_referents
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer.function import FunctionAdapter

from umem.chainer.function_facts import is_array, owner_of
from umem.planner import DRAWS

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
"""Attributes of every function node, including Chainer's private ones: they are not function state,
but the graph, layouts, and retained inputs and outputs, which have their own slots."""


class Slot:
    """A place on the tape that holds an array; its owner is held weakly.

    Args:
        owner: a variable node, a function node, or the `chainer.Function` behind one.
        name: the owner's attribute.
        index: the place in the attribute's tuple; None: the attribute is the array.
    """

    __slots__ = ("_index", "_name", "_owner")

    def __init__(self, owner: Any, name: str, index: int | None = None) -> None:
        self._owner = weakref.ref(owner)
        self._name, self._index = name, index

    @property
    def key(self) -> tuple[int, str, int | None]:
        """Return a key that is equal for slots of the same place, while their owner is alive."""
        return id(self._owner()), self._name, self._index

    def owner(self) -> Any:
        """Return the object that has the slot; None if that object was freed."""
        return self._owner()

    def get(self) -> Any:
        """Return the array in the slot; None if the slot is empty, or its owner was freed."""
        value = getattr(self._owner(), self._name, None)
        return value if self._index is None or value is None else value[self._index]

    def put(self, array: Any) -> None:
        """Put an array, or None, into the slot; no effect if its owner or tuple was freed."""
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
        """Return the function that made the array, as output or state; None for a graph's input."""
        owner: Any = self._owner()
        return owner.creator_node if self._name == "_data" else owner

    @property
    def is_state(self) -> bool:
        """True if the slot holds function state, not a retained input or output."""
        return self._name not in ("_data", "_retained_output_data")


def node_slot(node: Any) -> Slot:
    """Return the slot of a variable node."""
    return Slot(node, "_data")


def slots_of(func: Any) -> Iterator[Slot]:
    """Yield the slots of the saved tensors of a function that has run forward.

    The state of an old-style function is omitted, because the program may hold that function.
    """
    yield from retained_slots(func)
    if not isinstance(func, FunctionAdapter):
        for name, value in list(vars(func).items()):
            if name not in NODE_ATTRIBUTES and is_array(value):
                yield Slot(func, name)


def retained_slots(func: Any) -> Iterator[Slot]:
    """Yield the slots of retained inputs, then those of retained outputs.

    Each output has two: the function's own, then its variable node's while that is alive.
    """
    for index in func._input_indexes_to_retain or ():
        yield node_slot(func.inputs[index])
    for place, index in enumerate(func._output_indexes_to_retain or ()):
        yield Slot(func, "_retained_output_data", place)
        node = func.outputs[index]()
        if node is not None:
            yield node_slot(node)


def state_slots(func: Any, names: Iterable[str]) -> list[Slot]:
    """Return the slots of a function's state, given the names of its attributes."""
    owner = owner_of(func)
    return [Slot(owner, name) for name in names]


# -- all outputs of a function at once -------------------------------------------------------------


def output_nodes(func: Any) -> Iterator[tuple[int, Any]]:
    """Yield the live variable nodes of a function's outputs, each with its index."""
    for index, reference in enumerate(func.outputs):
        node = reference()
        if node is not None:
            yield index, node


def empty_outputs(func: Any) -> list[int]:
    """Empty all slots of a function's outputs; return the indexes of outputs in variable nodes."""
    held = []
    for index, reference in enumerate(func.outputs):
        node = reference()
        if node is not None and node._data is not None:
            held.append(index)
            node._data = None
    func._retained_output_data = None
    return held


def refill_outputs(func: Any, outputs: Sequence[Any], held: Iterable[int]) -> None:
    """Put outputs back into the slots that `empty_outputs` has emptied.

    Args:
        func: the function.
        outputs: all outputs of the function.
        held: indexes of the outputs to put into their variable nodes, if these are alive.
    """
    for index in held:
        node = func.outputs[index]()
        if node is not None:
            node._data = outputs[index]
    if func._output_indexes_to_retain is not None:
        func._retained_output_data = tuple([outputs[i] for i in func._output_indexes_to_retain])


def holds_outputs(func: Any) -> bool:
    """Tell whether a slot of a function's outputs has an array."""
    if func._retained_output_data is not None:
        return True
    return any(node._data is not None for _, node in output_nodes(func))


def lacks_outputs(func: Any) -> bool:
    """Tell whether a function retains outputs, and its slots for them are empty."""
    return func._output_indexes_to_retain is not None and func._retained_output_data is None


def held_array(node: Any) -> Any:
    """Return a variable node's array, from its slot or else its variable; None if both lack it."""
    if node._data is not None:
        return node._data
    variable = node.get_variable_or_none()
    return None if variable is None else variable.array


# -- the graph behind variables --------------------------------------------------------------------


def functions_behind(nodes: Iterable[Any]) -> list[Any]:
    """Return the functions that backward from some variable nodes reaches, once, in no order."""
    found: dict[Any, None] = {}
    pending = [node.creator_node for node in nodes]
    while pending:
        func = pending.pop()
        if func is not None and func not in found and func.inputs is not None:
            found[func] = None
            pending += [x.creator_node for x in func.inputs if x.requires_grad]
    return list(found)


# -- function state --------------------------------------------------------------------------------


def values_on(func: Any) -> list[Any]:
    """Return the values of a function's attributes, and perhaps its class.

    ``__dict__`` is not used: Python up to 3.12 would then make a dictionary that the function has
    not needed so far, and Chainer's later use of the function would be slower by about a
    microsecond an operation.
    """
    values = get_referents(func)
    if dict in map(type, values):  # it has a dictionary already
        values = list(func.__dict__.values())
    return values


def holds_nothing(func: Any) -> bool:
    """Tell cheaply whether a function certainly has no arrays as function state.

    True if all its attributes are plain values, except for the tuples of `FunctionNode.apply`: two
    of layouts, two of the graph (inputs and outputs), and those of retained indexes and outputs, if
    any. False may be wrong.
    """
    kinds = [*map(type, get_referents(func))]
    # Chainer's privates, read because each may be one more tuple; there is no public access.
    tuple_count = 2 if func.inputs is None else 4
    if func._input_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._output_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._retained_output_data is not None:
        tuple_count += 1
    return kinds.count(tuple) == tuple_count and _PLAIN_OR_TUPLE.issuperset(kinds)


def arrays_on(func: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a function's state, each with its name; sparse matrices in parts."""
    found: list[tuple[str, Any]] = []
    for key, value in func.__dict__.items():
        if key not in NODE_ATTRIBUTES and value.__class__ not in _PLAIN:
            find_arrays(key, value, found)
    return found


def arrays_in(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the arrays in named values, each with its name; see `find_arrays`."""
    found: list[tuple[str, Any]] = []
    for key, value in items:
        find_arrays(key, value, found)
    return found


def find_arrays(key: str, value: Any, found: list[tuple[str, Any]]) -> None:
    """Append the arrays in an attribute's value to a list, each with its name.

    The value may be an array, a list or tuple of arrays, a sparse matrix, whose parts are named
    ``key.data`` and so on, or another function, whose state is appended under its own names.
    """
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
    """The function state of one call: can be dropped, restored and, for dropout, packed.

    State that was drawn at random is never dropped, because recomputing would draw again. The mask
    of `chainer.functions.dropout` on arrays of NumPy or CuPy, zeros and one scale, can be packed to
    one bit an element. Masks from the user, and cuDNN's own states, stay as they are.

    Args:
        kind: the function's class.
        names: the function's attributes that hold the state.

    Attributes:
        names: the function's attributes that hold the state.
        is_dropped: whether the state was dropped, and not restored since.
    """

    __slots__ = ("_draws", "_has_mask", "_packed", "is_dropped", "names")

    def __init__(self, kind: type, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self.is_dropped = False
        self._draws = kind.__name__ in DRAWS
        self._has_mask = kind.__name__ == "Dropout" and kind.__module__.startswith("chainer.")
        self._packed: Packed | None = None

    def drop(self, func: Any) -> None:
        """Empty the slots of the state, unless the state was drawn or the function was freed."""
        if func is None or self._draws or not self.names:
            return
        for slot in state_slots(func, self.names):
            slot.put(None)
        self.is_dropped = True

    def arrays(self, func: Any) -> list[Any]:
        """Return the arrays of the state; an empty list if an attribute holds no single array."""
        found = [] if func is None else [slot.get() for slot in state_slots(func, self.names)]
        return found if all(hasattr(array, "dtype") for array in found) else []

    def restore(self, func: Any, arrays: Sequence[Any]) -> None:
        """Put the state back into its slots, from the arrays that `arrays` returned."""
        for slot, array in zip(state_slots(func, self.names), arrays, strict=True):
            slot.put(array)
        self.is_dropped = False

    def pack(self, func: Any) -> None:
        """Pack a dropout's mask to bits, and drop the mask; no effect without a mask."""
        if func is None or not self._has_mask or "mask" not in self.names or func.mask is None:
            return
        if self._packed is None:
            self._packed = pack(func.mask)
        if self._packed is not None:
            func.mask = None

    def unpack(self, func: Any) -> bool:
        """Put a packed mask back on the function; return whether that was needed."""
        if self._packed is None or func.mask is not None:
            return False
        func.mask = unpack(self._packed)
        return True


NO_STASH = Stash(object)
"""The state of all calls without state: one object, because there are many."""


def packing(func: Any, arrays: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
    """Return the bytes of a dropout's mask, unpacked and packed; zeros for any other function."""
    if type(func).__name__ != "Dropout" or "mask" not in arrays:
        return 0, 0
    mask = arrays["mask"][0]
    return mask.nbytes, -(-mask.size // 8)


class Packed(NamedTuple):
    """A mask packed to bits, with the scale and shape to unpack it."""

    bits: Any
    scale: Any
    shape: tuple[int, ...]


def pack(mask: Any) -> Packed | None:
    """Pack a mask to bits; None unless it is in C order, not empty, and of zeros and one scale."""
    if mask is None or not mask.flags.c_contiguous or not mask.size:
        return None
    xp = chainer.backend.get_array_module(mask)
    scale = mask.max()
    kept, other = mask != 0, mask != scale
    other &= kept
    if bool(other.any()):
        return None
    return Packed(xp.packbits(kept), scale, mask.shape)


def unpack(packed: Packed) -> Any:
    """Return the mask that was packed, equal to the bit."""
    xp = chainer.backend.get_array_module(packed.bits)
    flags = xp.unpackbits(packed.bits)[: math.prod(packed.shape)].view(bool).reshape(packed.shape)
    return packed.scale * flags
