"""Checks for parameters and rules that cannot be updated in shards, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import chainer
import numpy as np
from chainer.backends import cuda

from umem.chainer.agreement import Gather
from umem.chainer.parallel.shard_hooks import BY_ELEMENT, BY_NORM
from umem.chainer.parameters_once import overlapping
from umem.errors import StateError, UmemError, UnsupportedError


def check_optimizer_of_shards(optimizer: Any) -> None:
    """Raise unless an optimizer can update shards, as far as this rank can tell.

    Raises:
        UnsupportedError: it cannot; the message names it.
    """
    if not isinstance(optimizer, chainer.GradientMethod):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not a chainer.GradientMethod, with an update rule for "
            "each parameter; sharded takes Chainer's optimizers and umem's 8-bit ones"
        )
    _check_rule(optimizer.create_update_rule())
    if optimizer.target is not None:
        _named(optimizer)


def _check_rule(rule: Any) -> None:
    """Raise UnsupportedError for an update rule that may need whole parameters."""
    kind = type(rule)
    if not vars(kind).get("is_elementwise") or not vars(rule).keys().isdisjoint(_OWN):
        raise UnsupportedError(
            f"{kind.__name__} may need whole parameters, but shards are parts of them: "
            "sharded takes Chainer's own update rules, umem's 8-bit ones, and rules whose own "
            "class has is_elementwise = True. chainermn.create_multi_node_optimizer takes any"
        )
    if arrays := [n for n, v in rule.hyperparam.get_dict().items() if np.ndim(v)]:
        raise UnsupportedError(
            f"{kind.__name__} has arrays for hyper-parameters, {', '.join(arrays)}, which would "
            "not fit parts of parameters: give each parameter a number"
        )


_OWN = ("update_core", "update_core_cpu", "update_core_gpu", "update")


def _check_hooks(hooks: Iterable[Any], kinds: tuple[type, ...]) -> None:
    """Raise UnsupportedError for a hook that may need whole gradients."""
    for hook in hooks:
        if type(hook) not in kinds and not getattr(hook, "is_elementwise", False):
            name = getattr(hook, "__name__", type(hook).__name__)
            raise UnsupportedError(
                f"the hook {name} may need whole gradients, but shards have parts of them: "
                f"sharded takes {', '.join(kind.__name__ for kind in kinds)} here, and hooks "
                "with is_elementwise = True. Remove it, or use "
                "chainermn.create_multi_node_optimizer"
            )


def _hooks(owner: Any) -> list[Any]:
    # Chainer has no public list of hooks.
    hookable = owner._hookable
    return [*hookable._pre_update_hooks.values(), *hookable._post_update_hooks.values()]


def check_parameters(optimizer: Any, gather: Gather) -> list[tuple[str, Any]]:
    """Return the parameters to shard, after checking that all ranks have the same.

    Each parameter is listed once, by its first name, with an array and an enabled update rule.

    Raises:
        StateError: the optimizer is not set up; or ranks differ; names the first that does.
        UnsupportedError: a rule, a hook or an array cannot be updated in shards. Each on all ranks.
    """
    named: dict[int, tuple[str, Any]] = {}
    error: UmemError | None = None
    try:
        named = _named(optimizer)
    except UmemError as found:
        error = found
    mine = {
        name: (str(one.dtype), one.shape, type(one.update_rule).__name__)
        for name, one in named.values()
    }
    facts = gather((hash_of(mine), error))
    errors = [(rank, found) for rank, (_, found) in enumerate(facts) if found is not None]
    if errors:
        raise errors[0][1] from error
    if any(digest != facts[0][0] for digest, _ in facts):
        _tell_difference(gather(mine))
    return list(named.values())


def hash_of(facts: dict[str, Any]) -> int:
    """Return a hash of facts that is the same on every rank, unlike `hash`."""
    return crc32(repr(facts).encode())


def _named(optimizer: Any) -> dict[int, tuple[str, Any]]:
    """Return the enabled parameters of an optimizer by id, with their paths.

    Raises:
        StateError: the optimizer is not set up.
        UnsupportedError: a rule or hook needs whole parameters, or parameters share memory.
    """
    if optimizer.target is None:
        raise StateError("the optimizer is not set up: call its setup(model) first")
    _check_hooks(_hooks(optimizer), BY_ELEMENT + BY_NORM)
    found: dict[int, tuple[str, Any]] = {}
    for name, one in sorted(optimizer.target.namedparams(include_uninit=False)):
        if one.update_rule is not None and one.update_rule.enabled and id(one) not in found:
            _check_rule(one.update_rule)
            _check_hooks(_hooks(one.update_rule), BY_ELEMENT)
            _check_arrays(name, one)
            found[id(one)] = name, one
    for first, _, second, _ in overlapping(found.values()):
        raise UnsupportedError(
            f"{first} and {second} share memory, so that shards of one would overwrite shards of "
            "the other: tie them by umem.chainer.tie"
        )
    return found


def _check_arrays(name: str, parameter: Any) -> None:
    for array in (parameter.array, parameter.grad):
        if array is not None and not isinstance(array, (np.ndarray, cuda.ndarray)):
            raise UnsupportedError(
                f"{name} has an array of {type(array).__name__}; sharded takes NumPy's and CuPy's"
            )


def _tell_difference(every: list[dict[str, Any]]) -> None:
    """Raise StateError for the first parameter in which a rank differs from rank 0."""
    for rank, theirs in enumerate(every):
        for name in sorted(theirs.keys() | every[0].keys()):
            here, there = every[0].get(name), theirs.get(name)
            if here != there:
                raise StateError(
                    f"rank {rank} has another model than rank 0: {name} is {_shown(there)} there "
                    f"and {_shown(here)} on rank 0. Every rank needs the same parameters, "
                    "initialised by the same update and frozen alike"
                )


def _shown(fact: Any) -> str:
    if fact is None:
        return "missing, without an array, or frozen"
    dtype, shape, rule = fact
    return f"{dtype} of shape {shape} by {rule}"
