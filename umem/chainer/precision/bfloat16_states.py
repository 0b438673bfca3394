"""An optimizer's states in bfloat16: `bfloat16_states`, until undone."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from zlib import crc32

from umem.chainer.agreement import refuse_in_shards
from umem.chainer.precision.floats import SINGLE
from umem.chainer.precision.terms import check_optimizer
from umem.chainer.precision.words import WORD, from_words, to_words
from umem.chainer.tap import Proceed, Subscriber, check_chainer, subscribe, unsubscribe
from umem.errors import StateError

__all__ = ["Bfloat16States", "bfloat16_states"]


def bfloat16_states(optimizer: Any) -> Bfloat16States:
    """Keep an optimizer's states in bfloat16 between its updates, from now on.

    Each state as large as its parameter, such as both moments of Adam, takes two bytes a number
    instead of four; it is float32 for as long as its parameter is updated. Parameters stay as they
    are. States that are there are converted at once, later ones after their first update.

    Numbers are rounded up or down at random, the nearer the likelier, so that a mean that moves by
    a thousandth of itself a step is right on average: to the nearest it would not move at all. The
    draws depend on the parameter's name and its count of updates alone, so that a resumed run goes
    on to the bit. A state differs from float32's by at most 2**-7 of itself a step, 0.8%.

    ``undo()`` of what is returned, or the end of ``with`` it, makes states float32 again. Saved and
    loaded by ``optimizer.serialize`` as arrays of uint16, while it is on.

    Cost: about 5 ns a number and update on NumPy; a float32 copy of one parameter's states at a
    time. Thread-safety: as the optimizer's.

    Raises:
        StateError: the optimizer is not set up, or its states are in bfloat16 already, or in
            shards on several ranks.
        UnsupportedError: it is no GradientMethod.
    """
    check_optimizer(optimizer, "bfloat16_states")
    refuse_in_shards(optimizer, "bfloat16_states")
    if has_bfloat16_states(optimizer):
        raise StateError("the optimizer's states are in bfloat16 already")
    return Bfloat16States(optimizer)


_on: list[Bfloat16States] = []


def has_bfloat16_states(optimizer: Any) -> bool:
    """Tell whether an optimizer's states are in bfloat16 between updates."""
    return any(one.optimizer is optimizer for one in _on)


class Bfloat16States(Subscriber):
    """An optimizer whose states are in bfloat16, while they are; see `bfloat16_states`.

    Attributes:
        optimizer: whose states they are.
    """

    place = 2

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        check_chainer()  # before a state changes
        self._named: dict[int, tuple[str, Any]] = {}
        for name, parameter in optimizer.target.namedparams():
            self._named.setdefault(id(parameter), (name, parameter))
            _pack(parameter.update_rule, parameter, name)
        _on.append(self)
        subscribe(self)

    def undo(self) -> None:
        """Make the states float32 again.

        Raises:
            StateError: it was undone before; nothing has changed.
        """
        if self not in _on:
            raise StateError("bfloat16_states was undone already: the states are float32")
        _on.remove(self)
        unsubscribe(self)
        for _, parameter in self._named.values():  # those too that were tied since
            _unpack(parameter.update_rule)

    def __enter__(self) -> Bfloat16States:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self in _on:
            self.undo()

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Have the states in float32 while a parameter is updated."""
        name, _ = self._named.get(id(parameter), (None, None))
        if name is None or not rule.enabled:
            proceed(rule, parameter)
            return
        _unpack(rule)
        try:
            proceed(rule, parameter)
        finally:
            _pack(rule, parameter, name)


def _unpack(rule: Any) -> None:
    for key, value in _arrays(rule):
        if value.dtype == WORD:
            rule.state[key] = from_words(value)


def _pack(rule: Any, parameter: Any, name: str) -> None:
    if getattr(rule, "is_quantized", False):  # scales may be as many as the parameter's elements
        return
    for key, value in _arrays(rule):
        if value.dtype == SINGLE and value.shape == parameter.shape:
            rule.state[key] = to_words(value, crc32(f"{name}.{key}.{rule.t}".encode()))


def _arrays(rule: Any) -> list[tuple[str, Any]]:
    state = None if rule is None else rule.state
    return [(key, value) for key, value in (state or {}).items() if hasattr(value, "dtype")]
