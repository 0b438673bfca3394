"""What backward needs, kept in bfloat16 from forward on: `saved_in`, until undone."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from umem.chainer.precision.floats import SINGLE
from umem.chainer.precision.words import from_words, to_words
from umem.chainer.saved.slots import Slot, retained_slots
from umem.chainer.switch import Switch
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


Emptied = tuple[Slot, Any]
"""A slot, and the bfloat16 words of what it held."""
_on: list[SavedIn] = []


class SavedIn(Subscriber, Switch):
    """Activations in bfloat16, while it is on; see `saved_in`."""

    place = -3
    undone = "saved_in was undone already: activations are saved as they are"

    def __init__(self) -> None:
        self._emptied: WeakKeyDictionary[Any, list[Emptied]] = WeakKeyDictionary()
        subscribe(self)
        _on.append(self)

    def _take_back(self) -> None:
        """Save what comes in float32 again, and give graphs that are alive theirs."""
        _on.remove(self)
        unsubscribe(self)
        for emptied in list(self._emptied.values()):
            _restore(emptied)
        self._emptied.clear()

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Round what a function has retained."""
        outputs = proceed(func, inputs)
        if func.inputs is not None and not hasattr(func, "_umem_call"):
            if emptied := _round(func):
                self._emptied[func] = emptied
        return outputs

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Have there what a function has retained, for as long as its backward runs."""
        emptied = self._emptied.get(func, [])
        _restore(emptied)
        try:
            proceed(func, *args)
        finally:
            _empty(emptied)


def _round(func: Any) -> list[Emptied]:
    """Empty the slots of what a function retains; return them, each with its words.

    A node's words are remembered on it, for other functions that retain the same.
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
    """Fill the slots that are empty; those of the same words with one array."""
    held = {id(words): slot.get() for slot, words in emptied}
    for slot, words in emptied:
        if slot.get() is None:
            if held[id(words)] is None:
                held[id(words)] = from_words(words)
            slot.put(held[id(words)])


def _empty(emptied: list[Emptied]) -> None:
    for slot, _ in emptied:
        slot.put(None)
