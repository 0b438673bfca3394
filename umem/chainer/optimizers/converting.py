"""Conversion of an optimizer that is set up, in place: its states to 8 bits, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chainer import optimizers

from umem.chainer.agreement import refuse_in_shards
from umem.chainer.finite import LARGEST_SINGLE, first_beyond, why
from umem.chainer.optimizers import paths
from umem.chainer.optimizers.eight_bit import Adam8bit, AdamW8bit, MomentumSGD8bit
from umem.chainer.optimizers.rules import (
    NO_VARIANTS,
    QUANTIZED,
    QuantizedRule,
    has_variant,
    plain,
    quantize,
)
from umem.chainer.optimizers.state_policy import LEAST_SIZE, StatePolicy, kept_in_32_bits
from umem.chainer.parameters_once import parameters
from umem.errors import StateError, UnsupportedError

SMALL = {
    optimizers.Adam: Adam8bit,
    optimizers.AdamW: AdamW8bit,
    optimizers.MomentumSGD: MomentumSGD8bit,
}
"""For each of Chainer's optimizers, the one with 8-bit states."""
PLAIN = {small: one for one, small in SMALL.items()}


def quantize_states(
    optimizer: Any,
    *,
    keep: Sequence[str] = (),
    least_size: int = LEAST_SIZE,
    embeddings: bool = False,
    paged: bool = False,
) -> int:
    """Convert an optimizer to 8-bit states, in place; returns the bytes saved.

    Chainer's Adam becomes an `Adam8bit`, AdamW an `AdamW8bit`, MomentumSGD a `MomentumSGD8bit`: the
    same object with the same hooks, hyper-parameters and counts. Single parameters with a rule of
    another kind keep it. `dequantize_states` converts the optimizer back.

    Cost: one pass over the states, one at a time; a GPU's states are copied through the host.

    Args:
        optimizer: of exactly one of those classes, and set up.
        keep: see `Adam8bit`, also for the other arguments.

    Raises:
        StateError: it is not set up, has 8-bit states already, or its state is in shards on several
            ranks; or a state has NaN or infinity.
        UnsupportedError: another class, or amsgrad or adabound.
        ValueError: a name in ``keep`` matches no parameter.

    After any of these the optimizer is as before.
    """
    model = _model(optimizer, "quantize_states")
    if type(optimizer) in PLAIN:
        raise StateError(f"the optimizer has 8-bit states already: it is {_name(optimizer)}")
    if type(optimizer) not in SMALL:
        raise _unknown(optimizer, SMALL)
    rules = _rules_by_name(model)
    if any(has_variant(rule) for rule in (optimizer, *rules.values())):
        raise UnsupportedError(NO_VARIANTS)
    policy = StatePolicy(keep, least_size, embeddings, paged)
    kept = {id(param) for param in kept_in_32_bits(policy, model)}
    _check_states(rules)
    before = _state_bytes(model)
    for param in model.params():
        if type(param.update_rule) in QUANTIZED and id(param) not in kept:
            quantize(param.update_rule, policy)
    optimizer.__class__ = SMALL[type(optimizer)]
    optimizer.policy = policy
    paths.prepare(model, optimizer.create_update_rule().step)
    return before - _state_bytes(model)


def dequantize_states(optimizer: Any) -> int:
    """Convert an optimizer with 8-bit states to Chainer's own; the inverse of `quantize_states`.

    States are dequantised. Returns the additional bytes that they take.

    Raises:
        StateError: it is not set up, has no 8-bit states, or its state is in shards.
        UnsupportedError: a class of your own. After either the optimizer is as before.
    """
    model = _model(optimizer, "dequantize_states")
    if type(optimizer) in SMALL:
        raise StateError(f"the optimizer has no 8-bit states: it is {_name(optimizer)}")
    if type(optimizer) not in PLAIN:
        raise _unknown(optimizer, PLAIN)
    before = _state_bytes(model)
    for param in model.params():
        if isinstance(param.update_rule, QuantizedRule):
            plain(param.update_rule, param)
    optimizer.__class__ = PLAIN[type(optimizer)]
    del optimizer.policy
    return _state_bytes(model) - before


def _model(optimizer: Any, what: str) -> Any:
    model = getattr(optimizer, "target", None)
    if model is None:
        raise StateError("the optimizer is not set up: call its setup(model) first")
    refuse_in_shards(optimizer, what)
    return model


def _name(optimizer: Any) -> str:
    return type(optimizer).__name__


def _unknown(optimizer: Any, known: Any) -> UnsupportedError:
    names = ", ".join(sorted(kind.__name__ for kind in known))
    return UnsupportedError(
        f"{_name(optimizer)} has no known 8-bit form; the optimizers that have one are {names}"
    )


def _rules_by_name(model: Any) -> dict[str, Any]:
    return {
        name: param.update_rule
        for name, param in model.namedparams()
        if type(param.update_rule) in QUANTIZED
    }


def _check_states(rules: dict[str, Any]) -> None:
    """Raise if a state has values that float32 cannot hold."""
    named = [
        (f"{key} of {name}", value)
        for name, rule in rules.items()
        for key, value in (rule.state or {}).items()
    ]
    found = first_beyond(named, LARGEST_SINGLE)
    if found is not None:
        name, value = found
        raise StateError(f"8 bits cannot hold the state {name}: {why(value, LARGEST_SINGLE)}")


def _state_bytes(model: Any) -> int:
    rules = (param.update_rule for param in parameters(model))
    states = (rule.state or {} for rule in rules if rule is not None)
    return sum(getattr(value, "nbytes", 0) for state in states for value in state.values())
