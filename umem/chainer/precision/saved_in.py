"""`saved_in`: saved tensors in bfloat16 from forward to backward."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from umem._common.switch import Switch
from umem.chainer.precision.floats import SINGLE
from umem.chainer.precision.words import from_words, to_words
from umem.chainer.saved.slots import Slot, retained_slots
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import StateError, UnsupportedError

__all__ = ["SavedIn", "saved_in"]


def saved_in(dtype: str) -> SavedIn:
    """Store retained activations in bfloat16 from now on: two bytes a number.

    Forward computes in float32 as before. The inputs and outputs that a function retains for its
    backward are rounded to the nearest bfloat16 as soon as the function has run, and are float32
    again while its backward runs. The relative error of a retained number is at most 2**-8, 0.4%.
    Zeros and signs are preserved, and so are relu's gradients; losses are the same to the bit.

    Parameters, inputs of the program, integers, float16, function state such as a mask, and saved
    tensors of functions under `umem.chainer.Recompute` are not rounded. An array to which the
    program has its own reference stays float32 for the program, so that it takes memory beside its
    rounded copy.

    `SavedIn.undo`, or the end of the result's ``with`` block, ends it: saved tensors of live graphs
    become float32 again, with the rounded numbers.

    Args:
        dtype: "bfloat16"; no other.

    Cost: on NumPy about 4 ns to round a retained number, and 1 ns to decode it.
    Thread-safety: for the process, any thread.

    Raises:
        UnsupportedError: another dtype.
        StateError: activations are saved in bfloat16 already.
    """
    if str(dtype) != "bfloat16":
        raise UnsupportedError(f'activations can be saved in "bfloat16", not in {dtype!r}')
    if _on:
        raise StateError("activations are saved in bfloat16 already: undo() that first")
    return SavedIn()


Emptied = tuple[Slot, Any]
"""A slot that was emptied, and the bfloat16 words of its array."""
_on: list[SavedIn] = []


class SavedIn(Subscriber, Switch):
    """Retained activations stored in bfloat16, until `undo`; see `saved_in`."""

    place = -3
    undone = "saved_in was undone already: activations are saved as they are"

    def __init__(self) -> None:
        self._emptied: WeakKeyDictionary[Any, list[Emptied]] = WeakKeyDictionary()
        subscribe(self)
        _on.append(self)

    def _take_back(self) -> None:
        """Save later activations in float32 again, and restore live graphs' to float32."""
        _on.remove(self)
        unsubscribe(self)
        for emptied in list(self._emptied.values()):
            _restore(emptied)
        self._emptied.clear()

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Run a function, then round its retained arrays, unless Recompute manages it."""
        outputs = proceed(func, inputs)
        if func.inputs is not None and not hasattr(func, "_umem_call"):
            if emptied := _round(func):
                self._emptied[func] = emptied
        return outputs

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Restore a function's retained arrays to float32 while its backward runs."""
        emptied = self._emptied.get(func, [])
        _restore(emptied)
        try:
            proceed(func, *args)
        finally:
            _empty(emptied)


def _round(func: Any) -> list[Emptied]:
    """Round a function's retained float32 arrays to bfloat16, and empty their slots.

    Inputs of the graph are left alone. The words of an array are kept on its variable node, for
    other functions that retain the array.

    Returns:
        the emptied slots, each with its words.
    """
    emptied: list[Emptied] = []
    known: dict[int, Any] = {}
    for slot in retained_slots(func):
        array = slot.get()
        if array is None or array.dtype != SINGLE or slot.maker() is None:
            continue
        owner = slot.owner()
        words = known.get(id(array))
        if words is None:
            words = getattr(owner, "_umem_words", None)
        if words is None:
            words = to_words(array)
        known[id(array)] = words
        if owner is not func:
            owner._umem_words = words
        emptied.append((slot, words))
        slot.put(None)
    return emptied


def _restore(emptied: list[Emptied]) -> None:
    """Fill the empty slots from their words; slots of the same words share one array."""
    held = {id(words): slot.get() for slot, words in emptied}
    for slot, words in emptied:
        if slot.get() is None:
            if held[id(words)] is None:
                held[id(words)] = from_words(words)
            slot.put(held[id(words)])


def _empty(emptied: list[Emptied]) -> None:
    for slot, _ in emptied:
        slot.put(None)
