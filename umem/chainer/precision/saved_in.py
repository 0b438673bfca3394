"""What backward needs, kept in bfloat16 from forward on: `saved_in`, until undone."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any
from weakref import WeakSet

from umem.chainer.precision.floats import SINGLE
from umem.chainer.precision.words import from_words, to_words
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import StateError, UnsupportedError

__all__ = ["SavedIn", "saved_in"]


def saved_in(dtype: str) -> SavedIn:
    """Keep the activations that backward needs in bfloat16, from now on: two bytes a number.

    Forward computes with float32 as ever. What a function retains for its backward is rounded to
    the nearest bfloat16 as soon as the function is done, and is float32 again while its backward
    runs: a retained number is off by at most 2**-8 of itself, 0.4%. Whether it is zero, positive
    or negative stays as it is, so that relu's gradients do; losses are the same to the bit.

    Parameters, inputs of the program, whole numbers, halves, and what a function keeps on itself,
    such as a mask, stay as they are; so does all that `umem.chainer.Recompute` looks after. An
    array that the program holds by a variable of its own is not rounded, and takes memory twice.

    ``undo()`` of what is returned, or the end of ``with`` it, ends it: graphs that are alive get
    back float32, with what was rounded.

    Args:
        dtype: "bfloat16"; no other.

    Cost: about 4 ns a retained number on NumPy to round it, and 1 ns to have it back.
    Thread-safety: for the process, any thread.

    Raises:
        UnsupportedError: another dtype.
        StateError: it is on already.
    """
    if str(dtype) != "bfloat16":
        raise UnsupportedError(f'activations can be saved in "bfloat16", not in {dtype!r}')
    if _on:
        raise StateError("activations are saved in bfloat16 already: undo() that first")
    return SavedIn()


_on: list[SavedIn] = []


class SavedIn(Subscriber):
    """Activations in bfloat16, while it is on; see `saved_in`."""

    place = -3

    def __init__(self) -> None:
        self._functions: WeakSet[Any] = WeakSet()
        subscribe(self)
        _on.append(self)

    def undo(self) -> None:
        """Save what comes in float32 again.

        Raises:
            StateError: it was undone before; nothing has changed.
        """
        if self not in _on:
            raise StateError("saved_in was undone already: activations are saved as they are")
        _on.remove(self)
        unsubscribe(self)
        for func in list(self._functions):
            _restore(func)
        self._functions.clear()

    def __enter__(self) -> SavedIn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self in _on:
            self.undo()

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Round what a function has retained."""
        outputs = proceed(func, inputs)
        if func.inputs is not None and not hasattr(func, "_umem_call"):
            if _round(func):
                self._functions.add(func)
        return outputs

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Have there what a function has retained, for as long as its backward runs."""
        if func not in self._functions:
            proceed(func, *args)
            return
        _restore(func)
        try:
            proceed(func, *args)
        finally:
            _let_go(func)


# Chainer's privates hold what is retained: an input's node its array, the function those of its
# outputs, each of which its node holds too; there is no public way to let them go.


def _round(func: Any) -> bool:
    """Put words on the nodes of what is retained, and on the function its outputs'.

    Returns whether anything was rounded.
    """
    for node in _inputs(func):
        if node.creator_node is not None and _is_single(node._data):
            if not hasattr(node, "_umem_words"):
                node._umem_words = to_words(node._data)
            node._data = None
    func._umem_words = {}
    data = list(func._retained_output_data or ())
    for place, index in enumerate(func._output_indexes_to_retain or ()):
        if _is_single(data[place]):
            node = func.outputs[index]()
            words = getattr(node, "_umem_words", None)
            func._umem_words[place] = to_words(data[place]) if words is None else words
            data[place] = None
            if node is not None:
                node._umem_words, node._data = func._umem_words[place], None
    if data:
        func._retained_output_data = tuple(data)
    return bool(func._umem_words) or any(hasattr(node, "_umem_words") for node in _inputs(func))


def _restore(func: Any) -> None:
    for node in _inputs(func):
        if node._data is None and hasattr(node, "_umem_words"):
            node._data = from_words(node._umem_words)
    if func._retained_output_data is None:  # another has let go of the function
        return
    data = list(func._retained_output_data)
    for place, index in enumerate(func._output_indexes_to_retain or ()):
        if data[place] is None and place in func._umem_words:
            node = func.outputs[index]()
            held = None if node is None else node._data
            data[place] = from_words(func._umem_words[place]) if held is None else held
            if node is not None:
                node._data = data[place]
    func._retained_output_data = tuple(data)


def _let_go(func: Any) -> None:
    for node in _inputs(func):
        if hasattr(node, "_umem_words"):
            node._data = None
    if func._retained_output_data is None:
        return
    data = list(func._retained_output_data)
    for place in func._umem_words:
        data[place] = None
        node = func.outputs[func._output_indexes_to_retain[place]]()
        if node is not None:
            node._data = None
    func._retained_output_data = tuple(data)


def _inputs(func: Any) -> Iterator[Any]:
    """The nodes of the inputs that a function retains."""
    return (func.inputs[index] for index in func._input_indexes_to_retain or ())


def _is_single(array: Any) -> bool:
    return array is not None and array.dtype == SINGLE
